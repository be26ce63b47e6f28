"""Rules on state: a call depends on its arguments alone, and changes nothing but its results."""

from __future__ import annotations

import contextlib
import io
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor

from opgraft.testing import ambient, judges
from opgraft.testing.calls import Call
from opgraft.testing.faults import Declined, NotApplicable, Violation
from opgraft.testing.groups import broad, buffered, sizes
from opgraft.testing.layouts import OUTPUT_LAYOUTS, PLAIN
from opgraft.testing.rule import rule
from opgraft.testing.subject import DIRECT, Observation, Reference, Subject

_RUNS: Final = 20
_MANY_SECONDS: Final = 0.5
_MANY: Final = 4000
_THREADS: Final = 4
_THREAD_SECONDS: Final = 0.6


@rule(seconds=1.5)
def circumstances_do_not_matter(subject: Subject) -> None:
    """Default dtype and device, grad modes, autocast, filled memory, threads, folder: no matter."""
    calls = [*sizes(subject, (0, 64, 5, 1031)), *buffered(subject, (33, 64), (PLAIN, OUTPUT_LAYOUTS[0]))]
    for call in subject.in_time(calls[:12], 4):
        if not _is_right(subject, call):
            continue
        for name, circumstance in ambient.CIRCUMSTANCES.items():
            _under(subject, call, name, circumstance)
        _in_event_loop(subject, call)


def _is_right(subject: Subject, call: Call) -> bool:
    """Look whether the call is right in ordinary circumstances; where it is not, other rules tell."""
    try:
        return judges.everything(subject.observe(call, DIRECT)) is None
    except (Declined, NotApplicable, Violation):
        return False


def _under(subject: Subject, call: Call, name: str, circumstance: ambient.Circumstance) -> None:
    if name == "inference mode":
        with circumstance():
            _judged(subject, call, name)
        return
    try:
        reference = subject.reference(call)
        arguments, placed = subject.prepare(call)
    except NotApplicable:
        return
    if not _native_works(subject, call, circumstance):
        return
    try:
        with circumstance():
            result = subject.invoke(DIRECT, call, arguments)
    except Declined:
        return
    except Violation as violation:
        fault: str | None = violation.what
    else:
        fault = judges.everything(subject.seen(call, placed, result, reference))
    if fault and name == ambient.DEFAULT_DEVICE and subject.device.type == "cpu":
        # A kernel for CPUs alone may count on the CPU being the default, though none should.
        note = f"with {name}: {fault}; name the device of what the kernel allocates"
        subject.notes += [] if note in subject.notes else [note]
    elif fault:
        raise Violation(f"with {name}: {fault}", call, DIRECT)


def _native_works(subject: Subject, call: Call, circumstance: ambient.Circumstance) -> bool:
    """Look whether native itself gives the same under a circumstance, on the CPU."""
    arguments, _ = subject.prepare(call, torch.device("cpu"))
    args, kwargs = subject.split(arguments)
    try:
        with circumstance():
            result = subject.op.forward_native(*args, **kwargs)
    except Exception:  # noqa: BLE001 - whatever it is, native fails too
        return False
    results = result if isinstance(result, tuple) else (result,)
    expected = subject.reference(call).outputs
    return all(
        not isinstance(mine, Tensor) or judges.difference(mine, native, None) is None
        for mine, native in zip(results, expected, strict=False)
    )


def _judged(subject: Subject, call: Call, name: str) -> None:
    try:
        seen = subject.observe(call, DIRECT)
    except (Declined, NotApplicable):
        return
    except Violation as violation:
        text = f"with {name}: {violation.what}"
        raise Violation(text, call, DIRECT) from violation
    _report(seen, judges.values(seen) or judges.dtype(seen), name)


def _report(seen: Observation, fault: str | None, name: str) -> None:
    if fault:
        raise Violation(f"with {name}: {fault}", seen.call, DIRECT)


def _in_event_loop(subject: Subject, call: Call) -> None:
    ambient.in_event_loop(lambda: _judged(subject, call, "a running event loop"))


