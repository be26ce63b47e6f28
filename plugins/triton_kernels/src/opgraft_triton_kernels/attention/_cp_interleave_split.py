"""The Triton kernel of ``attention.cp_interleave_split``."""

# The parameters of a kernel are Triton's values, which have no Python type.
# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs

from __future__ import annotations

import torch
import triton.language as tl

from opgraft_triton_kernels.launcher import Launcher, unspecialized

__all__ = ["cp_interleave_split"]

# The usual batch in one step.
_TILE = 1024
_WARPS = 8


@unspecialized
def cp_interleave_split_kernel(
    lengths_ptr,
    shares_ptr,
    requests_ptr,
    batch: tl.int32,
    stride: tl.int64,
    world: tl.int32,
    rank: tl.int32,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    # One program: where a share goes depends on all requests before it.
    tile = tl.arange(0, TILE)
    begin = world * 0
    kept = batch * 0
    for first in range(0, batch, TILE):
        request = first + tile
        there = request < batch
        length = tl.load(lengths_ptr + request.to(tl.int64) * stride, mask=there, other=0)
        length = tl.maximum(length, 0)
        rounds = length // world.to(length.dtype)
        rest = (length - rounds * world.to(length.dtype)).to(tl.int32)
        # Places count modulo the world. A tile's remainders add up to less than 2**31, or WIDE.
        summed = rest.to(tl.int64) if WIDE else rest
        laid = tl.cumsum(summed, 0)
        place = ((begin + laid - summed) % world).to(tl.int32)
        skipped = tl.where(place <= rank, rank - place, rank - place + world)
        share = rounds + (skipped < rest).to(rounds.dtype)
        owns = there & (share > 0)
        destination = kept + tl.cumsum(owns.to(tl.int32), 0) - 1
        tl.store(shares_ptr + destination, share, mask=owns)
        tl.store(requests_ptr + destination, request, mask=owns)
        begin = ((begin + tl.sum(summed, 0)) % world).to(tl.int32)
        kept += tl.sum(owns.to(tl.int32), 0)
    for first in range(kept, batch, TILE):
        request = first + tile
        tl.store(shares_ptr + request, 0, mask=request < batch)
        tl.store(requests_ptr + request, -1, mask=request < batch)


kernel = Launcher(cp_interleave_split_kernel, TILE=_TILE, num_warps=_WARPS)


def cp_interleave_split(extend_lens: torch.Tensor, *, world_size: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Say how many tokens of each request a rank of an interleaved split owns, in one launch.

    Parameters
    ----------
    extend_lens
        [batch], int32 or int64, tokens, any stride, any value.
    world_size
        Ranks, from 1 to 2**31 - 1.
    rank
        This rank, below `world_size`.

    Returns
    -------
    tuple of torch.Tensor
        Shares [batch], of the dtype of `extend_lens`, and the requests they belong to [batch],
        int32: first those of which the rank owns any, then 0 and -1.

    Raises
    ------
    Nothing of its own.

    Numerics
    --------
    Exact: the places of the requests are summed modulo the world, which cannot overflow.

    Source
    ------
    Written from the formula; corresponds to SGLang's interleaved context-parallel split.
    """
    shares = torch.empty_like(extend_lens, memory_format=torch.contiguous_format)
    requests = torch.empty_like(shares, dtype=torch.int32)
    batch = extend_lens.shape[0]
    if batch != 0:
        stride = extend_lens.stride(0)
        wide = world_size * (_TILE + 1) >= 2**31
        kernel.launch((1, 1, 1), extend_lens, shares, requests, batch, stride, world_size, rank, wide)
    return shares, requests
