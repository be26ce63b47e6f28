"""The op ``attention.seqlens_expand``."""

# ruff: noqa: ARG002 - validate takes the op's parameters, used or not

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from opgraft.fused_op import BaseFusedOp
from opgraft.ops._arguments import INT64_MAX, INT64_MIN, require_int, require_length
from opgraft.ops._dtypes import INDEX, INT32
from opgraft.ops._ragged import deliver, spread
from opgraft.ops._samples import Arguments, Cases, Dtypes, batch_of, integers, lengths_near, tensor
from opgraft.spec import EXACT, FormatSignature

__all__ = ["SeqlensExpand"]


class SeqlensExpand(BaseFusedOp):
    """Give the causal KV length of each query token.

    The tokens of all requests lie end to end; the last token of request b sees ``kv_lens[b]``
    tokens, each earlier one sees one less.

    Parameters
    ----------
    q_lens
        [batch], int32 or int64, tokens: query tokens of each request; below 0 as 0.
    kv_lens
        [batch], int32 or int64, tokens: KV length after the query tokens were appended.
    total
        Tokens of the result, meant to be the sum of `q_lens`.
    out
        [total], int32, any stride: receives the lengths.

    Returns
    -------
    Tensor
        [total], int32: ``max(kv_lens[b] - q_lens[b] + 1 + i, 0)`` for token i of request b, and 0
        behind the last request; `out` itself where given. Tokens beyond `total` are dropped.

    Raises
    ------
    ArgumentTypeError
        If a dtype is another one, or `total` is no int.
    ArgumentValueError
        If a shape, a range or a device does not fit.

    Notes
    -----
    *Numerics.* Exact. No length is negative: some consumers read them as unsigned.

    *Source.* Written from the formula; corresponds to ``seqlens_expand_triton`` of SGLang.

    Examples
    --------
    >>> import torch
    >>> from opgraft.ops import attention
    >>> attention.seqlens_expand(torch.tensor([3, 0, 2]), torch.tensor([10, 5, 1]), total=5)
    tensor([ 8,  9, 10,  0,  1], dtype=torch.int32)

    """

    op = "attention.seqlens_expand"
    format_signature = FormatSignature(
        supported_dtypes={"q_lens": INDEX, "kv_lens": INDEX, "out": INT32},
        output_dtype="int32",
        description="Query and KV lengths of requests in, KV lengths of query tokens out.",
        shapes={"q_lens": ("batch",), "kv_lens": ("batch",), "out": ("total",)},
    )
    tolerance = EXACT
    deterministic = True
    sample_sizes: ClassVar[tuple[int, ...]] = (1, 64, 4096, 2**17)

    def forward_native(self, q_lens: Tensor, kv_lens: Tensor, *, total: int, out: Tensor | None = None) -> Tensor:
        """Compute it from the formula, in plain torch: each token looks for its request."""
        if q_lens.shape[0] == 0:
            return deliver(q_lens.new_zeros(total), torch.int32, out)
        queries = q_lens.to(torch.int64).clamp(min=0)
        run, rank, covered = spread(queries, total)
        # Counted back from the last token, which cannot wrap round.
        lengths = kv_lens.to(torch.int64).clamp(min=0)[run] - (queries[run] - 1 - rank)
        lengths = torch.where(covered, lengths.clamp(min=0), 0)
        return deliver(lengths, torch.int32, out)

    def validate(self, q_lens: Tensor, kv_lens: Tensor, *, total: int, out: Tensor | None = None) -> None:
        """Refuse a total that is no int, negative or not the size of the buffer."""
        require_int(self.op, "total", total)
        if out is not None:
            require_length(self.op, "out", out, total, "entries (total)")

    def sample(self, size: int, *, dtypes: Dtypes, generator: torch.Generator) -> Arguments:
        """Draw about `size` tokens: a few a request up to 512 requests, then more a request."""
        batch = batch_of(size, per_request=4)
        queries = lengths_near(size // max(batch, 1), batch, torch.int64, generator)
        context = integers(0, 2**17, (batch,), torch.int64, generator)
        return {
            "q_lens": queries.to(dtypes["q_lens"]),
            "kv_lens": (queries + context).to(dtypes["kv_lens"]),
            "total": int(queries.sum()),
        }

    def edge_samples(self, *, dtypes: Dtypes, generator: torch.Generator) -> Cases:
        """Give the calls at which an implementation goes wrong."""

        def call(queries: list[int], lengths: list[int], **options: Any) -> Arguments:
            return {
                "q_lens": tensor(queries, dtypes["q_lens"]),
                "kv_lens": tensor(lengths, dtypes["kv_lens"]),
                **options,
            }

        def canary(size: int) -> Tensor:
            return torch.full((size,), -77, dtype=torch.int32)

        yield "no requests", call([], [], total=0)
        yield "no requests, tokens", call([], [], total=5)
        yield "no requests, buffer", call([], [], total=5, out=canary(5))
        yield "no tokens", call([0, -3, 0], [5, 6, 7], total=0)
        yield "empty requests", call([0, 3, 0, 0, 2, 0, -1], [9, 9, 9, 9, 9, 9, 9], total=5)
        yield "queries exceed lengths", call([5, 4, 3], [2, 0, -7], total=12)
        yield "sum below total", call([2, 3], [7, 8], total=9, out=canary(9))
        yield "sum above total", call([2, 3, 4], [7, 8, 9], total=4, out=canary(4))
        yield "no room", call([2, 3], [7, 8], total=0, out=canary(0))
        yield ("extremes", call([2, INT64_MIN, 3, 2], [INT64_MIN, 5, -1, 2**31 - 1], total=7))
        yield ("queries without end", call([2, INT64_MAX, 3, INT64_MAX], [4, INT64_MAX, 5, 6], total=40))
        yield "one long, many short", call([1] * 20 + [4099] + [1] * 20, [5000] * 41, total=4139)
        queries = integers(0, 4, (1031,), torch.int64, generator).tolist()
        yield "many requests", call(queries, [9] * 1031, total=sum(queries))
