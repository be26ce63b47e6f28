"""Rules on caller buffers: ``out`` and its like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from opgraft.errors import ArgumentValueError, NoKernelError
from opgraft.testing import judges
from opgraft.testing.calls import Call
from opgraft.testing.faults import Declined, NotApplicable, Violation
from opgraft.testing.groups import buffered, sizes
from opgraft.testing.layouts import OUTPUT_LAYOUTS, PLAIN
from opgraft.testing.rule import rule
from opgraft.testing.subject import HANDLE, Subject
from opgraft.testing.survey import BUFFERED, EDGES, buffer_values_plain, buffer_values_strided, surveyed


def _require_buffers(subject: Subject) -> None:
    if not subject.material.writes:
        raise NotApplicable("the op has no caller buffer")
    if set(subject.material.writes) <= subject.kernel.leaves_out:
        raise NotApplicable("the kernel leaves the op's buffers out")


@rule(seconds=2.0)
def buffer_is_returned(subject: Subject) -> None:
    """A caller's buffer is returned as the very object that was passed, shape and strides kept."""
    _require_buffers(subject)
    surveyed(subject, BUFFERED, judges.buffer_identity)


@rule(seconds=2.0)
def buffer_is_filled(subject: Subject) -> None:
    """A caller's buffer holds what native would have written into it."""
    _require_buffers(subject)
    surveyed(subject, BUFFERED, buffer_values_plain)
    subject.every(buffered(subject, (33, 64, 1, 5), (PLAIN,)), judges.buffer_values)
    if subject.material.is_elementwise:
        subject.every(_small_numbers(subject), judges.buffer_values)


def _small_numbers(subject: Subject) -> Iterator[Call]:
    """Give calls whose results include those that somebody might expect in a buffer already."""
    for combination in subject.material.combinations:
        call = subject.material.of_values((*range(-3, 9), -(2**31), 2**31 - 1), combination)
        for name in subject.material.writes:
            yield call.but(buffers=((name, PLAIN),))
            yield call.but(buffers=((name, OUTPUT_LAYOUTS[3]),))


@rule(seconds=2.0)
def buffer_of_any_stride(subject: Subject) -> None:
    """A buffer that is sliced, stepped, transposed or misaligned is filled all the same."""
    _require_buffers(subject)
    surveyed(subject, BUFFERED, buffer_values_strided)
    subject.every(buffered(subject, (33, 64), OUTPUT_LAYOUTS), judges.buffer_values)


@rule(seconds=2.0)
def memory_around_a_buffer_is_kept(subject: Subject) -> None:
    """Nothing is written before, after or between the elements of a caller's buffer."""
    _require_buffers(subject)
    surveyed(subject, BUFFERED, judges.surroundings)


@rule(seconds=2.0)
def buffer_edge_cases(subject: Subject) -> None:
    """The buffer is right, returned and guarded in the edge cases that the op lists."""
    _require_buffers(subject)
    for judge in (judges.buffer_identity, judges.buffer_values, judges.surroundings):
        surveyed(subject, EDGES, judge)


@rule()
def buffer_and_strided_input(subject: Subject) -> None:
    """A strided buffer and a strided input together give native's values."""
    _require_buffers(subject)

    def calls() -> Iterator[Call]:
        for call in buffered(subject, (5, 64, 33, 1031), OUTPUT_LAYOUTS):
            for name in subject.material.required[:1]:
                yield call.but(layouts=((name, OUTPUT_LAYOUTS[3]),))
                yield call.but(layouts=((name, OUTPUT_LAYOUTS[0]),))

    subject.every(calls(), judges.everything)


@rule()
def overlapping_buffer_is_refused(subject: Subject) -> None:
    """A buffer that overlaps an input is refused; one beside it in the same memory is filled."""
    _require_buffers(subject)
    if subject.handle is None:
        raise NotApplicable("the op's handle is not at hand")
    tried = False
    for call in sizes(subject, (33, 64)):
        for buffer in subject.material.writes.keys() - subject.kernel.leaves_out:
            for name in subject.material.required:
                tried |= _overlap(subject, call, buffer, name)
    if not tried:
        raise NotApplicable("no buffer can share memory with an input")


def _overlap(subject: Subject, call: Call, buffer: str, name: str) -> bool:
    try:
        expected = subject.reference(call.but(buffers=((buffer, PLAIN),)))
        arguments, _ = subject.prepare(call.but(buffers=((buffer, PLAIN),)))
        source, target = arguments[name], arguments[buffer]
        if not source.numel() or not target.numel():
            return False
        shared = _side_by_side(source, target, overlap=source.element_size())
        beside = _side_by_side(source, target, overlap=0)
    except (NotApplicable, NotImplementedError, RuntimeError):
        return False
    arguments[name], arguments[buffer] = shared
    args, kwargs = subject.split(arguments)
    text = f"{subject.show(call)}, {buffer} begins at the last element of {name}"
    try:
        subject.routes[HANDLE](*args, **kwargs)
    except ArgumentValueError:
        pass
    except NoKernelError as error:
        if subject.is_passed_over(error):
            return False
        raise Violation("NoKernelError, expected ArgumentValueError", text) from error
    except Exception as error:
        raise Violation(f"{type(error).__name__}, expected ArgumentValueError", text) from error
    else:
        raise Violation("an overlapping buffer is taken, expected ArgumentValueError", text)
    arguments[name], arguments[buffer] = beside
    _beside(subject, call, arguments, buffer, expected.outputs)
    return True


def _side_by_side(source: Tensor, target: Tensor, *, overlap: int) -> tuple[Tensor, Tensor]:
    """Put input and buffer into one memory, the buffer behind the input."""
    width = max(source.element_size(), target.element_size())
    first = source.numel() * source.element_size()
    start = -(-(first - overlap) // width) * width if not overlap else (first - overlap) // width * width
    memory = torch.zeros(start + target.numel() * target.element_size() + width, dtype=torch.uint8).to(source.device)
    before = memory[:first].view(source.dtype).view(source.shape)
    end = start + target.numel() * target.element_size()
    behind = memory[start:end].view(target.dtype).view(target.shape)
    before.copy_(source)
    if not overlap:
        behind.copy_(target)
    return before, behind


def _beside(subject: Subject, call: Call, arguments: dict[str, Any], buffer: str, expected: tuple[Any, ...]) -> None:
    for route in subject.routes:
        try:
            result = subject.invoke(route, call, arguments)
        except Declined:
            continue
        results = result if isinstance(result, tuple) else (result,)
        number = subject.material.writes[buffer]
        fault = judges.difference(results[number], expected[number], subject.op.tolerance)
        if fault:
            text = f"{subject.show(call)}, {buffer} directly behind the input in one memory"
            raise Violation(fault, text, route)
