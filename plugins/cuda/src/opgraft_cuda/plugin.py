"""What opgraft loads: the hooks of the backend ``cuda``. Kernels are imported when they first run.

One decorated function an op: its parameters are the op's, its body names the kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opgraft import (
    Available,
    Backend,
    CapabilityRequirement,
    KernelBackend,
    Unavailable,
    forward,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import Tensor

# From the oldest GPU with what the kernels use to the newest whose code the tests compile. An arch
# that nobody has compiled for is not claimed.
ARCHS = CapabilityRequirement.cuda(min_sm="8.0", max_sm="12.1")


@hookimpl
def opgraft_backend() -> Backend:
    """Name the backend and its platform."""
    return Backend(name="cuda", platforms=("cuda",), summary="NVIDIA GPUs through CUDA")


@hookimpl
def opgraft_probe() -> Available | Unavailable:
    """Ask torch's build and its device count; neither initialises a device."""
    import torch

    if torch.version.cuda is None:
        return Unavailable("this torch was built without CUDA")
    count = torch.cuda.device_count()
    return Available(count) if count else Unavailable("torch sees no CUDA device")


@forward("attention.clamp_position", kernel_backend=KernelBackend.TRITON, capabilities=ARCHS)
def clamp_position(seq_lens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Run the portable Triton kernel."""
    from opgraft_triton_kernels.attention import clamp_position as kernel

    return kernel(seq_lens, out=out)
