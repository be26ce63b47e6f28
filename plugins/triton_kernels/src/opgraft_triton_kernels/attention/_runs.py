"""Runs laid end to end: in which run each place lies.

Every program sums up the lengths of the runs, a tile of them at a time, up to the one that covers
the last of its places, and each place looks its run up among their ends. What it costs does not
depend on how long any run is.
"""

# The parameters of a jitted function are Triton's values, which have no Python type.
# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

__all__ = ["LOOKUPS", "PLACES", "WARPS", "ends_need_64_bit", "runs_of_places"]

# The usual batch is one tile. A lookup among it reads shared memory ten times; marking the ends with
# Triton's histogram took 6.5 us a call on an H200.
PLACES: Final = 512
LOOKUPS: Final = 9
"""Bits of the place of a run in its tile, which has ``2**LOOKUPS`` runs."""
WARPS: Final = 4


def ends_need_64_bit(total: int) -> bool:
    """Say whether a tile's runs, each cut to `total`, may end beyond what 32 bit count."""
    return (total << LOOKUPS) + total + PLACES >= 2**31


@triton.jit
def _count_until(ends, place, LOOKUPS: tl.constexpr):
    """Count the ends, which ascend, that do not lie behind each place."""
    count = (place * 0).to(tl.int32)
    for lookup in tl.static_range(LOOKUPS):
        step = 1 << (LOOKUPS - 1 - lookup)
        count += tl.where(tl.gather(ends, count + (step - 1), 0) <= place, step, 0)
    return count + (tl.gather(ends, count, 0) <= place).to(tl.int32)


@triton.jit
def runs_of_places(
    lengths_ptr, stride, runs, total, begin, WIDE: tl.constexpr, PLACES: tl.constexpr, LOOKUPS: tl.constexpr
):
    """Give the run of each place from `begin` on, and the place's rank in it.

    Places behind the last run get the number of runs. A length below 0 counts as 0, one above
    `total`, the number of all places, as that.
    """
    TILE: tl.constexpr = 1 << LOOKUPS
    tile = tl.arange(0, TILE)
    begin = begin if WIDE else begin.to(tl.int32)
    most = total if WIDE else total.to(tl.int32)
    place = begin + tl.arange(0, PLACES)
    run = tl.zeros([PLACES], tl.int32) + runs
    start = place * 0
    laid = begin * 0
    first = runs * 0
    while (first < runs) & (laid < begin + PLACES):
        listed = first + tile
        length_ptr = lengths_ptr + listed.to(tl.int64) * stride
        length = tl.maximum(tl.load(length_ptr, mask=listed < runs, other=0), 0)
        length = tl.minimum(length.to(tl.int64), total).to(most.dtype)
        end = laid + tl.cumsum(length, 0)
        count = _count_until(end, place, LOOKUPS)
        here = (place >= laid) & (count < TILE)
        run = tl.where(here, first + count, run)
        start = tl.where(here, tl.gather(end - length, tl.minimum(count, TILE - 1), 0), start)
        laid += tl.sum(length, 0)
        first += TILE
    return tl.minimum(run, runs), place - start
