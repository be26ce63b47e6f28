"""Rules on the values: equal to native's, within the op's tolerance, wherever one may look."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from opgraft.testing import judges
from opgraft.testing.calls import LARGE_SIZES, LARGER_SIZES, Call
from opgraft.testing.faults import Declined, NotApplicable, Violation
from opgraft.testing.groups import boundaries, dense_numbers, edges, every_combination, extreme_numbers, sizes, strided
from opgraft.testing.layouts import INPUT_LAYOUTS, OUTPUT_LAYOUTS, PLAIN
from opgraft.testing.rule import rule
from opgraft.testing.subject import DIRECT, Observation, Subject
from opgraft.testing.survey import EDGES, surveyed

_LARGE_SECONDS: Final = 0.4
_ELEMENTWISE: Final = "the op does not work element by element; its own edge cases are tried"


@rule()
def every_declared_dtype(subject: Subject) -> None:
    """The values are native's for every declared dtype, of each input independently."""
    if not subject.material.combinations:
        raise Violation("the kernel declares no dtype that the op supports")
    for size in (64, 5, 1031):
        subject.every(every_combination(subject, size), judges.values)


@rule(seconds=2.0)
def every_size(subject: Subject) -> None:
    """The values are native's at every size: small, around powers of two, at block edges."""
    subject.every(boundaries(subject), judges.values)


@rule()
def empty_input(subject: Subject) -> None:
    """An empty input gives the right empty result, whatever its strides are."""

    def calls() -> Iterator[Call]:
        for combination in subject.material.combinations:
            call = Call(size=0, seed=1, dtypes=combination)
            yield call
            yield from (
                call.but(layouts=((name, layout),)) for name in subject.material.inputs for layout in INPUT_LAYOUTS
            )
            yield from (call.but(buffers=((name, PLAIN),)) for name in subject.material.writes)

    subject.every(calls(), judges.everything)


@rule(seconds=2.0)
def edge_cases(subject: Subject) -> None:
    """The values are native's in every edge case that the op lists."""
    surveyed(subject, EDGES, judges.values)
    subject.every(itertools.islice(edges(subject), 24), judges.values)


@rule()
def extreme_values(subject: Subject) -> None:
    """The values are native's at the ends of the dtype, at zero and around powers of two."""
    if not subject.material.is_elementwise:
        raise NotApplicable(_ELEMENTWISE)
    numbers = extreme_numbers()

    def calls() -> Iterator[Call]:
        for combination in subject.material.combinations:
            yield subject.material.of_values(numbers, combination)
        for one, combination in itertools.product(numbers, subject.material.combinations):
            yield subject.material.of_values((one,), combination)

    subject.every(calls(), judges.values)


