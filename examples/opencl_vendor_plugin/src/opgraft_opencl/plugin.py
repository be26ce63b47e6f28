"""What this backend offers to opgraft. Loading this module loads neither torch nor OpenCL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opgraft import Available, Backend, KernelBackend, Unavailable, forward, hookimpl

if TYPE_CHECKING:
    from torch import Tensor


@hookimpl
def opgraft_backend() -> Backend:
    """Name the backend; its tensors are the CPU's, whatever device OpenCL computes on."""
    return Backend(name="opencl", platforms=("cpu",), summary="OpenCL, on CPU tensors")


@hookimpl
def opgraft_probe() -> Available | Unavailable:
    """Ask the OpenCL loader for platforms, which starts no device."""
    from opgraft_opencl.device import find_platforms

    platforms, reason = find_platforms()
    return Available(len(platforms)) if platforms else Unavailable(reason)


# The priority is negative: the CPU's own kernels need no detour, so this one runs when asked for.
@forward("attention.clamp_position", kernel_backend=KernelBackend.JIT, priority=-10)
def clamp_position(seq_lens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Offer the OpenCL kernel; it is imported and compiled when it first runs."""
    from opgraft_opencl.kernels.clamp_position import clamp_position as kernel

    return kernel(seq_lens, out=out)
