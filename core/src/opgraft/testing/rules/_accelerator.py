"""Rules on streams, graphs and devices; they need an accelerator that has them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from opgraft.testing import judges
from opgraft.testing.calls import Call
from opgraft.testing.faults import Declined, NotApplicable, Violation
from opgraft.testing.groups import buffered, sizes
from opgraft.testing.layouts import PLAIN
from opgraft.testing.rule import rule
from opgraft.testing.subject import DIRECT, HANDLE, Observation, Subject

_DELAY: Final = 20_000_000  # clock ticks of the device, some 10 ms
_SIZE: Final = 1031


def _streams(subject: Subject) -> Any:
    """Give torch's module of the device, if the device has streams."""
    if subject.device.type == "cpu":
        raise NotApplicable("a CPU has no streams")
    module = getattr(torch, subject.device.type, None)
    if not all(hasattr(module, name) for name in ("Stream", "stream", "synchronize")):
        raise NotApplicable(f"torch.{subject.device.type} has no streams")
    return module


def _graphs(subject: Subject) -> Any:
    module = _streams(subject)
    if not all(hasattr(module, name) for name in ("CUDAGraph", "graph")):
        raise NotApplicable(f"torch.{subject.device.type} has no graphs")
    return module


def _calls(subject: Subject) -> Iterator[Call]:
    yield from sizes(subject, (_SIZE,))
    yield from buffered(subject, (_SIZE,), (PLAIN,))


@rule(seconds=5.0)
def current_stream_is_used(subject: Subject) -> None:
    """The kernel is launched on the current stream: it sees what that stream wrote before."""
    module = _streams(subject)
    for call in _calls(subject):
        try:
            subject.observe(call, DIRECT)
            arguments, placed = subject.prepare(call)
        except (Declined, NotApplicable):
            continue
        kept = {name: one.memory.clone() for name, one in placed.items()}
        for name in subject.material.inputs:
            if name in placed:
                placed[name].memory.zero_()
        module.synchronize()
        side = module.Stream()
        with module.stream(side):
            _delay(module)
            for name in subject.material.inputs:
                if name in placed:
                    placed[name].memory.copy_(kept[name])
            result = subject.invoke(DIRECT, call, arguments)
        side.synchronize()
        fault = judges.values(subject.seen(call, placed, result, subject.reference(call)))
        if fault:
            raise Violation(f"on a side stream: {fault}", call, DIRECT)


def _delay(module: Any) -> None:
    sleep = getattr(module, "_sleep", None)
    if sleep is not None:
        sleep(_DELAY)


@rule(seconds=5.0)
def nothing_waits_for_the_device(subject: Subject) -> None:
    """A call reads no device value and waits for nothing, unless native's meaning needs it."""
    module = _streams(subject)
    if not hasattr(module, "set_sync_debug_mode"):
        raise NotApplicable(f"torch.{subject.device.type} does not tell who waits")
    for call in _calls(subject):
        try:
            subject.observe(call, DIRECT)
            arguments, _ = subject.prepare(call)
        except (Declined, NotApplicable):
            continue
        module.synchronize()
        try:
            with _waiting_is_an_error(module):
                subject.invoke(DIRECT, call, arguments)
        except Violation as violation:
            if not _native_waits(subject, module, call):
                raise Violation(violation.what, call, DIRECT) from violation


@contextlib.contextmanager
def _waiting_is_an_error(module: Any) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not notice every wait
        module.set_sync_debug_mode("error")
        try:
            yield
        finally:
            module.set_sync_debug_mode("default")


def _native_waits(subject: Subject, module: Any, call: Call) -> bool:
    arguments, _ = subject.prepare(call)
    args, kwargs = subject.split(arguments)
    try:
        with _waiting_is_an_error(module):
            subject.op.forward_native(*args, **kwargs)
    except RuntimeError:
        return True
    return False


@rule(seconds=10.0)
def graph_can_be_captured_and_replayed(subject: Subject) -> None:
    """A captured call, replayed after its input changed, gives the new input's result."""
    module = _graphs(subject)
    for call in _calls(subject):
        # What the host knows, such as the size of a result, is captured with the call.
        other = call.but(seed=call.seed + 100, host_seed=call.seed)
        try:
            subject.observe(call, DIRECT)
            arguments, placed = subject.prepare(call)
            _, new = subject.prepare(other)
            subject.reference(other)
        except (Declined, NotApplicable):
            continue
        if any(new[name].memory.shape != one.memory.shape for name, one in placed.items()):
            continue
        for route in (DIRECT, HANDLE) if subject.handle is not None else (DIRECT,):
            subject.observe(call, route)  # what is chosen and compiled at the first call is there then
            result = _captured(subject, module, call, arguments, route)
            if result is _NOT_CAPTURED:
                break
            for turn, source in enumerate((new, placed, new)):
                graph, values = result
                before = {name: one.before for name, one in source.items()}
                for name, one in placed.items():
                    one.memory.copy_(before[name])
                graph.replay()
                module.synchronize()
                expected = call if source is placed else other
                reference = subject.reference(expected)
                fault = judges.values(subject.seen(expected, placed, values, reference))
                if fault:
                    text = f"replay {turn + 1} through {route}: {fault}"
                    raise Violation(text, call, route)


_NOT_CAPTURED: Final[Any] = object()


def _captured(subject: Subject, module: Any, call: Call, arguments: dict[str, Any], route: str) -> Any:
    graph = module.CUDAGraph()
    module.synchronize()
    try:
        with module.graph(graph):
            values = subject.invoke(route, call, arguments)
    except (Violation, RuntimeError) as error:
        if _native_waits(subject, module, call):
            return _NOT_CAPTURED
        what = error.what if isinstance(error, Violation) else str(error).partition("\n")[0]
        raise Violation(f"while it is captured: {what}", call, route) from error
    return graph, values


@rule(seconds=5.0)
def second_device_works(subject: Subject) -> None:
    """Tensors on the second device are computed there while the first is current."""
    module = getattr(torch, subject.device.type, None)
    count = getattr(module, "device_count", int)() if subject.device.type != "cpu" else 1
    if count < 2:  # noqa: PLR2004 - a second one
        raise NotApplicable("there is one device")
    second = Subject(
        op=subject.op,
        kernel=subject.kernel,
        device=torch.device(subject.device.type, 1),
        handle=subject.handle,
        thorough=subject.thorough,
    )
    with contextlib.ExitStack() as stack:
        current = getattr(module, "device", None)
        if current is not None:
            stack.enter_context(current(0))
        second.begin(5.0)
        second.every(_calls(second), _there)


def _there(seen: Observation) -> str | None:
    found = judges.values(seen) or judges.device(seen)
    if found:
        return found
    module: Any = getattr(torch, seen.subject.device.type)
    if module.current_device() != 0:
        return f"the current device is {module.current_device()} after the call, it was 0"
    strays = [one for one in seen.outputs if isinstance(one, Tensor) and one.device.index != 1]
    return f"a result is on {strays[0].device}" if strays else None
