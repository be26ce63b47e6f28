"""The Triton kernel of ``attention.block_table``."""

# The parameters of a kernel are Triton's values, which have no Python type.
# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from opgraft_triton_kernels.attention._row_parts import HAND, REACH, at, counted, deal, dealt, narrowed, pick, within
from opgraft_triton_kernels.launcher import Launcher

__all__ = ["block_table"]

# One H200, replayed graph, us for 16, 64, 128 and 512 rows of 131072 tokens, pages of 64; part/warps
# 512/4 2.44 3.16 5.05 31.3, 256/2 2.27 3.16 4.82 31.0, 128/1 2.08 3.34 4.80 31.1, 1024/4 2.75 3.31 4.80
# 30.9. A bare strided copy of the same entries takes 2.11 2.57 3.91 28.4: of 512 rows every entry is 64
# bytes from DRAM, about as many a second as it opens pages.
_PART = 512
_WARPS = 4


@triton.jit
def _load_pages(
    requests_ptr,
    lengths_ptr,
    starts_ptr,
    row,
    there,
    requests_stride,
    lengths_stride,
    starts_stride,
    pool,
    page_size,
    width,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_STARTS: tl.constexpr,
):
    """Give each row's request, or -1, its first position and its number of pages."""
    request = tl.load(requests_ptr + at(row, requests_stride, UNIT), mask=there, other=-1)
    length = tl.load(lengths_ptr + at(row, lengths_stride, UNIT), mask=there, other=0)
    start = length * 0
    if HAS_STARTS:
        start = tl.load(starts_ptr + at(row, starts_stride, UNIT), mask=there, other=0)
    # The last page holds the last token: this rounds up without a sum that wraps.
    pages = tl.where(length > 0, (length - 1) // page_size.to(length.dtype) + 1, 0)
    pages = tl.minimum(narrowed(pages, WIDE), counted(width, WIDE))
    request = narrowed(tl.where(within(request, pool), request, -1), WIDE=False)
    return request, start.to(tl.int64), pages


@triton.jit
def _write_part(
    table_ptr,
    out_ptr,
    request,
    start,
    pages,
    row,
    first,
    columns,
    row_stride,
    page_size,
    width,
    tail,
    out_row_stride,
    WIDE: tl.constexpr,
    FILL: tl.constexpr,
    PART: tl.constexpr,
):
    row_ptr = table_ptr + tl.maximum(request, 0).to(tl.int64) * row_stride
    readable = tl.where(request >= 0, columns, 0)
    lane = tl.arange(0, PART)
    here = lane < pages - first
    position = start + first.to(tl.int64) * page_size + lane.to(tl.int64) * page_size
    slots = tl.load(row_ptr + position, mask=here & within(position, readable), other=-1)
    page = tl.where(slots < 0, -1, slots // page_size.to(slots.dtype)).to(tl.int32)
    kept = here
    if FILL:
        page = tl.where(here, page, tail)
        kept = lane < counted(width, WIDE) - first
    tl.store(out_ptr + row.to(tl.int64) * out_row_stride + first + lane, page, mask=kept)


@triton.jit(
    do_not_specialize=[
        "table_ptr",
        "requests_ptr",
        "lengths_ptr",
        "starts_ptr",
        "out_ptr",
        "batch",
        "parts",
        "spread",
        "turns",
        "bits",
        "pool",
        "columns",
        "row_stride",
        "requests_stride",
        "lengths_stride",
        "starts_stride",
        "page_size",
        "width",
        "tail",
        "out_row_stride",
    ]
)
def block_table_kernel(
    table_ptr,
    requests_ptr,
    lengths_ptr,
    starts_ptr,
    out_ptr,
    batch: tl.int32,
    parts: tl.int32,
    spread: tl.int32,
    turns: tl.int32,
    bits: tl.int32,
    pool: tl.int64,
    columns: tl.int64,
    row_stride: tl.int64,
    requests_stride: tl.int64,
    lengths_stride: tl.int64,
    starts_stride: tl.int64,
    page_size: tl.int64,
    width: tl.int64,
    tail: tl.int32,
    out_row_stride: tl.int64,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    FILL: tl.constexpr,
    PART: tl.constexpr,
    HAND: tl.constexpr,
) -> None:
    if (tl.program_id(0) >= spread) | (turns == 1):
        row, part, there = dealt(0, batch, parts, spread, bits, WIDE)
        request, start, pages = _load_pages(
            requests_ptr,
            lengths_ptr,
            starts_ptr,
            row,
            there,
            requests_stride,
            lengths_stride,
            starts_stride,
            pool,
            page_size,
            width,
            WIDE,
            UNIT,
            HAS_STARTS,
        )
        if there:
            _write_part(
                table_ptr,
                out_ptr,
                request,
                start,
                pages,
                row,
                part * PART,
                columns,
                row_stride,
                page_size,
                width,
                tail,
                out_row_stride,
                WIDE,
                FILL,
                PART,
            )
    else:
        lane = tl.arange(0, HAND)
        for turn in range(0, turns, HAND):
            row, part, there = dealt(turn + lane, batch, parts, spread, bits, WIDE)
            request, start, pages = _load_pages(
                requests_ptr,
                lengths_ptr,
                starts_ptr,
                row,
                there,
                requests_stride,
                lengths_stride,
                starts_stride,
                pool,
                page_size,
                width,
                WIDE,
                UNIT,
                HAS_STARTS,
            )
            first = part * PART
            todo = tl.where(there if FILL else there & (first < pages), lane, HAND)
            current = tl.min(todo, 0)
            while current < HAND:
                chosen = lane == current
                _write_part(
                    table_ptr,
                    out_ptr,
                    pick(chosen, request),
                    pick(chosen, start),
                    pick(chosen, pages),
                    pick(chosen, row),
                    pick(chosen, first),
                    columns,
                    row_stride,
                    page_size,
                    width,
                    tail,
                    out_row_stride,
                    WIDE,
                    FILL,
                    PART,
                )
                todo = tl.where(chosen, HAND, todo)
                current = tl.min(todo, 0)


kernel = Launcher(block_table_kernel, PART=_PART, HAND=HAND, num_warps=_WARPS)


def block_table(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_lens: torch.Tensor,
    kv_starts: torch.Tensor | None = None,
    *,
    page_size: int,
    max_pages: int | None = None,
    tail: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """List the KV pages of each request in a rectangular table, in one launch.

    Parameters
    ----------
    req_to_token
        [pool, columns], int32 or int64, column stride 1, any row stride.
    req_pool_indices
        [batch], int32 or int64, any stride, any value.
    kv_lens
        [batch], int32 or int64, tokens, any stride, any value.
    kv_starts
        [batch], int32 or int64, tokens, any stride, any value; 0 where left out.
    page_size
        Slots per page, from 1 to 2**31 - 1.
    max_pages
        Columns of a fresh table.
    tail
        What stands behind a request's pages; -1 in a fresh table, what stands there in `out`.
    out
        [batch, max_pages], int32, column stride 1, any row stride: receives the pages. A fresh
        tensor if left out.

    Returns
    -------
    torch.Tensor
        [batch, max_pages], int32; `out` itself if given.

    Raises
    ------
    Nothing of its own.

    Numerics
    --------
    Exact; addresses and positions are 64-bit.

    Source
    ------
    Written from the formula; corresponds to SGLang's ``create_flashmla_kv_indices_triton``.
    """
    batch = req_pool_indices.shape[0]
    fill = out is None or tail is not None
    if out is None:
        out = torch.empty((batch, max_pages or 0), dtype=torch.int32, device=kv_lens.device)
    width = out.shape[1]
    if batch == 0 or width == 0:
        return out
    pool, columns = req_to_token.shape
    programs, parts, spread, turns, bits = deal(batch, width, _PART)
    starts = kv_lens if kv_starts is None else kv_starts
    requests_stride = req_pool_indices.stride(0)
    lengths_stride = kv_lens.stride(0)
    starts_stride = starts.stride(0)
    kernel.launch(
        (programs, 1, 1),
        req_to_token,
        req_pool_indices,
        kv_lens,
        starts,
        out,
        batch,
        parts,
        spread,
        turns,
        bits,
        pool,
        columns,
        req_to_token.stride(0),
        requests_stride,
        lengths_stride,
        starts_stride,
        page_size,
        width,
        -1 if tail is None else tail,
        out.stride(0),
        max(width, turns * spread) > REACH,
        requests_stride == lengths_stride == starts_stride == 1,
        kv_starts is not None,
        fill,
    )
    return out
