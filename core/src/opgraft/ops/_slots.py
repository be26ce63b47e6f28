"""Reads of a table of KV slots or pages, right at every edge of the table."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["read_slots", "translate"]


def read_slots(table: Tensor, rows: Tensor, positions: Tensor, page_size: int = 1) -> Tensor:
    """Give the slot at each position of each row; -1 where the table has none.

    Parameters
    ----------
    table
        [pool, columns]: slots, or pages of `page_size` slots.
    rows, positions
        int64, any value, shapes that broadcast.
    page_size
        Slots per table entry. With 1 a negative entry is passed on as it is, else it gives -1.

    Returns
    -------
    Tensor
        int64, of the broadcast shape.

    """
    columns = positions if page_size == 1 else positions.div(page_size, rounding_mode="floor")
    pool, width = table.shape
    if pool == 0 or width == 0:
        return torch.full_like(rows + columns, -1)
    inside = (rows >= 0) & (rows < pool) & (columns >= 0) & (columns < width)
    entries = table[rows.clamp(0, pool - 1), columns.clamp(0, width - 1)].to(torch.int64)
    if page_size != 1:
        inside &= entries >= 0
        entries = entries * page_size + positions.remainder(page_size)
    return torch.where(inside, entries, -1)


def translate(slots: Tensor, token_map: Tensor) -> Tensor:
    """Look slots up in a map, [tokens]; -1 where a slot is negative or beyond it."""
    tokens = token_map.shape[0]
    if tokens == 0:
        return torch.full_like(slots, -1)
    inside = (slots >= 0) & (slots < tokens)
    return torch.where(inside, token_map[slots.clamp(0, tokens - 1)].to(torch.int64), -1)
