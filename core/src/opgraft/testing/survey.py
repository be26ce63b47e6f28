"""One walk over a group of calls, judged in every way at once and remembered.

Several rules look at the same calls, each for one thing. The calls are run once; a rule then reads
what its judge said, and shrinks the call that it said it of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from opgraft.testing import judges
from opgraft.testing.calls import Call
from opgraft.testing.faults import Declined, NotApplicable, Violation
from opgraft.testing.groups import broad, buffered, edges
from opgraft.testing.layouts import OUTPUT_LAYOUTS, PLAIN
from opgraft.testing.subject import Judge, Observation, Subject

__all__ = ["BROAD", "BUFFERED", "EDGES", "buffer_values_plain", "buffer_values_strided", "surveyed"]

_AT_LEAST: Final = 40

BROAD: Final = "a few calls of every kind"
EDGES: Final = "the op's own edge cases"
BUFFERED: Final = "caller buffers of every layout"


def buffer_values_plain(seen: Observation) -> str | None:
    """Judge the values in caller buffers that lie plainly in memory."""
    return judges.buffer_values(seen) if seen.call.is_plain else None


def buffer_values_strided(seen: Observation) -> str | None:
    """Judge the values in caller buffers that do not."""
    return None if seen.call.is_plain else judges.buffer_values(seen)


def _edge_calls(subject: Subject) -> Iterator[Call]:
    """Give the op's edge cases, and those with a buffer once more with the buffer elsewhere."""
    writes = subject.material.writes
    for call in edges(subject):
        yield call
        if writes:
            for name in writes.keys() & subject.material.arguments(call).keys():
                yield call.but(layouts=((name, OUTPUT_LAYOUTS[0]),))
                yield call.but(layouts=((name, OUTPUT_LAYOUTS[3]),))


def _buffer_calls(subject: Subject) -> Iterator[Call]:
    yield from buffered(subject)
    for size in (2**16 + 1, 2**17 + 3):
        for combination in subject.material.combinations[:2] if subject.affords(size) else ():
            for name in subject.material.writes:
                yield Call(size=size, seed=8, dtypes=combination, buffers=((name, PLAIN),))


_GROUPS: Final[dict[str, tuple[Callable[[Subject], Iterator[Call]], tuple[Judge, ...]]]] = {
    BROAD: (
        broad,
        (
            judges.structure,
            judges.dtype,
            judges.shape,
            judges.device,
            judges.contiguity,
            judges.plainness,
            judges.aliasing,
            judges.changed_inputs,
        ),
    ),
    EDGES: (
        _edge_calls,
        (
            judges.values,
            judges.dtype,
            judges.shape,
            judges.changed_inputs,
            judges.aliasing,
            judges.buffer_identity,
            judges.buffer_values,
            judges.surroundings,
        ),
    ),
    BUFFERED: (
        _buffer_calls,
        (
            judges.buffer_identity,
            buffer_values_plain,
            buffer_values_strided,
            judges.surroundings,
            judges.changed_inputs,
        ),
    ),
}


class _Survey:
    """What each judge said first, over a group of calls."""

    def __init__(self, subject: Subject, group: str) -> None:
        calls, self.judges = _GROUPS[group]
        self.faults: dict[Judge, tuple[Call, str, Violation]] = {}
        self.raised: Violation | None = None
        self.why = "the op has no such call"
        self.notes: list[str] = []
        self.ran = 0
        for call in subject.in_time(calls(subject), _AT_LEAST):
            for route in subject.routes:
                self._look(subject, call, route)
        self.notes += subject.notes

    def _look(self, subject: Subject, call: Call, route: str) -> None:
        try:
            seen = subject.observe(call, route)
        except (NotApplicable, Declined) as reason:
            self.why = str(reason)
            return
        except Violation as violation:
            self.raised = self.raised or violation
            return
        self.ran += 1
        for judge in self.judges:
            if judge not in self.faults:
                what = judge(seen)
                if what is not None:
                    fault = Violation(what, call, route)
                    self.faults[judge] = call, route, fault


def surveyed(subject: Subject, group: str, judge: Judge) -> None:
    """Hold what a judge said of a group of calls against the kernel.

    Calls that raise are the business of the rules on values, unless all of them do.

    Raises
    ------
    Violation
        For the smallest call that was judged wrong.
    NotApplicable
        If no call could be run.

    """
    kept = subject.surveys.get(group)
    if not isinstance(kept, _Survey):
        kept = subject.surveys[group] = _Survey(subject, group)
    subject.notes += [note for note in kept.notes if note not in subject.notes]
    if judge in kept.faults:
        call, route, fault = kept.faults[judge]
        raise subject.smallest(call, route, judge, fault)
    if not kept.ran:
        if kept.raised is not None:
            raise kept.raised
        raise NotApplicable(kept.why)
