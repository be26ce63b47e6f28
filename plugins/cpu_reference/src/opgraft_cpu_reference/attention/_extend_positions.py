"""``attention.extend_positions`` on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from opgraft_cpu_reference._ramps import write_ramps

__all__ = ["extend_positions"]


def extend_positions(prefix_lens: Tensor, extend_lens: Tensor, *, total: int, out: Tensor | None = None) -> Tensor:
    """Give the position of each new token: a ramp for each request.

    Parameters
    ----------
    prefix_lens
        [batch] or [0], int32 or int64: cached tokens of each request.
    extend_lens
        [batch], int32 or int64: new tokens of each request.
    total
        Tokens of the result.
    out
        [total], int64, any stride: receives the positions.

    Returns
    -------
    Tensor
        [total], int64; `out` itself where given.

    Raises
    ------
    RuntimeError
        From torch, for arguments that the op would have refused.

    Notes
    -----
    *Numerics.* Exact.

    *Source.* Written from the formula of the op.

    """
    fresh = out is None
    if out is None:
        out = torch.empty((total,), dtype=torch.int64, device="cpu")
    firsts = prefix_lens.clamp(min=0) if prefix_lens.shape[0] else torch.zeros_like(extend_lens)
    written = write_ramps(firsts, extend_lens, out)
    if fresh and written < total:
        out[written:] = 0
    return out
