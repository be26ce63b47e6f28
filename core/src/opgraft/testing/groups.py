"""Groups of calls that rules run through: sizes, dtypes, layouts, buffers, numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Final

from opgraft.testing.calls import BOUNDARY_SIZES, Call
from opgraft.testing.layouts import INPUT_LAYOUTS, OUTPUT_LAYOUTS, PLAIN
from opgraft.testing.subject import Subject

__all__ = [
    "boundaries",
    "broad",
    "buffered",
    "dense_numbers",
    "edges",
    "every_combination",
    "extreme_numbers",
    "sizes",
    "strided",
]

_FEW: Final = 4
_SIZES: Final = (0, 1, 2, 7, 33, 257, 1025)
_BIG: Final = 2**17 + 1

Combination = tuple[tuple[str, str], ...]


def _some(combinations: tuple[Combination, ...], turn: int) -> tuple[Combination, ...]:
    """Give all combinations where they are few, else a few of them, others at every turn."""
    if len(combinations) <= _FEW:
        return combinations
    chosen = {(turn * _FEW + step) % len(combinations) for step in range(_FEW)}
    return tuple(combinations[place] for place in sorted(chosen))


def sizes(subject: Subject, wanted: Iterable[int], *, seed: int = 1) -> Iterator[Call]:
    """Give plain sample calls of these sizes, dtypes taking turns where they are many."""
    combinations = subject.material.combinations
    for turn, size in enumerate(wanted):
        for combination in _some(combinations, turn):
            yield Call(size=size, seed=seed, dtypes=combination)


def every_combination(subject: Subject, size: int, *, seed: int = 2) -> Iterator[Call]:
    """Give a plain sample call for every combination of dtypes."""
    for combination in subject.material.combinations:
        yield Call(size=size, seed=seed, dtypes=combination)


def boundaries(subject: Subject) -> Iterator[Call]:
    """Give every small size, then those around powers of two and block edges, up and down."""
    yield from sizes(subject, range(131), seed=3)
    yield from sizes(subject, BOUNDARY_SIZES, seed=4)
    yield from sizes(subject, (4096, 64, 1031, 1, 0, 2049, 3), seed=5)


def strided(
    subject: Subject, wanted: Iterable[int] = (1, 2, 5, 33, 1031), *, seed: int = 6
) -> Iterator[Call]:
    """Give calls in which one input, or all of them, lie in memory in another way."""
    inputs = subject.material.inputs
    turn = itertools.count()
    for size in wanted:
        for layout in INPUT_LAYOUTS:
            for combination in _some(subject.material.combinations, next(turn)):
                call = Call(size=size, seed=seed, dtypes=combination)
                for name in inputs:
                    yield call.but(layouts=((name, layout),))
                if len(subject.material.required) > 1:
                    every = tuple((name, layout) for name in subject.material.required)
                    yield call.but(layouts=every)


def buffered(
    subject: Subject,
    wanted: Iterable[int] = (0, 1, 2, 5, 33, 1031),
    layouts: Iterable[str] = (PLAIN, *OUTPUT_LAYOUTS),
    *,
    seed: int = 7,
) -> Iterator[Call]:
    """Give calls with caller buffers, one or all of them, laid out in every way."""
    buffers = tuple(subject.material.writes)
    if not buffers:
        return
    shapes = [tuple((name, layout) for name in buffers) for layout in layouts]
    if len(buffers) > 1:
        shapes += [((name, layout),) for name in buffers for layout in layouts]
    for turn, size in enumerate(wanted):
        for shape in shapes:
            for combination in _some(subject.material.combinations, turn):
                yield Call(size=size, seed=seed, dtypes=combination, buffers=shape)
    for combination in subject.material.buffer_combinations():
        for shape in shapes:
            yield Call(size=33, seed=seed, dtypes=combination, buffers=shape)


def edges(subject: Subject) -> Iterator[Call]:
    """Give the op's own edge cases, dtypes taking turns where they are many."""
    for combination in _some(subject.material.combinations, 0):
        yield from subject.material.edges(combination)
    for combination in subject.material.combinations[_FEW:]:
        yield from subject.material.edges(combination)


def broad(subject: Subject) -> Iterator[Call]:
    """Give a few calls of every kind."""
    yield from sizes(subject, _SIZES)
    for combination in subject.material.combinations[:1]:
        yield from itertools.islice(subject.material.edges(combination), 8)
    yield from strided(subject, (33,))
    yield from buffered(subject, (0, 33), (PLAIN, OUTPUT_LAYOUTS[0], OUTPUT_LAYOUTS[3]))
    yield from sizes(subject, (_BIG,))


def extreme_numbers() -> tuple[float, ...]:
    """Give zero, the ends of every dtype, and every power of two with its neighbours."""
    powers = (2**power + step for power in range(65) for step in (-1, 0, 1))
    whole = sorted({0, *powers} | {-2**power + step for power in range(64) for step in (-1, 0, 1)})
    broken = (0.5, -0.5, 1e-45, 1e-38, -1e-38, 65504.0, 3.4e38, -3.4e38, 1e308)
    return (*whole, *broken, float("inf"), float("-inf"), float("nan"), -0.0)


def dense_numbers(first: int, last: int) -> tuple[float, ...]:
    """Give every whole number from first up to last."""
    return tuple(range(first, last))
