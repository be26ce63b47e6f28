"""A strided table as one line of memory, so that an address is a single number."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["FAR", "address_dtype", "flat_view"]

FAR: Final = 2**61
"""Beyond every real position; a few of them still add up in 64 bit."""


def flat_view(table: Tensor) -> Tensor:
    """View a table, [rows, columns], at least one each, from its first entry to its last.

    Entry (r, c) lies at ``r * table.stride(0) + c * table.stride(1)``. What lies between the rows
    is in the view but never addressed; nothing behind the last entry is in it.
    """
    reach = sum((size - 1) * stride for size, stride in zip(table.shape, table.stride(), strict=True))
    return table.as_strided((reach + 1,), (1,))


def address_dtype(flat: Tensor, beyond: int = 0) -> torch.dtype:
    """Give the narrowest dtype that holds every address of a flat view, and some beyond its end."""
    highest = flat.shape[0] + beyond
    return torch.int32 if highest <= torch.iinfo(torch.int32).max else torch.int64
