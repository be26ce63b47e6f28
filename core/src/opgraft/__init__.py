"""opgraft grafts hardware that no inference engine has in its tree onto that engine's operators.

Importing it imports neither torch nor a plugin: what needs torch is resolved when first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from opgraft.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    BufferOverflowError,
    NoKernelError,
    NotSupported,
    OpgraftError,
    PluginError,
    PolicyError,
    RegistrationError,
    UnknownOpError,
    UnknownSelectorError,
)

if TYPE_CHECKING:
    from opgraft import compat, host, ops, testing
    from opgraft.api import (
        apply_policy,
        backends,
        explain,
        explain_for,
        export_policy,
        get_policy,
        get_trace,
        op,
        refresh,
        register_backend,
        registry,
        set_policy,
        trace,
        use,
        warmup,
    )
    from opgraft.fused_op import (
        BaseFusedOp,
        publish,
        register_fused_op,
        register_oot_forward,
        torch_compile_mode,
    )
    from opgraft.hardware import ANY, CapabilityRequirement, DeviceFacts
    from opgraft.hookspecs import forward, hookimpl
    from opgraft.planning import Plan, check_agreement, plan
    from opgraft.spec import (
        Available,
        Backend,
        BackendRecord,
        FormatSignature,
        KernelBackend,
        KernelSpec,
        Tolerance,
        Unavailable,
    )

__version__ = "0.1.0"

_LAZY = {
    "api": "apply_policy backends explain explain_for export_policy get_policy get_trace op refresh "
    "register_backend registry set_policy trace use warmup",
    "fused_op": "BaseFusedOp publish register_fused_op register_oot_forward torch_compile_mode",
    "hardware": "ANY CapabilityRequirement DeviceFacts",
    "hookspecs": "forward hookimpl",
    "planning": "Plan check_agreement plan",
    "selection": "Candidate Selection",
    "spec": "Available Backend BackendRecord FormatSignature KernelBackend KernelSpec Tolerance "
    "Unavailable",
}
_WHERE = {name: module for module, names in _LAZY.items() for name in names.split()}
_MODULES = frozenset({"compat", "host", "ops", "testing", "torch_ops"})


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any of the public names
    """Resolve a public name at its first use."""
    if name in _WHERE:
        value = getattr(importlib.import_module(f"opgraft.{_WHERE[name]}"), name)
    elif name in _MODULES:
        return importlib.import_module(f"opgraft.{name}")
    else:
        message = f"module 'opgraft' has no attribute {name!r}"
        raise AttributeError(message)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, resolved or not."""
    return sorted({*globals(), *_WHERE, *_MODULES})


__all__ = [
    "ANY",
    "ArgumentTypeError",
    "ArgumentValueError",
    "Available",
    "Backend",
    "BackendRecord",
    "BaseFusedOp",
    "BufferOverflowError",
    "CapabilityRequirement",
    "DeviceFacts",
    "FormatSignature",
    "KernelBackend",
    "KernelSpec",
    "NoKernelError",
    "NotSupported",
    "OpgraftError",
    "Plan",
    "PluginError",
    "PolicyError",
    "RegistrationError",
    "Tolerance",
    "Unavailable",
    "UnknownOpError",
    "UnknownSelectorError",
    "apply_policy",
    "backends",
    "check_agreement",
    "compat",
    "explain",
    "explain_for",
    "export_policy",
    "forward",
    "get_policy",
    "get_trace",
    "hookimpl",
    "host",
    "op",
    "ops",
    "plan",
    "publish",
    "refresh",
    "register_backend",
    "register_fused_op",
    "register_oot_forward",
    "registry",
    "set_policy",
    "testing",
    "torch_compile_mode",
    "trace",
    "use",
    "warmup",
]
