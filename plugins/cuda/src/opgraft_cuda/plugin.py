"""What opgraft loads: the hooks of the backend ``cuda``. Kernels are imported when they first run.

One decorated function an op: its parameters are the op's, its body names the kernel.
"""

# A kernel is looked up by name, so that mypy cannot see what it returns: what its op returns.
# mypy: no-warn-return-any

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING, Any

from opgraft import Available, Backend, CapabilityRequirement, KernelBackend, Unavailable, forward, hookimpl

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


@functools.cache
def _triton(op: str) -> Callable[..., Any]:
    """Import a portable kernel once: an import statement in its place costs 0.3 us a call."""
    from opgraft_triton_kernels import attention

    return getattr(attention, op)


@forward("attention.clamp_position", kernel_backend=KernelBackend.TRITON, capabilities=ARCHS)
def clamp_position(seq_lens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Run the portable Triton kernel."""
    return _triton("clamp_position")(seq_lens, out=out)


@forward("attention.csr_kv_indices", kernel_backend=KernelBackend.TRITON, capabilities=ARCHS)
def csr_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: Tensor,
    kv_indptr: Tensor,
    kv_starts: Tensor | None = None,
    *,
    page_size: int = 1,
    token_map: Tensor | None = None,
    total: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Run the portable Triton kernel."""
    return _triton("csr_kv_indices")(
        req_to_token,
        req_pool_indices,
        kv_lens,
        kv_indptr,
        kv_starts,
        page_size=page_size,
        token_map=token_map,
        total=total,
        out=out,
    )


@forward("attention.block_table", kernel_backend=KernelBackend.TRITON, capabilities=ARCHS)
def block_table(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: Tensor,
    kv_starts: Tensor | None = None,
    *,
    page_size: int,
    max_pages: int | None = None,
    tail: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Run the portable Triton kernel."""
    return _triton("block_table")(
        req_to_token, req_pool_indices, kv_lens, kv_starts, page_size=page_size, max_pages=max_pages, tail=tail, out=out
    )


@forward("attention.prefill_aware_page_table", kernel_backend=KernelBackend.TRITON, capabilities=ARCHS)
def prefill_aware_page_table(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    prefill_lens: Tensor,
    *,
    window: int,
    max_kv: int | None = None,
    out: Tensor | None = None,
    out_lens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the portable Triton kernel."""
    return _triton("prefill_aware_page_table")(
        req_to_token, req_pool_indices, seq_lens, prefill_lens, window=window, max_kv=max_kv, out=out, out_lens=out_lens
    )


@forward("attention.seqlens_expand", kernel_backend=KernelBackend.TRITON, capabilities=ARCHS)
def seqlens_expand(q_lens: Tensor, kv_lens: Tensor, *, total: int, out: Tensor | None = None) -> Tensor:
    """Run the portable Triton kernel."""
    return _triton("seqlens_expand")(q_lens, kv_lens, total=total, out=out)


@forward("attention.extend_positions", kernel_backend=KernelBackend.TRITON, capabilities=ARCHS)
def extend_positions(prefix_lens: Tensor, extend_lens: Tensor, *, total: int, out: Tensor | None = None) -> Tensor:
    """Run the portable Triton kernel."""
    return _triton("extend_positions")(prefix_lens, extend_lens, total=total, out=out)


@forward("attention.compact_valid_indices", kernel_backend=KernelBackend.TRITON, capabilities=ARCHS)
def compact_valid_indices(
    indices: Tensor, indptr: Tensor | None = None, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the portable Triton kernels."""
    return _triton("compact_valid_indices")(indices, indptr, out=out)


@forward("attention.topk_to_slots", kernel_backend=KernelBackend.TRITON, capabilities=ARCHS)
def topk_to_slots(
    table: Tensor,
    topk: Tensor,
    *,
    cu_q: Tensor | None = None,
    output_rows: int | None = None,
    page_size: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Run the portable Triton kernel."""
    return _triton("topk_to_slots")(table, topk, cu_q=cu_q, output_rows=output_rows, page_size=page_size, out=out)


@forward("attention.topk_valid_length", kernel_backend=KernelBackend.TRITON, capabilities=ARCHS)
def topk_valid_length(topk: Tensor, *, rule: str = "last", minimum: int = 1, repair: bool = False) -> Tensor:
    """Run the portable Triton kernel."""
    return _triton("topk_valid_length")(topk, rule=rule, minimum=minimum, repair=repair)


@forward("attention.topk_to_slots_dcp", kernel_backend=KernelBackend.TRITON, capabilities=ARCHS)
def topk_to_slots_dcp(slots: Tensor, *, world_size: int, rank: int) -> tuple[Tensor, Tensor]:
    """Run the portable Triton kernel."""
    return _triton("topk_to_slots_dcp")(slots, world_size=world_size, rank=rank)


@forward("attention.cp_interleave_split", kernel_backend=KernelBackend.TRITON, capabilities=ARCHS)
def cp_interleave_split(extend_lens: Tensor, *, world_size: int, rank: int) -> tuple[Tensor, Tensor]:
    """Run the portable Triton kernel."""
    return _triton("cp_interleave_split")(extend_lens, world_size=world_size, rank=rank)


def _has_cuda_bindings() -> bool:
    """Say whether CUDA C++ can be compiled here, without importing what compiles it."""
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


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
