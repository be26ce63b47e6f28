"""Time the Triton kernels of the index ops on a CUDA device, against a copy of the same bytes.

GPU time of a call inside a replayed CUDA graph; all ways take turns, round after round, since
sequential timing drifts. The buffers stay the same from call to call, and mostly in the L2 cache,
as a decode step's own do; ``--cold`` takes turns among so many sets of them that none stays there.
``--json FILE`` keeps the figures. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from opgraft_triton_kernels import attention

Call = Callable[[], Any]
DEVICE = "cuda"
CALLS = 20
L2_BYTES = 60 * 2**20
BANDWIDTH = 4.2e6  # bytes per us that an H200 reaches
WIDE = 131072  # columns of tables that are wider than any row, as an engine's are
LAUNCH = 2.0  # us: specs put the floor of a launch at 2 to 3
ROWS = {
    "1 x 131072": ([131072], 1.5),
    "8 x 131072": ([131072] * 8, 1.25),
    "64 x 32768": ([32768] * 64, 1.25),
    "256 x 8192": ([8192] * 256, 1.25),
    "512 x 4096": ([4096] * 512, 1.25),
    "1 x 131072 and 255 x 64": ([64] * 77 + [131072] + [64] * 178, 1.5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement: `ratio` is the time over `against`, the copy or the floor."""

    op: str
    case: str
    us: float
    against: float
    ratio: float
    target: float | None


def graphs(calls: dict[str, list[Call]]) -> dict[str, torch.cuda.CUDAGraph]:
    """Capture every way, `CALLS` calls in turn over its sets of buffers."""
    captured = {}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for name, sets in calls.items():
            for call in sets:
                call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for number in range(CALLS):
                    sets[number % len(sets)]()
            captured[name] = graph
    return captured


def timed(calls: dict[str, list[Call]], rounds: int) -> dict[str, float]:
    """Give the median time of a call of each way, us."""
    captured = graphs(calls)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 3):
        for name, graph in captured.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number >= 3:
                times[name].append(begin.elapsed_time(end) * 1000 / CALLS)
    return {name: statistics.median(values) for name, values in times.items()}


def copy_of(bytes_each_way: int) -> Call:
    """Copy as many bytes as a call reads, which is as many as it writes."""
    source = torch.randint(0, 100, (bytes_each_way // 4,), dtype=torch.int32, device=DEVICE)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def slot_rows(lengths: list[int], columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a slot table, the request of each row and the lengths."""
    batch = len(lengths)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 2**30, (batch + 1, columns), dtype=torch.int32, device=DEVICE)
    requests = (torch.randperm(batch, generator=generator) + 1).to(torch.int32).to(DEVICE)
    return table, requests, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def csr(lengths: list[int], columns: int, room: int, seed: int) -> Call:
    """Prepare a call of csr_kv_indices, and check it."""
    table, requests, lens = slot_rows(lengths, columns, seed)
    indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32)
    out = torch.empty(sum(lengths) + room, dtype=torch.int32, device=DEVICE)

    def call() -> Any:
        return attention.csr_kv_indices(table, requests, lens, indptr, out=out)

    call()
    parts = zip(requests.tolist(), lengths, strict=True)
    expected = torch.cat([table[request, :length] for request, length in parts])
    assert torch.equal(expected, out[: sum(lengths)])
    return call


