"""``attention.compact_valid_indices`` on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from opgraft_cpu_reference._flat import FAR
from opgraft_cpu_reference._masks import count_dtype, pick

__all__ = ["compact_valid_indices"]


def compact_valid_indices(
    indices: Tensor, indptr: Tensor | None = None, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Turn a rectangular selection with holes into one stream.

    A mask picks the valid entries in the order in which they belong; only rows that are to lie
    elsewhere than end to end are placed one entry at a time.

    Parameters
    ----------
    indices
        [rows, columns], int32 or int64, any stride: a negative entry is a hole.
    indptr
        [rows + 1], int32 or int64: place of each row's first valid index.
    out
        [capacity], int32, any stride: receives the indices.

    Returns
    -------
    tuple of Tensor
        [rows + 1], int32, and [rows * columns], int32, or `out` itself.

    Raises
    ------
    RuntimeError
        From torch, for arguments that the op would have refused.

    Notes
    -----
    *Numerics.* Exact.

    *Source.* Written from the formula of the op.

    """
    rows, columns = indices.shape
    valid = indices >= 0
    narrow = count_dtype(columns, indices.numel())
    counts = valid.sum(1, dtype=narrow)
    ends = counts.cumsum(0)
    packed = pick(indices, valid)
    places = torch.zeros((rows + 1,), dtype=torch.int32, device="cpu")
    places[1:] = ends
    if out is None:
        out = torch.empty((rows * columns,), dtype=torch.int32, device="cpu")
        unwritten = out if indptr is not None else out[packed.shape[0] :]
        unwritten.fill_(-1)
    if indptr is None or torch.equal(places[:-1], indptr[:-1]):
        fitting = min(packed.shape[0], out.shape[0])
        out[:fitting] = packed[:fitting]
    else:
        shifts = indptr[:-1].to(torch.int64).clamp(-FAR, FAR) - (ends - counts)
        row = torch.repeat_interleave(counts.to(torch.int64))
        targets = shifts.index_select(0, row).add_(torch.arange(packed.shape[0], device="cpu"))
        fits = (targets >= 0) & (targets < out.shape[0])
        out[targets[fits]] = packed[fits].to(out.dtype)
    return places if indptr is None else places.copy_(indptr), out
