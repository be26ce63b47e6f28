"""What ran: one record a call, bounded and thread-safe, nothing at all while it is off."""

from __future__ import annotations

import collections
import json
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Final

CAPACITY: Final = 65_536
"""Records kept by default; the oldest are dropped first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecord:
    """One call that returned.

    Parameters
    ----------
    op
        Op id, or the class name of an op without id.
    kernel
        The kernel's label: ``cuda/triton``, ``native``, or a platform key for a platform method.
    tensors
        ``"torch.float32[2, 3]"`` for every tensor argument, positional ones first.

    """

    op: str
    kernel: str
    tensors: tuple[str, ...]


class Trace:
    """A bounded list of records that any thread may append to.

    Parameters
    ----------
    capacity
        How many records are kept.

    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._records: collections.deque[TraceRecord] = collections.deque(maxlen=capacity)
        self._counts: collections.Counter[TraceRecord] = collections.Counter()
        self._lock = threading.Lock()

    def add(self, record: TraceRecord) -> None:
        """Append a record; the counts go on where the list has to drop its oldest."""
        with self._lock:
            self._records.append(record)
            if record in self._counts or len(self._counts) < CAPACITY:
                self._counts[record] += 1

    @property
    def records(self) -> list[TraceRecord]:
        """A copy of what was recorded."""
        with self._lock:
            return list(self._records)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._records.clear()
            self._counts.clear()

    def summary(self) -> list[dict[str, object]]:
        """Count calls per (op, kernel, tensors), the most frequent first."""
        with self._lock:
            counts = self._counts.most_common()
        return [{**asdict(record), "tensors": list(record.tensors), "calls": n} for record, n in counts]

    def to_json(self) -> str:
        """Write the summary as JSON."""
        return json.dumps(self.summary())

    def __iter__(self) -> Iterator[TraceRecord]:
        """Go through a copy of the records."""
        return iter(self.records)

    def __len__(self) -> int:
        """Count the records kept."""
        return len(self._records)

    def __str__(self) -> str:
        """Write the summary as a table."""
        rows = [("calls", "op", "kernel", "tensors")]
        for row in self.summary():
            tensors: Iterable[str] = row["tensors"]  # type: ignore[assignment]
            text = ", ".join(tensors)
            rows.append((str(row["calls"]), str(row["op"]), str(row["kernel"]), text))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows)
        return "\n".join(line.rstrip() for line in lines)
