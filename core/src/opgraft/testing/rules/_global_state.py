"""The rule on what a call leaves behind in the process; the first to run a kernel."""

from __future__ import annotations

import itertools

from opgraft.testing import ambient
from opgraft.testing.calls import Call
from opgraft.testing.faults import NotApplicable, Violation
from opgraft.testing.groups import broad, sizes
from opgraft.testing.rule import rule
from opgraft.testing.subject import DIRECT, Subject


@rule()
def process_state_is_kept(subject: Subject) -> None:
    """A call changes no default, mode, random state, environment, thread count, device or patch."""
    call = next(sizes(subject, (33,)), None)
    if call is None:
        raise NotApplicable("the kernel declares no dtype that the op supports")
    before = ambient.lasting()
    ran = subject.attempt(call)
    _compare(call, ambient.changed(before, ambient.lasting()))
    for call in subject.in_time(itertools.islice(broad(subject), 40)):
        steady = ambient.snapshot()
        ran |= subject.attempt(call)
        _compare(call, ambient.changed(steady, ambient.snapshot()))
    if not ran:
        raise NotApplicable("every call was passed on")


def _compare(call: Call, names: list[str]) -> None:
    if names:
        raise Violation(f"a call changes {', '.join(names)}", call, DIRECT)
