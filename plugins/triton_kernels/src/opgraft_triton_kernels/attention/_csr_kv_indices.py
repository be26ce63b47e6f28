"""The Triton kernel of ``attention.csr_kv_indices``."""

# The parameters of a kernel are Triton's values, which have no Python type.
# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from opgraft_triton_kernels.attention._row_parts import (
    HAND,
    REACH,
    at,
    copy_part,
    counted,
    deal,
    dealt,
    narrowed,
    negated,
    pick,
    within,
)
from opgraft_triton_kernels.launcher import Launcher, unspecialized

__all__ = ["csr_kv_indices"]

# One H200, replayed graph, over a copy of the same bytes, for 1 and 8 rows of 131072, 64 of 32768, 256
# of 8192, 512 of 4096, and one of 131072 beside 255 of 64; part/warps 1024/2 1.23 1.08 1.07 1.07 1.05
# 1.39, 1024/1 1.25 1.08 1.06 1.05 1.05 1.35, 512/1 1.22 1.10 1.17 1.12 1.11 1.52, 2048/4 1.19 1.08 1.06
# 1.09 1.08 1.59, or 1.40 with half the programs; 1024/1 takes a tenth longer for short rows. The
# parameters of the kernels stand in the order in which they are needed: 2 per cent.
_PART = 1024
_WARPS = 2


@triton.jit
def _load_run(
    requests_ptr,
    lengths_ptr,
    offsets_ptr,
    starts_ptr,
    row,
    there,
    requests_stride,
    lengths_stride,
    offsets_stride,
    starts_stride,
    pool,
    capacity,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_STARTS: tl.constexpr,
):
    """Give each row's request, or -1, its first position, and place and length in the stream."""
    request = tl.load(requests_ptr + at(row, requests_stride, UNIT), mask=there, other=-1)
    length = tl.load(lengths_ptr + at(row, lengths_stride, UNIT), mask=there, other=0)
    offset = tl.load(offsets_ptr + at(row, offsets_stride, UNIT), mask=there, other=0)
    # What would lie before the stream is skipped: the run starts later, by so many positions.
    skipped = tl.maximum(negated(offset), 0)
    offset = narrowed(tl.maximum(offset, 0), WIDE)
    length = narrowed(tl.maximum(length, 0) - skipped, WIDE)
    # Not negative: a part's distance, taken from it, must not wrap round.
    length = tl.maximum(tl.minimum(length, counted(capacity, WIDE) - offset), 0)
    start = skipped
    if HAS_STARTS:
        start += tl.load(starts_ptr + at(row, starts_stride, UNIT), mask=there, other=0)
    request = narrowed(tl.where(within(request, pool), request, -1), WIDE=False)
    return request, narrowed(start, WIDE), offset, length


