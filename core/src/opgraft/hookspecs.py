"""The hooks a plugin implements, and the markers that mark them.

pluggy collects the hook implementations, checks them and blocks what is denied. None of it is on
the call path, and pluggy's own order (last registered first) is never read: which kernel wins is
the selection's business alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pluggy

from opgraft.errors import RegistrationError
from opgraft.hardware import Capabilities, CapabilityRequirement, capability_set
from opgraft.spec import (
    Available,
    Backend,
    DtypeRule,
    KernelBackend,
    Unavailable,
    check_op_id,
    check_priority,
    dtype_rule,
)

if TYPE_CHECKING:
    from opgraft.fused_op import BaseFusedOp

PROJECT: Final = "opgraft"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

_Function = TypeVar("_Function", bound=Callable[..., Any])
OFFER: Final = "opgraft_offer"
_FORWARD_PREFIX: Final = "opgraft_forward_"


class HookSpecs:
    """The hooks every backend may implement; each returns data."""

    @hookspec(firstresult=True)
    def opgraft_backend(self) -> Backend:  # type: ignore[empty-body]
        """Name the backend and its platform keys. Required.

        The name equals the entry point's name. Do not import torch or a kernel module here.
        """

    @hookspec(firstresult=True)
    def opgraft_probe(self) -> Available | Unavailable:  # type: ignore[empty-body]
        """Say whether the hardware is there. Optional; the default is what torch says.

        Called once, when first needed. Ask the torch build and torch's device count, never
        ``PATH`` or folders, and initialise no device.
        """

    @hookspec(firstresult=True)
    def opgraft_ops(self) -> Sequence[type[BaseFusedOp]]:  # type: ignore[empty-body]
        """Give the op classes that this plugin adds to the catalogue. Optional."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What :func:`forward` knows of the kernel it marks; the backend is known only later."""

    op: str
    kernel_backend: KernelBackend
    capabilities: Capabilities | None
    priority: int
    rejects: Callable[..., str | None] | None
    dtypes: DtypeRule | None
    differentiable: bool


def forward_hook(op_id: str) -> str:
    """Name the hook of an op: ``attention.clamp_position`` has its own pluggy hook."""
    return _FORWARD_PREFIX + op_id.replace(".", "__")


def offer_of(function: Callable[..., Any]) -> Offer | None:
    """Give what :func:`forward` attached, or None."""
    offer = getattr(function, OFFER, None)
    return offer if isinstance(offer, Offer) else None


def forward(
    op_id: str,
    *,
    kernel_backend: KernelBackend | str,
    capabilities: CapabilityRequirement | Sequence[CapabilityRequirement] | None = None,
    priority: int = 50,
    rejects: Callable[..., str | None] | None = None,
    dtypes: DtypeRule | None = None,
    differentiable: bool = False,
) -> Callable[[_Function], _Function]:
    """Offer the decorated function as a kernel of an op.

    The function takes the op's parameters. Keyword-only parameters with a default may be left
    out; calls that pass them then go to another kernel.

    Parameters
    ----------
    op_id
        ``"group.name"``.
    kernel_backend
        How the kernel is built; not ``torch``, which is native.
    capabilities
        Where it may run: one requirement, a set of them, or ``ANY``. Without it the kernel runs
        on its own backend's platforms only.
    priority
        The higher, the earlier. A negative one is never chosen unasked.
    rejects
        Function of the op's parameters that gives the reason why a call cannot run here, or
        None. It looks at metadata only (shape, stride, dtype), never at values.
    dtypes
        Narrows the op's own dtypes: a tuple, or a mapping from parameter to tuple.
    differentiable
        Whether gradients may flow through the kernel.

    Returns
    -------
    callable
        A decorator that returns the function itself.

    Raises
    ------
    RegistrationError
        If the declaration cannot be meant.

    """
    whose = f"@forward({op_id!r})"
    if rejects is not None and not callable(rejects):
        raise RegistrationError(f"{whose}: rejects must be a function, got {rejects!r}")
    if KernelBackend(kernel_backend) is KernelBackend.TORCH:
        raise RegistrationError(f"{whose}: kernel_backend 'torch' is native, which the op itself defines")
    check_priority(priority, whose)
    offer = Offer(
        op=check_op_id(op_id),
        kernel_backend=KernelBackend(kernel_backend),
        capabilities=None if capabilities is None else capability_set(capabilities, whose),
        priority=priority,
        rejects=rejects,
        dtypes=None if dtypes is None else dtype_rule(dtypes, whose),
        differentiable=differentiable,
    )

    def mark(function: _Function) -> _Function:
        other = offer_of(function)
        if other is not None and other.op != op_id and not hasattr(function, "__wrapped__"):
            raise RegistrationError(f"{whose}: {function!r} is a kernel of {other.op!r} already; write one for each op")
        setattr(function, OFFER, offer)
        return hookimpl(specname=forward_hook(op_id))(function)

    return mark
