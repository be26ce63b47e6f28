"""``attention.csr_kv_indices`` on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from opgraft_cpu_reference._flat import FAR, address_dtype, flat_view

__all__ = ["csr_kv_indices"]

# One by one a run costs 2.3 us; all together cost 110 us and 1.9 ns a token (EPYC, one thread,
# torch 2.13, int32, 1 to 512 runs of 1 to 4096 tokens). They meet at 40 runs and one for each
# thousand tokens more.
_FEW = 40
_TOKENS_PER_RUN = 1000


def csr_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: Tensor,
    kv_indptr: Tensor,
    kv_starts: Tensor | None = None,
    *,
    page_size: int = 1,
    token_map: Tensor | None = None,
    total: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Flatten each request's KV slots into one stream.

    Long runs are copied as they lie in the table, each at once; short ones are gathered together.

    Parameters
    ----------
    req_to_token
        [pool, columns], int32 or int64, column stride 1: slots, or pages of `page_size` slots.
    req_pool_indices, kv_lens
        [batch], int32 or int64: table row and length of each request.
    kv_indptr
        [batch + 1], int32 or int64: place of each request's first slot.
    kv_starts
        [batch], int32 or int64: first position of each request.
    page_size
        Slots per table entry.
    token_map
        [tokens], int32 or int64: applied to every slot.
    total
        Size of a fresh result; ``kv_indptr[-1]`` where left out.
    out
        [capacity], int32 or int64, any stride: receives the stream.

    Returns
    -------
    Tensor
        [total], int32, -1 where no run covers it; or `out` itself.

    Raises
    ------
    RuntimeError
        From torch, for arguments that the op would have refused.

    Notes
    -----
    *Numerics.* Exact.

    *Source.* Written from the formula of the op.

    """
    if out is None:
        size = max(int(kv_indptr[-1]), 0) if total is None else total
        out = torch.full((size,), -1, dtype=torch.int32, device="cpu")
    batch = kv_lens.shape[0]
    if batch == 0 or out.shape[0] == 0:
        return out
    if page_size == 1 and token_map is None:
        tokens = int(kv_lens.clamp(0, out.shape[0]).sum())
        if batch <= _FEW + tokens // _TOKENS_PER_RUN:
            _copy_runs(req_to_token, req_pool_indices, kv_lens, kv_indptr, kv_starts, out)
            return out
    runs = _Runs(kv_lens, kv_indptr, kv_starts, out.shape[0])
    slots = _gather(req_to_token, req_pool_indices.to(torch.int64), runs, page_size)
    runs.write(slots if token_map is None else _translate(slots, token_map), out)
    return out


def _copy_runs(
    table: Tensor, rows: Tensor, lengths: Tensor, indptr: Tensor, starts: Tensor | None, out: Tensor
) -> None:
    """Copy run by run; neighbours in `out` are joined into one copy."""
    pool, width = table.shape
    stride = table.stride(0)
    flat = flat_view(table) if table.numel() else table.view(-1)
    absent = torch.full((1,), -1, dtype=table.dtype, device="cpu")
    capacity = out.shape[0]
    pieces: list[Tensor] = []
    joined = end = 0
    for row, length, begin, start in zip(
        rows.tolist(),
        lengths.tolist(),
        indptr.tolist(),
        [0] * rows.shape[0] if starts is None else starts.tolist(),
        strict=False,
    ):
        first, last = max(begin, 0), min(begin + length, capacity)
        if first >= last:
            continue
        if first != end:
            _join(pieces, out[joined:end])
            joined = first
        end = last
        count = last - first
        position = start + first - begin
        # The part of the run that the table has: all of it, but for misuse.
        low = min(max(-position, 0), count)
        high = max(min(width - position, count), low) if 0 <= row < pool else low
        if low:
            pieces.append(absent.expand(low))
        if low < high:
            address = row * stride + position
            pieces.append(flat[address + low : address + high])
        if high < count:
            pieces.append(absent.expand(count - high))
    _join(pieces, out[joined:end])


def _join(pieces: list[Tensor], out: Tensor) -> None:
    if pieces:
        torch.cat(pieces, out=out)
        pieces.clear()


class _Runs:
    """The parts of all runs that lie within the destination, as vectors of int64.

    Parameters
    ----------
    lengths, indptr, starts
        Of the call.
    capacity
        Size of the destination.

    """

    def __init__(self, lengths: Tensor, indptr: Tensor, starts: Tensor | None, capacity: int) -> None:
        begins = indptr[:-1].to(torch.int64).clamp(-FAR, FAR)
        self.firsts = begins.clamp(min=0)
        lasts = lengths.to(torch.int64).clamp(0, FAR).add_(begins).clamp_(max=capacity)
        self.counts = (lasts - self.firsts).clamp_(min=0)
        self.positions = self.firsts - begins
        if starts is not None:
            self.positions += starts.to(torch.int64).clamp(-FAR, FAR)
        self.before = self.counts.cumsum(0).sub_(self.counts)
        self.owner = torch.repeat_interleave(self.counts)

    def spread(self, values: Tensor) -> Tensor:
        """Give every token its run's value."""
        return values.index_select(0, self.owner)

    def ramp(self, values: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
        """Give the tokens of a run its value, and one more each."""
        steps = torch.arange(self.owner.shape[0], dtype=dtype, device="cpu")
        return self.spread((values - self.before).to(dtype)).add_(steps)

    def write(self, values: Tensor, out: Tensor) -> None:
        """Put the tokens' values where the runs lie in the destination."""
        ends = self.firsts + self.counts
        if torch.equal(self.firsts[1:], ends[:-1]):
            first = int(self.firsts[0])
            out[first : first + values.shape[0]] = values
        else:
            out[self.ramp(self.firsts)] = values.to(out.dtype)


def _gather(table: Tensor, rows: Tensor, runs: _Runs, page_size: int) -> Tensor:
    """Read all tokens of all runs, end to end."""
    pool, width = table.shape
    if table.numel() == 0:
        return torch.full(runs.owner.shape, -1, device="cpu")
    within = (rows >= 0) & (rows < pool)
    within &= (runs.positions >= 0) & (runs.positions <= width * page_size - runs.counts)
    within |= runs.counts == 0
    everywhere = bool(within.all())
    bases = rows.clamp(0, pool - 1) * table.stride(0)
    flat = flat_view(table)
    if everywhere and page_size == 1:
        return flat.index_select(0, runs.ramp(bases + runs.positions, address_dtype(flat)))
    positions = runs.ramp(runs.positions)
    columns = positions.div(page_size, rounding_mode="floor") if page_size != 1 else positions
    valid = columns.clamp(0, width - 1) if not everywhere else columns
    slots = flat.index_select(0, runs.spread(bases).add_(valid)).to(torch.int64)
    if page_size != 1:
        holes = slots < 0
        slots.mul_(page_size).add_(positions).sub_(columns * page_size).masked_fill_(holes, -1)
    if not everywhere:
        slots.masked_fill_(columns != valid, -1)
        slots.masked_fill_(runs.spread((rows < 0) | (rows >= pool)), -1)
    return slots


def _translate(slots: Tensor, token_map: Tensor) -> Tensor:
    tokens = token_map.shape[0]
    if tokens == 0:
        return torch.full_like(slots, -1)
    known = slots.clamp(0, tokens - 1)
    found = token_map.index_select(0, known.to(torch.int64))
    return found.masked_fill_(known != slots, -1)
