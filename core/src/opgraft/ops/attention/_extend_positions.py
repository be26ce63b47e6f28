"""The op ``attention.extend_positions``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from opgraft.errors import ArgumentValueError
from opgraft.fused_op import BaseFusedOp
from opgraft.ops._arguments import INT64_MAX, INT64_MIN, require_int, require_length
from opgraft.ops._dtypes import INDEX, INT64
from opgraft.ops._ragged import deliver, spread
from opgraft.ops._samples import Arguments, Cases, Dtypes, batch_of, integers, lengths_near, tensor
from opgraft.spec import EXACT, FormatSignature

__all__ = ["ExtendPositions"]


class ExtendPositions(BaseFusedOp):
    """Give the position of each new token of a prefill batch.

    The new tokens of all requests lie end to end; those of request b follow its cached prefix.

    Parameters
    ----------
    prefix_lens
        [batch], or [0] where nobody has a prefix; int32 or int64, tokens; below 0 as 0.
    extend_lens
        [batch], int32 or int64, tokens: new tokens of each request; below 0 as 0.
    total
        Tokens of the result, meant to be the sum of `extend_lens`.
    out
        [total], int64, any stride: receives the positions; behind the last request it keeps its
        values.

    Returns
    -------
    Tensor
        [total], int64: ``prefix_lens[b] + i`` for new token i of request b, and 0 behind the last
        request in a fresh result; `out` itself where given. Tokens beyond `total` are dropped.

    Raises
    ------
    ArgumentTypeError
        If a dtype is another one, or `total` is no int.
    ArgumentValueError
        If a shape, a range or a device does not fit.

    Notes
    -----
    *Numerics.* Exact, in 64 bit.

    *Source.* Written from the formula; corresponds to ``compute_position`` of SGLang.

    Examples
    --------
    >>> import torch
    >>> from opgraft.ops import attention
    >>> attention.extend_positions(torch.tensor([7, 0]), torch.tensor([2, 3]), total=5)
    tensor([7, 8, 0, 1, 2])

    """

    op = "attention.extend_positions"
    format_signature = FormatSignature(
        supported_dtypes={"prefix_lens": INDEX, "extend_lens": INDEX, "out": INT64},
        output_dtype="int64",
        description="Prefix and extend lengths of requests in, positions of new tokens out.",
        shapes={"prefix_lens": ("prefixes",), "extend_lens": ("batch",), "out": ("total",)},
    )
    tolerance = EXACT
    deterministic = True
    sample_sizes: ClassVar[tuple[int, ...]] = (1, 64, 4096, 2**17)

    def forward_native(
        self, prefix_lens: Tensor, extend_lens: Tensor, *, total: int, out: Tensor | None = None
    ) -> Tensor:
        """Compute it from the formula, in plain torch: each token looks for its request."""
        if out is None:
            out = torch.zeros(total, dtype=torch.int64, device=extend_lens.device)
        if extend_lens.shape[0] == 0:
            return out
        run, positions, covered = spread(extend_lens.to(torch.int64).clamp(min=0), total)
        if prefix_lens.shape[0] != 0:
            positions = prefix_lens.to(torch.int64).clamp(min=0)[run] + positions
        return deliver(torch.where(covered, positions, out), torch.int64, out)

    def validate(self, prefix_lens: Tensor, extend_lens: Tensor, *, total: int, out: Tensor | None = None) -> None:
        """Refuse prefixes for other requests, and a total that does not fit."""
        prefixes, batch = prefix_lens.shape[0], extend_lens.shape[0]
        if prefixes != 0 and prefixes != batch:  # noqa: PLR1714 - a symbolic size has no hash
            message = f"{self.op}: prefix_lens must have {batch} entries, as extend_lens has, or none, got {prefixes}"
            raise ArgumentValueError(message)
        require_int(self.op, "total", total)
        if out is not None:
            require_length(self.op, "out", out, total, "entries (total)")

    def sample(self, size: int, *, dtypes: Dtypes, generator: torch.Generator) -> Arguments:
        """Draw about `size` new tokens of up to 512 requests."""
        batch = batch_of(size, per_request=32)
        lengths = lengths_near(size // max(batch, 1), batch, torch.int64, generator)
        return {
            "prefix_lens": integers(0, 2**15, (batch,), dtypes["prefix_lens"], generator),
            "extend_lens": lengths.to(dtypes["extend_lens"]),
            "total": int(lengths.sum()),
        }

    def edge_samples(self, *, dtypes: Dtypes, generator: torch.Generator) -> Cases:
        """Give the calls at which an implementation goes wrong."""

        def call(prefixes: list[int], lengths: list[int], **options: Any) -> Arguments:
            return {
                "prefix_lens": tensor(prefixes, dtypes["prefix_lens"]),
                "extend_lens": tensor(lengths, dtypes["extend_lens"]),
                **options,
            }

        def canary(size: int) -> Tensor:
            return torch.full((size,), -77, dtype=torch.int64)

        yield "no requests", call([], [], total=0)
        yield "no requests, tokens", call([], [], total=5)
        yield "no requests, buffer", call([], [], total=5, out=canary(5))
        yield "no tokens", call([5, 6, 7], [0, -3, 0], total=0)
        yield "no prefixes", call([], [3, 0, 2], total=5)
        yield "empty requests", call([9, 8, 7, 6, 5, 4], [0, 3, 0, 2, 0, -1], total=5)
        yield "negative prefixes", call([-1, INT64_MIN], [2, 2], total=4)
        yield "far positions", call([2**31 - 1, 2**40], [2, 3], total=5)
        yield "sum below total", call([2, 3], [2, 3], total=9)
        yield "sum below total, buffer", call([2, 3], [2, 3], total=9, out=canary(9))
        yield "sum above total", call([2, 3], [2, 30], total=9, out=canary(9))
        yield "no room", call([2, 3], [7, 8], total=0, out=canary(0))
        yield "lengths without end", call([2, 3, 4], [2, INT64_MAX, INT64_MAX], total=40)
        yield "one long, many short", call([77] * 41, [1] * 20 + [4099] + [1] * 20, total=4139)
        lengths = integers(0, 4, (1031,), torch.int64, generator).tolist()
        yield "many requests", call([5] * 1031, lengths, total=sum(lengths))
