"""The op ``attention.block_table``."""

# ruff: noqa: ARG002 - validate takes the op's parameters, used or not

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from opgraft.fused_op import BaseFusedOp
from opgraft.ops._arguments import (
    INT32_MAX,
    INT32_MIN,
    INT64_MAX,
    INT64_MIN,
    columns_of,
    require_columns,
    require_int,
    require_unit_column_stride,
)
from opgraft.ops._dtypes import INDEX, INT32
from opgraft.ops._ragged import deliver, within_reach
from opgraft.ops._samples import Arguments, Cases, Dtypes, batch_of, integers, lengths_near, slot_table, tensor
from opgraft.ops._slots import read_slots
from opgraft.spec import EXACT, FormatSignature

__all__ = ["BlockTable"]


class BlockTable(BaseFusedOp):
    """List the KV pages of each request in a rectangular table.

    Of each page only the first token is read: the slot table is taken to be page-aligned.

    Parameters
    ----------
    req_to_token
        [pool, columns], int32 or int64, column stride 1, any row stride: KV slot of each position
        of each request slot.
    req_pool_indices
        [batch], int32 or int64: row of the table of each request.
    kv_lens
        [batch], int32 or int64, tokens; below 1 the request has no page.
    kv_starts
        [batch], int32 or int64, tokens: first position of each request; 0 where left out.
    page_size
        Slots per page, from 1 to 2**31 - 1.
    max_pages
        Columns of a fresh table; with `out` it may be left out, or agree with it.
    tail
        What stands behind a request's pages, an int32; -1 where left out. With `out` and without
        `tail`, what stands there stays.
    out
        [batch, max_pages], int32, column stride 1, any row stride: receives the pages.

    Returns
    -------
    Tensor
        [batch, max_pages], int32: in row b, for j below ``ceil(kv_lens[b] / page_size)``, the page
        of the slot at position ``kv_starts[b] + j * page_size``; `out` itself where given. -1 for
        a negative slot, a position outside the table and a request outside the pool. Pages beyond
        `max_pages` are dropped.

    Raises
    ------
    ArgumentTypeError
        If a dtype is another one, or an int is none or missing.
    ArgumentValueError
        If a shape, a stride, a range or a device does not fit.

    Notes
    -----
    *Numerics.* Exact; addresses are 64-bit, and -1 stays -1 where a truncating division would make
    it page 0.

    *Source.* Written from the formula; corresponds to ``create_flashmla_kv_indices_triton`` of
    SGLang.

    Examples
    --------
    >>> import torch
    >>> from opgraft.ops import attention
    >>> table = torch.tensor([[0, 0, 0, 0, 0, 0], [8, 9, 10, 11, 20, 21]], dtype=torch.int32)
    >>> attention.block_table(table, torch.tensor([1, 0]), torch.tensor([6, 0]), page_size=4, max_pages=3)
    tensor([[ 2,  5, -1],
            [-1, -1, -1]], dtype=torch.int32)

    """

    op = "attention.block_table"
    format_signature = FormatSignature(
        supported_dtypes={
            "req_to_token": INDEX,
            "req_pool_indices": INDEX,
            "kv_lens": INDEX,
            "kv_starts": INDEX,
            "out": INT32,
        },
        output_dtype="int32",
        description="A slot table and runs of positions in, a rectangular table of pages out.",
        shapes={
            "req_to_token": ("pool", "columns"),
            "req_pool_indices": ("batch",),
            "kv_lens": ("batch",),
            "kv_starts": ("batch",),
            "out": ("batch", "max_pages"),
        },
    )
    tolerance = EXACT
    deterministic = True
    sample_sizes: ClassVar[tuple[int, ...]] = (1, 64, 4096, 2**17)

    def forward_native(
        self,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        kv_lens: Tensor,
        kv_starts: Tensor | None = None,
        *,
        page_size: int,
        max_pages: int | None = None,
        tail: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute it from the formula, in plain torch."""
        columns = columns_of(max_pages, out)
        pages = torch.arange(columns, device=kv_lens.device)
        # The last page holds token `length - 1`: this rounds up without an addition that wraps.
        counts = (within_reach(kv_lens, low=0) - 1).div(page_size, rounding_mode="floor") + 1
        positions = pages * page_size
        if kv_starts is not None:
            positions = within_reach(kv_starts)[:, None] + positions
        slots = read_slots(req_to_token, req_pool_indices.to(torch.int64)[:, None], positions)
        table = torch.where(slots < 0, -1, slots.div(page_size, rounding_mode="floor"))
        behind: Tensor | int = -1 if tail is None else tail
        if out is not None and tail is None:
            behind = out
        table = torch.where(pages < counts[:, None], table.to(torch.int32), behind)
        return deliver(table, torch.int32, out)

    def traffic(self, *, kv_lens: Tensor, page_size: int, **_: object) -> int:
        """Count the bytes of a 32-byte sector read and a page written for each page."""
        pages = (kv_lens.clamp(min=0).to(torch.int64) + page_size - 1) // page_size
        return int(pages.sum()) * (32 + 4)

    def validate(
        self,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        kv_lens: Tensor,
        kv_starts: Tensor | None = None,
        *,
        page_size: int,
        max_pages: int | None = None,
        tail: int | None = None,
        out: Tensor | None = None,
    ) -> None:
        """Refuse strided columns, and ints that are missing, disagree or are out of range."""
        require_unit_column_stride(self.op, "req_to_token", req_to_token)
        require_int(self.op, "page_size", page_size, at_least=1, at_most=INT32_MAX)
        require_columns(self.op, "max_pages", max_pages, out)
        if tail is not None:
            require_int(self.op, "tail", tail, at_least=INT32_MIN, at_most=INT32_MAX)
        if out is not None:
            require_unit_column_stride(self.op, "out", out)

    def sample(self, size: int, *, dtypes: Dtypes, generator: torch.Generator) -> Arguments:
        """Draw about `size` pages of 64 tokens, of up to 512 requests."""
        batch = batch_of(size, per_request=256)
        columns = -(-size // max(batch, 1))
        lengths = lengths_near(columns * 43, batch, dtypes["kv_lens"], generator)
        table = slot_table(batch, (columns + 1) * 64, dtypes["req_to_token"], generator)
        return {
            "req_to_token": table,
            "req_pool_indices": integers(0, table.shape[0], (batch,), dtypes["req_pool_indices"], generator),
            "kv_lens": lengths,
            "kv_starts": integers(0, 2, (batch,), dtypes["kv_starts"], generator) * 64,
            "page_size": 64,
            "max_pages": columns,
        }

    def edge_samples(self, *, dtypes: Dtypes, generator: torch.Generator) -> Cases:
        """Give the calls at which an implementation goes wrong."""

        def call(
            table: Tensor, rows: list[int], lengths: list[int], starts: list[int] | None = None, **options: Any
        ) -> Arguments:
            arguments = {
                "req_to_token": table,
                "req_pool_indices": tensor(rows, dtypes["req_pool_indices"]),
                "kv_lens": tensor(lengths, dtypes["kv_lens"]),
                **options,
            }
            if starts is not None:
                arguments["kv_starts"] = tensor(starts, dtypes["kv_starts"])
            return arguments

        def canary(batch: int, columns: int) -> Tensor:
            return torch.full((batch, columns), -77, dtype=torch.int32)

        table = integers(0, 2**20, (6, 600), dtypes["req_to_token"], generator)
        holes = table.clone()
        holes[:, ::3] = -1
        holes[:, ::5] = -2
        holes[:, ::16] = torch.iinfo(holes.dtype).min
        rows = [1, 2, 3, 4, 5, 0]
        yield "no requests", call(table, [], [], page_size=64, max_pages=4)
        yield "no columns", call(table, rows[:2], [3, 4], page_size=64, max_pages=0)
        yield "no columns, buffer", call(table, rows[:2], [3, 4], page_size=64, out=canary(2, 0))
        yield "all empty", call(table, [1, 2], [0, INT64_MIN], page_size=16, max_pages=3)
        yield "all empty, buffer", call(table, [1, 2], [0, -1], page_size=16, out=canary(2, 3))
        for page_size in (1, 16, 64, 100):
            lengths = [0, 1, page_size - 1, page_size, page_size + 1, 600]
            yield (
                f"page size {page_size}",
                call(table, rows, lengths, page_size=page_size, max_pages=600 // page_size + 2),
            )
            yield (f"page size {page_size}, buffer", call(table, rows, lengths, page_size=page_size, out=canary(6, 40)))
        yield "a column short", call(table, rows, [600] * 6, page_size=16, max_pages=37)
        yield ("a column short, buffer", call(table, rows, [600, 0, 600, 33, 600, 1], page_size=16, out=canary(6, 37)))
        yield ("filled tail", call(table, rows, [600, 0, 7, 33, 64, 1], page_size=16, tail=0, out=canary(6, 41)))
        yield "fresh tail", call(table, rows[:2], [5, 40], page_size=16, max_pages=5, tail=7)
        yield ("negative slots", call(holes, rows, [600] * 6, [0, 1, 2, 3, 4, 5], page_size=16, max_pages=40))
        yield ("beyond the table", call(table, [1, 2, 3], [90, 65, 64], [560, 599, 600], page_size=16, max_pages=7))
        yield (
            "far outside the table",
            call(
                table,
                [1, 2, 3, 4],
                [90, 90, 90, INT64_MAX],
                [-17, INT64_MIN, INT64_MAX, INT64_MAX],
                page_size=16,
                max_pages=7,
            ),
        )
        yield ("requests outside", call(table, [-1, 6, INT64_MIN, INT64_MAX], [90] * 4, page_size=16, max_pages=7))
        yield "largest page", call(table, [1, 2], [600, 1], page_size=2**31 - 1, max_pages=3)
        yield "table without rows", call(table[:0], [0, 1], [20, 3], page_size=16, max_pages=3)
        yield ("table without columns", call(table[:, :0].contiguous(), [0, 1], [20, 3], page_size=16, max_pages=3))