@rule(seconds=1.0)
def every_small_number(subject: Subject) -> None:
    """The values are native's for every whole number around zero, and around each power of two."""
    if not subject.material.is_elementwise:
        raise NotApplicable(_ELEMENTWISE)
    middles = [sign * 2**power for power in range(16, 64) for sign in (-1, 1)]
    around_powers = tuple(itertools.chain.from_iterable(dense_numbers(one - 200, one + 200) for one in middles))
    reach = 2**20 if subject.thorough else 2**16

    def calls() -> Iterator[Call]:
        for combination in subject.material.combinations:
            yield subject.material.of_values(around_powers, combination)
        for first in range(-reach // 4, reach, 2**14):
            for combination in subject.material.combinations:
                yield subject.material.of_values(dense_numbers(first, first + 2**14), combination)

    subject.every(calls(), judges.values)


@rule(seconds=3.0)
def large_input(subject: Subject) -> None:
    """The values are native's for more than 2**20 elements (2**24 with --thorough)."""
    # A kernel that refuses odd sizes gets an even one; for the others one is enough.
    wanted: tuple[int, ...] = LARGE_SIZES if subject.kernel.rejects is not None else LARGE_SIZES[:1]
    wanted += LARGER_SIZES if subject.thorough else ()
    affordable = [size for size in wanted if subject.affords(size, _LARGE_SECONDS)]
    if not affordable:
        smaller = (size for size in (2**19 + 3, 2**17 + 3, 2**15 + 3, 2**13) if subject.affords(size, _LARGE_SECONDS))
        affordable = [next(smaller)]
        subject.notes = [f"stopped at size {affordable[0]}: larger ones take too long here"]

    def calls() -> Iterator[Call]:
        last = subject.material.combinations[-1]
        for size in affordable:
            for combination in subject.material.combinations[:2]:
                yield Call(size=size, seed=1, dtypes=combination)
            for name in subject.material.writes:
                yield Call(size=size, seed=2, dtypes=last, buffers=((name, OUTPUT_LAYOUTS[0]),))

    subject.every(calls(), judges.values, routes=(DIRECT,))


@rule(seconds=1.5)
def strided_input(subject: Subject) -> None:
    """The values are native's for sliced, stepped, transposed and misaligned inputs."""
    subject.every(strided(subject), judges.values)


@rule()
def expanded_input(subject: Subject) -> None:
    """The values are native's for an input whose elements are all one (stride 0)."""
    if not subject.material.is_elementwise:
        raise NotApplicable(_ELEMENTWISE)
    (name,) = subject.material.inputs
    layouts = ((name, "expanded (stride 0)"),)

    def calls() -> Iterator[Call]:
        for combination in subject.material.combinations:
            for number in (0, 5, -3, 2**31 - 1):
                for count in (2, 3, 33, 1031):
                    call = subject.material.of_values((number,) * count, combination)
                    yield call.but(layouts=layouts)

    subject.every(calls(), judges.values)


@rule()
def input_beyond_32_bits(subject: Subject) -> None:
    """The values are native's for inputs whose offsets exceed 2**31 elements (--thorough)."""
    if not subject.thorough:
        raise NotApplicable("only with --thorough")
    far = "reaching beyond 2**31 elements"

    def calls() -> Iterator[Call]:
        for call in sizes(subject, (2, 3, 5)):
            for name in subject.material.inputs:
                yield call.but(layouts=((name, far),))

    try:
        subject.every(calls(), judges.values, routes=("direct",))
    except (RuntimeError, MemoryError) as error:
        raise NotApplicable(f"this machine cannot reserve the memory: {error}") from None


@rule()
def arguments_by_keyword(subject: Subject) -> None:
    """Passing every argument by its name gives the same, and so does passing None for a buffer."""

    def calls() -> Iterator[Call]:
        for call in sizes(subject, (0, 5, 33)):
            yield call.but(by_keyword=True)

    subject.every(calls(), _only_by_keyword)
    for combination in subject.material.combinations[:1]:
        call = Call(size=5, seed=1, dtypes=combination)
        for route in subject.routes:
            _explicit_none(subject, call, route)


def _only_by_keyword(seen: Observation) -> str | None:
    """Judge a call by keyword; what is wrong with the same call by position too, other rules tell."""
    found = judges.everything(seen)
    if found and judges.everything(seen.subject.observe(seen.call.but(by_keyword=False), seen.route)):
        return None
    return found


def _explicit_none(subject: Subject, call: Call, route: str) -> None:
    optional = [
        name
        for name in subject.material.writes
        if name not in subject.kernel.leaves_out and subject.material.signature.parameters[name].default is None
    ]
    if not optional:
        return
    reference = subject.reference(call)
    arguments, placed = subject.prepare(call)
    try:
        result = subject.invoke(route, call, arguments | dict.fromkeys(optional))
    except Declined:
        return
    fault = judges.everything(subject.seen(call, placed, result, reference, route))
    if fault and not judges.everything(subject.observe(call, route)):
        names = ", ".join(f"{name}=None" for name in optional)
        raise Violation(f"with {names}: {fault}", call, route)
