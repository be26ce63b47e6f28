"""The op ``attention.clamp_position``."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from opgraft.fused_op import BaseFusedOp
from opgraft.ops._dtypes import INDEX, INT64
from opgraft.ops._ragged import deliver
from opgraft.ops._samples import Arguments, Cases, Dtypes, integers, tensor
from opgraft.spec import EXACT, FormatSignature

__all__ = ["ClampPosition"]


class ClampPosition(BaseFusedOp):
    """Give the zero-based position of each request's newest token.

    Parameters
    ----------
    seq_lens
        [batch], int32 or int64, tokens per request, any value, any stride.
    out
        [batch], int64, any stride: receives the positions.

    Returns
    -------
    Tensor
        [batch], int64: ``max(seq_lens, 1) - 1``, so 0 for an empty request and for a negative
        length. `out` itself where given.

    Raises
    ------
    ArgumentTypeError
        If a dtype is another one.
    ArgumentValueError
        If a shape or device does not fit.

    Notes
    -----
    *Numerics.* Exact. The maximum comes first: ``seq_lens - 1`` would wrap round at the smallest
    integer.

    *Source.* Written from the formula; corresponds to ``clamp_position`` of SGLang.

    Examples
    --------
    >>> import torch
    >>> from opgraft.ops import attention
    >>> attention.clamp_position(torch.tensor([0, 1, 5, 128], dtype=torch.int32))
    tensor([  0,   0,   4, 127])

    """

    op = "attention.clamp_position"
    format_signature = FormatSignature(
        supported_dtypes={"seq_lens": INDEX, "out": INT64},
        output_dtype="int64",
        description="Lengths in, positions out; positions are int64 whatever the lengths are.",
        shapes={"seq_lens": ("batch",), "out": ("batch",)},
    )
    tolerance = EXACT
    deterministic = True
    sample_sizes: ClassVar[tuple[int, ...]] = (1, 64, 4096, 2**20)

    def forward_native(self, seq_lens: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Compute it from the formula, in plain torch."""
        return deliver(seq_lens.to(torch.int64).clamp(min=1) - 1, torch.int64, out)

    def sample(self, size: int, *, dtypes: Dtypes, generator: torch.Generator) -> Arguments:
        """Draw `size` lengths."""
        return {"seq_lens": integers(0, 2**17, (size,), dtypes["seq_lens"], generator)}

    def edge_samples(self, *, dtypes: Dtypes, generator: torch.Generator) -> Cases:
        """Give the lengths at which an implementation goes wrong."""
        dtype = dtypes["seq_lens"]
        limits = torch.iinfo(dtype)
        extremes = [limits.min, limits.min + 1, -1, 0, 1, 2, limits.max - 1, limits.max]
        yield "no requests", {"seq_lens": tensor([], dtype)}
        yield "extremes", {"seq_lens": tensor(extremes, dtype)}
        canary = torch.full((len(extremes),), -77, dtype=torch.int64)
        yield "extremes, buffer", {"seq_lens": tensor(extremes, dtype), "out": canary}
        yield ("any value, odd size", {"seq_lens": integers(limits.min, limits.max, (1031,), dtype, generator)})
