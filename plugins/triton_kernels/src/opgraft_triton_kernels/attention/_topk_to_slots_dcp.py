"""The Triton kernel of ``attention.topk_to_slots_dcp``."""

# The parameters of a kernel are Triton's values, which have no Python type.
# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs

from __future__ import annotations

import torch
import triton.language as tl

from opgraft_triton_kernels.attention._row_parts import at
from opgraft_triton_kernels.launcher import Launcher, unspecialized

__all__ = ["topk_to_slots_dcp"]

_BLOCK = 1024
_WARPS = 4


@unspecialized
def topk_to_slots_dcp_kernel(
    slots_ptr,
    out_ptr,
    counts_ptr,
    k: tl.int32,
    row_stride: tl.int64,
    stride: tl.int64,
    world: tl.int64,
    rank: tl.int64,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    row_ptr = slots_ptr + token * row_stride
    out_row_ptr = out_ptr + token * k.to(tl.int64)
    lane = tl.arange(0, BLOCK)
    kept = tl.program_id(0) * 0
    for first in range(0, k, BLOCK):
        place = first + lane
        slot = tl.load(row_ptr + at(place, stride, UNIT), mask=place < k, other=-1)
        local = slot // world.to(slot.dtype)
        owned = (slot >= 0) & (slot - local * world.to(slot.dtype) == rank)
        owned_before = tl.cumsum(owned.to(tl.int32), 0) - 1
        tl.store(out_row_ptr + kept + owned_before, local.to(tl.int32), mask=owned)
        kept += tl.sum(owned.to(tl.int32), 0)
    for first in range(kept, k, BLOCK):
        tl.store(out_row_ptr + first + lane, -1, mask=first + lane < k)
    tl.store(counts_ptr + token, kept)


kernel = Launcher(topk_to_slots_dcp_kernel, BLOCK=_BLOCK, num_warps=_WARPS)


def topk_to_slots_dcp(slots: torch.Tensor, *, world_size: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep this rank's share of selected slots, compact, and count it, in one launch.

    Parameters
    ----------
    slots
        [tokens, k], int32 or int64, any stride, any value.
    world_size
        Ranks, from 1 to 2**31 - 1.
    rank
        This rank, below `world_size`.

    Returns
    -------
    tuple of torch.Tensor
        This rank's slots [tokens, k], then -1, and their number [tokens], both int32.

    Raises
    ------
    Nothing of its own.

    Numerics
    --------
    Exact.

    Source
    ------
    Written from the formula; corresponds to the top-k filter of SGLang's decode context
    parallelism.
    """
    tokens, k = slots.shape
    out = torch.empty((tokens, k), dtype=torch.int32, device=slots.device)
    if tokens == 0 or k == 0:
        return out, torch.zeros((tokens,), dtype=torch.int32, device=slots.device)
    counts = torch.empty((tokens,), dtype=torch.int32, device=slots.device)
    row_stride, stride = slots.stride()
    kernel.launch((tokens, 1, 1), slots, out, counts, k, row_stride, stride, world_size, rank, stride == 1)
    return out, counts
