"""The Triton kernel of ``attention.extend_positions``."""

# The parameters of a kernel are Triton's values, which have no Python type.
# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs

from __future__ import annotations

import torch
import triton.language as tl

from opgraft_triton_kernels.attention._runs import LOOKUPS, PLACES, WARPS, ends_need_64_bit, runs_of_places
from opgraft_triton_kernels.launcher import Launcher, unspecialized

__all__ = ["extend_positions"]


@unspecialized
def extend_positions_kernel(
    extends_ptr,
    prefixes_ptr,
    out_ptr,
    batch: tl.int32,
    prefixes: tl.int32,
    total: tl.int64,
    extends_stride: tl.int64,
    prefixes_stride: tl.int64,
    out_stride: tl.int64,
    FILL: tl.constexpr,
    WIDE: tl.constexpr,
    PLACES: tl.constexpr,
    LOOKUPS: tl.constexpr,
) -> None:
    begin = tl.program_id(0).to(tl.int64) * PLACES
    run, rank = runs_of_places(extends_ptr, extends_stride, batch, total, begin, WIDE, PLACES, LOOKUPS)
    row = run.to(tl.int64)
    prefix = tl.load(prefixes_ptr + row * prefixes_stride, mask=run < prefixes, other=0)
    position = tl.maximum(prefix.to(tl.int64), 0) + rank
    places = begin + tl.arange(0, PLACES)
    written = places < total
    if FILL:
        position = tl.where(run < batch, position, 0)
    else:
        written = written & (run < batch)
    tl.store(out_ptr + places * out_stride, position, mask=written)


kernel = Launcher(extend_positions_kernel, PLACES=PLACES, LOOKUPS=LOOKUPS, num_warps=WARPS)


def extend_positions(
    prefix_lens: torch.Tensor, extend_lens: torch.Tensor, *, total: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Give the position of each new token of a prefill batch, in one launch.

    Parameters
    ----------
    prefix_lens
        [batch] or [0], int32 or int64, tokens, any stride, any value.
    extend_lens
        [batch], int32 or int64, tokens, any stride, any value.
    total
        Tokens of the result.
    out
        [total], int64, any stride: receives the positions; behind the last request it keeps its
        values. A fresh tensor, with 0 there, if left out.

    Returns
    -------
    torch.Tensor
        [total], int64; `out` itself if given.

    Raises
    ------
    Nothing of its own.

    Numerics
    --------
    Exact, in 64 bit.

    Source
    ------
    Written from the formula; corresponds to SGLang's ``compute_position``.
    """
    fill = out is None
    if out is None:
        out = torch.empty((total,), dtype=torch.int64, device=extend_lens.device)
    if total == 0:
        return out
    kernel.launch(
        ((total + PLACES - 1) // PLACES, 1, 1),
        extend_lens,
        prefix_lens,
        out,
        extend_lens.shape[0],
        prefix_lens.shape[0],
        total,
        extend_lens.stride(0),
        prefix_lens.stride(0),
        out.stride(0),
        fill,
        ends_need_64_bit(total),
    )
    return out
