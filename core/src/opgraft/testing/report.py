"""What the suite found, as data, as text for a terminal and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from opgraft.testing.rule import PRESENCE

__all__ = ["Outcome", "Report", "Result"]

Outcome = Literal["passed", "failed", "skipped", "expected failure", "unexpected pass"]

_BAD: frozenset[Outcome] = frozenset({"failed", "unexpected pass"})
_WORDS: dict[Outcome, str] = {
    "passed": "passed",
    "failed": "failed",
    "skipped": "not applicable",
    "expected failure": "failed as expected",
    "unexpected pass": "passed unexpectedly",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one rule.

    Parameters
    ----------
    op, kernel, device
        What it was tried on; empty for the backend itself.
    rule, summary
        The rule, and its sentence.
    outcome
        What became of it.
    message
        What is wrong, or why it does not apply.
    example, route
        The smallest call that shows it, and through which door.
    notes
        What was left out, such as sizes that would have taken too long.
    seconds
        How long it took.

    """

    op: str
    kernel: str
    device: str
    rule: str
    summary: str
    outcome: Outcome
    message: str = ""
    example: str = ""
    route: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def is_bad(self) -> bool:
        """Whether the backend fails by it."""
        return self.outcome in _BAD

    @property
    def subject(self) -> str:
        """What it was tried on, in one line."""
        where = f" on {self.device}" if self.device else ""
        return f"{self.op}, {self.kernel}{where}" if self.op else "the backend itself"

    def text(self) -> str:
        """Write rule, fault and call, a line each."""
        lines = [f"{self.rule}: {self.summary}", f"  {self.message}"]
        if self.example:
            door = {"direct": " (called directly)", "handle": " (through the handle)"}
            lines.append(f"  {self.example}{door.get(self.route, '')}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of every rule.

    Parameters
    ----------
    backend, distribution, version, status, reason
        The backend, as it is installed.
    thorough
        Whether time did not matter.
    results
        One a rule and subject.

    """

    backend: str
    distribution: str
    version: str
    status: str
    reason: str
    thorough: bool
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not any(result.is_bad for result in self.results)

    @property
    def seconds(self) -> float:
        """How long all of it took."""
        return sum(result.seconds for result in self.results)

    def by_subject(self) -> Iterator[tuple[str, list[Result]]]:
        """Give the results of the backend itself, then those of each kernel."""
        groups: dict[str, list[Result]] = {}
        for result in self.results:
            groups.setdefault(result.subject, []).append(result)
        yield from groups.items()

    def json(self) -> str:
        """Write everything as JSON."""
        data: dict[str, Any] = asdict(self)
        data["passed"] = self.passed
        data["seconds"] = round(self.seconds, 3)
        for result in data["results"]:
            result["seconds"] = round(result["seconds"], 3)
        return json.dumps(data, indent=2)

    def lines(self) -> Iterator[str]:
        """Write everything for people: faults in full, the rest counted."""
        owner = f"{self.distribution} {self.version}".strip() or "no metadata"
        reason = f": {self.reason}" if self.reason else ""
        yield f"{self.backend} ({owner}) is {self.status}{reason}"
        for subject, results in self.by_subject():
            counts = Counter(result.outcome for result in results)
            told = ", ".join(f"{counts[one]} {word}" for one, word in _WORDS.items() if counts[one])
            yield ""
            yield f"{subject}: {told}, {sum(one.seconds for one in results):.1f} s"
            for result in results:
                yield from _detail(result)
        yield ""
        yield self.verdict()

    def verdict(self) -> str:
        """Say in one line whether the backend conforms."""
        counts = Counter(result.outcome for result in self.results)
        bad = counts["failed"] + counts["unexpected pass"]
        if bad:
            return f"{self.backend} does not conform: {bad} of {len(self.results)} rules fail."
        tried = {result.device for result in self.results if result.device}
        if not tried:
            return f"{self.backend}: nothing is wrong, and no kernel could be run here."
        known = counts["expected failure"]
        but = f", but for {known} expected failures" if known else ""
        return f"{self.backend} conforms{but} ({counts['passed']} rules passed)."


def _detail(result: Result) -> Iterator[str]:
    if result.is_bad:
        first, *rest = result.text().splitlines()
        yield f"  {result.outcome.upper()} {first}"
        yield from (f"    {line}" for line in rest)
    elif result.outcome == "expected failure":
        yield f"  expected: {result.rule}: {result.message}"
    elif result.rule == PRESENCE and result.outcome == "skipped":
        yield f"  not run: {result.message}"
    for note in result.notes:
        yield f"  note: {result.rule}: {note}"
