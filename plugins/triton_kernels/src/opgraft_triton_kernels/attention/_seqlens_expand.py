"""The Triton kernel of ``attention.seqlens_expand``."""

# The parameters of a kernel are Triton's values, which have no Python type.
# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs

from __future__ import annotations

import torch
import triton.language as tl

from opgraft_triton_kernels.attention._runs import LOOKUPS, PLACES, WARPS, ends_need_64_bit, runs_of_places
from opgraft_triton_kernels.launcher import Launcher, unspecialized

__all__ = ["seqlens_expand"]


@unspecialized
def seqlens_expand_kernel(
    queries_ptr,
    lengths_ptr,
    out_ptr,
    batch: tl.int32,
    total: tl.int64,
    queries_stride: tl.int64,
    lengths_stride: tl.int64,
    out_stride: tl.int64,
    WIDE: tl.constexpr,
    PLACES: tl.constexpr,
    LOOKUPS: tl.constexpr,
) -> None:
    begin = tl.program_id(0).to(tl.int64) * PLACES
    run, rank = runs_of_places(queries_ptr, queries_stride, batch, total, begin, WIDE, PLACES, LOOKUPS)
    covered = run < batch
    row = run.to(tl.int64)
    queries = tl.load(queries_ptr + row * queries_stride, mask=covered, other=0).to(tl.int64)
    lengths = tl.load(lengths_ptr + row * lengths_stride, mask=covered, other=0).to(tl.int64)
    # Counted back from the last token, which cannot wrap round.
    seen = tl.maximum(tl.maximum(lengths, 0) - (queries - 1 - rank), 0)
    seen = tl.where(covered, seen, 0)
    places = begin + tl.arange(0, PLACES)
    tl.store(out_ptr + places * out_stride, seen.to(tl.int32), mask=places < total)


kernel = Launcher(seqlens_expand_kernel, PLACES=PLACES, LOOKUPS=LOOKUPS, num_warps=WARPS)


def seqlens_expand(
    q_lens: torch.Tensor, kv_lens: torch.Tensor, *, total: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Give the causal KV length of each query token, in one launch.

    Parameters
    ----------
    q_lens
        [batch], int32 or int64, tokens, any stride, any value.
    kv_lens
        [batch], int32 or int64, tokens, any stride, any value.
    total
        Tokens of the result.
    out
        [total], int32, any stride: receives the lengths. A fresh tensor if left out.

    Returns
    -------
    torch.Tensor
        [total], int32; `out` itself if given.

    Raises
    ------
    Nothing of its own.

    Numerics
    --------
    Exact, in 64 bit.

    Source
    ------
    Written from the formula; corresponds to SGLang's ``seqlens_expand_triton``.
    """
    if out is None:
        out = torch.empty((total,), dtype=torch.int32, device=q_lens.device)
    if total == 0:
        return out
    kernel.launch(
        ((total + PLACES - 1) // PLACES, 1, 1),
        q_lens,
        kv_lens,
        out,
        q_lens.shape[0],
        total,
        q_lens.stride(0),
        kv_lens.stride(0),
        out.stride(0),
        ends_need_64_bit(total),
    )
    return out
