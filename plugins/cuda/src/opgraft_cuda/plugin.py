"""What opgraft loads: the hooks of the backend ``cuda``; it runs every portable Triton kernel, and one in CUDA C++."""

# A kernel is looked up by name, so that mypy cannot see what it returns: what its op returns.
# mypy: no-warn-return-any

from __future__ import annotations

import functools
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from opgraft import Available, Backend, CapabilityRequirement, KernelBackend, Unavailable, forward, hookimpl
from opgraft_triton_kernels.forwards import offered

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# From the oldest GPU with what the kernels use to the newest for which the tests compile them.
ARCHS = CapabilityRequirement.cuda(min_sm=(8, 0), max_sm=(12, 1))


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


globals().update(offered(capabilities=ARCHS))


def _has_cuda_bindings() -> bool:
    """Say whether CUDA C++ can be compiled here, importing nothing, not even the package ``cuda``."""
    cuda = PathFinder.find_spec("cuda")
    places = cuda.submodule_search_locations if cuda is not None else None
    return places is not None and PathFinder.find_spec("cuda.bindings", places) is not None


if _has_cuda_bindings():

    @functools.cache
    def _compiled(op: str) -> Callable[..., Any]:
        from opgraft_cuda import clamp_position as module

        return getattr(module, op)

    # Above Triton's 50: a call of 64 int32 takes 10.8 us of host time on an H200 (torch 2.11), Triton's 11.8.
    @forward("attention.clamp_position", kernel_backend=KernelBackend.JIT, capabilities=ARCHS, priority=60)
    def clamp_position_jit(seq_lens: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Run the kernel written in CUDA C++."""
        return _compiled("clamp_position")(seq_lens, out=out)
