"""Show that calls, scoped policies and refreshes leave memory as it was.

Each activity runs first to fill what is kept on purpose (interpreter caches included, which hold a
few thousand entries), then again at full length. What counts is how many bytes Python holds more
after the second run than before it, and by how much the process grew.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import opgraft

if TYPE_CHECKING:
    from collections.abc import Callable

TRACED_LIMIT_BYTES = 64 * 1024
RESIDENT_LIMIT_BYTES = 4 * 1024 * 1024
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SEQ_LENS = torch.tensor([0, 1, 5], dtype=torch.int32)


def calls(count: int) -> None:
    """Call the op."""
    clamp_position = opgraft.ops.attention.clamp_position
    for _ in range(count):
        clamp_position(SEQ_LENS)


def scoped_policies(count: int) -> None:
    """Enter a policy that nobody has entered before, call the op, leave it."""
    clamp_position = opgraft.ops.attention.clamp_position
    for index in range(count):
        with opgraft.use(order={f"made.up_{index}*": ["native"]}, force="native"):
            clamp_position(SEQ_LENS)


def refreshes(count: int) -> None:
    """Discover everything again, and call the op."""
    clamp_position = opgraft.ops.attention.clamp_position
    for _ in range(count):
        opgraft.refresh()
        clamp_position(SEQ_LENS)


ACTIVITIES: tuple[tuple[str, Callable[[int], None], int], ...] = (
    ("calls", calls, 1_000_000),
    ("scoped policies", scoped_policies, 10_000),
    ("refreshes", refreshes, 1_000),
)


def resident_bytes() -> int:
    """Return the resident size of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES


def growth(activity: Callable[[int], None], count: int) -> tuple[int, int]:
    """Return how many traced and how many resident bytes an activity leaves behind."""
    activity(max(count // 2, 1))
    gc.collect()
    resident = resident_bytes()
    activity(count)
    gc.collect()
    resident = resident_bytes() - resident

    # Tracing slows everything; a tenth of the length shows a leak per round as well. What was made before it started is
    # unknown to it, so the caches have to be filled once more with what it knows.
    tracemalloc.start()
    activity(max(count // 4, 1))
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0]
    activity(max(count // 10, 1))
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0] - traced
    tracemalloc.stop()
    return traced, resident


def main() -> int:
    """Measure and print; with ``--check``, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when memory grows")
    parser.add_argument("--scale", type=float, default=1.0, help="length of the run")
    options = parser.parse_args()
    flat = True
    for name, activity, full in ACTIVITIES:
        count = max(int(full * options.scale), 10)
        traced, resident = growth(activity, count)
        kept = traced <= TRACED_LIMIT_BYTES and resident <= RESIDENT_LIMIT_BYTES
        flat = flat and kept
        print(
            f"{count:9,} {name:16} python {traced / 1024:+9.1f} KiB,"
            f" process {resident / 1024:+9.0f} KiB  {'flat' if kept else 'GROWS'}"
        )
    return 1 if options.check and not flat else 0


if __name__ == "__main__":
    sys.exit(main())