@rule()
def calls_are_quiet(subject: Subject) -> None:
    """After the first call, a call prints nothing and warns of nothing."""
    calls = [*sizes(subject, (0, 64, 33)), *buffered(subject, (64,), (PLAIN,))][:8]
    ran = [call for call in calls if subject.attempt(call)]
    if not ran:
        raise NotApplicable("every call was passed on")
    for call in ran:
        arguments, _ = subject.prepare(call)
        printed = io.StringIO()
        with (
            warnings.catch_warnings(record=True) as caught,
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            warnings.simplefilter("always")
            subject.invoke(DIRECT, call, arguments)
        if printed.getvalue():
            text = f"a call prints {printed.getvalue()[:80]!r}"
            raise Violation(text, call, DIRECT)
        if caught:
            text = f"a call warns: {caught[0].message}"
            raise Violation(text, call, DIRECT)


@rule(seconds=1.5)
def same_input_same_result(subject: Subject) -> None:
    """Twenty runs of a call give the same bits, where the op is declared deterministic."""
    if not subject.op.deterministic:
        raise NotApplicable("the op is not declared deterministic")
    calls = [*sizes(subject, (1024, 1031, 2**14 + 1))][:5]
    calls += [*buffered(subject, (1024,), OUTPUT_LAYOUTS[:1])][:1]
    calls += [*sizes(subject, (2**16, 33))][:3]
    why, ran = "the op has no such call", False
    for call in subject.in_time(calls, 2):
        try:
            first = _bits(subject.observe(call, DIRECT))
            reference = subject.reference(call)
            again = (_bits(subject.observe(call, DIRECT, reference)) for _ in range(_RUNS - 1))
            different = [number for number, bits in enumerate(again, 2) if bits != first]
        except (Declined, NotApplicable) as reason:
            why = str(reason)
            continue
        ran = True
        if different:
            text = f"run {different[0]} of {_RUNS} differs from the first"
            raise Violation(text, call, DIRECT)
    if not ran:
        raise NotApplicable(why)


def _bits(seen: Observation) -> list[bytes]:
    tensors = [one for one in seen.outputs if isinstance(one, Tensor)]
    return [one.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for one in tensors]


@rule(seconds=1.0)
def many_calls_stay_right(subject: Subject) -> None:
    """Thousands of calls of changing size, dtype and layout, in random order, are all right."""
    ready = _ready(subject, [*broad(subject)][:60])
    order = random.Random(0)  # noqa: S311 - an order, no secret
    until = time.perf_counter() + _MANY_SECONDS * (20 if subject.thorough else 1)
    for number in range(_MANY * (20 if subject.thorough else 1)):
        if time.perf_counter() > until:
            break
        call, reference = order.choice(ready)
        fault = judges.values(subject.observe(call, DIRECT, reference))
        if fault:
            raise Violation(f"call {number + 1}: {fault}", call, DIRECT)


def _ready(subject: Subject, calls: list[Call]) -> list[tuple[Call, Reference]]:
    ready, why = [], "the op has no such call"
    for call in calls:
        if call.size > 2**16:
            continue
        try:
            ready.append((call, subject.observe(call, DIRECT).reference))
        except (Declined, NotApplicable) as reason:
            why = str(reason)
    if not ready:
        raise NotApplicable(why)
    return ready


@rule()
def changed_input_changes_the_result(subject: Subject) -> None:
    """The same tensor objects with other values give the other values' result."""
    tried = False
    for call in (*sizes(subject, (33, 64)), *sizes(subject, (1031,)), *buffered(subject, (33, 64), (PLAIN,))):
        other = call.but(seed=call.seed + 100)
        try:
            arguments, placed = subject.prepare(call)
            fresh, new = subject.prepare(other)
            expected = subject.reference(other)
        except NotApplicable:
            continue
        if not _interchangeable(arguments, fresh):
            continue
        with contextlib.suppress(Declined):
            subject.invoke(DIRECT, call, arguments)
            for name, value in fresh.items():
                if isinstance(value, Tensor):
                    placed[name].memory.copy_(new[name].memory)
            result = subject.invoke(DIRECT, call, arguments)
            tried = True
            fault = judges.values(subject.seen(other, placed, result, expected))
            if fault:
                text = f"after the input's values were replaced: {fault}"
                raise Violation(text, other, DIRECT)
    if not tried:
        raise NotApplicable("no two samples have the same shapes")


def _interchangeable(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        isinstance(other := right[name], Tensor) and other.shape == value.shape
        if isinstance(value, Tensor)
        else right[name] == value
        for name, value in left.items()
    )


@rule(seconds=1.5)
def threads_do_not_disturb_each_other(subject: Subject) -> None:
    """Calls from several threads at once, each with its own tensors, are all right."""
    calls = [*sizes(subject, (5, 64, 1031, 4096)), *buffered(subject, (64, 1031), (PLAIN,))]
    ready = _ready(subject, calls[:16])
    faults: list[Violation] = []
    start = threading.Barrier(_THREADS)
    until = time.perf_counter() + _THREAD_SECONDS

    def work(turn: int) -> None:
        mine = ready[turn % len(ready) :] + ready[: turn % len(ready)]
        start.wait()
        try:
            while not faults and time.perf_counter() < until:
                _burst(subject, mine, until)
        except Violation as violation:
            faults.append(violation)

    workers = [threading.Thread(target=work, args=(3 * turn,)) for turn in range(_THREADS)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    if faults:
        text = f"with {_THREADS} threads at once: {faults[0].what}"
        raise Violation(text, faults[0].call, DIRECT)


def _burst(subject: Subject, calls: list[tuple[Call, Reference]], until: float) -> None:
    """Run calls one directly after the other, and judge them afterwards."""
    prepared = [(call, reference, *subject.prepare(call)) for call, reference in calls]
    results = []
    former = sys.gettrace()
    sys.settrace(_give_way(until))
    try:
        for call, _, arguments, _ in prepared:
            results.append(subject.invoke(DIRECT, call, arguments))
            if time.perf_counter() > until:
                break
    finally:
        sys.settrace(former)
    for (call, reference, _, placed), result in zip(prepared, results, strict=False):
        fault = judges.values(subject.seen(call, placed, result, reference))
        if fault:
            raise Violation(fault, call, DIRECT)


def _give_way(until: float) -> Callable[..., Any]:
    """Let another thread run at every line of the kernel: what threads share is met half done."""

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        del event, argument
        if frame.f_globals.get("__name__", "").startswith("opgraft.") or time.perf_counter() > until:
            return None
        time.sleep(0)
        return trace

    return trace
