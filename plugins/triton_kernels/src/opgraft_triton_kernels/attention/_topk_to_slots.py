"""The Triton kernel of ``attention.topk_to_slots``."""

# The parameters of a kernel are Triton's values, which have no Python type.
# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs

from __future__ import annotations

import torch
import triton.language as tl

from opgraft_triton_kernels.attention._row_parts import at, within
from opgraft_triton_kernels.launcher import Launcher, unspecialized

__all__ = ["topk_to_slots"]

# One H200, replayed graph, us for 64 queries of 64 and of 8 requests and for 1024 of 128, 2048 random
# positions each in rows of 131072: 2.75 2.96 25.5; with the first blocks of all queries before their
# second ones the last takes 34.9.
_BLOCK = 512
_BOUNDS = 4
_LANES = 32
_WARPS = 4


@unspecialized
def topk_to_slots_kernel(
    table_ptr,
    topk_ptr,
    bounds_ptr,
    out_ptr,
    blocks: tl.int32,
    rows: tl.int64,
    columns: tl.int64,
    tokens: tl.int64,
    k: tl.int64,
    table_row_stride: tl.int64,
    table_stride: tl.int64,
    topk_row_stride: tl.int64,
    topk_stride: tl.int64,
    bounds_stride: tl.int64,
    out_row_stride: tl.int64,
    out_stride: tl.int64,
    page_size: tl.int64,
    UNIT: tl.constexpr,
    OWNED: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK: tl.constexpr,
    BOUNDS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    # The blocks of a query are neighbours, and so are the queries of a request: what they read of its
    # row is still in the L2 cache.
    query = tl.program_id(0) // blocks
    token = query.to(tl.int64)
    place = (tl.program_id(0) - query * blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    selected = place < tl.where(token < tokens, k, 0)
    topk_row_ptr = topk_ptr + token * topk_row_stride
    position = tl.load(topk_row_ptr + at(place, topk_stride, UNIT), mask=selected, other=-1)
    row = token
    if OWNED:
        # A token's request is the number of requests that end at or before it. As few lanes as a warp
        # has: every warp counts for itself, and none waits for another.
        ended = tl.zeros([LANES], tl.int32)
        for first in range(0, rows, BOUNDS * LANES):
            for part in tl.static_range(BOUNDS):
                request = first + part * LANES + tl.arange(0, LANES)
                bound_ptr = bounds_ptr + at(request + 1, bounds_stride, UNIT)
                bound = tl.load(bound_ptr, mask=request < rows, other=0)
                ended += ((request < rows) & (bound <= query)).to(tl.int32)
        row = tl.sum(ended, 0).to(tl.int64)
        row = tl.where((query >= tl.load(bounds_ptr)) & (row < rows), row, -1)
    row_ptr = table_ptr + tl.maximum(row, 0) * table_row_stride
    readable = tl.where(row >= 0, columns, 0)
    if PAGED:
        size = page_size.to(position.dtype)
        column = position // size
        inside = (position >= 0) & within(column, readable)
        entry = tl.load(row_ptr + at(column, table_stride, UNIT), mask=inside, other=-1)
        rest = (position - column * size).to(tl.int64)
        entry = entry.to(tl.int64)
        slot = tl.where(entry < 0, -1, entry * page_size + rest)
    else:
        inside = within(position, readable)
        slot = tl.load(row_ptr + at(position, table_stride, UNIT), mask=inside, other=-1)
    out_row_ptr = out_ptr + token * out_row_stride
    tl.store(out_row_ptr + at(place, out_stride, UNIT), slot.to(tl.int32), mask=place < k)


kernel = Launcher(topk_to_slots_kernel, BLOCK=_BLOCK, BOUNDS=_BOUNDS, LANES=_LANES, num_warps=_WARPS)


def topk_to_slots(
    table: torch.Tensor,
    topk: torch.Tensor,
    *,
    cu_q: torch.Tensor | None = None,
    output_rows: int | None = None,
    page_size: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Give the KV slots of selected positions, in one launch.

    Parameters
    ----------
    table
        [rows, columns], int32 or int64, any stride: KV slots, or pages; a row a query, or with
        `cu_q` a row a request.
    topk
        [tokens, k], int32 or int64, any stride, any value: selected positions.
    cu_q
        [rows + 1], int32 or int64, any stride: first query of each request, ascending, and the end
        of the last.
    output_rows
        Rows of the result, at least `tokens`, which it is where left out.
    page_size
        Slots per table entry, from 1 to 2**31 - 1.
    out
        [output_rows, k], int32, any stride: receives the slots. A fresh tensor if left out.

    Returns
    -------
    torch.Tensor
        [output_rows, k], int32; `out` itself if given.

    Raises
    ------
    Nothing of its own.

    Numerics
    --------
    Exact; addresses are 64-bit.

    Source
    ------
    Written from the formula; corresponds to SGLang's ``transform_index_page_table_decode`` and
    ``transform_index_page_table_prefill``.
    """
    tokens, k = topk.shape
    written = tokens if output_rows is None else output_rows
    if out is None:
        out = torch.empty((written, k), dtype=torch.int32, device=topk.device)
    if written == 0 or k == 0:
        return out
    bounds = topk if cu_q is None else cu_q
    table_row_stride, table_stride = table.stride()
    topk_row_stride, topk_stride = topk.stride()
    out_row_stride, out_stride = out.stride()
    bounds_stride = bounds.stride(-1)
    blocks = (k + _BLOCK - 1) // _BLOCK
    kernel.launch(
        (written * blocks, 1, 1),
        table,
        topk,
        bounds,
        out,
        blocks,
        table.shape[0],
        table.shape[1],
        tokens,
        k,
        table_row_stride,
        table_stride,
        topk_row_stride,
        topk_stride,
        bounds_stride,
        out_row_stride,
        out_stride,
        page_size,
        topk_stride == table_stride == out_stride == bounds_stride == 1,
        cu_q is not None,
        page_size != 1,
    )
    return out
