"""Rules on what a kernel refuses: through ``rejects``, through ``NotSupported``, and not at all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opgraft.errors import ArgumentTypeError, ArgumentValueError, NoKernelError, NotSupported
from opgraft.testing import judges
from opgraft.testing.calls import Call, Material
from opgraft.testing.faults import NotApplicable, Violation
from opgraft.testing.groups import broad, buffered, edges, every_combination, sizes
from opgraft.testing.layouts import OUTPUT_LAYOUTS
from opgraft.testing.rule import rule
from opgraft.testing.subject import DIRECT, HANDLE, Subject

_NO_REJECTS: Final = "the kernel has no rejects"
_SMALLEST: Final = 16  # smaller calls may be refused: a kernel may work in whole vectors
_LARGEST: Final = 2**20


# -- rejects -------------------------------------------------------------------------------------


def _asked(subject: Subject) -> Iterator[Call]:
    if subject.kernel.rejects is None:
        raise NotApplicable(_NO_REJECTS)
    yield from subject.in_time(itertools.chain(broad(subject), edges(subject)))


@rule()
def rejects_gives_a_reason_or_none(subject: Subject) -> None:
    """``rejects`` answers every call with a sentence or None, and raises for none."""
    for call in _asked(subject):
        answer = _answer(subject, call)
        if answer is not None and (not isinstance(answer, str) or not answer.strip()):
            text = f"it answers {answer!r}, expected a reason or None"
            raise Violation(text, call, DIRECT)


def _answer(subject: Subject, call: Call) -> object:
    try:
        subject.reference(call)
        arguments, placed = subject.prepare(call)
    except NotApplicable:
        return None
    try:
        answer = subject.refusal(arguments)
        again = subject.refusal(arguments)
    except Exception as error:
        text = f"it raises {type(error).__name__}: {error}"
        raise Violation(text, call, DIRECT) from error
    if answer != again:
        text = f"it answers {answer!r}, then {again!r} to the same call"
        raise Violation(text, call, DIRECT)
    for name, one in placed.items():
        if not torch.equal(one.after().view(torch.uint8), one.before.view(torch.uint8)):
            raise Violation(f"it changes {name}", call, DIRECT)
    return answer


@rule()
def rejects_reads_no_value(subject: Subject) -> None:
    """``rejects`` looks at metadata alone: it runs no operator and its answer needs no values."""
    for call in _asked(subject):
        try:
            subject.reference(call)
            arguments, _ = subject.prepare(call)
        except NotApplicable:
            continue
        _runs_no_operator(subject, call, arguments)
        _works_without_data(subject, call, arguments)
        _ignores_values(subject, call, arguments)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that do more than make a view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns  # noqa: SLF001 - the only way to ask
        aliases = [one.alias_info for one in returns]
        if not aliases or not all(info is not None and not info.is_write for info in aliases):
            self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


def _asked_of(subject: Subject, arguments: dict[str, Any]) -> object:
    try:
        return subject.refusal(arguments)
    except Exception:  # noqa: BLE001 - what it raises is the business of another rule
        return None


def _runs_no_operator(subject: Subject, call: Call, arguments: dict[str, Any]) -> None:
    with _Watch() as watch:
        _asked_of(subject, arguments)
    if watch.ran:
        raise Violation(f"it runs {', '.join(watch.ran)}", call, DIRECT)


def _works_without_data(subject: Subject, call: Call, arguments: dict[str, Any]) -> None:
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = {
                name: mode.from_tensor(value) if isinstance(value, Tensor) else value
                for name, value in arguments.items()
            }
            subject.refusal(fakes)
    except DataDependentOutputException as error:
        raise Violation(f"it reads a value: {error.func}", call, DIRECT) from None
    except Exception as error:  # noqa: BLE001 - a fake tensor has no address, which is no fault
        if "numpy" in str(error):
            text = f"it reads values: {error}"
            raise Violation(text, call, DIRECT) from None


def _ignores_values(subject: Subject, call: Call, arguments: dict[str, Any]) -> None:
    answer = _asked_of(subject, arguments)
    for seed in (11, 12):
        others = {
            name: _other(value, seed) if isinstance(value, Tensor) else value for name, value in arguments.items()
        }
        other = _asked_of(subject, others)
        if other != answer:
            text = f"it answers {answer!r}, and {other!r} when only the values differ"
            raise Violation(text, call, DIRECT)


def _other(value: Tensor, seed: int) -> Tensor:
    """Give a tensor of the same metadata whose values are others."""
    memory = torch.empty(value.untyped_storage().nbytes() // value.element_size(), dtype=value.dtype)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 256, (memory.numel() * value.element_size(),), generator=generator)
    if value.dtype is not torch.bool:
        memory.view(torch.uint8).copy_(noise)
    elif memory.numel():
        memory.copy_(noise > 127)  # noqa: PLR2004 - half of them
    moved = memory.to(value.device)
    return moved.as_strided(value.shape, value.stride(), int(value.storage_offset()))


@rule(seconds=1.5)
def rejects_keeps_what_is_declared(subject: Subject) -> None:
    """``rejects`` refuses no declared dtype, and no plain call that the kernel runs rightly."""
    if subject.kernel.rejects is None:
        raise NotApplicable(_NO_REJECTS)
    for combination in subject.material.combinations:
        reasons = []
        wanted = [size for size in subject.op.sample_sizes if size <= _LARGEST] or [64]
        for size in wanted:
            call = Call(size=size, seed=1, dtypes=combination)
            reason = _reason(subject, call)
            reasons.append(reason)
            if reason is not None and size >= _SMALLEST:
                _not_a_pretext(subject, call, reason)
        if all(reason is not None for reason in reasons):
            dtypes = ", ".join(f"{n} {d}" for n, d in combination if n in subject.material.inputs)
            raise Violation(f"it refuses every call with {dtypes}, which is declared: {reasons[-1]}")


def _reason(subject: Subject, call: Call) -> object:
    try:
        arguments, _ = subject.prepare(call)
    except NotApplicable:
        return None
    return _asked_of(subject, arguments)


def _not_a_pretext(subject: Subject, call: Call, reason: object) -> None:
    arguments, _ = subject.prepare(call)
    args, kwargs = subject.split(arguments)
    try:
        result = subject.function(*args, **kwargs)
        native = subject.reference(call).outputs
    except Exception:  # noqa: BLE001 - then it was right to refuse
        return
    results = result if isinstance(result, tuple) else (result,)
    pairs = list(zip(results, native, strict=False))
    tolerance = subject.op.tolerance
    if pairs and all(
        isinstance(mine, Tensor) and judges.difference(mine, theirs, tolerance) is None for mine, theirs in pairs
    ):
        text = f"it refuses ({reason}) a plain call that the kernel runs rightly"
        raise Violation(text, call, DIRECT)


# -- calls that are not refused --------------------------------------------------------------------


@rule()
def calls_that_are_not_rejected_run(subject: Subject) -> None:
    """A plain call that ``rejects`` lets through is run, not passed on with ``NotSupported``."""
    ran = False
    calls = itertools.chain(every_combination(subject, 64), edges(subject), broad(subject))
    for call in subject.in_time(calls, 64):
        if not call.is_plain:
            continue
        try:
            arguments, _ = subject.prepare(call)
            subject.reference(call)
        except NotApplicable:
            continue
        if _asked_of(subject, arguments) is not None:
            continue
        args, kwargs = subject.split(arguments)
        ran = True
        try:
            subject.function(*args, **kwargs)
        except NotSupported as error:
            text = f"it raises NotSupported ({error}) and rejects lets the call through"
            raise Violation(text, call, DIRECT) from None
        except Exception as error:
            text = f"it raises {type(error).__name__}: {error}"
            raise Violation(text, call, DIRECT) from error
    if not ran:
        raise NotApplicable("rejects lets no plain call through")


@rule()
def not_supported_comes_before_writing(subject: Subject) -> None:
    """A kernel that raises ``NotSupported`` has written nothing."""
    met = False
    calls = itertools.chain(buffered(subject, (33, 64), OUTPUT_LAYOUTS), broad(subject))
    for call in subject.in_time(calls):
        try:
            arguments, placed = subject.prepare(call)
        except NotApplicable:
            continue
        args, kwargs = subject.split(arguments)
        try:
            subject.function(*args, **kwargs)
        except NotSupported:
            met = True
        except Exception:  # noqa: BLE001, S112 - the business of other rules
            continue
        else:
            continue
        for name, one in placed.items():
            if not torch.equal(one.after().view(torch.uint8), one.before.view(torch.uint8)):
                text = f"it has written to {name} before it raises NotSupported"
                raise Violation(text, call, DIRECT)
    if not met:
        raise NotApplicable("the kernel raised NotSupported for no call")


# -- calls that must be refused --------------------------------------------------------------------


@rule()
def bad_input_is_refused(subject: Subject) -> None:
    """A wrong kind, dtype, shape, device or buffer raises what native raises, of that class."""
    if subject.handle is None:
        raise NotApplicable("the op's handle is not at hand")
    for call in sizes(subject, (5, 64)):
        for what, arguments in _spoilt(subject, call):
            args, kwargs = subject.split(arguments)
            try:
                subject.handle(*args, backend="native", **kwargs)
            except (ArgumentTypeError, ArgumentValueError) as refusal:
                _same_refusal(subject, what, arguments, type(refusal))
            except Exception:  # noqa: BLE001, S112 - not what the op itself calls bad input
                continue


def _same_refusal(subject: Subject, what: str, arguments: dict[str, Any], expected: type[Exception]) -> None:
    args, kwargs = subject.split(arguments)
    try:
        subject.routes[HANDLE](*args, **kwargs)
    except expected:
        return
    except Exception as error:
        if isinstance(error, NoKernelError) and subject.is_passed_over(error):
            return
        text = f"raises {type(error).__name__}: {error}; expected {expected.__name__}"
        raise Violation(text, what, HANDLE) from error
    raise Violation(f"is run, expected {expected.__name__}", what, HANDLE)


def _spoilt(subject: Subject, call: Call) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        arguments, _ = subject.prepare(call)
        reference = subject.reference(call)
    except NotApplicable:
        return
    device = subject.device
    for name in subject.material.inputs:
        value = arguments.get(name)
        if isinstance(value, Tensor):
            for what, bad in _bad(value, device):
                yield f"{name} {what}", arguments | {name: bad}
    for name, number in subject.material.writes.items():
        if name in subject.kernel.leaves_out or number >= len(reference.outputs):
            continue
        like = reference.outputs[number]
        dtype: torch.dtype = getattr(torch, dict(call.dtypes)[name])
        good = torch.zeros(like.shape, dtype=dtype).to(device)
        for what, bad in _bad(good, device):
            yield f"{name} {what}", arguments | {name: bad}


def _bad(value: Tensor, device: torch.device) -> Iterator[tuple[str, object]]:
    for dtype in (torch.float32, torch.bool, torch.uint8, torch.int16, torch.complex64):
        if dtype != value.dtype:
            yield f"of dtype {dtype}", torch.zeros(value.shape, dtype=dtype).to(device)
    yield "a list", [1, 2, 3, 4, 5]
    yield "a number", 5
    more = torch.zeros((1, *value.shape), dtype=value.dtype).to(device)
    yield "with one dim more", more
    yield "without dims", torch.zeros((), dtype=value.dtype).to(device)
    longer = torch.zeros((value.shape[0] + 1, *value.shape[1:]), dtype=value.dtype).to(device)
    yield "one longer", longer
    if device.type != "cpu":
        yield "on the CPU", torch.zeros(value.shape, dtype=value.dtype)


@rule()
def undeclared_dtype_is_left_alone(subject: Subject) -> None:
    """A dtype that the op has and the kernel does not declare never reaches the kernel."""
    if subject.handle is None:
        raise NotApplicable("the op's handle is not at hand")
    whole = Material(subject.op)
    declared = set(subject.material.combinations)
    others = [one for one in whole.combinations if one not in declared]
    if not others:
        raise NotApplicable("the kernel declares all of the op's dtypes")
    for combination in others[:8]:
        call = Call(size=5, seed=1, dtypes=combination)
        arguments, _ = subject.prepare(call)
        args, kwargs = subject.split(arguments)
        try:
            subject.routes[HANDLE](*args, **kwargs)
        except NoKernelError:
            continue
        except Exception as error:
            message = f"raises {type(error).__name__}, expected NoKernelError"
            raise Violation(message, call, HANDLE) from error
        raise Violation("the kernel is run with a dtype that it does not declare", call, HANDLE)
