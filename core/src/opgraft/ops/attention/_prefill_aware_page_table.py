"""The op ``attention.prefill_aware_page_table``."""

# ruff: noqa: ARG002 - validate takes the op's parameters, used or not

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from opgraft.errors import ArgumentValueError
from opgraft.fused_op import BaseFusedOp
from opgraft.ops._arguments import (
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

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PrefillAwarePageTable"]


class PrefillAwarePageTable(BaseFusedOp):
    """List the KV slots a decode step sees when every prompt token stays in sight.

    A sliding window forgets only generated tokens: request b sees its prompt, positions below
    ``prefill_lens[req_pool_indices[b]]``, and the last `window` of the generated ones.

    Parameters
    ----------
    req_to_token
        [pool, columns], int32 or int64, column stride 1, any row stride: KV slot of each position
        of each request slot.
    req_pool_indices
        [batch], int32 or int64: row of the table of each request.
    seq_lens
        [batch], int32 or int64, tokens, prompt included; below 0 as 0.
    prefill_lens
        [slots], slots at least pool, int32 or int64, tokens: prompt length by *request slot*, not
        by batch row; below 0 as 0.
    window
        Generated tokens in sight, not negative.
    max_kv
        Columns of a fresh table; with `out` it may be left out, or agree with it.
    out
        [batch, max_kv], int32, any stride: receives the slots; the rest of a row keeps its values.
    out_lens
        [batch], int32, any stride: receives the lengths.

    Returns
    -------
    tuple of Tensor
        Table [batch, max_kv], int32: the slots in sight in order of position, then 0 in a fresh
        table; and their number [batch], int32, at most `max_kv`. `out` and `out_lens` themselves
        where given. A table entry is passed on as it is; a position outside the table and a
        request outside the pool, which has no prompt, give -1. Where more is in sight than fits,
        the prompt stays whole and the window shrinks to its end; a prompt that does not fit is cut
        off.

    Raises
    ------
    ArgumentTypeError
        If a dtype is another one, or an int is none or missing.
    ArgumentValueError
        If a shape, a stride, a range or a device does not fit.

    Notes
    -----
    *Numerics.* Exact; addresses are 64-bit. With ``p = min(prompt, seq_len)`` and the window
    starting at ``d = max(p, seq_len - window)``, column j holds position j below p and
    ``j + d - p`` from there on.

    *Source.* Written from the formula; corresponds to ``_build_pa_page_table`` of SGLang.

    Examples
    --------
    >>> import torch
    >>> from opgraft.ops import attention
    >>> table = torch.tensor([[0] * 6, [10, 11, 12, 13, 14, 15]], dtype=torch.int32)
    >>> attention.prefill_aware_page_table(
    ...     table, torch.tensor([1]), torch.tensor([6]), torch.tensor([0, 2]), window=2, max_kv=5
    ... )
    (tensor([[10, 11, 14, 15,  0]], dtype=torch.int32), tensor([4], dtype=torch.int32))

    """

    op = "attention.prefill_aware_page_table"
    format_signature = FormatSignature(
        supported_dtypes={
            "req_to_token": INDEX,
            "req_pool_indices": INDEX,
            "seq_lens": INDEX,
            "prefill_lens": INDEX,
            "out": INT32,
            "out_lens": INT32,
        },
        output_dtype=("int32", "int32"),
        description="A slot table, sequence and prompt lengths in; the slots in sight out.",
        shapes={
            "req_to_token": ("pool", "columns"),
            "req_pool_indices": ("batch",),
            "seq_lens": ("batch",),
            "prefill_lens": ("slots",),
            "out": ("batch", "max_kv"),
            "out_lens": ("batch",),
        },
    )
    writes: ClassVar[Mapping[str, int]] = {"out": 0, "out_lens": 1}
    tolerance = EXACT
    deterministic = True
    sample_sizes: ClassVar[tuple[int, ...]] = (1, 64, 4096, 2**17, 2**21)

    def forward_native(
        self,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        prefill_lens: Tensor,
        *,
        window: int,
        max_kv: int | None = None,
        out: Tensor | None = None,
        out_lens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute it from the formula, in plain torch."""
        columns = columns_of(max_kv, out)
        rows = req_pool_indices.to(torch.int64)
        lengths = within_reach(seq_lens, low=0)
        pool = req_to_token.shape[0]
        prompts = torch.zeros_like(lengths)
        if pool != 0:
            inside = (rows >= 0) & (rows < pool)
            prompts = torch.where(inside, prefill_lens[rows.clamp(0, pool - 1)], prompts)
        prompts = torch.minimum(prompts.clamp(min=0), lengths)
        # Room that the prompt leaves; the window is never longer.
        seen = (columns - prompts).clamp(0, columns).clamp(max=window)
        window_begins = torch.maximum(prompts, lengths - seen)
        counts = prompts.clamp(max=columns) + (lengths - window_begins)
        places = torch.arange(columns, device=lengths.device)
        gaps = torch.where(places < prompts[:, None], 0, (window_begins - prompts)[:, None])
        slots = read_slots(req_to_token, rows[:, None], places + gaps)
        behind: Tensor | int = 0 if out is None else out
        table = torch.where(places < counts[:, None], slots.to(torch.int32), behind)
        return deliver(table, torch.int32, out), deliver(counts, torch.int32, out_lens)

    def fresh_buffer(self, name: str, *, req_pool_indices: Tensor, max_kv: int | None, **_: object) -> Tensor:
        """Make the buffer that a caller left out who gave the other one."""
        batch = req_pool_indices.shape[0]
        shape = (batch,) if name == "out_lens" or max_kv is None else (batch, max_kv)
        return req_pool_indices.new_zeros(shape, dtype=torch.int32)

    def traffic(self, **arguments: Any) -> int:
        """Count the bytes of one read and one write for each slot in sight."""
        slots = int(self.forward_native(**arguments)[1].sum())
        table: Tensor = arguments["req_to_token"]
        return slots * (table.element_size() + 4)

    def validate(
        self,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        prefill_lens: Tensor,
        *,
        window: int,
        max_kv: int | None = None,
        out: Tensor | None = None,
        out_lens: Tensor | None = None,
    ) -> None:
        """Refuse strided columns, too few prompt lengths, and ints that do not fit."""
        require_unit_column_stride(self.op, "req_to_token", req_to_token)
        require_int(self.op, "window", window)
        require_columns(self.op, "max_kv", max_kv, out)
        pool, slots = req_to_token.shape[0], prefill_lens.shape[0]
        if slots < pool:
            message = (
                f"{self.op}: prefill_lens must have at least {pool} entries, one for each row of "
                f"req_to_token, got {slots}"
            )
            raise ArgumentValueError(message)

    def sample(self, size: int, *, dtypes: Dtypes, generator: torch.Generator) -> Arguments:
        """Draw about `size` slots in sight of up to 512 requests: three quarters are prompt."""
        batch = batch_of(size)
        mean = -(-size // max(batch, 1))
        window = -(-mean // 4)
        prompts = lengths_near(mean - window, batch, torch.int64, generator)
        generated = lengths_near(2 * window, batch, torch.int64, generator)
        max_kv = mean + mean // 2 + 1
        table = slot_table(batch, mean * 2 + 8, dtypes["req_to_token"], generator)
        rows = integers(0, table.shape[0], (batch,), torch.int64, generator)
        pool_prompts = integers(0, mean + 1, (table.shape[0],), torch.int64, generator)
        pool_prompts[rows] = prompts
        return {
            "req_to_token": table,
            "req_pool_indices": rows.to(dtypes["req_pool_indices"]),
            "seq_lens": (pool_prompts[rows] + generated).to(dtypes["seq_lens"]),
            "prefill_lens": pool_prompts.to(dtypes["prefill_lens"]),
            "window": window,
            "max_kv": max_kv,
        }

    def edge_samples(self, *, dtypes: Dtypes, generator: torch.Generator) -> Cases:
        """Give the calls at which an implementation goes wrong."""
        table = integers(0, 2**20, (6, 600), dtypes["req_to_token"], generator)
        holes = table.clone()
        holes[:, ::3] = -1
        holes[:, ::5] = -2
        prompts = [9, 0, 40, 255, 600, -5]

        def call(rows: list[int], lengths: list[int], source: Tensor = table, **options: Any) -> Arguments:
            return {
                "req_to_token": source,
                "req_pool_indices": tensor(rows, dtypes["req_pool_indices"]),
                "seq_lens": tensor(lengths, dtypes["seq_lens"]),
                "prefill_lens": tensor(prompts, dtypes["prefill_lens"]),
                **options,
            }

        def canary(*shape: int) -> Tensor:
            return torch.full(shape, -77, dtype=torch.int32)

        rows = [3, 1, 0, 5, 2, 4]
        lengths = [300, 257, 9, 600, 41, 599]
        yield "no requests", call([], [], window=16, max_kv=8)
        yield "no columns", call(rows, lengths, window=16, max_kv=0)
        yield ("no columns, buffers", call(rows, lengths, window=16, out=canary(6, 0), out_lens=canary(6)))
        yield "all empty", call(rows[:3], [0, -1, INT64_MIN], window=16, max_kv=5)
        yield "all empty, buffer", call(rows[:3], [0, -1, -9], window=16, out=canary(3, 5))
        for window in (0, 1, 128, 600, INT64_MAX):
            yield f"window {window}", call(rows, lengths, window=window, max_kv=620)
        yield "stale prompt length", call([4, 3, 2], [10, 255, 40], window=7, max_kv=300)
        yield "a column short", call(rows, lengths, window=128, max_kv=299)
        yield "window that does not fit", call(rows, lengths, window=128, out=canary(6, 60))
        yield "prompt that does not fit", call(rows, lengths, window=128, out=canary(6, 30))
        yield ("both buffers, tails", call(rows, lengths, window=64, out=canary(6, 700), out_lens=canary(6)))
        yield "lengths buffer", call(rows, lengths, window=64, max_kv=320, out_lens=canary(6))
        yield ("beyond the table", call(rows, [1000, 601, 700, 650, 9999, 640], window=64, max_kv=400))
        yield ("far beyond the table", call([0, 3, 4], [INT64_MAX, INT64_MAX - 1, 2**40], window=8, max_kv=300))
        extreme = [5, INT64_MAX, 9, INT64_MAX - 2] * 5
        yield "far beyond the table, many", call([0, 3, 4, 99] * 5, extreme, window=1, max_kv=6)
        yield "requests outside", call([-1, 6, INT64_MIN, INT64_MAX], [90] * 4, window=8, max_kv=20)
        yield "negative entries", call(rows, lengths, holes, window=64, max_kv=320)
        yield "table without rows", call([0, 1], [20, 3], table[:0], window=8, max_kv=20)
        yield ("table without columns", call([0, 1], [20, 3], table[:, :0].contiguous(), window=8, max_kv=20))
        long = integers(0, 2**20, (6, 20_011), dtypes["req_to_token"], generator)
        many = [64] * 12
        many[7] = 20_011
        yield "one long, many short", call([4] * 12, many, long, window=20_000, max_kv=20_011)
