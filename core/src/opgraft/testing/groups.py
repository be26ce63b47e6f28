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
_SIZES: Final = (0, 1, 2, 7, 33, 64, 257, 1025, 4096)
_BIG: Final = 2**17 + 1

Combination = tuple[tuple[str, str], ...]


class _Turns:
    """Combinations of dtypes: all of them where they are few, else one at a time, in turn."""

    def __init__(self, subject: Subject) -> None:
        self._all = subject.material.combinations
        self._turn = 0

    def next(self, count: int = 1) -> tuple[Combination, ...]:
        if len(self._all) <= _FEW:
            return self._all
        places = [(self._turn + step) % len(self._all) for step in range(count)]
        self._turn += count
        return tuple(self._all[place] for place in places)


def sizes(subject: Subject, wanted: Iterable[int], *, seed: int = 1) -> Iterator[Call]:
    """Give plain sample calls of these sizes, dtypes taking turns where they are many."""
    turns = _Turns(subject)
    for size in wanted:
        if subject.affords(size):
            for combination in turns.next(2):
                yield Call(size=size, seed=seed, dtypes=combination)


def every_combination(subject: Subject, size: int, *, seed: int = 2) -> Iterator[Call]:
    """Give a plain sample call for every combination of dtypes."""
    for combination in subject.material.combinations:
        yield Call(size=size, seed=seed, dtypes=combination)


def boundaries(subject: Subject) -> Iterator[Call]:
    """Give every small size, then those around powers of two and block edges, up and down."""
    yield from sizes(subject, (1025, 2**16 + 1, 1, 0, 3, 2**17 + 1, 2049, 64), seed=5)
    yield from sizes(subject, range(67), seed=3)
    yield from sizes(subject, BOUNDARY_SIZES, seed=4)
    yield from sizes(subject, range(67, 131), seed=3)


def strided(subject: Subject, wanted: Iterable[int] = (5, 33, 64, 1, 1031, 2), *, seed: int = 6) -> Iterator[Call]:
    """Give calls in which one input, or all of them, lie in memory in another way."""
    turns = _Turns(subject)
    required = subject.material.required
    for size in wanted:
        for layout in INPUT_LAYOUTS:
            chosen: list[Combination] = [((name, layout),) for name in subject.material.inputs]
            if len(required) > 1:
                chosen.append(tuple((name, layout) for name in required))
            for layouts in chosen:
                for combination in turns.next():
                    yield Call(size=size, seed=seed, dtypes=combination, layouts=layouts)


def buffered(
    subject: Subject,
    wanted: Iterable[int] = (33, 0, 5, 64, 1, 1031, 2),
    layouts: Iterable[str] = (PLAIN, *OUTPUT_LAYOUTS),
    *,
    seed: int = 7,
) -> Iterator[Call]:
    """Give calls with caller buffers, one or all of them, laid out in every way."""
    buffers = tuple(subject.material.writes)
    if not buffers:
        return
    turns = _Turns(subject)
    shapes = [tuple((name, layout) for name in buffers) for layout in layouts]
    if len(buffers) > 1:
        shapes += [((name, layout),) for name in buffers for layout in layouts]
    for size in wanted:
        for shape in shapes:
            for combination in turns.next():
                yield Call(size=size, seed=seed, dtypes=combination, buffers=shape)
    for combination in itertools.islice(subject.material.buffer_combinations(), 1, None):
        for shape in shapes:
            yield Call(size=33, seed=seed, dtypes=combination, buffers=shape)


def edges(subject: Subject) -> Iterator[Call]:
    """Give the op's own edge cases, for every combination of dtypes."""
    for combination in subject.material.combinations:
        yield from subject.material.edges(combination)


def broad(subject: Subject) -> Iterator[Call]:
    """Give a few calls of every kind, in turn."""
    first = subject.material.combinations[:1]
    cases = itertools.chain.from_iterable(map(subject.material.edges, first))
    return _in_turn(
        sizes(subject, (*_SIZES, _BIG)),
        strided(subject, (33, 64)),
        buffered(subject, (33, 0, 64), (PLAIN, OUTPUT_LAYOUTS[0], OUTPUT_LAYOUTS[3])),
        itertools.islice(cases, 8),
    )


def _in_turn(*groups: Iterator[Call]) -> Iterator[Call]:
    for turn in itertools.zip_longest(*groups):
        yield from (call for call in turn if call is not None)


def extreme_numbers() -> tuple[float, ...]:
    """Give zero, the ends of every dtype, and every power of two with its neighbours."""
    powers = (2**power + step for power in range(65) for step in (-1, 0, 1))
    whole = sorted({0, *powers} | {-(2**power) + step for power in range(64) for step in (-1, 0, 1)})
    broken = (0.5, -0.5, 1e-45, 1e-38, -1e-38, 65504.0, 3.4e38, -3.4e38, 1e308)
    return (*whole, *broken, float("inf"), float("-inf"), float("nan"), -0.0)


def dense_numbers(first: int, last: int) -> tuple[float, ...]:
    """Give every whole number from first up to last."""
    return tuple(range(first, last))
