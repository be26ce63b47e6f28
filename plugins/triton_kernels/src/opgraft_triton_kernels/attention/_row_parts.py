"""Rows of unequal length, cut into parts of one size and dealt to programs.

One long row among many short ones costs what their sum costs, and no program searches for its work
among all rows. The first part of every row has a program of its own, and so has every later part
while there are few. Otherwise neighbouring rows form a group, and each program of a group is dealt
one part of every row of it, from another place in each row: those of one row all go to different
programs, and so do the second parts of all. The program looks at its parts at once, one a lane, to
see which of them exist at all.

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

# One H200, replayed graph, csr_kv_indices | prefill_aware_page_table over a copy of the same bytes, at
# part 1024, 2 warps, for one row of 131072 beside 255 of 64, and for 512 rows of 4096 in tables 131072
# wide: 750 programs 1.49 | 1.61 and 1.27 | 1.35, 1500 1.39 | 1.48 and 1.10 | 1.16, 3000 1.77 | 1.77 and
# 1.10 | 1.19. Hands of 64 lanes for half the programs, and programs of one warp, are no faster; nor are
# first parts that are dealt like the others. Were the programs of a group not neighbours, those of one
# row would share a quarter of the GPU: 1.45 | 1.58. A scan of all lengths in every program takes 0.7 us.
_MOST_PROGRAMS = 2100
_PROGRAMS = 1500
_MOST_GROUPS = 65535


def deal(batch: int, width: int, part: int) -> tuple[tuple[int, int, int], int, int, int, int]:
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
    tuple
        Grid, of programs of a group by groups of rows; parts of a row, at least 1; how many programs
        of a group are dealt later parts, before those for the first parts; parts that each of them
        is dealt; bits of the number of a row in its group.

    """
    parts = max((width + part - 1) // part, 1)
    later = parts - 1
    dealers, bits = later, (batch // _MOST_GROUPS).bit_length()
    if batch * later > _MOST_PROGRAMS:
        bits = min((batch * later // _PROGRAMS).bit_length(), (batch - 1).bit_length())
        dealers = min(later, max((_PROGRAMS << bits) // batch, 1))
    groups = (batch + (1 << bits) - 1) >> bits
    turns = ((later + dealers - 1) // dealers if dealers else 1) << bits
    return (dealers + (1 << bits), groups, 1), parts, dealers, turns, bits


@triton.jit
def dealt(hand, batch, parts, dealers, bits, WIDE: tl.constexpr):
    """Give row and part of a lane of this program's hand, and whether there is such a part."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    own = program >= dealers
    rank = hand & ((1 << bits) - 1)
    begin = program + ((rank * dealers.to(program.dtype)) >> bits)
    begin -= tl.where(begin >= dealers, dealers, 0)
    part = tl.where(own, hand, 1 + begin + (hand >> bits) * dealers)
    row = (tl.program_id(1) << bits) + tl.where(own, program - dealers, rank)
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
def _lanes(FIRST: tl.constexpr, LANES: tl.constexpr):
    # In two dimensions, or Triton lays these lanes out like those of the aligned copy beside it:
    # four neighbours to a thread, which would then be read one at a time.
    return FIRST + tl.arange(0, LANES // 64)[:, None] * 64 + tl.arange(0, 64)[None, :]


@triton.jit
def _load_lanes(source_ptr, position, begin, end, columns, FIRST: tl.constexpr, LANES: tl.constexpr):
    lane = _lanes(FIRST, LANES)
    here = (lane >= begin) & (lane < end) & within(position + lane, columns)
    return tl.load(source_ptr + lane, mask=here, other=-1)


@triton.jit
def _store_lanes(
    target_ptr, target_stride, entries, begin, end, FIRST: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr
):
    lane = _lanes(FIRST, LANES)
    here = (lane >= begin) & (lane < end)
    tl.store(target_ptr + at(lane, target_stride, UNIT), entries.to(target_ptr.dtype.element_ty), mask=here)


@triton.jit
def copy_lanes(
    source_ptr, target_ptr, target_stride, position, begin, end, columns, PART: tl.constexpr, UNIT: tl.constexpr
):
    """Copy the lanes from `begin` to `end` of a part, one by one.

    Lane i is the entry at `position` + i of a table row of so many columns, and -1 outside it.
    """
    HALF: tl.constexpr = PART // 2
    entries = _load_lanes(source_ptr, position, begin, end, columns, 0, HALF)
    if end > HALF:
        later = _load_lanes(source_ptr, position, begin, end, columns, HALF, HALF)
        _store_lanes(target_ptr, target_stride, later, begin, end, HALF, HALF, UNIT)
    _store_lanes(target_ptr, target_stride, entries, begin, end, 0, HALF, UNIT)


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
