"""Runs laid end to end: in which run each place lies.

Every program counts the runs that end before its places, and marks on a strip of its own where
others end; a running count of the marks says the rest. Nothing is searched, and a run of any length
costs the same. Runs are read in tiles, up to the one that covers the last place.
"""

# The parameters of a jitted function are Triton's values, which have no Python type.
# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["runs_of_places"]


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def runs_of_places(lengths_ptr, stride, runs, total, begin, PLACES: tl.constexpr, TILE: tl.constexpr):
    """Give the run of each place from `begin` on, and the place's rank in it.

    Places behind the last run get the number of runs. Lengths below 0 count as 0, those above
    `total`, the number of places, as that: sums stay far from wrapping round.
    """
    tile = tl.arange(0, TILE)
    place = tl.arange(0, PLACES)
    marks = tl.zeros([PLACES], tl.int32)
    ended = runs * 0
    laid = begin * 0
    last_end = begin * 0
    first = runs * 0
    while (first < runs) & (laid < begin + PLACES):
        run = first + tile
        there = run < runs
        length = tl.load(lengths_ptr + run.to(tl.int64) * stride, mask=there, other=0)
        length = tl.minimum(tl.maximum(length.to(tl.int64), 0), total)
        end = laid + tl.cumsum(length, 0) - begin
        before = there & (end <= 0)
        ended += tl.sum(before.to(tl.int32), 0)
        last_end = tl.maximum(last_end, tl.max(tl.where(before, end + begin, 0), 0))
        amid = there & (end > 0) & (end < PLACES)
        marks += tl.histogram(tl.where(amid, end, 0).to(tl.int32), PLACES, mask=amid)
        laid += tl.sum(length, 0)
        first += TILE
    run = ended + tl.cumsum(marks, 0)
    run = tl.where(begin + place < laid, run, runs)
    start = tl.associative_scan(tl.where(marks > 0, place, -1), 0, _larger)
    rank = tl.where(start < 0, begin - last_end + place, place - start)
    return run, rank
