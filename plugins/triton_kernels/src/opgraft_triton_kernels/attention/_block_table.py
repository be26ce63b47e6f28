"""The Triton kernel of ``attention.block_table``."""

# The parameters of a kernel are Triton's values, which have no Python type.
# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from opgraft_triton_kernels.attention._row_parts import HAND, REACH, at, counted, deal, dealt, narrowed, pick, within
from opgraft_triton_kernels.launcher import Launcher, unspecialized

__all__ = ["block_table"]

# One H200, replayed graph, us for 16, 64, 128 and 512 rows of 131072 tokens, pages of 64: 2.00 2.82 4.08
# 30.6. A strided copy by torch of the same entries takes 2.01 2.59 4.04 28.2, nothing but the loads and
# stores in Triton 3.4 and 23.4 in the last two, whatever its shape and its cache hints: every entry is
# a DRAM access of its own.
_PART = 512
_WARPS = 4


def _reciprocal(divisor: int) -> tuple[int, int]:
    """Give factor and shift: ``n // divisor == n * (factor % 2**32) >> shift`` for n from 0 to 2**31 - 1."""
    shift = 31 + (divisor - 1).bit_length()
    return (1 << shift) // divisor + 1 - (1 << 32), shift


@triton.jit
def _pages_of(slots, page_size, factor, shift):
    """Divide by the page size, round down; no slot is negative."""
    if slots.dtype == tl.int64:
        pages = slots // page_size
    else:
        scaled = slots.to(tl.uint32, bitcast=True).to(tl.uint64) * factor.to(tl.uint32, bitcast=True).to(tl.uint64)
        pages = (scaled >> shift.to(tl.uint64)).to(tl.int32)
    return pages


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
    factor,
    shift,
    width,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_STARTS: tl.constexpr,
):
    """Give each row's request, or -1, its first position and its number of pages."""
    request = tl.load(requests_ptr + at(row, requests_stride, UNIT), mask=there, other=-1)
    length = tl.load(lengths_ptr + at(row, lengths_stride, UNIT), mask=there, other=0)
    start = request * 0
    if HAS_STARTS:
        start = tl.load(starts_ptr + at(row, starts_stride, UNIT), mask=there, other=0)
    # The last page holds the last token: this rounds up without a sum that wraps.
    last = tl.maximum(length, 1) - 1
    pages = tl.where(length > 0, _pages_of(last, page_size, factor, shift) + 1, 0)
    pages = narrowed(tl.minimum(pages, counted(width, WIDE)), WIDE)
    request = narrowed(tl.where(within(request, pool), request, -1), WIDE=False)
    return request, start, pages


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
    factor,
    shift,
    width,
    tail,
    out_row_stride,
    WIDE: tl.constexpr,
    FILL: tl.constexpr,
    PART: tl.constexpr,
):
    row_ptr = table_ptr + tl.maximum(request, 0).to(tl.int64) * row_stride
    readable = tl.where(request >= 0, counted(columns, WIDE), 0)
    lane = tl.arange(0, PART)
    here = lane < pages - first
    begin = start.to(tl.int64) + first.to(tl.int64) * page_size
    if WIDE:
        position = begin + lane.to(tl.int64) * page_size
    else:
        # A part spans less than 2**30 positions: what begins beyond that reaches no column.
        begin = tl.minimum(tl.maximum(begin, -1073741824), 1073741824).to(tl.int32)
        position = begin + lane * page_size.to(tl.int32)
    slots = tl.load(row_ptr + position, mask=here & within(position, readable), other=-1)
    page = tl.where(slots < 0, -1, _pages_of(tl.maximum(slots, 0), page_size, factor, shift)).to(tl.int32)
    kept = here
    if FILL:
        page = tl.where(here, page, tail)
        kept = lane < counted(width, WIDE) - first
    tl.store(out_ptr + row.to(tl.int64) * out_row_stride + first + lane, page, mask=kept)


@unspecialized
def block_table_kernel(
    requests_ptr,
    lengths_ptr,
    starts_ptr,
    batch: tl.int32,
    parts: tl.int32,
    dealers: tl.int32,
    turns: tl.int32,
    bits: tl.int32,
    table_ptr,
    out_ptr,
    row_stride: tl.int64,
    out_row_stride: tl.int64,
    pool: tl.int64,
    page_size: tl.int64,
    factor: tl.int32,
    shift: tl.int32,
    width: tl.int64,
    columns: tl.int64,
    tail: tl.int32,
    requests_stride: tl.int64,
    lengths_stride: tl.int64,
    starts_stride: tl.int64,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    FILL: tl.constexpr,
    PART: tl.constexpr,
    HAND: tl.constexpr,
) -> None:
    if (tl.program_id(0) >= dealers) | (turns == 1):
        row, part, there = dealt(0, batch, parts, dealers, bits, WIDE)
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
            factor,
            shift,
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
                factor,
                shift,
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
            row, part, there = dealt(turn + lane, batch, parts, dealers, bits, WIDE)
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
                factor,
                shift,
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
                    factor,
                    shift,
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
    Exact. Addresses are 64-bit; positions are counted in 32 bit while the columns of both tables and
    the positions of 512 pages stay below 2**30.

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
    grid, parts, dealers, turns, bits = deal(batch, width, _PART)
    starts = kv_lens if kv_starts is None else kv_starts
    factor, shift = _reciprocal(page_size)
    requests_stride = req_pool_indices.stride(0)
    lengths_stride = kv_lens.stride(0)
    starts_stride = starts.stride(0)
    kernel.launch(
        grid,
        req_pool_indices,
        kv_lens,
        starts,
        batch,
        parts,
        dealers,
        turns,
        bits,
        req_to_token,
        out,
        req_to_token.stride(0),
        out.stride(0),
        pool,
        page_size,
        factor,
        shift,
        width,
        columns,
        -1 if tail is None else tail,
        requests_stride,
        lengths_stride,
        starts_stride,
        max(width, columns, page_size * _PART, turns * dealers) > REACH,
        requests_stride == lengths_stride == starts_stride == 1,
        kv_starts is not None,
        fill,
    )
    return out
