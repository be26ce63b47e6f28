"""Calls of the index ops, and how an implementation is held against the model.

`check` runs one call of one implementation: values, dtypes, shapes and strides of the results, the
surroundings of every destination, and that no input changed. `edge_cases` and `random_cases` give
the calls; `laid_out` gives the same call in another memory layout.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import model_index_ops as model
import torch

from opgraft.ops import attention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Arguments = dict[str, Any]

OPS = {name: getattr(attention, name).op for name in attention.__all__}
NAMES = tuple(OPS)
DTYPES = {"int32": torch.int32, "int64": torch.int64}
CANARY = -77
BUFFERS = ("out", "out_lens")


class Rows:
    """A table that is too large for lists, read entry by entry."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return self.tensor.shape[0]

    def __getitem__(self, index: int) -> Any:
        part = self.tensor[index]
        return Rows(part) if part.dim() else int(part)


def plain(value: Any) -> Any:
    """Turn tensors into what the model takes."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.tolist() if value.numel() < 2**20 else Rows(value)


def bits(arguments: Arguments) -> int:
    return 32 if arguments.get("out") is None else torch.iinfo(arguments["out"].dtype).bits


def expected_outputs(name: str, arguments: Arguments) -> tuple[Any, ...]:
    """What the model says, as nested lists, one per output."""
    a = {key: plain(value) for key, value in arguments.items()}
    out, out_lens = a.pop("out", None), a.pop("out_lens", None)
    match name:
        case "clamp_position":
            return (model.clamp_position(a["seq_lens"]),)
        case "csr_kv_indices":
            options = pick(a, "page_size", "token_map", "total")
            result = model.csr_kv_indices(
                a["req_to_token"],
                a["req_pool_indices"],
                a["kv_lens"],
                a["kv_indptr"],
                a.get("kv_starts"),
                out=out,
                bits=bits(arguments),
                **options,
            )
            return (result,)
        case "block_table":
            options = pick(a, "page_size", "max_pages", "tail")
            result = model.block_table(
                a["req_to_token"], a["req_pool_indices"], a["kv_lens"], a.get("kv_starts"), out=out, **options
            )
            return (result,)
        case "prefill_aware_page_table":
            return model.prefill_aware_page_table(
                a["req_to_token"],
                a["req_pool_indices"],
                a["seq_lens"],
                a["prefill_lens"],
                out=out,
                **pick(a, "window", "max_kv"),
            )
        case "seqlens_expand":
            return (model.seqlens_expand(a["q_lens"], a["kv_lens"], total=a["total"]),)
        case "extend_positions":
            result = model.extend_positions(a["prefix_lens"], a["extend_lens"], total=a["total"], out=out)
            return (result,)
        case "compact_valid_indices":
            return model.compact_valid_indices(a["indices"], a.get("indptr"), out=out, bits=bits(arguments))
        case "topk_to_slots":
            options = pick(a, "cu_q", "output_rows", "page_size")
            k = arguments["topk"].shape[1]
            result = model.topk_to_slots(a["table"], a["topk"], **options)
            return ([line or [model.ABSENT] * k for line in result],)
        case "topk_valid_length":
            lengths, _ = model.topk_valid_length(**a)
            return (lengths,)
        case "topk_to_slots_dcp":
            return model.topk_to_slots_dcp(**a)
        case "cp_interleave_split":
            return model.cp_interleave_split(**a)
    raise LookupError(name)


def expected_inputs(name: str, arguments: Arguments) -> dict[str, Any]:
    """What the inputs hold afterwards: themselves, but for the one op that repairs."""
    after = {
        key: value.clone()
        for key, value in arguments.items()
        if isinstance(value, torch.Tensor) and key not in BUFFERS and value.numel() < 2**28
    }
    if name == "topk_valid_length" and arguments.get("repair"):
        _, repaired = model.topk_valid_length(arguments["topk"].tolist(), repair=arguments["repair"])
        after["topk"] = torch.tensor(repaired, dtype=arguments["topk"].dtype).view(arguments["topk"].shape)
    return after


def expected_shapes(name: str, arguments: Arguments) -> tuple[tuple[int, ...], ...]:
    """The shapes of the outputs, from the signatures alone."""
    a = arguments
    match name:
        case "clamp_position":
            return (tuple(a["seq_lens"].shape),)
        case "csr_kv_indices":
            if a.get("out") is not None:
                return (tuple(a["out"].shape),)
            size = a["total"] if a.get("total") is not None else max(int(a["kv_indptr"][-1]), 0)
            return ((size,),)
        case "block_table" | "prefill_aware_page_table":
            batch = a["req_pool_indices"].shape[0]
            width = a.get("max_pages", a.get("max_kv"))
            if a.get("out") is not None:
                width = a["out"].shape[1]
            return ((batch, width),) if name == "block_table" else ((batch, width), (batch,))
        case "seqlens_expand" | "extend_positions":
            return ((a["total"],),)
        case "compact_valid_indices":
            rows, columns = a["indices"].shape
            size = rows * columns if a.get("out") is None else a["out"].shape[0]
            return ((rows + 1,), (size,))
        case "topk_to_slots":
            tokens, k = a["topk"].shape
            rows = a.get("output_rows")
            return ((tokens if rows is None else rows, k),)
        case "topk_valid_length":
            return ((a["topk"].shape[0],),)
        case "topk_to_slots_dcp":
            return (tuple(a["slots"].shape), (a["slots"].shape[0],))
        case "cp_interleave_split":
            return (tuple(a["extend_lens"].shape),) * 2
    raise LookupError(name)


def pick(arguments: Mapping[str, Any], *names: str) -> Arguments:
    return {name: arguments[name] for name in names if name in arguments}


# ------------------------------------------------------------------------------------- destinations


def guarded(buffer: torch.Tensor, layout: str) -> tuple[torch.Tensor, Callable[[], None]]:
    """Give a buffer of the same content inside canaries, and a check that these are untouched."""
    shape = buffer.shape
    room = [size + 5 for size in shape]
    step = [slice(2, 2 + size) for size in shape]
    if layout == "strided":
        room[0] = 2 * shape[0] + 5
        step[0] = slice(3, 3 + 2 * shape[0], 2)
    storage = torch.full(room, CANARY + 1, dtype=buffer.dtype)
    view = storage[tuple(step)]
    if layout == "transposed" and buffer.dim() == 2:
        storage = torch.full(room[::-1], CANARY + 1, dtype=buffer.dtype)
        view = storage.t()[tuple(step)]
    assert shape == view.shape
    view.copy_(buffer)
    hidden = torch.ones_like(storage, dtype=torch.bool)
    mask = hidden.t() if layout == "transposed" and buffer.dim() == 2 else hidden
    mask[tuple(step)] = False

    def untouched() -> None:
        assert bool((storage[hidden] == CANARY + 1).all()), "written beside the destination"

    return view, untouched


def check(call: Callable[..., Any], name: str, arguments: Arguments, *, layout: str = "contiguous") -> None:
    """Run one call and hold everything about it against the model."""
    outputs = expected_outputs(name, arguments)
    inputs = expected_inputs(name, arguments)
    shapes = expected_shapes(name, arguments)
    given = dict(arguments)
    if name == "topk_valid_length":
        # The one input that may be written to: it lies between canaries as destinations do.
        given["topk"], untouched_topk = guarded(arguments["topk"], layout)
    else:
        untouched_topk = None
    checks = [untouched_topk] if untouched_topk else []
    for buffer in BUFFERS:
        if given.get(buffer) is not None:
            allowed = "sliced" if name == "block_table" and layout == "transposed" else layout
            given[buffer], untouched = guarded(given[buffer], allowed)
            checks.append(untouched)
    result = call(**given)
    results = result if isinstance(result, tuple) else (result,)
    op = OPS[name]
    assert len(outputs) == len(results)
    for index, (output, shape, got) in enumerate(zip(outputs, shapes, results, strict=True)):
        assert shape == tuple(got.shape)
        buffer = next((b for b, i in op_writes(op).items() if i == index), None)
        if buffer is not None and given.get(buffer) is not None:
            assert got is given[buffer], f"{buffer} itself is returned"
        else:
            assert got.is_contiguous()
            assert declared_dtype(op, index, arguments) == got.dtype
            for key, value in given.items():
                if isinstance(value, torch.Tensor):
                    assert not torch._C._is_alias_of(value, got), f"result {index} aliases {key}"
        assert output == got.tolist()
    for key, value in inputs.items():
        assert torch.equal(value, given[key]), f"{key} changed"
    for untouched in checks:
        untouched()


def op_writes(op: Any) -> Mapping[str, int]:
    return getattr(op, "writes", None) or {"out": 0}


def declared_dtype(op: Any, index: int, arguments: Arguments) -> torch.dtype:
    declared = op.format_signature.output_dtype
    word = declared[index] if isinstance(declared, tuple) else declared
    if word.startswith("like:"):
        return arguments[word.removeprefix("like:")].dtype
    return DTYPES[word]


# -------------------------------------------------------------------------------------------- calls


def index_parameters(name: str) -> tuple[str, ...]:
    """The parameters whose dtype is free."""
    supported = OPS[name].format_signature.supported_dtypes
    return tuple(key for key, names in supported.items() if len(names) > 1)


def dtype_mixes(name: str) -> Iterator[dict[str, torch.dtype]]:
    """Dtypes of all tensor parameters: all narrow, all wide, and pairs of parameters apart."""
    supported = OPS[name].format_signature.supported_dtypes
    fixed = {key: DTYPES[names[0]] for key, names in supported.items()}
    free = index_parameters(name)
    seen = set()
    for pattern in range(1 + len(free)):
        for flip in (False, True):
            wide = {key for place, key in enumerate(free) if ((place >> (pattern - 1)) & 1 if pattern else 0) ^ flip}
            if frozenset(wide) not in seen:
                seen.add(frozenset(wide))
                yield fixed | {key: torch.int64 if key in wide else torch.int32 for key in free}


def edge_cases(name: str, dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Arguments]]:
    generator = torch.Generator().manual_seed(3)
    yield from OPS[name].edge_samples(dtypes=dtypes, generator=generator)


def sample(name: str, size: int, dtypes: Mapping[str, torch.dtype], seed: int = 5) -> Arguments:
    return OPS[name].sample(size, dtypes=dtypes, generator=torch.Generator().manual_seed(seed))


def laid_out(arguments: Arguments, layout: str) -> Arguments:
    """Give the same call with its inputs in another memory layout."""
    return {
        key: relaid(key, value, layout) if isinstance(value, torch.Tensor) and key not in BUFFERS else value
        for key, value in arguments.items()
    }


def relaid(key: str, tensor: torch.Tensor, layout: str) -> torch.Tensor:
    unit_columns = key == "req_to_token"
    match layout:
        case "offset":
            room = torch.full((tensor.numel() + 3,), 12345, dtype=tensor.dtype)
            view = room[3:].view(tensor.shape)
        case "strided" if tensor.dim() == 1:
            view = torch.full((2 * tensor.numel(),), 12345, dtype=tensor.dtype)[::2]
        case "strided" | "transposed" if tensor.dim() == 2:
            rows, columns = tensor.shape
            if layout == "transposed" and not unit_columns:
                view = torch.full((columns, rows), 12345, dtype=tensor.dtype).t()
            else:
                # The last row ends where the allocation ends.
                stride = columns + 7
                size = max((rows - 1) * stride + columns, 0) if rows else 0
                room = torch.full((size,), 12345, dtype=tensor.dtype)
                view = room.as_strided((rows, columns), (stride, 1))
        case _:
            return tensor
    view.copy_(tensor)
    return view


class Draw:
    """Adversarial arguments, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def dtype(self) -> torch.dtype:
        return self.random.choice([torch.int32, torch.int64])

    def tensor(self, values: list[Any], dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or self.dtype()
        limits = torch.iinfo(dtype)
        return torch.tensor(values, dtype=torch.int64).clamp(limits.min, limits.max).to(dtype)

    def length(self) -> int:
        kind = self.random.random()
        if kind < 0.15:
            return self.random.choice([0, 0, -1, -(2**63), 1])
        return self.random.randrange(0, 70 if kind < 0.9 else 400)

    def lengths(self, batch: int) -> list[int]:
        return [self.length() for _ in range(batch)]

    def batch(self) -> int:
        return self.random.choice([0, 1, 2, 3, 7, 17, 40])

    def rows(self, batch: int, pool: int) -> list[int]:
        wild = [-1, pool, pool + 3, -(2**63), 2**63 - 1]
        return [
            self.random.choice(wild) if self.random.random() < 0.05 or pool == 0 else self.random.randrange(pool)
            for _ in range(batch)
        ]

    def table(self, rows: int, columns: int, low: int = 0, high: int = 2**20) -> torch.Tensor:
        def entry() -> int:
            if self.random.random() < 0.05:
                return self.random.choice([-1, -1, -1, -2, -(2**31)])
            return self.random.randrange(low, high)

        values = [[entry() for _ in range(columns)] for _ in range(rows)]
        return self.tensor(values).view(rows, columns)

    def buffer(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, CANARY, dtype=dtype)

    def maybe(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance


def random_case(name: str, seed: int) -> Arguments:
    """Draw one call."""
    draw = Draw(seed)
    arguments: Arguments = globals()[f"_random_{name}"](draw)
    layout = draw.random.choice(["contiguous", "contiguous", "offset", "strided", "transposed"])
    return laid_out(arguments, layout)


def _random_clamp_position(draw: Draw) -> Arguments:
    arguments: Arguments = {"seq_lens": draw.tensor(draw.lengths(draw.batch()))}
    if draw.maybe():
        arguments["out"] = draw.buffer(arguments["seq_lens"].shape[0], dtype=torch.int64)
    return arguments


def _random_csr_kv_indices(draw: Draw) -> Arguments:
    batch, pool, width = draw.batch(), draw.random.choice([0, 1, 5]), draw.random.choice([0, 9, 90])
    lengths, gap = draw.lengths(batch), draw.random.choice([0, 0, 5])
    indptr = [draw.random.randrange(0, 1 + gap)]
    for length in lengths:
        indptr.append(indptr[-1] + max(length, 0) + draw.random.randrange(0, 1 + gap))
    arguments: Arguments = {
        "req_to_token": draw.table(pool, width, high=200),
        "req_pool_indices": draw.tensor(draw.rows(batch, pool)),
        "kv_lens": draw.tensor(lengths),
        "kv_indptr": draw.tensor(indptr),
    }
    if draw.maybe():
        starts = [draw.random.choice([0, 3, width - 5, -2, width]) for _ in range(batch)]
        arguments["kv_starts"] = draw.tensor(starts)
    if draw.maybe():
        arguments["page_size"] = draw.random.choice([1, 2, 16, 100])
    if draw.maybe(0.3):
        arguments["token_map"] = draw.table(1, draw.random.choice([0, 50, 3000]))[0]
    if draw.maybe():
        size = max(0, indptr[-1] + draw.random.choice([0, 0, 9, -9]))
        arguments["out"] = draw.buffer(size, dtype=draw.dtype())
    elif draw.maybe(0.8):
        arguments["total"] = max(0, indptr[-1] + draw.random.choice([0, 0, 9, -9]))
    return arguments


def _random_block_table(draw: Draw) -> Arguments:
    batch, pool, width = draw.batch(), draw.random.choice([0, 1, 5]), draw.random.choice([0, 9, 90])
    arguments: Arguments = {
        "req_to_token": draw.table(pool, width),
        "req_pool_indices": draw.tensor(draw.rows(batch, pool)),
        "kv_lens": draw.tensor(draw.lengths(batch)),
        "page_size": draw.random.choice([1, 2, 7, 16, 64]),
    }
    if draw.maybe():
        starts = [draw.random.choice([0, 3, width - 5, -2, 2**63 - 1]) for _ in range(batch)]
        arguments["kv_starts"] = draw.tensor(starts)
    columns = draw.random.choice([0, 1, 5, 30])
    if draw.maybe():
        arguments["tail"] = draw.random.choice([0, -1, 7])
    if draw.maybe():
        arguments["out"] = draw.buffer(batch, columns)
    if "out" not in arguments or draw.maybe(0.2):
        arguments["max_pages"] = columns
    return arguments


def _random_prefill_aware_page_table(draw: Draw) -> Arguments:
    batch, pool, width = draw.batch(), draw.random.choice([0, 1, 5]), draw.random.choice([0, 9, 90])
    arguments: Arguments = {
        "req_to_token": draw.table(pool, width),
        "req_pool_indices": draw.tensor(draw.rows(batch, pool)),
        "seq_lens": draw.tensor(draw.lengths(batch)),
        "prefill_lens": draw.tensor([draw.length() // 2 for _ in range(pool)]),
        "window": draw.random.choice([0, 1, 5, 40, 2**63 - 1]),
    }
    columns = draw.random.choice([0, 1, 5, 30, 120])
    if draw.maybe():
        arguments["out"] = draw.buffer(batch, columns)
    if draw.maybe():
        arguments["out_lens"] = draw.buffer(batch)
    if "out" not in arguments:
        arguments["max_kv"] = columns
    return arguments


def _random_seqlens_expand(draw: Draw) -> Arguments:
    batch = draw.batch()
    queries = draw.lengths(batch)
    total = max(0, sum(max(q, 0) for q in queries) + draw.random.choice([0, 0, 7, -7]))
    arguments: Arguments = {"q_lens": draw.tensor(queries), "kv_lens": draw.tensor(draw.lengths(batch)), "total": total}
    if draw.maybe():
        arguments["out"] = draw.buffer(total)
    return arguments


def _random_extend_positions(draw: Draw) -> Arguments:
    batch = draw.batch()
    lengths = draw.lengths(batch)
    total = max(0, sum(max(n, 0) for n in lengths) + draw.random.choice([0, 0, 7, -7]))
    arguments: Arguments = {
        "prefix_lens": draw.tensor(draw.lengths(draw.random.choice([0, batch]))),
        "extend_lens": draw.tensor(lengths),
        "total": total,
    }
    if draw.maybe():
        arguments["out"] = draw.buffer(total, dtype=torch.int64)
    return arguments


def _selection(draw: Draw) -> torch.Tensor:
    rows, columns = draw.batch(), draw.random.choice([0, 1, 3, 16, 33])
    chance = draw.random.choice([0.0, 0.2, 0.9, 1.0])

    def entry() -> int:
        return draw.random.choice([-1, -2, -(2**63)]) if draw.maybe(chance) else draw.length() % 95

    return draw.tensor([[entry() for _ in range(columns)] for _ in range(rows)]).view(rows, columns)


def _random_compact_valid_indices(draw: Draw) -> Arguments:
    selection = _selection(draw)
    rows, columns = selection.shape
    arguments: Arguments = {"indices": selection}
    if draw.maybe():
        gap = draw.random.choice([0, 4])
        places = [draw.random.choice([0, 0, -3])]
        for line in selection.tolist():
            places.append(places[-1] + sum(v >= 0 for v in line) + draw.random.randrange(gap + 1))
        arguments["indptr"] = draw.tensor(places)
    if draw.maybe():
        size = max(0, rows * columns + draw.random.choice([0, 8, -8]))
        arguments["out"] = draw.buffer(size, dtype=draw.dtype())
    return arguments


def _random_topk_to_slots(draw: Draw) -> Arguments:
    topk = _selection(draw)
    tokens, k = topk.shape
    arguments: Arguments = {"topk": topk}
    rows = tokens
    if draw.maybe():
        bounds = [draw.random.choice([0, 0, 1])]
        for _ in range(draw.random.randrange(6)):
            bounds.append(bounds[-1] + draw.random.randrange(9))
        arguments["cu_q"] = draw.tensor(bounds)
        rows = len(bounds) - 1
    arguments["table"] = draw.table(rows, draw.random.choice([0, 9, 90]))
    if draw.maybe():
        arguments["page_size"] = draw.random.choice([1, 2, 16])
    if draw.maybe():
        arguments["output_rows"] = tokens + draw.random.choice([0, 5])
    if draw.maybe():
        arguments["out"] = draw.buffer(arguments.get("output_rows", tokens), k)
    return arguments


def _random_topk_valid_length(draw: Draw) -> Arguments:
    return {
        "topk": _selection(draw),
        "rule": draw.random.choice(["last", "count"]),
        "minimum": draw.random.choice([0, 1]),
        "repair": draw.maybe(),
    }


def _random_topk_to_slots_dcp(draw: Draw) -> Arguments:
    world_size = draw.random.choice([1, 2, 3, 8])
    rank = draw.random.randrange(world_size)
    return {"slots": _selection(draw), "world_size": world_size, "rank": rank}


def _random_cp_interleave_split(draw: Draw) -> Arguments:
    world_size = draw.random.choice([1, 2, 3, 8])
    return {
        "extend_lens": draw.tensor(draw.lengths(draw.batch())),
        "world_size": world_size,
        "rank": draw.random.randrange(world_size),
    }
