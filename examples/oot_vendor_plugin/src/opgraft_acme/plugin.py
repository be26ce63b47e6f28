"""What Acme offers to opgraft. Loading this module loads neither torch nor a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opgraft import Backend, KernelBackend, forward, hookimpl

if TYPE_CHECKING:
    from torch import Tensor


@hookimpl
def opgraft_backend() -> Backend:
    """Name the backend and the torch device types that it serves."""
    return Backend(name="acme", platforms=("acme",), summary="Acme NPU")


@forward("attention.clamp_position", kernel_backend=KernelBackend.PLUGIN, priority=100)
def clamp_position(seq_lens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Offer Acme's kernel; it is imported when it first runs."""
    from opgraft_acme.kernels.clamp_position import clamp_position as kernel

    return kernel(seq_lens, out=out)
