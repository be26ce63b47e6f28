"""Calls of the index ops: the ops' own edge cases and samples, random ones, and other layouts.

An implementation is held against the model on them by `index_check.check`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from opgraft.ops import attention

Arguments = dict[str, Any]

OPS = {name: getattr(attention, name).op for name in attention.__all__}
NAMES = tuple(OPS)
DTYPES = {"int32": torch.int32, "int64": torch.int64}
CANARY = -77
BUFFERS = ("out", "out_lens")


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
        self.random = random.Random(seed)  # noqa: S311 - cases, no secrets

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
        arguments["out"] = draw.buffer(size)
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
