"""``conformance-xfails.txt``: failures that are known, each with its reason.

A line is ``OP RULE REASON``; OP is an op id or a pattern such as ``attention.*``, or ``-`` for the
rules on the backend as a whole. ``#`` begins a comment line. An entry whose rule passes is itself
a failure, so that the list never outlives the fault.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from opgraft.errors import OpgraftError, nearest

__all__ = ["BACKEND_ITSELF", "FILE_NAME", "ExpectedFailure", "ExpectedFailuresError", "read"]

FILE_NAME: Final = "conformance-xfails.txt"
BACKEND_ITSELF: Final = "-"
_FIELDS: Final = 3


class ExpectedFailuresError(OpgraftError, ValueError):
    """A line of the list cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedFailure:
    """One line of the list.

    Parameters
    ----------
    op
        Op id or pattern; ``-`` for the backend itself.
    rule
        Name of the rule.
    reason
        Why it is known to fail.

    """

    op: str
    rule: str
    reason: str

    def matches(self, op: str, rule: str) -> bool:
        """Say whether it speaks of a rule on an op (empty for the backend itself)."""
        return rule == self.rule and fnmatch.fnmatchcase(op or BACKEND_ITSELF, self.op)


def read(path: Path, rules: Iterable[str], ops: Iterable[str]) -> tuple[ExpectedFailure, ...]:
    """Read a list.

    Parameters
    ----------
    path
        The file.
    rules
        Names of all rules.
    ops
        Ids of all ops.

    Returns
    -------
    tuple of ExpectedFailure
        In the order of the file.

    Raises
    ------
    ExpectedFailuresError
        If a line has no reason, or names an op or a rule that does not exist.

    """
    found = []
    known_rules, known_ops = tuple(rules), tuple(ops)
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        where = f"{path.name}, line {number}"
        fields = line.split(maxsplit=2)
        reason = fields[2].lstrip("#:- ") if len(fields) == _FIELDS else ""
        if not reason:
            raise ExpectedFailuresError(
                f"{where}: {line!r} has no reason; write 'OP RULE REASON', "
                f"for instance 'attention.clamp_position extreme_values the NPU saturates'"
            )
        op, rule = fields[0], fields[1]
        if rule not in known_rules:
            raise ExpectedFailuresError(f"{where}: unknown rule {rule!r}{nearest(rule, known_rules)}")
        if op != BACKEND_ITSELF and not fnmatch.filter(known_ops, op):
            raise ExpectedFailuresError(f"{where}: no op matches {op!r}{nearest(op, known_ops)}")
        found.append(ExpectedFailure(op=op, rule=rule, reason=reason))
    return tuple(found)
