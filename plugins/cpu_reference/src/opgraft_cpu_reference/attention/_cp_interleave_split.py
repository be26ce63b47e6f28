"""``attention.cp_interleave_split`` on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cp_interleave_split"]


def cp_interleave_split(extend_lens: Tensor, *, world_size: int, rank: int) -> tuple[Tensor, Tensor]:
    """Say how many tokens of each request a rank of an interleaved split owns.

    Whole rounds of the world give every rank one token; what is left over is counted as the
    difference of how many tokens the rank owns before either end.

    Parameters
    ----------
    extend_lens
        [batch], int32 or int64, tokens.
    world_size
        Ranks.
    rank
        This rank.

    Returns
    -------
    tuple of Tensor
        Shares [batch], of the dtype of `extend_lens`, and requests [batch], int32.

    Raises
    ------
    RuntimeError
        From torch, for arguments that the op would have refused.

    Notes
    -----
    *Numerics.* Exact: only what is left over is summed, which cannot overflow.

    *Source.* Written from the formula of the op.

    """
    lengths = extend_lens.to(torch.int64).clamp(min=0)
    rounds = lengths.div(world_size, rounding_mode="floor")
    ends = (lengths - rounds * world_size).cumsum(0)
    owned = ends.add_(world_size - 1 - rank).div_(world_size, rounding_mode="floor")
    shares = rounds.add_(owned)
    shares[1:] -= owned[:-1]
    found = shares.nonzero().view(-1)
    share_count = found.shape[0]
    requests = torch.full(extend_lens.shape, -1, dtype=torch.int32, device="cpu")
    requests[:share_count] = found
    if share_count == shares.shape[0]:
        return shares.to(extend_lens.dtype), requests
    compact = torch.zeros(extend_lens.shape, dtype=extend_lens.dtype, device="cpu")
    compact[:share_count] = shares.index_select(0, found)
    return compact, requests
