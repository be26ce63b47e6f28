"""``attention.topk_to_slots`` on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from opgraft_cpu_reference._flat import flat_view

__all__ = ["topk_to_slots"]


def topk_to_slots(
    table: Tensor,
    topk: Tensor,
    *,
    cu_q: Tensor | None = None,
    output_rows: int | None = None,
    page_size: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Map each query's selected positions to KV slots.

    One row a query is gathered along the rows. Where requests own several queries, these are
    counted off along the bounds, and entries are read through their addresses in memory.

    Parameters
    ----------
    table
        [rows, columns], int32 or int64, any stride: slots, or pages of `page_size` slots.
    topk
        [tokens, k], int32 or int64, any stride: positions; a negative one selects none.
    cu_q
        [rows + 1], int32 or int64: first query of each request, and the end of the last.
    output_rows
        Rows of the result.
    page_size
        Slots per table entry.
    out
        [output_rows, k], int32, any stride: receives the slots.

    Returns
    -------
    Tensor
        [output_rows, k], int32; `out` itself where given.

    Raises
    ------
    RuntimeError
        From torch, for arguments that the op would have refused.

    Notes
    -----
    *Numerics.* Exact.

    *Source.* Written from the formula of the op.

    """
    tokens, k = topk.shape
    height = tokens if output_rows is None else output_rows
    if cu_q is None and height == tokens and table.numel():
        slots = _read(table, None, topk, page_size)
        if out is not None:
            return out.copy_(slots)
        return slots.to(torch.int32).contiguous()
    if out is None:
        out = torch.empty((height, k), dtype=torch.int32, device="cpu")
    first, last, rows = 0, tokens, None
    if cu_q is not None:
        # Ascending whatever comes, so that there are as many owners as queries.
        bounds = cu_q.clamp(0, tokens).cummax(0).values
        first, last = int(bounds[0]), int(bounds[-1])
        rows = torch.repeat_interleave(bounds.diff()).to(torch.int64)
    if first >= last or not table.numel():
        return out.fill_(-1)
    out[:first] = -1
    out[last:] = -1
    out[first:last] = _read(table, rows, topk[first:last], page_size)
    return out


def _read(table: Tensor, rows: Tensor | None, topk: Tensor, page_size: int) -> Tensor:
    """Read from row t for query t, or from the row that `rows` says."""
    columns = topk if page_size == 1 else topk.div(page_size, rounding_mode="floor")
    within = columns.clamp(0, table.shape[1] - 1)
    outside = within != columns
    if rows is None:
        slots = table.gather(1, within.to(torch.int64))
    else:
        bases = rows * table.stride(0)
        addresses = within.to(torch.int64).mul(table.stride(1)).add_(bases[:, None])
        slots = flat_view(table).index_select(0, addresses.reshape(-1)).view(topk.shape)
    if page_size != 1:
        outside |= slots < 0
        slots = slots.to(torch.int64).mul_(page_size).add_(topk - columns * page_size)
    return slots.masked_fill_(outside, -1)
