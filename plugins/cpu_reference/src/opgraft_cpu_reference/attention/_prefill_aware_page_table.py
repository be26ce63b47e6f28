"""``attention.prefill_aware_page_table`` on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from opgraft_cpu_reference._flat import FAR, address_dtype, flat_view

__all__ = ["prefill_aware_page_table"]

# One by one a row costs 8.5 us whatever its width; all together cost 118 us and 4 ns an entry
# (EPYC, one thread, torch 2.13, int32, 1 to 512 rows of 16 to 4096 columns).
_FEW = 12
_COLUMNS = 2048
# Reading one prompt length costs as much as listing 128 of them.
_PROMPTS_PER_READ = 128


def prefill_aware_page_table(
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
    """List the KV slots in sight when the prompt stays and the window slides.

    Prompt and window are two runs of the table's row: in wide tables they are copied as they lie,
    in narrow ones all columns are gathered at once.

    Parameters
    ----------
    req_to_token
        [pool, columns], int32 or int64, column stride 1: KV slots.
    req_pool_indices, seq_lens
        [batch], int32 or int64: table row and length of each request.
    prefill_lens
        [slots], int32 or int64: prompt length by request slot.
    window
        Generated tokens in sight.
    max_kv
        Columns of a fresh table.
    out
        [batch, max_kv], int32, any stride: receives the slots.
    out_lens
        [batch], int32, any stride: receives the lengths.

    Returns
    -------
    tuple of Tensor
        [batch, max_kv] and [batch], int32; `out` and `out_lens` themselves where given.

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
        out = torch.empty((seq_lens.shape[0], max_kv or 0), dtype=torch.int32, device="cpu")
    batch, columns = out.shape
    if out_lens is None:
        out_lens = torch.empty((batch,), dtype=torch.int32, device="cpu")
    if out.numel() == 0:
        return out, out_lens.zero_()
    if batch <= _FEW or columns >= _COLUMNS:
        _copy_rows(req_to_token, req_pool_indices, seq_lens, prefill_lens, window, out, out_lens, fresh=fresh)
    else:
        _gather_all(req_to_token, req_pool_indices, seq_lens, prefill_lens, window, out, out_lens, fresh=fresh)
    return out, out_lens


def _copy_rows(
    table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    prefill_lens: Tensor,
    window: int,
    out: Tensor,
    out_lens: Tensor,
    *,
    fresh: bool,
) -> None:
    """Copy row by row; a fresh table is one copy, zeros included."""
    pool, width = table.shape
    columns = out.shape[1]
    stride = table.stride(0)
    flat = flat_view(table) if table.numel() else table.view(-1)
    zeros = torch.zeros(columns if fresh else 0, dtype=table.dtype, device="cpu")
    absent = torch.full((1,), -1, dtype=table.dtype, device="cpu")
    prompts = prefill_lens.tolist() if rows.shape[0] * _PROMPTS_PER_READ > pool else None
    counts: list[int] = []
    pieces: list[Tensor] = []
    for request, (row, seq_len) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        inside = 0 <= row < pool
        length = max(seq_len, 0)
        prompt = 0
        if inside:
            prompt = prompts[row] if prompts is not None else int(prefill_lens[row])
            prompt = min(max(prompt, 0), length)
        whole = min(prompt, columns)
        seen = min(window, length - prompt, columns - whole)
        # What of each run the table has: all of it, but for misuse.
        base = row * stride
        has = min(whole, width) if inside else 0
        if has:
            pieces.append(flat[base : base + has])
        if has < whole:
            pieces.append(absent.expand(whole - has))
        begin = length - seen
        has = min(max(width - begin, 0), seen) if inside else 0
        if has:
            pieces.append(flat[base + begin : base + begin + has])
        if has < seen:
            pieces.append(absent.expand(seen - has))
        count = whole + seen
        counts.append(count)
        if fresh:
            pieces.append(zeros[count:])
        elif count:
            torch.cat(pieces, out=out[request, :count])
            pieces.clear()
    if fresh:
        torch.cat(pieces, out=out.view(-1))
    out_lens.copy_(torch.tensor(counts, device="cpu"))


def _gather_all(
    table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    prefill_lens: Tensor,
    window: int,
    out: Tensor,
    out_lens: Tensor,
    *,
    fresh: bool,
) -> None:
    """Read every column of every row at once."""
    pool = table.shape[0]
    lengths = seq_lens.to(torch.int64).clamp(0, FAR)
    known = rows.to(torch.int64).clamp(0, max(pool - 1, 0))
    strangers = known != rows if pool else torch.ones_like(known, dtype=torch.bool)
    prompts = torch.zeros_like(lengths)
    if pool:
        prompts = prefill_lens.index_select(0, known).to(torch.int64).clamp_(min=0)
        prompts = torch.minimum(prompts.masked_fill_(strangers, 0), lengths)
    whole = prompts.clamp(max=out.shape[1])
    seen = torch.minimum((out.shape[1] - whole).clamp_(max=window), lengths - prompts)
    counts = whole + seen
    out_lens.copy_(counts)
    used = int(counts.max())
    slots = _read(table, known, lengths, whole, lengths - counts, used)
    if strangers.any():
        slots.masked_fill_(strangers[:, None], -1)
    behind = torch.arange(used, dtype=torch.int32, device="cpu") >= counts[:, None]
    if fresh:
        out[:, :used] = slots.masked_fill_(behind, 0)
        out[:, used:] = 0
    else:
        torch.where(behind, out[:, :used], slots.to(torch.int32), out=out[:, :used])


def _read(table: Tensor, rows: Tensor, lengths: Tensor, whole: Tensor, gaps: Tensor, used: int) -> Tensor:
    """Read the first columns of all rows; from `whole` on, positions are `gaps` further."""
    width = table.shape[1]
    if table.numel() == 0 or used == 0:
        return torch.full((rows.shape[0], used), -1, device="cpu")
    flat = flat_view(table)
    regular = int(lengths.max()) <= width
    dtype = address_dtype(flat, beyond=width + used) if regular else torch.int64
    places = torch.arange(used, dtype=dtype, device="cpu")
    near, far = torch.zeros_like(gaps), gaps
    bases = rows * table.stride(0)
    if regular:
        near, far = bases, gaps + bases
    first = torch.where(places < whole.to(dtype)[:, None], near.to(dtype)[:, None], far.to(dtype)[:, None])
    addresses = first.add_(places)
    if regular:
        # Behind the last slot in sight addresses go on into other rows, or behind the table.
        addresses.clamp_(max=flat.shape[0] - 1)
        return flat.index_select(0, addresses.view(-1)).view(addresses.shape)
    within = addresses.clamp(max=width - 1)
    outside = within != addresses
    slots = flat.index_select(0, within.add_(bases[:, None]).view(-1)).view(addresses.shape)
    return slots.masked_fill_(outside, -1)