def page_table(lengths: list[int], columns: int, forgotten: int, seed: int) -> Call:
    """Prepare a call of prefill_aware_page_table that has `lengths` in sight, and check it."""
    table, requests, lens = slot_rows(lengths, columns + forgotten, seed)
    lens += forgotten
    prompts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=DEVICE)
    halves = torch.tensor([length // 2 for length in lengths], dtype=torch.int32, device=DEVICE)
    prompts[requests.long()] = halves if len(set(lengths)) == 1 or not forgotten else 0
    window = max(lengths) - max(lengths) // 2 if forgotten else columns
    out = torch.empty((len(lengths), columns), dtype=torch.int32, device=DEVICE)
    out_lens = torch.empty(len(lengths), dtype=torch.int32, device=DEVICE)

    def call() -> Any:
        return attention.prefill_aware_page_table(
            table, requests, lens, prompts, window=window, out=out, out_lens=out_lens
        )

    call()
    for row in {0, len(lengths) // 3, len(lengths) - 1}:
        prompt, length, request = int(prompts[requests[row]]), int(lens[row]), int(requests[row])
        start = max(prompt, length - window)
        expected = torch.cat([table[request, :prompt], table[request, start:length]])
        assert len(expected) == int(out_lens[row])
        assert torch.equal(expected, out[row, : len(expected)])
    return call


def against_copy(rounds: int, *, cold: bool) -> list[Row]:
    """Time the two tables that are copies at heart."""
    found = []
    for case, (lengths, target) in ROWS.items():
        total, longest = sum(lengths), max(lengths)
        sets = min(16, 1 + 2 * L2_BYTES // (8 * total)) if cold else 1
        makers: dict[str, Callable[[int], Call]] = {
            "copy": lambda _, total=total: copy_of(4 * total),
            "csr_kv_indices": lambda seed, a=lengths, c=longest: csr(a, c, 0, seed),
            "prefill_aware_page_table": lambda seed, a=lengths, c=longest: page_table(a, c, 0, seed),
        }
        if not cold:
            makers |= {
                "csr_kv_indices, wide table and buffer": lambda seed, a=lengths: csr(a, WIDE, 2**20, seed),
                "prefill_aware_page_table, wide tables": lambda seed, a=lengths: page_table(a, WIDE, 0, seed),
            }
            if len(set(lengths)) == 1:
                makers["prefill_aware_page_table, 5 forgotten"] = lambda seed, a=lengths, c=longest: page_table(
                    a, c, 5, seed
                )
        calls = {name: [maker(seed) for seed in range(sets)] for name, maker in makers.items()}
        times = timed(calls, rounds)
        copy = times.pop("copy")
        for name, us in times.items():
            goal = target if "," not in name and not cold else None
            found.append(Row(op=name, case=case, us=us, against=copy, ratio=us / copy, target=goal))
        del calls
    return found


def gathers(rounds: int) -> list[Row]:
    """Time the ops that gather, against the floors of their specification."""
    found = []
    columns, page_size = 131072, 64
    pages = columns // page_size
    for batch in (1, 16, 64, 128, 512):
        table, requests, lens = slot_rows([columns] * batch, columns, 1)
        out = torch.empty((batch, pages), dtype=torch.int32, device=DEVICE)

        def keep(a: Any = (table, requests, lens), out: Any = out) -> Any:
            return attention.block_table(*a, page_size=page_size, out=out)

        def fill(a: Any = (table, requests, lens), out: Any = out) -> Any:
            return attention.block_table(*a, page_size=page_size, tail=-1, out=out)

        # What any kernel can do here: the same reads without a division or a condition.
        bare = torch.empty_like(out)
        source = table[1:].unflatten(1, (pages, page_size))[:, :, 0]

        def gather(source: Any = source, bare: Any = bare) -> Any:
            return bare.copy_(source)

        keep()
        assert torch.equal(out, table[requests.long()][:, ::page_size] // page_size)
        times = timed({"block_table": [keep], "block_table, tail": [fill], "strided copy": [gather]}, rounds)
        floor = max(batch * pages * 36 / BANDWIDTH, LAUNCH)
        case = f"{batch} x {columns}, page {page_size}"
        for name, us in times.items():
            target = 1.5 if name == "block_table" else None
            found.append(Row(op=name, case=case, us=us, against=floor, ratio=us / floor, target=target))
    for tokens, requests_count in ((1, 1), (64, 64), (64, 8), (1024, 128)):
        k = 2048
        table = torch.randint(0, 2**30, (max(requests_count, 1), columns), dtype=torch.int32, device=DEVICE)
        topk = torch.randint(0, columns, (tokens, k), dtype=torch.int32, device=DEVICE)
        out = torch.empty((tokens, k), dtype=torch.int32, device=DEVICE)
        bounds = None
        if requests_count != tokens:
            bounds = torch.arange(requests_count + 1, dtype=torch.int32, device=DEVICE) * (tokens // requests_count)

        def slots(table: Any = table, topk: Any = topk, bounds: Any = bounds, out: Any = out) -> Any:
            return attention.topk_to_slots(table, topk, cu_q=bounds, out=out)

        slots()
        rows = torch.arange(tokens, device=DEVICE) // (tokens // requests_count)
        assert torch.equal(out, table[rows[:, None], topk.long()])
        us = timed({"topk_to_slots": [slots]}, rounds)["topk_to_slots"]
        floor = max(tokens * k * 40 / BANDWIDTH, LAUNCH)
        case = f"{tokens} x {k} of {requests_count} requests"
        found.append(Row(op="topk_to_slots", case=case, us=us, against=floor, ratio=us / floor, target=1.5))
    return found


def others(rounds: int) -> list[Row]:
    """Time the rest at every sample size, against a copy of what they write and read."""
    import opgraft.ops.attention as ops

    found = []
    names = (
        "seqlens_expand",
        "extend_positions",
        "compact_valid_indices",
        "topk_valid_length",
        "topk_to_slots_dcp",
        "cp_interleave_split",
    )
    for name in names:
        op: Any = getattr(ops, name).op
        dtypes = dict.fromkeys(op.format_signature.supported_dtypes, torch.int32)
        for size in op.sample_sizes:
            sample = op.sample(size, dtypes=dtypes, generator=torch.Generator().manual_seed(1))
            given = {key: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for key, v in sample.items()}

            def call(name: str = name, given: Any = given) -> Any:
                return getattr(attention, name)(**given)

            result = call()
            outputs = result if isinstance(result, tuple) else (result,)
            tensors = [v for v in given.values() if isinstance(v, torch.Tensor)] + list(outputs)
            moved = sum(v.numel() * v.element_size() for v in tensors)
            times = timed({name: [call], "copy": [copy_of(max(moved // 2, 4))]}, rounds)
            us, copy = times[name], times["copy"]
            found.append(Row(op=name, case=f"size {size}", us=us, against=copy, ratio=us / copy, target=None))
    return found


def main() -> int:
    """Measure, print a table, say whether every target is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--cold", action="store_true", help="let no buffer stay in the L2 cache")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = against_copy(options.rounds, cold=options.cold)
    if not options.cold:
        found += gathers(options.rounds) + others(options.rounds)
    for row in found:
        goal = "" if row.target is None else f"  target {row.target:4.2f} {'' if row.ratio <= row.target else 'MISSED'}"
        print(f"{row.op:40} {row.case:28} {row.us:8.2f} us  {row.ratio:5.2f} x {row.against:7.2f}{goal}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
    return int(any(row.target is not None and row.ratio > row.target for row in found))


if __name__ == "__main__":
    sys.exit(main())