@triton.jit
def _write_translated(
    row_ptr,
    map_ptr,
    target_ptr,
    target_stride,
    position,
    end,
    columns,
    page_size,
    map_stride,
    tokens,
    PART: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """Write a part entry by entry: a page becomes a slot, a slot what the map makes of it."""
    # One division rounds down, that of the first position; what the lanes add to it is positive.
    size = page_size.to(position.dtype)
    page = position // size
    page = tl.where(page * size > position, page - 1, page)
    lane = tl.arange(0, PART)
    offset = (position - page * size).to(tl.uint32) + lane.to(tl.uint32)
    pages = offset // page_size.to(tl.uint32)
    column = page + pages.to(tl.int32)
    here = lane < end
    entries = tl.load(row_ptr + column, mask=here & within(column, columns), other=-1).to(tl.int64)
    in_page = (offset - pages * page_size.to(tl.uint32)).to(tl.int64)
    slots = tl.where((entries < 0) & (page_size > 1), -1, entries * page_size + in_page)
    if HAS_MAP:
        known = here & within(slots, tokens)
        slots = tl.load(map_ptr + slots * map_stride, mask=known, other=-1).to(tl.int64)
    places = at(lane, target_stride, UNIT)
    tl.store(target_ptr + places, slots.to(target_ptr.dtype.element_ty), mask=here)


@triton.jit
def _write_part(
    table_ptr,
    map_ptr,
    out_ptr,
    request,
    start,
    offset,
    length,
    first,
    columns,
    row_stride,
    page_size,
    map_stride,
    tokens,
    out_stride,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
    TRANSLATED: tl.constexpr,
    HAS_MAP: tl.constexpr,
    PART: tl.constexpr,
):
    row_ptr = table_ptr + tl.maximum(request, 0).to(tl.int64) * row_stride
    readable = tl.where(request >= 0, counted(columns, WIDE), 0)
    target_ptr = out_ptr + at(offset.to(tl.int64) + first, out_stride, UNIT)
    end = tl.minimum(length - first, PART)
    position = start + first
    if TRANSLATED:
        _write_translated(
            row_ptr,
            map_ptr,
            target_ptr,
            out_stride,
            position,
            end,
            readable,
            page_size,
            map_stride,
            tokens,
            PART,
            UNIT,
            HAS_MAP,
        )
    else:
        copy_part(row_ptr + position, target_ptr, out_stride, position, end, readable, PART, UNIT)


@unspecialized
def csr_kv_indices_kernel(
    requests_ptr,
    lengths_ptr,
    offsets_ptr,
    batch: tl.int32,
    parts: tl.int32,
    dealers: tl.int32,
    turns: tl.int32,
    bits: tl.int32,
    table_ptr,
    out_ptr,
    row_stride: tl.int64,
    capacity: tl.int64,
    pool: tl.int64,
    columns: tl.int64,
    starts_ptr,
    map_ptr,
    requests_stride: tl.int64,
    lengths_stride: tl.int64,
    offsets_stride: tl.int64,
    starts_stride: tl.int64,
    page_size: tl.int64,
    map_stride: tl.int64,
    tokens: tl.int64,
    out_stride: tl.int64,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    TRANSLATED: tl.constexpr,
    HAS_MAP: tl.constexpr,
    PART: tl.constexpr,
    HAND: tl.constexpr,
) -> None:
    if (tl.program_id(0) >= dealers) | (turns == 1):
        row, part, there = dealt(0, batch, parts, dealers, bits, WIDE)
        request, start, offset, length = _load_run(
            requests_ptr,
            lengths_ptr,
            offsets_ptr,
            starts_ptr,
            row,
            there,
            requests_stride,
            lengths_stride,
            offsets_stride,
            starts_stride,
            pool,
            capacity,
            WIDE,
            UNIT,
            HAS_STARTS,
        )
        first = part * PART
        # No condition on what was loaded before the table is read: it would delay the other loads.
        going = first >= 0
        while going:
            _write_part(
                table_ptr,
                map_ptr,
                out_ptr,
                request,
                start,
                offset,
                length,
                first,
                columns,
                row_stride,
                page_size,
                map_stride,
                tokens,
                out_stride,
                WIDE,
                UNIT,
                TRANSLATED,
                HAS_MAP,
                PART,
            )
            first += PART
            going = (part == parts - 1) & (first < length)
    else:
        lane = tl.arange(0, HAND)
        for turn in range(0, turns, HAND):
            row, part, there = dealt(turn + lane, batch, parts, dealers, bits, WIDE)
            request, start, offset, length = _load_run(
                requests_ptr,
                lengths_ptr,
                offsets_ptr,
                starts_ptr,
                row,
                there,
                requests_stride,
                lengths_stride,
                offsets_stride,
                starts_stride,
                pool,
                capacity,
                WIDE,
                UNIT,
                HAS_STARTS,
            )
            first = part * PART
            todo = tl.where(there & (first < length), lane, HAND)
            current = tl.min(todo, 0)
            while current < HAND:
                chosen = lane == current
                _write_part(
                    table_ptr,
                    map_ptr,
                    out_ptr,
                    pick(chosen, request),
                    pick(chosen, start),
                    pick(chosen, offset),
                    pick(chosen, length),
                    pick(chosen, first),
                    columns,
                    row_stride,
                    page_size,
                    map_stride,
                    tokens,
                    out_stride,
                    WIDE,
                    UNIT,
                    TRANSLATED,
                    HAS_MAP,
                    PART,
                )
                first += tl.where(chosen, PART, 0)
                done = (part < parts - 1) | (first >= length)
                todo = tl.where(chosen & done, HAND, todo)
                current = tl.min(todo, 0)


kernel = Launcher(csr_kv_indices_kernel, PART=_PART, HAND=HAND, num_warps=_WARPS)


def csr_kv_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_starts: torch.Tensor | None = None,
    *,
    page_size: int = 1,
    token_map: torch.Tensor | None = None,
    total: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Flatten each request's KV slots into one stream, in one launch.

    Parameters
    ----------
    req_to_token
        [pool, columns], int32 or int64, column stride 1, any row stride: KV slots, or KV pages
        where `page_size` is above 1.
    req_pool_indices
        [batch], int32 or int64, any stride, any value.
    kv_lens
        [batch], int32 or int64, tokens, any stride, any value.
    kv_indptr
        [batch + 1], int32 or int64, any stride, any order, any value.
    kv_starts
        [batch], int32 or int64, tokens, any stride, any value; 0 where left out.
    page_size
        Slots per table entry, from 1 to 2**31 - 1.
    token_map
        [tokens], int32 or int64, any stride.
    total
        Size of a fresh result; read from ``kv_indptr[-1]``, with one synchronisation, where neither
        it nor `out` is given.
    out
        [capacity], int32 or int64, any stride: receives the stream. A fresh tensor of int32, filled
        with -1 by a launch of its own, if left out.

    Returns
    -------
    torch.Tensor
        [total], int32, or `out` itself.

    Raises
    ------
    Nothing of its own.

    Numerics
    --------
    Exact. Addresses are 64-bit; positions are counted in 32 bit while both the table's columns and
    the stream stay below 2**30, where every sum that wraps is outside the table either way.

    Source
    ------
    Written from the formula; corresponds to SGLang's ``create_flashinfer_kv_indices_triton``.
    """
    if out is None:
        size = max(int(kv_indptr[-1]), 0) if total is None else total
        out = torch.full((size,), -1, dtype=torch.int32, device=kv_indptr.device)
    batch = req_pool_indices.shape[0]
    capacity = out.shape[0]
    if batch == 0 or capacity == 0:
        return out
    pool, columns = req_to_token.shape
    grid, parts, dealers, turns, bits = deal(batch, min(columns * page_size, capacity), _PART)
    starts = kv_lens if kv_starts is None else kv_starts
    tokens = req_pool_indices if token_map is None else token_map
    requests_stride = req_pool_indices.stride(0)
    lengths_stride = kv_lens.stride(0)
    offsets_stride = kv_indptr.stride(0)
    starts_stride = starts.stride(0)
    out_stride = out.stride(0)
    kernel.launch(
        grid,
        req_pool_indices,
        kv_lens,
        kv_indptr,
        batch,
        parts,
        dealers,
        turns,
        bits,
        req_to_token,
        out,
        req_to_token.stride(0),
        capacity,
        pool,
        columns,
        starts,
        tokens,
        requests_stride,
        lengths_stride,
        offsets_stride,
        starts_stride,
        page_size,
        tokens.stride(0),
        tokens.shape[0],
        out_stride,
        max(columns * page_size, capacity, turns * dealers) > REACH,
        requests_stride == lengths_stride == offsets_stride == starts_stride == out_stride == 1,
        kv_starts is not None,
        page_size != 1 or token_map is not None,
        token_map is not None,
    )
    return out
