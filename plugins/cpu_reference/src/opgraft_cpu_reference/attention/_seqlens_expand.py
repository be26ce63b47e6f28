"""``attention.seqlens_expand`` on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from opgraft_cpu_reference._ramps import write_ramps

__all__ = ["seqlens_expand"]


def seqlens_expand(q_lens: Tensor, kv_lens: Tensor, *, total: int, out: Tensor | None = None) -> Tensor:
    """Give the causal KV length of each query token: a ramp for each request.

    Parameters
    ----------
    q_lens, kv_lens
        [batch], int32 or int64: query tokens and KV length of each request.
    total
        Tokens of the result.
    out
        [total], int32, any stride: receives the lengths.

    Returns
    -------
    Tensor
        [total], int32; `out` itself where given.

    Raises
    ------
    RuntimeError
        From torch, for arguments that the op would have refused.

    Notes
    -----
    *Numerics.* Exact.

    *Source.* Written from the formula of the op.

    """
    if out is None:
        out = torch.empty((total,), dtype=torch.int32, device="cpu")
    written = write_ramps(kv_lens.clamp(min=0), q_lens, out, last=True, least=0)
    if written < total:
        out[written:] = 0
    return out
