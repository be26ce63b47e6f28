"""``attention.block_table`` on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from opgraft_cpu_reference._flat import FAR, flat_view

__all__ = ["block_table"]

# One by one a row costs 10 us; all together cost 59 us (EPYC, one thread, torch 2.13, int32, 1 to
# 32 rows of 1 to 64 pages).
_FEW = 4


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
    """List the KV pages of each request in a rectangular table.

    The addresses of the pages' first tokens are an outer sum, which is read in one go; division
    by a power of two is a shift, which rounds down for negative slots too.

    Parameters
    ----------
    req_to_token
        [pool, columns], int32 or int64, column stride 1: KV slots.
    req_pool_indices, kv_lens
        [batch], int32 or int64: table row and length of each request.
    kv_starts
        [batch], int32 or int64: first position of each request.
    page_size
        Slots per page.
    max_pages
        Columns of a fresh table.
    tail
        What stands behind a request's pages.
    out
        [batch, max_pages], int32: receives the pages.

    Returns
    -------
    Tensor
        [batch, max_pages], int32; `out` itself where given.

    Raises
    ------
    RuntimeError
        From torch, for arguments that the op would have refused.

    Notes
    -----
    *Numerics.* Exact.

    *Source.* Written from the formula of the op.

    """
    behind = -1 if tail is None else tail
    keep = out is not None and tail is None
    fresh = out is None
    if out is None:
        out = torch.empty((kv_lens.shape[0], max_pages or 0), dtype=torch.int32, device="cpu")
    batch, columns = out.shape
    if batch == 0 or columns == 0:
        return out
    if batch <= _FEW:
        _row_by_row(req_to_token, req_pool_indices, kv_lens, kv_starts, page_size, out, None if keep else behind)
        return out
    # Beyond the longest request there is nothing to read.
    used = min(columns, -(-max(int(kv_lens.max()), 0) // page_size))
    steps = torch.arange(0, used * page_size, page_size, device="cpu")
    table = _first_slots(req_to_token, req_pool_indices, kv_starts, steps)
    if page_size & (page_size - 1):
        table = table.div_(page_size, rounding_mode="floor")
    elif page_size > 1:
        table = table.bitwise_right_shift_(page_size.bit_length() - 1)
    table.clamp_(min=-1)
    unused = steps >= kv_lens[:, None]
    if keep:
        torch.where(unused, out[:, :used], table.to(torch.int32), out=out[:, :used])
        return out
    table.masked_fill_(unused, behind)
    if fresh and used == columns and table.dtype is torch.int32:
        return table
    out[:, :used] = table
    out[:, used:] = behind
    return out


def _row_by_row(
    table: Tensor, rows: Tensor, lengths: Tensor, starts: Tensor | None, page_size: int, out: Tensor, behind: int | None
) -> None:
    """Read each row with a stride of a page, which for a few rows is the least work."""
    pool, width = table.shape
    columns = out.shape[1]
    begins = [0] * rows.shape[0] if starts is None else starts.tolist()
    for line, row, length, start in zip(out.unbind(0), rows.tolist(), lengths.tolist(), begins, strict=True):
        used = min(-(-max(length, 0) // page_size), columns)
        # The steps whose first token the table has: all of them, but for misuse.
        low = min(max(-(start // page_size), 0), used)
        high = max(min(-((start - width) // page_size), used), low) if 0 <= row < pool else low
        if low < high:
            first = start + low * page_size
            slots = table[row, first : start + (high - 1) * page_size + 1 : page_size]
            pages = slots.div(page_size, rounding_mode="floor") if page_size != 1 else slots
            line[low:high] = pages.clamp(min=-1)
        if low:
            line[:low] = -1
        if high < used:
            line[high:used] = -1
        if behind is not None and used < columns:
            line[used:] = behind


def _first_slots(table: Tensor, rows: Tensor, starts: Tensor | None, steps: Tensor) -> Tensor:
    """Read the slot at each step from each start, [batch, steps]; -1 where the table has none."""
    pool, width = table.shape
    shape = (rows.shape[0], steps.shape[0])
    if table.numel() == 0 or steps.shape[0] == 0:
        return torch.full(shape, -1, dtype=torch.int32, device="cpu")
    flat = flat_view(table)
    lowest, highest = 0, int(steps[-1])
    if starts is not None:
        lowest = int(starts.min())
        highest += int(starts.max())
    known = rows.clamp(0, pool - 1)
    bases = known * torch.tensor([table.stride(0)], device="cpu")
    if 0 <= lowest <= highest < width:
        outside = None
        if starts is not None:
            bases += starts
        addresses = bases[:, None] + steps
    else:
        begins = 0 if starts is None else starts.to(torch.int64).clamp(-FAR, FAR)[:, None]
        positions = (begins + steps).expand(shape)
        within = positions.clamp(0, width - 1)
        outside = within != positions
        addresses = within.add_(bases[:, None])
    slots = flat.index_select(0, addresses.view(-1)).view(shape)
    if outside is not None:
        slots.masked_fill_(outside, -1)
    strangers = known != rows
    return slots.masked_fill_(strangers[:, None], -1) if strangers.any() else slots
