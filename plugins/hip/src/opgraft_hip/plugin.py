"""What opgraft loads: the hooks of the backend ``hip``. Kernels are imported when they first run.

One decorated function an op: its parameters are the op's, its body names the kernel.
"""

# A kernel is looked up by name, so that mypy cannot see what it returns: what its op returns.
# mypy: no-warn-return-any

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from opgraft import Available, Backend, CapabilityRequirement, KernelBackend, Unavailable, forward, hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# The archs for which the tests compile every kernel below; no other is claimed.
ARCHS = CapabilityRequirement.hip(archs=("gfx942", "gfx950", "gfx1201"))


@hookimpl
def opgraft_backend() -> Backend:
    """Name the backend and its platform."""
    return Backend(name="hip", platforms=("hip",), summary="AMD GPUs through ROCm")


@hookimpl
def opgraft_probe() -> Available | Unavailable:
    """Ask torch's build and its device count; neither initialises a device."""
    import torch

    if torch.version.hip is None:
        return Unavailable("this torch was built without ROCm")
    # A ROCm build of torch calls its devices "cuda".
    count = torch.cuda.device_count()
    return Available(count) if count else Unavailable("torch sees no ROCm device")


@functools.cache
def _triton(op: str) -> Callable[..., Any]:
    """Import a portable kernel once: an import statement in its place costs 0.3 us a call."""
    from opgraft_triton_kernels import attention

    return getattr(attention, op)


@forward("attention.clamp_position", kernel_backend=KernelBackend.TRITON, capabilities=ARCHS)
def clamp_position(seq_lens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Run the portable Triton kernel."""
    return _triton("clamp_position")(seq_lens, out=out)
