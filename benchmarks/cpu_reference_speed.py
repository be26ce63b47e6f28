"""Compare the CPU forwards with the natives, and with Python loops at batch 256 x 8192.

Native and kernel take turns within a round, since the speed of a machine drifts; each figure is the
fastest of its rounds. Exit code 1 where a kernel is slower than its native at a sample size, or
less than 20 times faster than a loop.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from opgraft.ops import attention
from opgraft_cpu_reference import attention as kernels

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import index_cases
import model_index_ops as model

if TYPE_CHECKING:
    from collections.abc import Callable

LOOP_FACTOR = 20
BATCH, LENGTH = 256, 8192


def seconds(call: Callable[..., Any], arguments: dict[str, Any], repeats: int) -> float:
    """Time one round."""
    start = time.perf_counter()
    for _ in range(repeats):
        call(**arguments)
    return (time.perf_counter() - start) / repeats


def compare(name: str, arguments: dict[str, Any], budget_s: float) -> tuple[float, float]:
    """Give the fastest native and the fastest kernel, in seconds."""
    native = getattr(attention, name).op.forward_native
    kernel = getattr(kernels, name)
    once = max(seconds(native, arguments, 1), seconds(native, arguments, 1))
    repeats = max(1, math.ceil(0.001 / once))
    rounds = max(5, min(200, math.ceil(budget_s / (2 * repeats * once))))
    best = [math.inf, math.inf]
    for _ in range(rounds):
        for place, call in enumerate((native, kernel)):
            best[place] = min(best[place], seconds(call, arguments, repeats))
    return best[0], best[1]


def samples(name: str, dtype: torch.dtype) -> list[tuple[int, dict[str, Any]]]:
    """Draw a call of each sample size."""
    op = getattr(attention, name).op
    dtypes = dict.fromkeys(op.format_signature.supported_dtypes, dtype)
    return [(size, index_cases.sample(name, size, dtypes)) for size in op.sample_sizes]


def loop_calls() -> dict[str, dict[str, Any]]:
    """Give each op a call that makes about batch x length = 2 million results."""
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    rows = torch.arange(BATCH, dtype=torch.int32)
    lengths = torch.full((BATCH,), LENGTH, dtype=torch.int32)
    table = draw(0, 2**20, BATCH, LENGTH)
    total = BATCH * LENGTH
    indptr = torch.arange(0, total + 1, LENGTH, dtype=torch.int32)
    request = {"req_to_token": table, "req_pool_indices": rows}
    prompts = {"seq_lens": lengths, "prefill_lens": lengths // 2}
    return {
        "clamp_position": {"seq_lens": draw(0, 2**17, total)},
        "csr_kv_indices": {**request, "kv_lens": lengths, "kv_indptr": indptr, "total": total},
        "block_table": {**request, "kv_lens": lengths, "page_size": 1, "max_pages": LENGTH},
        "prefill_aware_page_table": {**request, **prompts, "window": LENGTH, "max_kv": LENGTH},
        "seqlens_expand": {"q_lens": lengths, "kv_lens": lengths, "total": total},
        "extend_positions": {"prefix_lens": lengths, "extend_lens": lengths, "total": total},
        "compact_valid_indices": {"indices": draw(-(2**18), 2**20, BATCH, LENGTH)},
        "topk_to_slots": {"table": table, "topk": draw(-999, LENGTH, BATCH, LENGTH)},
        "topk_valid_length": {"topk": draw(-(2**18), 2**20, BATCH, LENGTH)},
        "topk_to_slots_dcp": {"slots": draw(-(2**18), 2**20, BATCH, LENGTH), "world_size": 4, "rank": 1},
        # A result a request, not a token: more requests than any batch has.
        "cp_interleave_split": {"extend_lens": draw(0, 9, LENGTH), "world_size": 4, "rank": 1},
    }


def against_loop(name: str, arguments: dict[str, Any]) -> tuple[float, float]:
    """Give the seconds of a Python loop over lists, and of the kernel."""
    lists = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
    loop = getattr(model, name)
    start = time.perf_counter()
    loop(*lists.values()) if name == "clamp_position" else _loop(loop, lists)
    looped = time.perf_counter() - start
    kernel = getattr(kernels, name)
    return looped, min(seconds(kernel, arguments, 1) for _ in range(50))


def _loop(loop: Callable[..., Any], lists: dict[str, Any]) -> None:
    options = {"page_size", "max_pages", "max_kv", "window", "total", "world_size", "rank"}
    positional = [value for key, value in lists.items() if key not in options]
    loop(*positional, **{key: value for key, value in lists.items() if key in options})


def main() -> int:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", default=[], help="all where left out")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per figure")
    parser.add_argument("--no-loops", action="store_true", help="leave the Python loops out")
    parser.add_argument("--threads", type=int, help="torch's own choice where left out")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    chosen = options.ops or attention.__all__
    complaints = []
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'op':26} {'dtype':6} {'size':>8} {'native us':>10} {'kernel us':>10} {'ratio':>6}")
    for name in chosen:
        for dtype in (torch.int32, torch.int64):
            for size, arguments in samples(name, dtype):
                native, kernel = compare(name, arguments, options.budget)
                word = str(dtype).removeprefix("torch.")
                line = f"{name:26} {word:6} {size:8} {native * 1e6:10.1f} {kernel * 1e6:10.1f}"
                print(f"{line} {native / kernel:6.2f}", flush=True)
                if kernel > native:
                    complaints.append(f"{name}, {word}, size {size}: slower than native")
    if not options.no_loops:
        print(f"\n{'op':26} {'loop ms':>10} {'kernel ms':>10} {'ratio':>6}")
        for name, arguments in loop_calls().items():
            if name in chosen:
                loop, kernel = against_loop(name, arguments)
                line = f"{name:26} {loop * 1e3:10.1f} {kernel * 1e3:10.2f} {loop / kernel:6.0f}"
                print(line, flush=True)
                if loop < LOOP_FACTOR * kernel:
                    complaints.append(f"{name}: less than {LOOP_FACTOR} times faster than a loop")
    print("\n".join(complaints) if complaints else "every limit is kept")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
