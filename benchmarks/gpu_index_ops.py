"""GPU time of the index and page-table ops in a replayed graph, against a copy of the same bytes.

Run on a machine with a CUDA device; prints a table, and exits non-zero where a limit is missed.
The sizes are those at which page tables are usually compared: batch x length, all of it in sight.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import opgraft
from opgraft.cli._timing import graph_microseconds, host_microseconds

DEVICE = torch.device("cuda")
ROWS = ((1, 131072), (8, 131072), (64, 32768), (256, 8192), (512, 4096))
MIXED = [131072] + [64] * 255
SEED = 7

attention = opgraft.ops.attention


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one size: the call, the bytes it moves at the least, and how far from a copy it may be."""

    name: str
    call: Callable[[], Any]
    moved: int
    limit: float | None


def table(pool: int, columns: int) -> torch.Tensor:
    """Draw a table of slots."""
    return torch.randint(0, 2**20, (pool, columns), dtype=torch.int32, device=DEVICE)


def lengths(values: list[int]) -> torch.Tensor:
    """Put lengths on the device."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def paged(name: str, rows: list[int], limit: float) -> Iterator[Case]:
    """Give the two ops that copy whole rows."""
    batch, longest, total = len(rows), max(rows), sum(rows)
    slots, lens = table(batch + 1, longest), lengths(rows)
    requests = torch.randperm(batch, device=DEVICE, dtype=torch.int32) + 1
    prompts = torch.zeros(batch + 1, dtype=torch.int32, device=DEVICE)
    prompts[requests.long()] = lens // 2
    indptr = torch.zeros(batch + 1, dtype=torch.int32, device=DEVICE)
    indptr[1:] = lens.cumsum(0)
    out = torch.empty(batch, longest, dtype=torch.int32, device=DEVICE)
    counts = torch.empty(batch, dtype=torch.int32, device=DEVICE)
    stream = torch.empty(total, dtype=torch.int32, device=DEVICE)
    prefill = partial(
        attention.prefill_aware_page_table, slots, requests, lens, prompts, window=longest, out=out, out_lens=counts
    )
    csr = partial(attention.csr_kv_indices, slots, requests, lens, indptr, out=stream)
    yield Case(f"prefill_aware_page_table {name}", prefill, total * 8, limit)
    yield Case(f"csr_kv_indices {name}", csr, total * 8, limit)


def others() -> Iterator[Case]:
    """Give the ops whose floor is not that of a copy of whole rows."""
    batch, context, page = 512, 131072, 64
    slots = table(batch + 1, context)
    requests = torch.arange(1, batch + 1, device=DEVICE, dtype=torch.int32)
    pages = torch.empty(batch, context // page, dtype=torch.int32, device=DEVICE)
    block = partial(attention.block_table, slots, requests, lengths([context] * batch), page_size=page, out=pages)
    yield Case("block_table 512 x 131072, page 64", block, batch * context // page * 36, 1.5)
    tokens, k = 64, 2048
    narrow = table(tokens, 65536)
    topk = torch.randint(0, 65536, (tokens, k), dtype=torch.int32, device=DEVICE)
    chosen = torch.empty(tokens, k, dtype=torch.int32, device=DEVICE)
    yield Case(
        "topk_to_slots 64 x 2048", partial(attention.topk_to_slots, narrow, topk, out=chosen), tokens * k * 40, 1.5
    )
    for batch, query in ((512, 4), (4, 131072 // 4)):
        total = batch * query
        q_lens, kv_lens = lengths([query] * batch), lengths([query + 4096] * batch)
        ints = torch.empty(total, dtype=torch.int32, device=DEVICE)
        longs = torch.empty(total, dtype=torch.int64, device=DEVICE)
        expand = partial(attention.seqlens_expand, q_lens, kv_lens, total=total, out=ints)
        extend = partial(attention.extend_positions, kv_lens, q_lens, total=total, out=longs)
        yield Case(f"seqlens_expand {batch} x {query}", expand, total * 4, None)
        yield Case(f"extend_positions {batch} x {query}", extend, total * 8, None)
    sparse = torch.randint(-1, 2**20, (1024, 2048), dtype=torch.int32, device=DEVICE)
    sparse[torch.rand(1024, 2048, device=DEVICE) < 0.3] = -1
    indptr = torch.zeros(1025, dtype=torch.int32, device=DEVICE)
    indptr[1:] = (sparse >= 0).sum(1).cumsum(0)
    values = torch.empty(sparse.numel(), dtype=torch.int32, device=DEVICE)
    compact = partial(attention.compact_valid_indices, sparse, indptr, out=values)
    yield Case("compact_valid_indices 1024 x 2048", compact, sparse.numel() * 8, None)
    yield Case(
        "the same without indptr",
        partial(attention.compact_valid_indices, sparse, out=values),
        sparse.numel() * 8,
        None,
    )
    yield Case("topk_valid_length 1024 x 2048", partial(attention.topk_valid_length, sparse), sparse.numel() * 4, None)
    dcp = partial(attention.topk_to_slots_dcp, sparse, world_size=4, rank=1)
    yield Case("topk_to_slots_dcp 1024 x 2048", dcp, sparse.numel() * 8, None)
    split = partial(attention.cp_interleave_split, lengths([7] * 512), world_size=4, rank=1)
    yield Case("cp_interleave_split 512", split, 512 * 12, None)


def launches(call: Callable[[], Any]) -> int:
    """Count the kernels that one call launches."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.device_type.name == "CUDA")


def main() -> int:
    """Time all of them."""
    torch.manual_seed(SEED)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; median us of 200 replays")
    print(f"{'':44}{'GPU us':>9}{'copy us':>9}{'ratio':>7}{'limit':>7}{'host us':>9}{'launches':>9}")
    cases = [case for batch, n in ROWS for case in paged(f"{batch} x {n}", [n] * batch, 1.5 if batch == 1 else 1.25)]
    missed = 0
    for case in [*cases, *paged("1 x 131072 and 255 x 64", MIXED, 1.5), *others()]:
        source = torch.empty(max(case.moved // 2, 1), dtype=torch.uint8, device=DEVICE)
        copy = partial(torch.empty_like(source).copy_, source)
        graph = graph_microseconds({"op": case.call, "copy": copy}, DEVICE)
        host = host_microseconds({"op": case.call}, DEVICE)["op"]
        taken, copied = graph["op"] or 0.0, graph["copy"] or 1.0
        limit = "" if case.limit is None else f"{case.limit:.2f}"
        missed += case.limit is not None and taken > case.limit * copied
        count = launches(case.call)
        print(f"{case.name:44}{taken:9.2f}{copied:9.2f}{taken / copied:7.2f}{limit:>7}{host:9.1f}{count:9}", flush=True)
    print("every limit is kept" if not missed else f"{missed} limits are missed")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
