"""The op ``attention.topk_valid_length``."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from opgraft.arguments import shares_places
from opgraft.errors import ArgumentTypeError, ArgumentValueError
from opgraft.fused_op import BaseFusedOp
from opgraft.ops._arguments import require_int
from opgraft.ops._dtypes import INDEX
from opgraft.ops._samples import Arguments, Cases, Dtypes, integers, tensor
from opgraft.spec import EXACT, FormatSignature

__all__ = ["TopkValidLength"]


class TopkValidLength(BaseFusedOp):
    """Count the entries of each row of a selection that a consumer has to read.

    Parameters
    ----------
    topk
        [tokens, k], int32 or int64, any stride: selected positions; a negative one is a hole.
        Mutated with `repair`, and only then.
    rule
        ``"last"``: up to and with the last valid entry, holes before it included. ``"count"``: the
        valid entries alone.
    minimum
        Least length, 0 or 1.
    repair
        Whether to write ``topk[t, 0] = 0`` in rows without a valid entry: a readable dummy, for
        consumers that give NaN on an empty row. The lengths are those from before the repair.

    Returns
    -------
    Tensor
        [tokens], int32.

    Raises
    ------
    ArgumentTypeError
        If a dtype is another one, `minimum` is no int or `repair` no bool.
    ArgumentValueError
        If a shape or device does not fit, `rule` is unknown, `minimum` is neither 0 nor 1, or rows
        to repair share memory.

    Notes
    -----
    *Numerics.* Exact.

    *Source.* Written from the formula; corresponds to the top-k length reductions beside
    ``prepare_trtllm_nope_sparse_metadata`` of SGLang.

    Examples
    --------
    >>> import torch
    >>> from opgraft.ops import attention
    >>> topk = torch.tensor([[4, -1, 6, -1], [-1, -1, -1, -1]])
    >>> attention.topk_valid_length(topk)
    tensor([3, 1], dtype=torch.int32)
    >>> attention.topk_valid_length(topk, rule="count", minimum=0, repair=True)
    tensor([2, 0], dtype=torch.int32)
    >>> topk
    tensor([[ 4, -1,  6, -1],
            [ 0, -1, -1, -1]])

    """

    op = "attention.topk_valid_length"
    format_signature = FormatSignature(
        supported_dtypes={"topk": INDEX},
        output_dtype="int32",
        description="A selection with holes in, the length of each row out.",
        shapes={"topk": ("tokens", "k")},
    )
    mutates: ClassVar[tuple[str, ...]] = ("topk",)
    tolerance = EXACT
    deterministic = True
    sample_sizes: ClassVar[tuple[int, ...]] = (1, 2048, 2**17, 2**21)

    def forward_native(self, topk: Tensor, *, rule: str = "last", minimum: int = 1, repair: bool = False) -> Tensor:
        """Compute it from the formula, in plain torch."""
        tokens, k = topk.shape
        if k == 0:
            return torch.full((tokens,), minimum, dtype=torch.int32, device=topk.device)
        valid = topk >= 0
        if rule == "last":
            lengths = torch.where(valid, torch.arange(1, k + 1, device=topk.device), 0).amax(1)
        else:
            lengths = valid.sum(1)
        if repair:
            topk[:, 0] = torch.where(lengths == 0, 0, topk[:, 0])
        return lengths.clamp(min=minimum).to(torch.int32)

    def validate(self, topk: Tensor, *, rule: str = "last", minimum: int = 1, repair: bool = False) -> None:
        """Refuse an unknown rule, another minimum than 0 and 1, and repairs in shared memory."""
        if rule not in {"last", "count"}:
            message = f"{self.op}: rule must be 'last' or 'count', got {rule!r}"
            raise ArgumentValueError(message)
        require_int(self.op, "minimum", minimum, at_most=1)
        if not isinstance(repair, bool):
            message = f"{self.op}: repair must be a bool, got {type(repair).__name__}"
            raise ArgumentTypeError(message)
        if repair and shares_places(topk):
            message = (
                f"{self.op}: topk must have entries of their own where repair is on, got strides "
                f"{tuple(topk.stride())} for shape {tuple(topk.shape)}"
            )
            raise ArgumentValueError(message)

    def sample(self, size: int, *, dtypes: Dtypes, generator: torch.Generator) -> Arguments:
        """Draw `size` entries, up to 2048 a row, filled from the left to a random length."""
        k = max(1, min(2048, size))
        tokens = size // k
        topk = integers(0, 2**17, (tokens, k), dtypes["topk"], generator)
        lengths = integers(0, k + 1, (tokens, 1), torch.int64, generator)
        return {"topk": topk.masked_fill_(torch.arange(k) >= lengths, -1)}

    def edge_samples(self, *, dtypes: Dtypes, generator: torch.Generator) -> Cases:
        """Give the selections at which an implementation goes wrong."""
        dtype = dtypes["topk"]
        limits = torch.iinfo(dtype)
        holes = integers(-2, 3, (37, 131), dtype, generator)
        holes[5:9] = -1
        holes[9] = limits.min
        holes[10, :-1] = -1
        holes[10, -1] = limits.max
        holes[11, 1:] = -2
        holes[11, 0] = 0
        selections = {
            "holes": holes,
            "one column": integers(-2, 3, (9, 1), dtype, generator),
            "2051 columns": integers(-90, 3, (3, 2051), dtype, generator),
            "all holes": torch.full((4, 7), -1, dtype=dtype),
            "no holes": tensor([[0, 1], [2, limits.max]], dtype),
            "no rows": holes[:0],
            "no columns": holes[:3, :0].contiguous(),
        }
        for name, topk in selections.items():
            for rule in ("last", "count"):
                for minimum in (0, 1):
                    options = {"topk": topk, "rule": rule, "minimum": minimum}
                    yield f"{name}, {rule}, minimum {minimum}", options
                    yield (
                        f"{name}, {rule}, minimum {minimum}, repaired",
                        {**options, "topk": topk.clone(), "repair": True},
                    )
