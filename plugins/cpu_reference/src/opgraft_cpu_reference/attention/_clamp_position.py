"""``attention.clamp_position`` on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["clamp_position"]

_ONE = torch.ones(1, dtype=torch.int64, device="cpu")
"""Widens what it is subtracted from within the subtraction: one call fewer, if a slower one."""
_LARGE = 2**15


def clamp_position(seq_lens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Give the zero-based position of each request's newest token.

    Parameters
    ----------
    seq_lens
        [batch], int32 or int64, tokens, any stride.
    out
        [batch], int64, any stride: receives the positions.

    Returns
    -------
    Tensor
        [batch], int64, ``max(seq_lens, 1) - 1``; `out` itself where given.

    Raises
    ------
    RuntimeError
        From torch, for arguments that the op would have refused.

    Notes
    -----
    *Numerics.* Exact: the maximum is taken in the lengths' own dtype, before the subtraction.

    *Source.* Written from the formula of the op.

    """
    lengths = seq_lens.clamp_min(1)
    if out is not None:
        return torch.sub(lengths, 1, out=out)
    if lengths.dtype is torch.int64:
        return lengths.sub_(1)
    if lengths.shape[0] < _LARGE:
        return lengths - _ONE
    return lengths.sub_(1).to(torch.int64)
