"""The Triton kernels of ``attention.compact_valid_indices``."""

# The parameters of a kernel are Triton's values, which have no Python type.
# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from opgraft_triton_kernels.attention._row_parts import REACH, at, counted, narrowed, within
from opgraft_triton_kernels.launcher import Launcher, unspecialized

__all__ = ["compact_valid_indices"]

_BLOCK = 1024
_COUNTS = 2048
_WARPS = 4
_MOST_PROGRAMS = 2048


@triton.jit
def _load_block(indices_ptr, block, blocks, columns, row_stride, stride, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Give the entries of a block, which is a part of one row, and which of them there are."""
    row = block // blocks
    column = (block - row * blocks) * BLOCK + tl.arange(0, BLOCK)
    entry_ptr = indices_ptr + row.to(tl.int64) * row_stride + at(column, stride, UNIT)
    return tl.load(entry_ptr, mask=column < columns, other=-1), column < columns


@unspecialized
def compact_valid_indices_count_kernel(
    indices_ptr,
    counts_ptr,
    blocks: tl.int32,
    columns: tl.int32,
    row_stride: tl.int64,
    stride: tl.int64,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    entry, _ = _load_block(indices_ptr, block, blocks, columns, row_stride, stride, UNIT, BLOCK)
    tl.store(counts_ptr + block, tl.sum((entry >= 0).to(tl.int32), 0))


@triton.jit
def _sum_counts(counts_ptr, begin, end, WIDE: tl.constexpr, COUNTS: tl.constexpr):
    lane = tl.arange(0, COUNTS)
    sums = tl.zeros([COUNTS], tl.int64 if WIDE else tl.int32)
    for first in range(begin, end, COUNTS):
        sums += tl.load(counts_ptr + first + lane, mask=first + lane < end, other=0)
    return tl.sum(sums, 0)


@unspecialized
def compact_valid_indices_kernel(
    indices_ptr,
    counts_ptr,
    given_ptr,
    places_ptr,
    out_ptr,
    rows: tl.int32,
    blocks: tl.int32,
    group: tl.int32,
    columns: tl.int32,
    row_stride: tl.int64,
    stride: tl.int64,
    given_stride: tl.int64,
    capacity: tl.int64,
    out_stride: tl.int64,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
    GIVEN: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTS: tl.constexpr,
) -> None:
    begin = tl.program_id(0) * group
    every = rows * blocks
    end = tl.minimum(begin + group, every)
    size = counted(capacity, WIDE)
    place = size * 0
    hole = size * 0
    if not GIVEN:
        place = _sum_counts(counts_ptr, begin * 0, begin, WIDE, COUNTS)
        if FILL:
            # Holes go behind all values, in their own order: that fills the rest of the result.
            values = place + _sum_counts(counts_ptr, begin, every, WIDE, COUNTS)
            first_row = begin // blocks
            seen = first_row.to(size.dtype) * columns + (begin - first_row * blocks) * BLOCK
            hole = values + seen - place
    for block in range(begin, end):
        row = block // blocks
        if block == row * blocks:
            if GIVEN:
                given = tl.load(given_ptr + row.to(tl.int64) * given_stride)
                tl.store(places_ptr + row, given.to(tl.int32))
                # Far beyond either end is beyond it however much is added.
                given = tl.minimum(tl.maximum(given.to(tl.int64), -(2**62)), 2**62)
                place = narrowed(given, WIDE)
            else:
                tl.store(places_ptr + row, place.to(tl.int32))
        entry, there = _load_block(indices_ptr, block, blocks, columns, row_stride, stride, UNIT, BLOCK)
        valid = entry >= 0
        rank = tl.cumsum(valid.to(tl.int32), 0)
        target = place + rank - 1
        value = entry.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at(target, out_stride, UNIT), value, mask=valid & within(target, size))
        place += tl.sum(valid.to(tl.int32), 0)
        if FILL:
            gone = there & (entry < 0)
            hole_target = hole + tl.arange(0, BLOCK) - rank
            tl.store(out_ptr + at(hole_target, out_stride, UNIT), -1, mask=gone)
            hole += tl.sum(gone.to(tl.int32), 0)
    if end == every:
        if GIVEN:
            last = tl.load(given_ptr + rows.to(tl.int64) * given_stride)
            tl.store(places_ptr + rows, last.to(tl.int32))
        else:
            tl.store(places_ptr + rows, place.to(tl.int32))


count = Launcher(compact_valid_indices_count_kernel, BLOCK=_BLOCK, num_warps=_WARPS)
compact = Launcher(compact_valid_indices_kernel, BLOCK=_BLOCK, COUNTS=_COUNTS, num_warps=_WARPS)


def compact_valid_indices(
    indices: torch.Tensor, indptr: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn a rectangular selection with holes into one stream: in one launch, or two if it counts.

    Parameters
    ----------
    indices
        [rows, columns], int32 or int64, any stride, any value: a negative one is a hole.
    indptr
        [rows + 1], int32 or int64, any stride, any value: place of each row's first valid index;
        counted if left out.
    out
        [capacity], int32 or int64, any stride: receives the indices. A fresh tensor of int32, with
        -1 where nothing comes, if left out; where `indptr` is given a launch of its own fills it.

    Returns
    -------
    tuple of torch.Tensor
        Places [rows + 1], int32, and the indices, [rows * columns], int32, or `out` itself.

    Raises
    ------
    Nothing of its own.

    Numerics
    --------
    Exact; places are counted in 64 bit where the selection or the stream has more than 2**30 entries.

    Source
    ------
    Written from the formula; corresponds to SGLang's ``get_valid_kv_indices``.
    """
    rows, columns = indices.shape
    device = indices.device
    given = indptr is not None
    fill = out is None and not given
    if out is None:
        size = (rows * columns,)
        if given:
            out = torch.full(size, -1, dtype=torch.int32, device=device)
        else:
            out = torch.empty(size, dtype=torch.int32, device=device)
    if rows == 0 or columns == 0:
        if indptr is None:
            return torch.zeros((rows + 1,), dtype=torch.int32, device=device), out
        return indptr.to(torch.int32, copy=True).contiguous(), out
    places = torch.empty((rows + 1,), dtype=torch.int32, device=device)
    row_stride, stride = indices.stride()
    capacity, out_stride = out.shape[0], out.stride(0)
    blocks = (columns + _BLOCK - 1) // _BLOCK
    every = rows * blocks
    if indptr is None:
        # A program begins with the sum of all counts before its blocks: with more programs than
        # this, those sums would cost more than the blocks.
        group = (every + _MOST_PROGRAMS - 1) // _MOST_PROGRAMS
        counts = torch.empty((every,), dtype=torch.int32, device=device)
        count.launch((every, 1, 1), indices, counts, blocks, columns, row_stride, stride, stride == 1)
        indptr = counts
    else:
        group = blocks
        counts = places
    compact.launch(
        ((every + group - 1) // group, 1, 1),
        indices,
        counts,
        indptr,
        places,
        out,
        rows,
        blocks,
        group,
        columns,
        row_stride,
        stride,
        indptr.stride(0),
        capacity,
        out_stride,
        max(rows * columns, capacity) > REACH,
        stride == out_stride == 1,
        given,
        fill,
    )
    return places, out
