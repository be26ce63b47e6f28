"""The Triton kernel of ``attention.topk_valid_length``."""

# The parameters of a kernel are Triton's values, which have no Python type.
# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs

from __future__ import annotations

import torch
import triton.language as tl

from opgraft_triton_kernels.attention._row_parts import at
from opgraft_triton_kernels.launcher import Launcher, unspecialized

__all__ = ["topk_valid_length"]

# The usual row in one step.
_BLOCK = 2048
_WARPS = 8


@unspecialized
def topk_valid_length_kernel(
    topk_ptr,
    out_ptr,
    k: tl.int32,
    row_stride: tl.int64,
    stride: tl.int64,
    minimum: tl.int32,
    UNIT: tl.constexpr,
    LAST: tl.constexpr,
    REPAIR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    row_ptr = topk_ptr + token * row_stride
    lane = tl.arange(0, BLOCK)
    reached = tl.zeros([BLOCK], tl.int32)
    for first in range(0, k, BLOCK):
        place = first + lane
        entry = tl.load(row_ptr + at(place, stride, UNIT), mask=place < k, other=-1)
        if LAST:
            reached = tl.where(entry >= 0, place.to(tl.int32) + 1, reached)
        else:
            reached += (entry >= 0).to(tl.int32)
    length = tl.max(reached, 0) if LAST else tl.sum(reached, 0)
    tl.store(out_ptr + token, tl.maximum(length, minimum))
    if REPAIR and length == 0:
        tl.store(row_ptr, 0)


kernel = Launcher(topk_valid_length_kernel, BLOCK=_BLOCK, num_warps=_WARPS)


def topk_valid_length(
    topk: torch.Tensor, *, rule: str = "last", minimum: int = 1, repair: bool = False
) -> torch.Tensor:
    """Count the entries of each row of a selection that a consumer has to read, in one launch.

    Parameters
    ----------
    topk
        [tokens, k], int32 or int64, any stride, any value; mutated with `repair`.
    rule
        ``"last"``: up to and with the last valid entry. ``"count"``: the valid entries alone.
    minimum
        Least length, 0 or 1.
    repair
        Whether to write ``topk[t, 0] = 0`` in rows without a valid entry.

    Returns
    -------
    torch.Tensor
        [tokens], int32.

    Raises
    ------
    Nothing of its own.

    Numerics
    --------
    Exact.

    Source
    ------
    Written from the formula; corresponds to the top-k length reductions beside SGLang's
    ``prepare_trtllm_nope_sparse_metadata``.
    """
    tokens, k = topk.shape
    if k == 0:
        return torch.full((tokens,), minimum, dtype=torch.int32, device=topk.device)
    out = torch.empty((tokens,), dtype=torch.int32, device=topk.device)
    if tokens != 0:
        row_stride, stride = topk.stride()
        grid = (tokens, 1, 1)
        kernel.launch(grid, topk, out, k, row_stride, stride, minimum, stride == 1, rule == "last", repair)
    return out
