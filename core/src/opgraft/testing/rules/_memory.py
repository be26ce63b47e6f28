"""Rules on memory: inputs stay as they are, results belong to the caller alone."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from opgraft.testing import judges
from opgraft.testing.calls import Call
from opgraft.testing.faults import Declined, NotApplicable, Violation
from opgraft.testing.groups import buffered, sizes
from opgraft.testing.layouts import OUTPUT_LAYOUTS, PLAIN
from opgraft.testing.rule import rule
from opgraft.testing.subject import DIRECT, Observation, Subject
from opgraft.testing.survey import BROAD, BUFFERED, EDGES, surveyed

_HELD: Final = 20
_PAUSE: Final = 0.02  # seconds for a write that comes after the call has returned


@rule(seconds=1.5)
def inputs_are_unchanged(subject: Subject) -> None:
    """Inputs keep their values, shape, strides and version, and so does the memory around them."""
    surveyed(subject, BROAD, judges.changed_inputs)
    for group in (EDGES, BUFFERED):
        with contextlib.suppress(NotApplicable):
            surveyed(subject, group, judges.changed_inputs)


@rule()
def result_shares_no_memory_with_an_input(subject: Subject) -> None:
    """A fresh result is neither an input nor a view of one."""
    surveyed(subject, BROAD, judges.aliasing)
    with contextlib.suppress(NotApplicable):
        surveyed(subject, EDGES, judges.aliasing)
    if subject.material.is_elementwise:
        subject.every(_uniform(subject), judges.aliasing)


def _uniform(subject: Subject) -> Iterator[Call]:
    """Give calls in which all values are one: there may be nothing to do, or one answer for all."""
    for combination in subject.material.combinations:
        for number in (0, 1, -1, 2):
            yield subject.material.of_values((number,) * 5, combination)


@rule()
def results_are_fresh(subject: Subject) -> None:
    """Every call allocates its result: earlier results neither share memory nor change later."""
    for call in itertools.islice(sizes(subject, (64, 1, 1031)), 3):
        _hold(subject, [call] * (_HELD // len(subject.routes)))
    _hold(subject, [*sizes(subject, (64, 65, 64, 1031, 33, 64, 2, 64))] * 2)


@rule()
def results_stay_as_they_are(subject: Subject) -> None:
    """What a call returned or wrote is complete when it returns, and no later call changes it."""
    buffers = list(buffered(subject, (33, 64), (PLAIN, OUTPUT_LAYOUTS[0])))[:8]
    calls = [*sizes(subject, (33, 64, 1031, 2**17 + 1)), *buffers, *sizes(subject, (33, 64))]
    seen = _hold(subject, calls)
    time.sleep(_PAUSE)
    _recheck(seen)


def _hold(subject: Subject, calls: list[Call]) -> list[Observation]:
    """Run calls, keep all their results, and look at all of them at the end."""
    seen: list[Observation] = []
    why = "the op has no such call"
    for call in subject.in_time(calls, _HELD // 2):
        for route in subject.routes:
            try:
                seen.append(subject.observe(call, route))
            except (Declined, NotApplicable) as reason:  # noqa: PERF203 - one call at a time
                why = str(reason)
    if not seen:
        raise NotApplicable(why)
    _distinct(seen)
    _recheck(seen)
    return seen


def _distinct(seen: list[Observation]) -> None:
    held: dict[int, Observation] = {}
    spans: list[tuple[int, int, Observation]] = []
    for one in seen:
        for _, result, _ in one.fresh():
            if not isinstance(result, Tensor):
                continue
            if id(result) in held:
                text = "two calls returned the same object"
                raise Violation(text, one.call, one.route)
            held[id(result)] = one
            storage = result.untyped_storage()
            if result.numel() and result.device.type != "meta":
                spans.append((storage.data_ptr(), storage.nbytes(), one))
    spans.sort(key=lambda span: span[0])
    for (first, size, _), (second, _, one) in itertools.pairwise(spans):
        if second < first + size:
            text = "the results of two calls share memory"
            raise Violation(text, one.call, one.route)


def _recheck(seen: list[Observation]) -> None:
    for one in seen:
        fault = judges.values(one) or judges.buffer_values(one)
        if fault:
            text = f"looked at again after later calls: {fault}"
            raise Violation(text, one.call, one.route)


class _Bytes(bytearray):
    """Memory that tells when it is released."""

    __slots__ = ("__weakref__",)


@rule()
def tensors_are_let_go(subject: Subject) -> None:
    """After a call nothing keeps the arguments or the result alive."""
    calls = [*sizes(subject, (33, 64)), *buffered(subject, (33, 64), (PLAIN,))]
    why = "the op has no such call"
    tried = False
    for call in calls[:12]:
        try:
            kept = [*_kept(subject, call), *_kept(subject, call.but(seed=call.seed + 1))]
        except (Declined, NotApplicable) as reason:
            why = str(reason)
            continue
        tried = True
        if any(reference() is not None for _, reference in kept):
            gc.collect()
        alive = sorted({name for name, reference in kept if reference() is not None})
        if alive:
            text = f"{', '.join(alive)} is still in memory after the call"
            raise Violation(text, call, DIRECT)
    if not tried:
        raise NotApplicable(why)


def _kept(subject: Subject, call: Call) -> Iterator[tuple[str, Any]]:
    arguments, _ = subject.prepare(call)
    references: list[tuple[str, Any]] = []
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            tensor = value
            if value.device.type == "cpu" and value.is_contiguous() and value.numel():
                memory = _Bytes(value.view(torch.uint8).numpy().tobytes())
                tensor = torch.frombuffer(memory, dtype=value.dtype).view(value.shape)
                references.append((name, weakref.ref(memory)))
                del memory
            references.append((name, weakref.ref(tensor)))
            arguments[name] = tensor
    result = subject.invoke(DIRECT, call, arguments)
    results = result if isinstance(result, (tuple, list)) else (result,)
    given = {id(value) for value in arguments.values()}
    references += [
        ("the result", weakref.ref(one)) for one in results if isinstance(one, Tensor) and id(one) not in given
    ]
    return iter(references)
