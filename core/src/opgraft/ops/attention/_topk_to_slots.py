"""The op ``attention.topk_to_slots``."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from opgraft.errors import ArgumentValueError
from opgraft.fused_op import BaseFusedOp
from opgraft.ops._arguments import INT32_MAX, require_int, require_length
from opgraft.ops._dtypes import INDEX, INT32
from opgraft.ops._ragged import deliver
from opgraft.ops._samples import Arguments, Cases, Dtypes, integers, tensor
from opgraft.ops._slots import read_slots
from opgraft.spec import EXACT, FormatSignature

__all__ = ["TopkToSlots"]


class TopkToSlots(BaseFusedOp):
    """Map each query's selected positions to KV slots.

    Parameters
    ----------
    table
        [rows, columns], int32 or int64, any stride: KV slot (or page) of each position; one row a
        query, or with `cu_q` one row a request.
    topk
        [tokens, k], int32 or int64, any stride: selected positions; a negative one selects none.
    cu_q
        [rows + 1], int32 or int64: first query of each request, ascending, and the end of the
        last; queries outside get -1 throughout. Left out, row t of the table serves query t.
    output_rows
        Rows of the result, at least `tokens`, which it is where left out.
    page_size
        Slots per table entry, from 1 to 2**31 - 1: slot ``entry * page_size + position mod
        page_size``.
    out
        [output_rows, k], int32, any stride: receives the slots, every entry of it.

    Returns
    -------
    Tensor
        [output_rows, k], int32; `out` itself where given. -1 where nothing is selected, where the
        position is outside the table, and in the rows from `tokens` on. A negative table entry is
        passed on as it is at page size 1 and gives -1 otherwise.

    Raises
    ------
    ArgumentTypeError
        If a dtype is another one, or an int is none.
    ArgumentValueError
        If a shape, a range or a device does not fit.

    Notes
    -----
    *Numerics.* Exact; addresses are 64-bit.

    *Source.* Written from the formula; corresponds to ``transform_index_page_table_decode`` and
    ``transform_index_page_table_prefill`` of SGLang.

    Examples
    --------
    >>> import torch
    >>> from opgraft.ops import attention
    >>> table = torch.tensor([[10, 11, 12], [20, 21, 22]], dtype=torch.int32)
    >>> attention.topk_to_slots(table, torch.tensor([[2, 0], [1, -1]]))
    tensor([[12, 10],
            [21, -1]], dtype=torch.int32)

    Request 0 owns one query, request 1 two.

    >>> attention.topk_to_slots(
    ...     table, torch.tensor([[2], [0], [1]]), cu_q=torch.tensor([0, 1, 3]), output_rows=4
    ... )
    tensor([[12],
            [20],
            [21],
            [-1]], dtype=torch.int32)

    """

    op = "attention.topk_to_slots"
    format_signature = FormatSignature(
        supported_dtypes={"table": INDEX, "topk": INDEX, "cu_q": INDEX, "out": INT32},
        output_dtype="int32",
        description="A slot table and selected positions in, slots out.",
        shapes={
            "table": ("rows", "columns"),
            "topk": ("tokens", "k"),
            "cu_q": ("rows + 1",),
            "out": ("output_rows", "k"),
        },
    )
    tolerance = EXACT
    deterministic = True
    sample_sizes: ClassVar[tuple[int, ...]] = (1, 2048, 2**17, 2**21)

    def forward_native(
        self,
        table: Tensor,
        topk: Tensor,
        *,
        cu_q: Tensor | None = None,
        output_rows: int | None = None,
        page_size: int = 1,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute it from the formula, in plain torch."""
        tokens, k = topk.shape
        rows = torch.arange(tokens, device=topk.device)
        if cu_q is not None:
            bounds = cu_q.to(torch.int64)
            owner = torch.searchsorted(bounds[1:].contiguous(), rows, right=True)
            rows = torch.where(rows < bounds[0], -1, owner)
        slots = read_slots(table, rows[:, None], topk.to(torch.int64), page_size)
        if output_rows is None:
            return deliver(slots, torch.int32, out)
        if out is None:
            out = torch.empty((output_rows, k), dtype=torch.int32, device=topk.device)
        out[:tokens].copy_(slots)
        out[tokens:].fill_(-1)
        return out

    def traffic(self, *, topk: Tensor, **_: object) -> int:
        """Count the bytes of a position, a 32-byte sector and a slot for each entry."""
        return topk.numel() * (topk.element_size() + 32 + 4)

    def validate(
        self,
        table: Tensor,
        topk: Tensor,
        *,
        cu_q: Tensor | None = None,
        output_rows: int | None = None,
        page_size: int = 1,
        out: Tensor | None = None,
    ) -> None:
        """Refuse a table for other queries, too few rows for the result, a page size below 1."""
        tokens = topk.shape[0]
        require_int(self.op, "page_size", page_size, at_least=1, at_most=INT32_MAX)
        if cu_q is None and table.shape[0] != tokens:
            message = (
                f"{self.op}: table must have {tokens} rows, one for each row of topk, where cu_q "
                f"is not given, got {table.shape[0]}"
            )
            raise ArgumentValueError(message)
        rows = tokens
        if output_rows is not None:
            require_int(self.op, "output_rows", output_rows)
            if output_rows < tokens:
                message = f"{self.op}: output_rows must be at least {tokens}, the rows of topk, got {output_rows}"
                raise ArgumentValueError(message)
            rows = output_rows
        if out is not None:
            require_length(self.op, "out", out, rows, "rows")

    def sample(self, size: int, *, dtypes: Dtypes, generator: torch.Generator) -> Arguments:
        """Draw `size` positions, up to 2048 a query, one query a request as in decoding."""
        k = max(1, min(2048, size))
        tokens = size // k
        topk = integers(0, 4096, (tokens, k), dtypes["topk"], generator)
        return {
            "table": integers(0, 2**20, (tokens, 4096), dtypes["table"], generator),
            "topk": topk.masked_fill_(topk % 41 == 0, -1),
        }

    def edge_samples(self, *, dtypes: Dtypes, generator: torch.Generator) -> Cases:
        """Give the selections at which an implementation goes wrong."""
        table = integers(0, 2**20, (5, 300), dtypes["table"], generator)
        holes = table.clone()
        holes[:, ::3] = -1
        holes[:, ::5] = -2
        limits = torch.iinfo(dtypes["topk"])

        def canary(rows: int, k: int) -> Tensor:
            return torch.full((rows, k), -77, dtype=torch.int32)

        def bounds(*values: int) -> Tensor:
            return tensor(list(values), dtypes["cu_q"])

        def positions(rows: int, k: int) -> Tensor:
            return integers(-3, 310, (rows, k), dtypes["topk"], generator)

        for k in (1, 31, 512, 2048, 2051):
            topk = positions(5, k)
            yield f"{k} columns", {"table": table, "topk": topk}
            yield f"{k} columns, buffer", {"table": table, "topk": topk, "out": canary(5, k)}
        topk = positions(11, 33)
        yield "no queries", {"table": table[:0], "topk": topk[:0]}
        yield "no queries, rows", {"table": table[:0], "topk": topk[:0], "output_rows": 3}
        yield "nothing selected", {"table": table, "topk": topk[:5, :0].contiguous()}
        ends = [limits.min, -2, -1, 0, 299, 300, 301, limits.max]
        yield "extremes", {"table": table, "topk": tensor([ends] * 5, dtypes["topk"])}
        yield "negative entries", {"table": holes, "topk": topk[:5]}
        yield "more rows", {"table": table, "topk": topk[:5], "output_rows": 9}
        yield ("more rows, buffer", {"table": table, "topk": topk[:5], "output_rows": 9, "out": canary(9, 33)})
        yield "requests", {"table": table, "topk": topk, "cu_q": bounds(0, 3, 3, 4, 10, 11)}
        yield (
            "requests, fewer queries than rows",
            {"table": table, "topk": topk, "cu_q": bounds(0, 3, 3, 4, 7, 8), "output_rows": 13, "out": canary(13, 33)},
        )
        yield "requests, none active", {"table": table, "topk": topk, "cu_q": bounds(*[0] * 6)}
        yield (
            "requests, more queries than rows",
            {"table": table, "topk": topk, "cu_q": bounds(2, 3, 5, 40, 41, 2**40)},
        )
        yield "no requests", {"table": table[:0], "topk": topk, "cu_q": bounds(0)}
        for page_size in (2, 16, 100):
            topk = integers(-3, 300 * page_size + 20, (5, 65), dtypes["topk"], generator)
            small = holes.clamp(max=2**20)
            yield f"page size {page_size}", {"table": small, "topk": topk, "page_size": page_size}
        yield ("table without columns", {"table": table[:, :0].contiguous(), "topk": positions(5, 7)})
