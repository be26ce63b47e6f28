"""``attention.topk_valid_length`` on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from opgraft_cpu_reference._masks import count_dtype

__all__ = ["topk_valid_length"]


def topk_valid_length(topk: Tensor, *, rule: str = "last", minimum: int = 1, repair: bool = False) -> Tensor:
    """Count the entries of each row of a selection that a consumer has to read.

    Parameters
    ----------
    topk
        [tokens, k], int32 or int64, any stride: a negative entry is a hole. Mutated with `repair`.
    rule
        ``"last"`` or ``"count"``.
    minimum
        Least length, 0 or 1.
    repair
        Whether to write ``topk[t, 0] = 0`` in rows without a valid entry.

    Returns
    -------
    Tensor
        [tokens], int32.

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
    if tokens == 0 or k == 0:
        return torch.full((tokens,), minimum, dtype=torch.int32, device="cpu")
    valid = topk >= 0
    narrow = count_dtype(k, topk.numel())
    ends = torch.arange(1, k + 1, dtype=narrow, device="cpu")
    lengths = valid.sum(1, dtype=narrow) if rule == "count" else valid.mul(ends).amax(1)
    if repair:
        topk.select(1, 0).masked_fill_(lengths == 0, 0)
    return lengths.clamp_(min=minimum).to(torch.int32)
