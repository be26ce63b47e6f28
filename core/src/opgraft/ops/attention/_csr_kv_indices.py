"""The op ``attention.csr_kv_indices``."""

# ruff: noqa: ARG002 - validate and forward_fake take the op's parameters, used or not

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from opgraft.errors import ArgumentValueError
from opgraft.fused_op import BaseFusedOp
from opgraft.ops._arguments import INT32_MAX, INT64_MAX, INT64_MIN, require_int, require_unit_column_stride
from opgraft.ops._dtypes import INDEX
from opgraft.ops._ragged import counts_before, within_reach
from opgraft.ops._samples import Arguments, Cases, Dtypes, batch_of, integers, lengths_near, slot_table, tensor
from opgraft.ops._slots import read_slots, translate
from opgraft.spec import EXACT, FormatSignature

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CsrKvIndices"]


class CsrKvIndices(BaseFusedOp):
    """Flatten each request's KV slots into one stream, CSR fashion.

    Request b contributes ``kv_lens[b]`` slots, from position ``kv_starts[b]`` of its row of the
    table on, at ``kv_indptr[b]`` of the stream. With `kv_starts` this is the chunked-prefix form:
    starts and lengths of one chunk, the chunk's own prefix sums.

    Parameters
    ----------
    req_to_token
        [pool, columns], int32 or int64, column stride 1, any row stride: KV slot of each position
        of each request slot, or KV page where `page_size` is above 1.
    req_pool_indices
        [batch], int32 or int64: row of the table of each request.
    kv_lens
        [batch], int32 or int64, tokens; below 1 the request contributes nothing.
    kv_indptr
        [batch + 1], int32 or int64: place of each request's first slot, in ascending order. Runs
        may leave gaps; what overlapping runs give is undefined. The last entry is read only where
        the size of the result depends on it.
    kv_starts
        [batch], int32 or int64, tokens: first position of each request; 0 where left out.
    page_size
        Slots per table entry, from 1 to 2**31 - 1: slot ``entry * page_size + position mod
        page_size``.
    token_map
        [tokens], int32 or int64: applied to every slot at the end.
    total
        Size of a fresh result. Without it and without `out` the size is read from
        ``kv_indptr[-1]``: the one synchronisation, which a captured graph cannot contain.
    out
        [capacity], int32 or int64, any stride: receives the stream. What would lie beyond it is
        dropped; what no run covers keeps its value.

    Returns
    -------
    Tensor
        [total], int32, -1 where no run covers it; or `out` itself. A position outside the table, a
        request outside the pool and a slot outside the map give -1. A negative table entry is
        passed on as it is at page size 1 without a map, and gives -1 otherwise.

    Raises
    ------
    ArgumentTypeError
        If a dtype is another one, or an int is none.
    ArgumentValueError
        If a shape, a stride, a range or a device does not fit, or a tensor without data is given
        and the size would be read from it.

    Notes
    -----
    *Numerics.* Exact; addresses and sums are 64-bit. A slot that the result's dtype cannot hold
    wraps round.

    *Source.* Written from the formula; corresponds to ``create_flashinfer_kv_indices_triton`` and
    ``create_chunked_prefix_cache_kv_indices`` of SGLang.

    Examples
    --------
    >>> import torch
    >>> from opgraft.ops import attention
    >>> table = torch.tensor([[0, 0, 0, 0], [10, 11, 12, 13], [20, 21, 22, 23]], dtype=torch.int32)
    >>> attention.csr_kv_indices(
    ...     table, torch.tensor([2, 1]), torch.tensor([3, 1]), torch.tensor([0, 3, 4]), total=4
    ... )
    tensor([20, 21, 22, 10], dtype=torch.int32)

    One chunk of a cached prefix: two tokens of each request, from a start of its own.

    >>> attention.csr_kv_indices(
    ...     table,
    ...     torch.tensor([2, 1]),
    ...     torch.tensor([2, 2]),
    ...     torch.tensor([0, 2, 4]),
    ...     torch.tensor([1, 2]),
    ...     total=4,
    ... )
    tensor([21, 22, 12, 13], dtype=torch.int32)

    """

    op = "attention.csr_kv_indices"
    format_signature = FormatSignature(
        supported_dtypes={
            "req_to_token": INDEX,
            "req_pool_indices": INDEX,
            "kv_lens": INDEX,
            "kv_indptr": INDEX,
            "kv_starts": INDEX,
            "token_map": INDEX,
            "out": INDEX,
        },
        output_dtype="int32",
        description="A slot table and runs of positions in, one stream of slots out.",
        shapes={
            "req_to_token": ("pool", "columns"),
            "req_pool_indices": ("batch",),
            "kv_lens": ("batch",),
            "kv_indptr": ("batch + 1",),
            "kv_starts": ("batch",),
            "token_map": ("tokens",),
            "out": ("capacity",),
        },
    )
    tolerance = EXACT
    deterministic = True
    sample_sizes: ClassVar[tuple[int, ...]] = (1, 64, 4096, 2**17, 2**21)

    def forward_native(
        self,
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
        """Compute it from the formula, in plain torch: each place looks for the run it is in."""
        if out is None:
            size = self._read_total(kv_indptr) if total is None else total
            out = torch.full((size,), -1, dtype=torch.int32, device=kv_indptr.device)
        if req_pool_indices.shape[0] == 0:
            return out
        lengths = within_reach(kv_lens, low=0)
        begins = within_reach(kv_indptr[:-1])
        # Offsets may come in any order. Empty runs go to the end, where no place can be.
        begins_or_never = torch.where(lengths > 0, begins, INT64_MAX)
        ordered, order = torch.sort(begins_or_never, stable=True)
        places = torch.arange(out.shape[0], device=out.device)
        rank = torch.searchsorted(ordered, places, right=True) - 1
        run = order[rank.clamp(min=0)]
        offsets = places - begins[run]
        covered = (rank >= 0) & (offsets < lengths[run])
        positions = offsets
        if kv_starts is not None:
            positions = within_reach(kv_starts)[run] + offsets.clamp(min=0)
        slots = read_slots(req_to_token, req_pool_indices.to(torch.int64)[run], positions, page_size)
        if token_map is not None:
            slots = translate(slots, token_map)
        return out.copy_(torch.where(covered, slots.to(out.dtype), out))

    def _read_total(self, kv_indptr: Tensor) -> int:
        if kv_indptr.is_meta:
            message = f"{self.op}: total must be given for tensors without data, got None"
            raise ArgumentValueError(message)
        return int(kv_indptr[-1].clamp(min=0).item())

    def forward_fake(
        self,
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
        """Give a result without values; its size is a symbol where nobody says it."""
        if out is not None:
            return out
        size = torch.library.get_ctx().new_dynamic_size() if total is None else total
        return req_to_token.new_empty((size,), dtype=torch.int32)

    def traffic(self, *, req_to_token: Tensor, kv_lens: Tensor, out: Tensor | None = None, **_: object) -> int:
        """Count the bytes of one read and one write for each index."""
        written = 4 if out is None else out.element_size()
        return int(kv_lens.clamp(min=0).sum()) * (req_to_token.element_size() + written)

    def validate(
        self,
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
    ) -> None:
        """Refuse a table with strided columns, a page size below 1 and a negative total."""
        require_unit_column_stride(self.op, "req_to_token", req_to_token)
        require_int(self.op, "page_size", page_size, at_least=1, at_most=INT32_MAX)
        if total is not None:
            require_int(self.op, "total", total)

    def sample(self, size: int, *, dtypes: Dtypes, generator: torch.Generator) -> Arguments:
        """Draw about `size` slots of up to 512 requests, 512 to 4096 each."""
        batch = batch_of(size)
        mean = size // max(batch, 1)
        lengths = lengths_near(mean, batch, torch.int64, generator)
        starts = integers(0, 64, (batch,), torch.int64, generator)
        indptr = counts_before(lengths)
        table = slot_table(batch, mean + mean // 2 + 64, dtypes["req_to_token"], generator)
        return {
            "req_to_token": table,
            "req_pool_indices": integers(0, table.shape[0], (batch,), dtypes["req_pool_indices"], generator),
            "kv_lens": lengths.to(dtypes["kv_lens"]),
            "kv_indptr": indptr.to(dtypes["kv_indptr"]),
            "kv_starts": starts.to(dtypes["kv_starts"]),
            "total": int(indptr[-1]),
        }

    def edge_samples(self, *, dtypes: Dtypes, generator: torch.Generator) -> Cases:
        """Give the calls at which an implementation goes wrong."""
        call = functools.partial(_call, dtypes)
        table = integers(0, 2**20, (5, 600), dtypes["req_to_token"], generator)
        yield from _positions(call, table)
        yield from _buffers(call, table, dtypes.get("out", torch.int32))
        yield from _entries(call, table, dtypes, generator)
        lengths = [64] * 40
        lengths[17] = 20_011
        long = integers(0, 2**20, (3, 20_011), dtypes["req_to_token"], generator)
        yield "one long, many short", call(long, [1] * 40, lengths, total=sum(lengths))
        far = [INT64_MIN, -(2**31), -(2**31) + 900, -9, 2**31 - 1, INT64_MAX]
        out = torch.full((2100,), -77, dtype=dtypes.get("out", torch.int32))
        yield "far before a buffer of many parts", call(long, [1] * 5, [0, 7, 2**31 - 850, 0, 3], indptr=far, out=out)


_EDGES = [0, 1, 511, 512, 513]
_ROWS = [0, 1, 2, 3, 4]


def _call(
    dtypes: Dtypes,
    table: Tensor,
    rows: list[int],
    lengths: list[int],
    starts: list[int] | None = None,
    indptr: list[int] | None = None,
    **options: Any,
) -> Arguments:
    if indptr is None:
        indptr = counts_before(tensor(lengths, torch.int64).clamp(min=0)).tolist()
    arguments = {
        "req_to_token": table,
        "req_pool_indices": tensor(rows, dtypes["req_pool_indices"]),
        "kv_lens": tensor(lengths, dtypes["kv_lens"]),
        "kv_indptr": tensor(indptr, dtypes["kv_indptr"]),
        **options,
    }
    if starts is not None:
        arguments["kv_starts"] = tensor(starts, dtypes["kv_starts"])
    return arguments


def _positions(call: Callable[..., Arguments], table: Tensor) -> Cases:
    """Ask for positions all around the table, and for none."""
    yield "no requests", call(table, [], [], total=0)
    yield "no requests, size read", call(table, [], [])
    yield "no requests, result wanted", call(table, [], [], total=3)
    yield "all empty", call(table, [1, 2, 3], [0, -1, INT64_MIN], total=0)
    yield "around block edges", call(table, _ROWS, _EDGES, total=sum(_EDGES))
    yield "size read", call(table, _ROWS, _EDGES)
    yield "starts", call(table, _ROWS, _EDGES, [600, 599, 89, 88, 87], total=sum(_EDGES))
    yield "total too small", call(table, _ROWS, _EDGES, total=600)
    yield "total too large", call(table, _ROWS, _EDGES, total=1600)
    yield "beyond the table", call(table, [1, 2], [9, 5], [595, 600], total=14)
    yield "before the table", call(table, [1, 2], [9, 5], [-3, INT64_MIN], total=14)
    far = [INT64_MAX, INT64_MAX - 4]
    yield "far beyond the table", call(table, [1, 2], [9, 5], far, total=14)
    outside = [-1, 5, 4, INT64_MIN, INT64_MAX]
    yield "requests outside", call(table, outside, [2] * 5, total=10)
    yield "table without rows", call(table[:0], [0, 1], [2, 3], total=5)
    narrow = table[:, :0].contiguous()
    yield "table without columns", call(narrow, [0, 1], [2, 3], total=5)


def _buffers(call: Callable[..., Arguments], table: Tensor, dtype: torch.dtype) -> Cases:
    """Write into buffers that are narrower and wider than what comes."""

    def canary(size: int) -> Tensor:
        return torch.full((size,), -77, dtype=dtype)

    yield "no requests, buffer", call(table, [], [], out=canary(5))
    yield "all empty, buffer", call(table, [1, 2, 3], [0, -1, INT64_MIN], out=canary(4))
    yield "narrow buffer", call(table, _ROWS, _EDGES, out=canary(700))
    yield "wide buffer", call(table, _ROWS, _EDGES, out=canary(2000))
    yield "no buffer at all", call(table, _ROWS, _EDGES, out=canary(0))
    gaps = [2, 9, 11, 16]
    yield "gaps", call(table, [3, 1, 2], [4, 0, 5], indptr=gaps, out=canary(20))
    outside = [-4, 8, 1000, INT64_MAX, 0]
    yield ("offsets outside", call(table, [1, 2, 3, 4], [9, 4, 4, 4], indptr=outside, out=canary(10)))
    yield "length without end", call(table, [1], [INT64_MAX], indptr=[3, 0], out=canary(700))


def _entries(call: Callable[..., Arguments], table: Tensor, dtypes: Dtypes, generator: torch.Generator) -> Cases:
    """Read entries that are negative, pages, or outside the map."""
    holes = table.clone()
    holes[:, ::7] = -1
    holes[:, 3::11] = -2
    holes[:, 5::13] = torch.iinfo(holes.dtype).min
    yield "negative entries", call(holes, _ROWS, _EDGES, total=sum(_EDGES))
    pages = integers(0, 4096, (5, 12), dtypes["req_to_token"], generator)
    pages[:, ::5] = -1
    for size in (16, 64, 100):
        tokens = [0, 1, size - 1, size + 1, 12 * size + 3]
        starts = [0, size - 1, 1, 7 * size, 2]
        arguments = call(pages, _ROWS, tokens, starts, page_size=size, total=sum(tokens))
        yield f"page size {size}", arguments
    mapping = integers(0, 2**20, (2**19,), dtypes["token_map"], generator)
    mapping[::9] = -1
    yield "map", call(holes, _ROWS, _EDGES, token_map=mapping, total=sum(_EDGES))
    options = {"token_map": mapping, "page_size": 50, "total": sum(_EDGES)}
    yield "map of pages", call(pages, _ROWS, _EDGES, **options)
    yield "empty map", call(table, [1], [3], token_map=mapping[:0], total=3)
