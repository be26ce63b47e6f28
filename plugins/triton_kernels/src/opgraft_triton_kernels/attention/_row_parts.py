"""Rows of unequal length, cut into parts of one size and dealt to programs.

One long row among many short ones costs what their sum costs, and no program searches for its work
among all rows. The places for parts go through the second parts of all rows, then through the third
parts, and so on; the first ``spread`` programs are dealt them like cards, one after the other. Each
looks at a hand of them at once, one a lane, to see which of these parts exist at all. As the number
of programs is prime, the parts of one row come to different programs. The first part of every row
has a program of its own, and so has every place while there are few: those look nowhere.

How many programs there are depends on sizes that the host knows, never on a length.
"""

# The parameters of a jitted function are Triton's values, which have no Python type.
# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "HAND",
    "REACH",
    "at",
    "copy_lanes",
    "copy_part",
    "counted",
    "deal",
    "dealt",
    "narrowed",
    "negated",
    "pick",
    "within",
]

HAND = 32
"""Places looked at together: the lanes of a warp, of which every one holds the whole hand."""

REACH = 2**30
"""Sizes up to this are counted in 32 bit: a sum of two positions fits an unsigned integer."""

# One H200, replayed graph, us of csr_kv_indices | prefill_aware_page_table at part 1024, 2 warps, for
# one row of 131072 beside 255 of 64, and for 512 rows of 4096 in tables 131072 wide: spread 257 2.78 |
# 3.31 and 5.99 | 7.32, 521 2.26 | 2.74 and 4.49 | 5.05, 1031 2.19 | 2.58 and 4.14 | 4.47. A program more
# costs 0.6 ns beside the 0.9 us of a launch, a second hand some 0.4 us. Rows of which every part has
# a program: 64 x 32768 take 3.93 | 4.33, dealt to 521 programs 4.24 | 4.46.
_MOST_PROGRAMS = 2100
_SPREAD = 1031


def deal(batch: int, width: int, part: int) -> tuple[int, int, int, int, int]:
    """Lay out the programs for rows of up to `width` elements.

    Parameters
    ----------
    batch
        Rows, at least 1.
    width
        Elements of a row; what a row has beyond them belongs to its last part.
    part
        Elements of a part.

    Returns
    -------
    tuple of int
        Programs; parts of a row, at least 1; programs of the later parts; places that each of them
        is dealt; bits of a row number.

    """
    parts = max((width + part - 1) // part, 1)
    bits = (batch - 1).bit_length()
    places = (parts - 1) << bits
    spread = places if places <= _MOST_PROGRAMS else _SPREAD
    turns = (places + spread - 1) // spread if spread else 1
    return batch + spread, parts, spread, turns, bits


@triton.jit
def dealt(hand, batch, parts, spread, bits, WIDE: tl.constexpr):
    """Give row and part of a place of this program's hand, and whether there is such a part."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    own = program >= spread
    place = program + hand * spread
    row = tl.where(own, program - spread, place & ((1 << bits) - 1))
    part = tl.where(own, hand, 1 + (place >> bits))
    return row, part, (row < batch) & (part < tl.where(own, 1, parts))


@triton.jit
def pick(chosen, values):
    """Give the value of the one chosen lane."""
    return tl.sum(tl.where(chosen, values, 0), 0)


@triton.jit
def at(index, stride, UNIT: tl.constexpr):
    """Give the distance of an element from the first one."""
    return index if UNIT else index.to(tl.int64) * stride


@triton.jit
def counted(size, WIDE: tl.constexpr):
    """Give a size that the host knows in the width in which positions are counted."""
    return size if WIDE else size.to(tl.int32)


@triton.jit
def negated(x):
    """Give ``-x``; the smallest integer counts as the next one, whose negative exists."""
    return -tl.maximum(x, -9223372036854775807 if x.dtype == tl.int64 else -2147483647)


@triton.jit
def narrowed(x, WIDE: tl.constexpr):
    """Count in 32 bit where that reaches; what lies beyond becomes the nearest that fits."""
    if WIDE:
        x = x.to(tl.int64)
    elif x.dtype == tl.int64:
        x = tl.minimum(tl.maximum(x, -2147483648), 2147483647).to(tl.int32)
    return x


@triton.jit
def within(x, size):
    """Say whether ``0 <= x < size`` in one comparison; `size` is not negative.

    A sum of two positions that wrapped round is negative, and so is outside as it should be.
    """
    if x.dtype == tl.int64:
        inside = x.to(tl.uint64, bitcast=True) < size.to(tl.uint64)
    elif size.dtype == tl.int64:
        inside = x.to(tl.uint32, bitcast=True) < tl.minimum(size, 2147483648).to(tl.uint32)
    else:
        inside = x.to(tl.uint32, bitcast=True) < size.to(tl.uint32, bitcast=True)
    return inside


@triton.jit
def _copy_aligned(source, target, source_type: tl.constexpr, target_type: tl.constexpr, PART: tl.constexpr):
    # Pointers made anew: a hint on a value holds wherever it is used, and these are multiples of 16
    # on this path alone.
    lane = tl.arange(0, PART)
    source_ptr = tl.multiple_of((source & -16).to(source_type), 16)
    target_ptr = tl.multiple_of((target & -16).to(target_type), 16)
    tl.store(target_ptr + lane, tl.load(source_ptr + lane).to(target_type.element_ty))


@triton.jit
def copy_lanes(
    source_ptr, target_ptr, target_stride, position, begin, end, columns, PART: tl.constexpr, UNIT: tl.constexpr
):
    """Copy the lanes from `begin` to `end` of a part, one by one.

    Lane i is the entry at `position` + i of a table row of so many columns, and -1 outside it.
    """
    # In two dimensions, or Triton lays these lanes out like those of the aligned copy beside it:
    # four neighbours to a thread, which would then be read one at a time.
    lane = tl.arange(0, PART // 128)[:, None] * 128 + tl.arange(0, 128)[None, :]
    here = (lane >= begin) & (lane < end)
    entries = tl.load(source_ptr + lane, mask=here & within(position + lane, columns), other=-1)
    places = at(lane, target_stride, UNIT)
    tl.store(target_ptr + places, entries.to(target_ptr.dtype.element_ty), mask=here)


@triton.jit
def copy_part(source_ptr, target_ptr, target_stride, position, end, columns, PART: tl.constexpr, UNIT: tl.constexpr):
    """Copy the lanes before `end` of a part; 16 bytes at a time where it is whole and aligned."""
    if UNIT:
        source = source_ptr.to(tl.int64)
        target = target_ptr.to(tl.int64)
        whole = (end >= PART) & (position >= 0) & (position <= columns - PART)
        if whole & (((source | target) & 15) == 0):
            _copy_aligned(source, target, source_ptr.dtype, target_ptr.dtype, PART)
        else:
            copy_lanes(source_ptr, target_ptr, target_stride, position, 0, end, columns, PART, UNIT)
    else:
        copy_lanes(source_ptr, target_ptr, target_stride, position, 0, end, columns, PART, UNIT)
