"""The rule that draws calls at random and shrinks the one that fails."""

from __future__ import annotations

from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, strategies

from opgraft.testing import judges
from opgraft.testing.calls import BOUNDARY_SIZES, Call
from opgraft.testing.faults import Declined, NotApplicable, Violation
from opgraft.testing.layouts import INPUT_LAYOUTS, OUTPUT_LAYOUTS, PLAIN
from opgraft.testing.rule import rule
from opgraft.testing.subject import Subject

_EXAMPLES = 250
_THOROUGH_EXAMPLES = 5000


@rule(seconds=3.0)
def random_calls(subject: Subject) -> None:
    """Random sizes, values, dtypes, layouts and buffers together give all that native gives."""
    if not subject.material.combinations:
        raise NotApplicable("the kernel declares no dtype that the op supports")
    found: dict[tuple[Call, str], Violation] = {}
    ran: list[Call] = []

    @hypothesis.settings(
        max_examples=_THOROUGH_EXAMPLES if subject.thorough else _EXAMPLES,
        derandomize=subject.seed is None,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(call=_calls(subject), route=strategies.sampled_from(list(subject.routes)))
    def attempt(call: Call, route: str) -> None:
        if (call, route) in found:
            raise found[call, route]
        if ran and subject.out_of_time:
            return
        fault = _fault(subject, call, route)
        ran.append(call)
        if fault is not None:
            found[call, route] = fault
            raise fault

    if subject.seed is not None:
        attempt = hypothesis.seed(subject.seed)(attempt)
    try:
        attempt()
    except hypothesis.errors.Flaky as error:
        text = "the same call is sometimes right and sometimes wrong"
        raise next(iter(found.values()), Violation(text)) from error
    if not ran:
        raise NotApplicable("every call was passed on")


def _fault(subject: Subject, call: Call, route: str) -> Violation | None:
    try:
        what = judges.everything(subject.observe(call, route))
    except (NotApplicable, Declined):
        hypothesis.reject()
    except Violation as violation:
        return violation
    return None if what is None else Violation(what, call, route)


@strategies.composite
def _calls(draw: Any, subject: Subject) -> Call:
    material = subject.material
    combination = draw(strategies.sampled_from(material.combinations))
    if material.is_elementwise and draw(strategies.booleans()):
        numbers = strategies.one_of(strategies.integers(-5, 1100), strategies.integers(-(2**63), 2**63 - 1))
        call = material.of_values(tuple(draw(strategies.lists(numbers, max_size=40))), combination)
    else:
        some = strategies.integers(0, 300)
        if draw(strategies.integers(0, 9)) == 9:  # noqa: PLR2004 - one in ten
            some = strategies.sampled_from(BOUNDARY_SIZES)
        seed = draw(strategies.integers(0, 2**16))
        call = Call(size=draw(some), seed=seed, dtypes=combination)
    layouts = {name: draw(strategies.sampled_from((PLAIN, *INPUT_LAYOUTS))) for name in material.required}
    buffers = {
        name: draw(strategies.sampled_from((PLAIN, *OUTPUT_LAYOUTS)))
        for name in material.writes
        if name not in subject.kernel.leaves_out and draw(strategies.booleans())
    }
    return call.but(
        layouts=tuple((name, layout) for name, layout in layouts.items() if layout != PLAIN),
        buffers=tuple(buffers.items()),
    )
