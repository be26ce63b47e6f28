"""``attention.topk_to_slots_dcp`` on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from opgraft_cpu_reference._masks import count_dtype, pick

__all__ = ["topk_to_slots_dcp"]


def topk_to_slots_dcp(slots: Tensor, *, world_size: int, rank: int) -> tuple[Tensor, Tensor]:
    """Keep this rank's share of selected slots, compact, and count it.

    A mask picks the owned slots of all rows in order; a second one, of as many leading entries a
    row, takes them up in the same order.

    Parameters
    ----------
    slots
        [tokens, k], int32 or int64, any stride: a negative entry is a hole.
    world_size
        Ranks.
    rank
        This rank.

    Returns
    -------
    tuple of Tensor
        [tokens, k] and [tokens], int32.

    Raises
    ------
    RuntimeError
        From torch, for arguments that the op would have refused.

    Notes
    -----
    *Numerics.* Exact.

    *Source.* Written from the formula of the op.

    """
    tokens, k = slots.shape
    if world_size & (world_size - 1):
        # The remainder of a negative slot is not positive, so it can only be taken for rank 0.
        owned = slots.fmod(world_size) == rank
        if rank == 0:
            owned &= slots >= 0
        local = pick(slots, owned).div_(world_size, rounding_mode="floor")
    else:
        # One test of the sign bit and of the remainder.
        sign = torch.iinfo(slots.dtype).min
        owned = slots.bitwise_and(sign | (world_size - 1)) == rank
        local = pick(slots, owned).bitwise_right_shift_(world_size.bit_length() - 1)
    narrow = count_dtype(k, slots.numel())
    counts = owned.sum(1, dtype=narrow)
    result = torch.full((tokens, k), -1, dtype=torch.int32, device="cpu")
    leading = torch.arange(k, dtype=narrow, device="cpu") < counts[:, None]
    result.masked_scatter_(leading, local.to(torch.int32))
    return result, counts.to(torch.int32)
