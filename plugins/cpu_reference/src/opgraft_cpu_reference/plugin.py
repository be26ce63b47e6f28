"""What opgraft loads: the hooks of the backend ``cpu_reference``. Kernels are imported late.

One decorated function an op: its parameters are the op's, its body names the kernel.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from opgraft import Backend, KernelBackend, forward, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from opgraft_cpu_reference import attention as kernels
else:
    from opgraft_cpu_reference._late import LateModule

    kernels = LateModule("opgraft_cpu_reference.attention")

offer = functools.partial(forward, kernel_backend=KernelBackend.AOT, priority=0)
"""ATen's own compiled loops do the work; any backend made for a particular CPU wins over them."""


@hookimpl
def opgraft_backend() -> Backend:
    """Name the backend and its platform."""
    return Backend(name="cpu_reference", platforms=("cpu",), summary="exact forwards for any CPU")


@offer("attention.clamp_position")
def clamp_position(seq_lens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Widen and count down."""
    return kernels.clamp_position(seq_lens, out=out)


@offer("attention.csr_kv_indices")
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
    """Copy long runs as they lie, gather short ones together."""
    return kernels.csr_kv_indices(
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


@offer("attention.block_table")
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
    """Read the first tokens of all pages through their addresses."""
    return kernels.block_table(
        req_to_token, req_pool_indices, kv_lens, kv_starts, page_size=page_size, max_pages=max_pages, tail=tail, out=out
    )


@offer("attention.prefill_aware_page_table")
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
    """Copy prompt and window of each row as they lie."""
    return kernels.prefill_aware_page_table(
        req_to_token, req_pool_indices, seq_lens, prefill_lens, window=window, max_kv=max_kv, out=out, out_lens=out_lens
    )


@offer("attention.seqlens_expand")
def seqlens_expand(q_lens: Tensor, kv_lens: Tensor, *, total: int, out: Tensor | None = None) -> Tensor:
    """Write a ramp for each request."""
    return kernels.seqlens_expand(q_lens, kv_lens, total=total, out=out)


@offer("attention.compact_valid_indices")
def compact_valid_indices(
    indices: Tensor, indptr: Tensor | None = None, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Pick the valid entries by a mask."""
    return kernels.compact_valid_indices(indices, indptr, out=out)


@offer("attention.topk_to_slots")
def topk_to_slots(
    table: Tensor,
    topk: Tensor,
    *,
    cu_q: Tensor | None = None,
    output_rows: int | None = None,
    page_size: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Gather along the rows."""
    return kernels.topk_to_slots(table, topk, cu_q=cu_q, output_rows=output_rows, page_size=page_size, out=out)


@offer("attention.topk_valid_length")
def topk_valid_length(topk: Tensor, *, rule: str = "last", minimum: int = 1, repair: bool = False) -> Tensor:
    """Reduce a mask in the narrowest dtype."""
    return kernels.topk_valid_length(topk, rule=rule, minimum=minimum, repair=repair)


@offer("attention.topk_to_slots_dcp")
def topk_to_slots_dcp(slots: Tensor, *, world_size: int, rank: int) -> tuple[Tensor, Tensor]:
    """Move the owned slots from one mask to another."""
    return kernels.topk_to_slots_dcp(slots, world_size=world_size, rank=rank)


@offer("attention.extend_positions")
def extend_positions(prefix_lens: Tensor, extend_lens: Tensor, *, total: int, out: Tensor | None = None) -> Tensor:
    """Write a ramp for each request."""
    return kernels.extend_positions(prefix_lens, extend_lens, total=total, out=out)


@offer("attention.cp_interleave_split")
def cp_interleave_split(extend_lens: Tensor, *, world_size: int, rank: int) -> tuple[Tensor, Tensor]:
    """Count whole rounds of the world, then what is left over."""
    return kernels.cp_interleave_split(extend_lens, world_size=world_size, rank=rank)
