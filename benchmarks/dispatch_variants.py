"""Measure what a call costs in every way of calling, and with 1, 10 and 100 backends installed."""

from __future__ import annotations

import argparse
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import trivial
from interleave import fastest, timed

import opgraft

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

DIRECT = "direct call of the kernel"
HANDLE = "handle"
CHAIN = 10


def accept(seq_lens: Tensor, *, out: Tensor | None = None) -> str | None:
    """Refuse nothing, but be asked on every call."""
    return "more than one dimension" if seq_lens.dim() > 1 else None


def returning() -> Callable[..., Tensor]:
    """Make a kernel that does nothing."""

    def clamp_position(seq_lens: Tensor, *, out: Tensor | None = None) -> Tensor:
        return seq_lens if out is None else out

    return clamp_position


def allocating() -> Callable[..., Tensor]:
    """Make a kernel that does what the least real one does: make room for the result."""

    def clamp_position(seq_lens: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.empty_like(seq_lens, dtype=torch.int64) if out is None else out

    return clamp_position


def register(
    name: str, kernel: Callable[..., Tensor], *, priority: int, rejects: Callable[..., str | None] | None = None
) -> None:
    """Make up a backend with one kernel for CPU tensors, and register it."""

    def opgraft_backend() -> opgraft.Backend:
        return opgraft.Backend(name=name, platforms=("cpu",))

    offer = opgraft.forward(
        "attention.clamp_position", kernel_backend=opgraft.KernelBackend.PLUGIN, priority=priority, rejects=rejects
    )
    plugin = ModuleType(name)
    vars(plugin).update(opgraft_backend=opgraft.hookimpl(opgraft_backend), clamp_position=offer(kernel))
    opgraft.register_backend(plugin)


def report(title: str, nanoseconds: dict[str, float]) -> None:
    """Print what each way of calling adds to the direct call."""
    direct = nanoseconds.pop(DIRECT)
    print(f"\n{title} (direct: {direct:.0f} ns)")
    for name, ns in nanoseconds.items():
        print(f"  {name:58} +{ns - direct:6.0f} ns")


def ways_of_calling(seq_lens: Tensor, measure: Callable[..., dict[str, float]]) -> None:
    """Measure the ways of calling while nothing but the trivial kernel is chosen."""
    handle = opgraft.ops.attention.clamp_position
    out = torch.empty_like(seq_lens, dtype=torch.int64)
    operator = torch.ops.opgraft.attention_clamp_position.default
    calls: dict[str, Any] = {
        DIRECT: timed(trivial.clamp_position, seq_lens),
        HANDLE: timed(handle, seq_lens),
        "handle, keyword argument": timed(handle, seq_lens=seq_lens),
        "handle, out=": timed(handle, seq_lens, out=out),
        "handle, backend=": timed(handle, seq_lens, backend="trivial"),
        "module, op(x)": timed(handle.op, seq_lens),
        "torch.ops.opgraft.attention_clamp_position.default": timed(operator, seq_lens),
    }
    report("Ways of calling", measure(calls))

    one_dtype = timed(handle, seq_lens)
    other_dtype = seq_lens.to(torch.int64)

    def alternate() -> None:
        handle(seq_lens)
        handle(other_dtype)

    def alternate_directly() -> None:
        trivial.clamp_position(seq_lens)
        trivial.clamp_position(other_dtype)

    report("Two calls that alternate between two dtypes", measure({DIRECT: alternate_directly, "handle": alternate}))

    with opgraft.use(deny=["a_backend_that_is_not_here"]):
        report("Inside a scoped policy", measure({DIRECT: timed(trivial.clamp_position, seq_lens), HANDLE: one_dtype}))
    with opgraft.trace():
        report("With tracing on", measure({DIRECT: timed(trivial.clamp_position, seq_lens), HANDLE: one_dtype}))


def compiled(seq_lens: Tensor, measure: Callable[..., dict[str, float]]) -> None:
    """Measure one call inside ``torch.compile``, as part of a chain of them."""
    allocate = allocating()
    register("allocating", allocate, priority=trivial.ALWAYS_FIRST + 2)
    handle = opgraft.ops.attention.clamp_position

    def chain(length: int) -> Callable[[Tensor], Tensor]:
        def run(value: Tensor) -> Tensor:
            for _ in range(length):
                value = handle(value)
            return value

        return torch.compile(run, fullgraph=True)

    short, long = chain(1), chain(1 + CHAIN)
    short(seq_lens)
    long(seq_lens)
    nanoseconds = measure(
        {DIRECT: timed(allocate, seq_lens), "short": timed(short, seq_lens), "long": timed(long, seq_lens)}
    )
    per_op = (nanoseconds["long"] - nanoseconds["short"]) / CHAIN
    report(
        "Inside torch.compile, kernel allocates its result",
        {DIRECT: nanoseconds[DIRECT], "one op of a compiled chain": per_op},
    )


def installed_backends(seq_lens: Tensor, measure: Callable[..., dict[str, float]]) -> None:
    """Measure the handle while more and more backends offer a kernel for the same call."""
    handle = opgraft.ops.attention.clamp_position
    direct = timed(trivial.clamp_position, seq_lens)
    registered = 0
    for count in (1, 10, 100):
        while registered < count:
            register(f"loser_{registered}", allocating(), priority=1)
            registered += 1
        title = f"{count} backends beside the one that wins"
        report(title, measure({DIRECT: direct, HANDLE: timed(handle, seq_lens)}))
    choosy = returning()
    register("choosy", choosy, priority=trivial.ALWAYS_FIRST + 1, rejects=accept)
    report(
        "The winner has a rejects predicate",
        measure({DIRECT: timed(choosy, seq_lens), HANDLE: timed(handle, seq_lens)}),
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--batch", type=int, default=1000)
    options = parser.parse_args()

    def measure(calls: dict[str, Any]) -> dict[str, float]:
        return fastest(calls, rounds=options.rounds, batch=options.batch)

    seq_lens = torch.arange(1, 65, dtype=torch.int32)
    trivial.register()
    ways_of_calling(seq_lens, measure)
    installed_backends(seq_lens, measure)
    compiled(seq_lens, measure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
