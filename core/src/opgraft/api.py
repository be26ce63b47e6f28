"""The functions a caller and an operator use, on the process's default registry."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from opgraft.errors import ArgumentTypeError
from opgraft.handle import OpFunction
from opgraft.hardware import arch_key
from opgraft.kernel_registry import default_registry
from opgraft.policy import Policy
from opgraft.selection import Selection
from opgraft.spec import DTYPES, BackendRecord
from opgraft.tracing import CAPACITY, Trace

registry = default_registry()


def backends() -> tuple[BackendRecord, ...]:
    """Give a record of every backend that is installed, whatever became of it."""
    return registry.backends()


def op(op_id: str) -> OpFunction:
    """Give an op's handle: what ``opgraft.ops.<group>.<name>`` is; ``.op`` is the op itself.

    Raises
    ------
    UnknownOpError
        If there is no such op, with the nearest names.

    """
    return registry.handle(op_id).function


def refresh() -> None:
    """Look again at what is installed and set; the policy that API calls set is kept."""
    registry.refresh()


def register_backend(plugin: object) -> BackendRecord:
    """Add a backend without metadata: a module or an object that carries the hooks.

    Raises
    ------
    PluginError
        If it breaks the contract; nothing of it is kept.

    """
    return registry.register_backend(plugin)


def explain(op_id: str, /, *args: Any, backend: str | None = None, **kwargs: Any) -> Selection:
    """Say which kernel would run this call and why each other one would not; runs nothing.

    Parameters
    ----------
    op_id
        ``"group.name"``.
    *args, **kwargs
        As for the op itself.
    backend
        As for the op itself.

    """
    one = registry.handle(op_id).op
    return one.dispatcher.explain(one.arguments().bind(*args, **kwargs), backend)


def explain_for(op_id: str, *, device: str = "cpu", arch: str = "", dtype: str = "") -> Selection:
    """Say which kernel would run on hardware that need not be here.

    Parameters
    ----------
    op_id
        ``"group.name"``.
    device
        Platform key: ``"cuda"``, ``"hip"``, ``"acme"``, ...
    arch
        ``"9.0"`` or ``"gfx942"``; empty is unknown.
    dtype
        Dtype name of the tensors; empty leaves dtypes out of account.

    Raises
    ------
    ArgumentTypeError
        If the dtype is unknown, or none of the op's.

    """
    one = registry.handle(op_id).op
    arch = arch if arch_key(arch) or not arch else arch.partition(":")[0]
    name = dtype.removeprefix("torch.")
    form = one.format_signature
    if name and form is not None:
        if name not in form.every_dtype:
            raise ArgumentTypeError(f"{op_id}: dtype must be {' or '.join(sorted(form.every_dtype))}, got {dtype}")
    elif name and name not in DTYPES:
        raise ArgumentTypeError(f"{op_id}: unknown dtype {dtype}")
    return one.dispatcher.select_on(device, arch, name, hardware=False).conditional()


def warmup(op_id: str, /, *args: Any, **kwargs: Any) -> Any:
    """Run an op once, so that a later call inside a captured graph loads and compiles nothing."""
    return op(op_id)(*args, **kwargs)


def use(**settings: Any) -> contextlib.AbstractContextManager[Policy]:
    """Set a policy for this context: ``order``, ``force``, ``deny``, ``strict``.

    Other threads and tasks are unaffected; scopes nest; leaving restores, on an exception too.
    """
    return registry.policy.use(**settings)


def set_policy(**settings: Any) -> None:
    """Set ``order``, ``force``, ``deny``, ``strict`` for the process; None takes one back."""
    registry.policy.set(**settings)


def get_policy() -> Policy:
    """Give the policy of this context, each setting with its source."""
    return registry.policy.current()


def export_policy() -> dict[str, Any]:
    """Give the process's policy as plain data, for :func:`apply_policy` in a child."""
    return registry.policy.export()


def apply_policy(data: Mapping[str, Any]) -> None:
    """Take over what :func:`export_policy` gave in another process."""
    registry.policy.apply(data)


def trace(capacity: int = CAPACITY) -> contextlib.AbstractContextManager[Trace]:
    """Record the calls of all threads while the context lasts.

    Parameters
    ----------
    capacity
        How many records are kept; the oldest are dropped first.

    """
    return registry.tracing(Trace(capacity))


def get_trace() -> Trace:
    """Give what ``OPGRAFT_TRACE=1`` recorded in this process."""
    return registry.process_trace
