"""Random arguments for ops on requests: batches, lengths and slot tables of realistic shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]
Dtypes = Mapping[str, torch.dtype]
Cases = Iterator[tuple[str, Arguments]]

__all__ = ["Arguments", "Cases", "Dtypes", "batch_of", "integers", "lengths_near", "slot_table", "tensor"]

_TABLE_LIMIT = 2**24
"""Entries of a sampled table at most: beyond it, requests share rows."""


def tensor(values: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
    """Make a tensor of given values; one that the dtype cannot hold becomes its nearest."""
    limits = torch.iinfo(dtype)
    return torch.tensor(values, dtype=torch.int64).clamp(limits.min, limits.max).to(dtype)


def integers(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw integers from [low, high)."""
    return torch.randint(low, high, shape, dtype=dtype, generator=generator)


def batch_of(size: int, per_request: int = 512, most: int = 512) -> int:
    """Say how many requests share `size` elements: none for none, else at least one."""
    return min(most, -(-size // per_request))


def lengths_near(mean: int, batch: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw lengths between half and one and a half of the mean; a mean of one gives ones."""
    spread = mean // 2
    return integers(mean - spread, mean + spread + 1, (batch,), dtype, generator)


def slot_table(batch: int, width: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw a table for a batch: a reserved row 0, then a row a request while they fit."""
    pool = max(2, min(batch + 1, _TABLE_LIMIT // max(width, 1)))
    return integers(0, 2**20, (pool, max(width, 1)), dtype, generator)
