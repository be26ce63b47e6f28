"""How long a call takes: on the host, and on a CUDA device inside a replayed graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

Call = Callable[[], Any]
_ROUNDS: Final = 15
_ROUND_SECONDS: Final = 0.004
_REPLAYS: Final = 200
_CALLS_PER_GRAPH: Final = 20


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def host_microseconds(calls: Mapping[str, Call], device: torch.device) -> dict[str, float]:
    """Time asynchronous calls from Python.

    Parameters
    ----------
    calls
        What is compared. All are run in turn, round by round, so that a slow moment of the machine
        meets every one; the least of the rounds counts.
    device
        Where they run; waited for between rounds.

    Returns
    -------
    dict
        Microseconds per call, by the calls' names.

    """
    repeats: dict[str, int] = {}
    for name, call in calls.items():
        call()
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        repeats[name] = max(1, min(1000, int(_ROUND_SECONDS / max(time.perf_counter() - began, 1e-7))))
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            count = repeats[name]
            synchronize(device)
            began = time.perf_counter()
            for _ in range(count):
                call()
            best[name] = min(best[name], (time.perf_counter() - began) / count * 1e6)
    synchronize(device)
    return best


def graph_microseconds(calls: Mapping[str, Call], device: torch.device) -> dict[str, float | None]:
    """Time calls inside a replayed CUDA graph; None on another device, or for a call that cannot be captured."""
    graphs = {name: _captured(call, device) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name, graph in graphs.items() if graph is not None}
    for _ in range(_REPLAYS):
        for name, found in times.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            graph = graphs[name]
            begin.record()
            graph.replay()  # type: ignore[union-attr]
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / _CALLS_PER_GRAPH)
    return {name: _median(times[name]) if name in times else None for name in calls}


def _captured(call: Call, device: torch.device) -> torch.cuda.CUDAGraph | None:
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(_CALLS_PER_GRAPH):
                call()
    except RuntimeError:  # it reads a value, which a graph cannot hold
        torch.cuda.synchronize(device)
        return None
    return graph


def _median(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 2]
