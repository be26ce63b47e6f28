"""Acme's kernel of `attention.clamp_position`."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch

from opgraft_acme.pretend_device.processor import launch

if TYPE_CHECKING:
    from collections.abc import MutableSequence, Sequence

    from torch import Tensor


def clamp_position(seq_lens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Give the zero-based position of the newest token of each request.

    Parameters
    ----------
    seq_lens
        ``[batch]``, int32 or int64, in tokens, on an Acme device, of any stride.
    out
        ``[batch]``, int64, same device, any stride but 0: receives the result.

    Returns
    -------
    Tensor
        ``[batch]``, int64: ``max(seq_lens, 1) - 1``; `out` itself where it is given.

    Raises
    ------
    ValueError
        If a tensor is one that the device's driver cannot run over. opgraft has already refused
        whatever the op's format signature rules out.

    Notes
    -----
    *Numerics.* Exact: the maximum is taken before the subtraction, so the smallest integer does
    not wrap.

    *Source.* Written from the formula of the op.

    """
    if out is None:
        out = torch.empty(seq_lens.shape, dtype=torch.int64, device=seq_lens.device)
    if seq_lens.numel():
        launch(_program, seq_lens, out)
    return out


def _program(seq_lens: Sequence[int], out: MutableSequence[int]) -> None:
    out[:] = array("q", [max(length, 1) - 1 for length in seq_lens])
