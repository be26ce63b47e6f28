"""Time `attention.clamp_position` on a GPU against other ways to do the same, side by side.

Host time is Python time per asynchronous call; GPU time is that of a call inside a replayed CUDA
graph. All ways take turns, round after round, since sequential timing drifts. SGLang takes part if
it can be imported. ``--json FILE`` keeps the figures. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton

if TYPE_CHECKING:
    from collections.abc import Callable

    Way = Callable[[torch.Tensor], torch.Tensor]

SIZES = (64, 2**24)
DTYPES = (torch.int32, torch.int64)
FASTEST_KNOWN = {  # us of GPU time, of any implementation measured on an H200 before this one
    (64, torch.int32): 1.09,
    (64, torch.int64): 1.08,
    (2**24, torch.int32): 51.4,
}

CPP = "#include <torch/extension.h>\ntorch::Tensor clamp_position(torch::Tensor seq_lens);"
CUDA = r"""
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

template <typename Length>
__global__ void kernel(const Length *seq_lens, int64_t *out, int64_t size) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < size) out[i] = static_cast<int64_t>((seq_lens[i] > 1 ? seq_lens[i] : 1) - 1);
}

torch::Tensor clamp_position(torch::Tensor seq_lens) {
  const at::cuda::OptionalCUDAGuard guard(seq_lens.device());
  auto out = at::empty(seq_lens.sizes(), seq_lens.options().dtype(at::kLong));
  const int64_t size = seq_lens.numel();
  const auto stream = at::cuda::getCurrentCUDAStream();
  const auto blocks = static_cast<unsigned>((size + 255) / 256);
  if (seq_lens.scalar_type() == at::kInt) {
    kernel<<<blocks, 256, 0, stream>>>(seq_lens.data_ptr<int>(), out.data_ptr<int64_t>(), size);
  } else {
    kernel<<<blocks, 256, 0, stream>>>(seq_lens.data_ptr<int64_t>(), out.data_ptr<int64_t>(), size);
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}
"""


def cpp_extension() -> Way:
    """Build what one would write by hand in C++."""
    from torch.utils.cpp_extension import load_inline

    built: Any = load_inline("clamp_position_by_hand", CPP, CUDA, functions=["clamp_position"])
    way: Way = built.clamp_position
    return way


def ordinary_triton() -> Way:
    """Launch the same Triton kernel as Triton does."""
    from opgraft_triton_kernels.attention import _clamp_position as module

    def way(seq_lens: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(seq_lens, dtype=torch.int64, memory_format=torch.contiguous_format)
        size = seq_lens.numel()
        grid = ((size + 511) // 512,)
        module.clamp_position_contiguous_kernel[grid](seq_lens, out, size, BLOCK=512, num_warps=8)
        return out

    return way


def ways() -> dict[str, Way]:
    """Give every way that works here, by name."""

    def op() -> Way:
        import opgraft

        return opgraft.ops.attention.clamp_position

    def triton_kernel() -> Way:
        from opgraft_triton_kernels.attention import clamp_position

        return clamp_position

    def cuda_kernel() -> Way:
        from opgraft_cuda.clamp_position import clamp_position

        return clamp_position

    def sglang() -> Way:
        from sglang.kernels.ops.attention.clamp_position import clamp_position

        return clamp_position

    makers: dict[str, Callable[[], Way]] = {
        "plain torch": lambda: lambda x: torch.clamp(x - 1, min=0).to(torch.int64),
        "allocation alone": lambda: lambda x: torch.empty_like(x, dtype=torch.int64),
        "SGLang": sglang,
        "C++ extension": cpp_extension,
        "Triton, ordinary launch": ordinary_triton,
        "opgraft Triton kernel": triton_kernel,
        "opgraft CUDA C++ kernel": cuda_kernel,
        "opgraft op": op,
    }
    found: dict[str, Way] = {}
    for name, make in makers.items():
        way = attempt(name, make)
        if way is not None:
            found[name] = way
    return found


def attempt(name: str, make: Callable[[], Way]) -> Way | None:
    """Make a way and call it once, or say why there is none."""
    try:
        way = make()
        way(torch.ones(4, dtype=torch.int32, device="cuda"))
    except Exception as error:  # noqa: BLE001 - whatever is wrong, the others are measured
        print(f"without {name}: {type(error).__name__}: {error}")
        return None
    return way


def check(name: str, way: Way) -> None:
    """Hold a way against the meaning before it is timed."""
    for dtype in DTYPES:
        for size in (1, 63, 1025, 2**17 + 3):
            x = torch.randint(-3, 2**31 - 1, (size,), dtype=dtype, device="cuda")
            expected = torch.maximum(x, torch.ones_like(x)).to(torch.int64) - 1
            actual = way(x)
            assert actual.dtype == torch.int64, name
            assert torch.equal(expected, actual), (name, dtype, size)


def host_us(way: Way, x: torch.Tensor, calls: int = 400) -> float:
    """Time the Python side of asynchronous calls."""
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(calls):
        way(x)
    took = time.perf_counter_ns() - start
    torch.cuda.synchronize()
    return took / calls / 1e3


def captured(way: Way, x: torch.Tensor, calls: int) -> torch.cuda.CUDAGraph:
    """Capture so many calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        way(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            way(x)
    return graph


def graph_us(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Time a replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / calls


def interleaved(measures: dict[str, Callable[[], float]], rounds: int) -> dict[str, tuple[float, float]]:
    """Let all take turns; give minimum and median of each."""
    times: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            times[name].append(measure())
    return {name: (min(one), statistics.median(one)) for name, one in times.items()}


def measured(found: dict[str, Way]) -> dict[str, dict[str, tuple[float, float]]]:
    """Take all figures."""
    figures: dict[str, dict[str, tuple[float, float]]] = {}
    for dtype in DTYPES:
        x = torch.randint(0, 5000, (64,), dtype=dtype, device="cuda")
        figures[f"host {dtype} 64"] = interleaved(
            {name: partial(host_us, way, x) for name, way in found.items()}, rounds=40
        )
    for size in SIZES:
        for dtype in DTYPES:
            x = torch.randint(-5, 5000, (size,), dtype=dtype, device="cuda")
            calls = 100 if size == SIZES[0] else 10
            graphs = {name: captured(way, x, calls) for name, way in found.items() if name != "allocation alone"}
            figures[f"graph {dtype} {size}"] = interleaved(
                {name: partial(graph_us, graph, calls) for name, graph in graphs.items()}, rounds=40
            )
            del graphs
            torch.cuda.empty_cache()
    return figures


def targets(figures: dict[str, dict[str, tuple[float, float]]]) -> list[tuple[str, float, float]]:
    """Give what is promised: what, the ratio measured, the ratio allowed."""
    host = {name: low for name, (low, _) in figures["host torch.int32 64"].items()}
    found = []
    for ours in ("opgraft Triton kernel", "opgraft CUDA C++ kernel", "opgraft op"):
        if ours not in host:
            continue
        found += [
            (f"{ours}: host time over {peer}'s", host[ours] / host[peer], allowed)
            for peer, allowed in (("SGLang", 0.6), ("C++ extension", 1.3))
            if peer in host
        ]
        if "H200" in torch.cuda.get_device_name():
            found += [
                (
                    f"{ours}: GPU time of {size} {dtype} over the fastest known",
                    figures[f"graph {dtype} {size}"][ours][0] / fastest,
                    1.05,
                )
                for (size, dtype), fastest in FASTEST_KNOWN.items()
            ]
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    print(machine)
    found = ways()
    for name, way in found.items():
        if name != "allocation alone":
            check(name, way)
    figures = measured(found)
    for title, rows in figures.items():
        print(f"\n{title}: us per call, minimum and median")
        for name, (low, middle) in rows.items():
            print(f"  {name:26s} {low:9.3f} {middle:9.3f}")
    missed = 0
    print("\nratios of minima, and what is allowed")
    for what, ratio, allowed in targets(figures):
        missed += ratio > allowed
        print(f"  {'ok    ' if ratio <= allowed else 'MISSED'} {ratio:6.3f} <= {allowed:4.2f}  {what}")
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine, "figures": figures}, indent=1))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
