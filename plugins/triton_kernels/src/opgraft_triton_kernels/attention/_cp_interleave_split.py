"""The Triton kernel of ``attention.cp_interleave_split``."""

# The parameters of a kernel are Triton's values, which have no Python type.
# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from opgraft_triton_kernels.launcher import Launcher

__all__ = ["cp_interleave_split"]

_TILE = 512
_WARPS = 4


@triton.jit(do_not_specialize=["lengths_ptr", "shares_ptr", "requests_ptr", "batch", "stride", "world", "rank"])
def cp_interleave_split_kernel(
    lengths_ptr,
    shares_ptr,
    requests_ptr,
    batch: tl.int32,
    stride: tl.int64,
    world: tl.int64,
    rank: tl.int64,
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
        length = tl.maximum(length.to(tl.int64), 0)
        # Places count modulo the world: a sum of remainders cannot wrap round.
        rest = length % world
        place = begin + tl.cumsum(rest, 0) - rest
        skipped = (rank - place % world + world) % world
        owns = there & (length > skipped)
        share = (length - skipped - 1) // world + 1
        destination = kept + tl.cumsum(owns.to(tl.int32), 0) - 1
        tl.store(shares_ptr + destination, share.to(shares_ptr.dtype.element_ty), mask=owns)
        tl.store(requests_ptr + destination, request, mask=owns)
        begin = (begin + tl.sum(rest, 0)) % world
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
    Exact, in 64 bit.

    Source
    ------
    Written from the formula; corresponds to SGLang's interleaved context-parallel split.
    """
    shares = torch.empty_like(extend_lens, memory_format=torch.contiguous_format)
    requests = torch.empty_like(shares, dtype=torch.int32)
    batch = extend_lens.shape[0]
    if batch != 0:
        stride = extend_lens.stride(0)
        kernel.launch((1, 1, 1), extend_lens, shares, requests, batch, stride, world_size, rank)
    return shares, requests
