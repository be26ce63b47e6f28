"""The Triton kernel of ``attention.clamp_position``."""

# The parameters of a kernel are Triton's values, which have no Python type.
# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from opgraft_triton_kernels.launcher import Launcher

__all__ = ["clamp_position"]

# One H200, replayed graph, us for 64 | 2**24 int32 and for the same of int64, block/warps: 512/8
# 1.04 | 50.9 and 1.05 | 65.0, 512/4 1.09 | 50.7 and 1.08 | 65.6, 256/8 1.03 | 59.5 and 1.04 | 71.8,
# 1024/8 1.10 | 55.5 and 1.07 | 66.9.
_BLOCK = 512
_WARPS = 8


@triton.jit(do_not_specialize=["size"])
def clamp_position_contiguous_kernel(seq_lens_ptr, out_ptr, size: tl.int64, BLOCK: tl.constexpr) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    lengths = tl.load(seq_lens_ptr + offsets, mask=mask, other=1)
    tl.store(out_ptr + offsets, (tl.maximum(lengths, 1) - 1).to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["size", "seq_lens_stride", "out_stride"])
def clamp_position_strided_kernel(
    seq_lens_ptr, out_ptr, size: tl.int64, seq_lens_stride: tl.int64, out_stride: tl.int64, BLOCK: tl.constexpr
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    lengths = tl.load(seq_lens_ptr + offsets * seq_lens_stride, mask=mask, other=1)
    tl.store(out_ptr + offsets * out_stride, (tl.maximum(lengths, 1) - 1).to(tl.int64), mask=mask)


contiguous = Launcher(clamp_position_contiguous_kernel, BLOCK=_BLOCK, num_warps=_WARPS)
strided = Launcher(clamp_position_strided_kernel, BLOCK=_BLOCK, num_warps=_WARPS)


def clamp_position(seq_lens: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Give the zero-based position of each request's newest token, in one launch.

    Parameters
    ----------
    seq_lens
        [batch], int32 or int64, tokens; any stride, any value.
    out
        [batch], int64, any stride: receives the positions. A fresh tensor if left out.

    Returns
    -------
    torch.Tensor
        [batch], int64, ``max(seq_lens, 1) - 1``; `out` itself if given.

    Numerics
    --------
    Exact. The maximum comes first, so that the smallest integer gives 0 rather than wrapping round.

    Source
    ------
    Written from the formula; corresponds to SGLang's ``clamp_position``.
    """
    if out is None:
        out = torch.empty_like(seq_lens, dtype=torch.int64, memory_format=torch.contiguous_format)
    size = seq_lens.numel()
    if size == 0:
        return out
    grid = ((size + _BLOCK - 1) // _BLOCK, 1, 1)
    if seq_lens.is_contiguous() and out.is_contiguous():
        contiguous.launch(grid, seq_lens, out, size)
    else:
        strided.launch(grid, seq_lens, out, size, seq_lens.stride(0), out.stride(0))
    return out
