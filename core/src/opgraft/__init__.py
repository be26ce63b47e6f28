"""opgraft grafts hardware that no inference engine has in its tree onto that engine's operators.

Importing it imports neither torch nor a plugin: each public name is resolved when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "api": "apply_policy backends explain explain_for export_policy get_policy get_trace op refresh register_backend "
    "registry set_policy trace use warmup",
    "errors": "ArgumentTypeError ArgumentValueError BufferOverflowError NoKernelError NotSupported OpgraftError "
    "PluginError PolicyError RegistrationError UnknownOpError UnknownSelectorError",
    "fused_op": "BaseFusedOp publish register_fused_op register_oot_forward torch_compile_mode",
    "hardware": "ANY CapabilityRequirement DeviceFacts",
    "hookspecs": "forward hookimpl",
    "planning": "Plan check_agreement plan",
    "selection": "Candidate Selection",
    "spec": "Available Backend BackendRecord FormatSignature KernelBackend KernelSpec Tolerance Unavailable",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = ("compat", "host", "ops", "testing", "torch_ops")

__all__ = sorted([*_WHERE, *_MODULES])  # noqa: PLE0605 - the names are those of _NAMES


def __getattr__(name: str) -> Any:
    """Resolve a public name at its first use."""
    if name in _MODULES:
        return importlib.import_module(f"opgraft.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'opgraft' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"opgraft.{_WHERE[name]}"), name)
    return value


def __dir__() -> list[str]:
    """List the public names, resolved or not."""
    return sorted({*globals(), *__all__})
