"""One kernel of one op on one device: how it is called, and what is seen when it is."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from opgraft.errors import ArgumentTypeError, ArgumentValueError, NoKernelError, NotSupported
from opgraft.testing.calls import VALUES, Call, Material
from opgraft.testing.faults import Declined, NotApplicable, Violation
from opgraft.testing.layouts import PLAIN, Placed, fill, place

if TYPE_CHECKING:
    from opgraft.fused_op import BaseFusedOp
    from opgraft.spec import KernelSpec

__all__ = ["DIRECT", "HANDLE", "Judge", "Observation", "Reference", "Subject", "canary"]

Function = Callable[..., Any]
Judge = Callable[["Observation"], "str | None"]

DIRECT: Final = "direct"
HANDLE: Final = "handle"
_KEPT_REFERENCES: Final = 512
_KEPT_ELEMENTS: Final = 2**14
_SHRINK_SECONDS: Final = 2.0
_SHOWN: Final = 12
_AT_LEAST: Final = 16
_ALL_SECONDS: Final = 11.0
_LAST_SECONDS: Final = 0.1
_THOROUGH: Final = 20
_TRIAL: Final = 2**13
_CALL_SECONDS: Final = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What native makes of a call: on the CPU, with arguments laid out the same way.

    Parameters
    ----------
    outputs
        Its results.
    is_tuple
        Whether it returns a tuple.
    buffers
        Caller buffers and mutated inputs after the call, as whole memories.

    """

    outputs: tuple[Any, ...]
    is_tuple: bool
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A call that a kernel ran.

    Parameters
    ----------
    subject, call, route
        Whose, which, and through which door.
    placed
        Its tensor arguments.
    result
        What the kernel returned.
    reference
        What native returns.

    """

    subject: Subject
    call: Call
    route: str
    placed: Mapping[str, Placed]
    result: Any
    reference: Reference

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The results as a tuple."""
        if isinstance(self.result, (tuple, list)):
            return tuple(self.result)
        return () if self.result is None else (self.result,)

    @property
    def written(self) -> dict[str, int]:
        """Caller buffers of this call, each with the place of the output that it receives."""
        return {name: place for name, place in self.subject.material.writes.items() if name in self.placed}

    def fresh(self) -> Iterator[tuple[str, Any, Any]]:
        """Give each output that is not a caller's buffer: its name, it, and native's."""
        given = set(self.written.values())
        pairs = zip(self.outputs, self.reference.outputs, strict=False)
        for number, (mine, native) in enumerate(pairs):
            if number not in given:
                yield self.name_of(number), mine, native

    def name_of(self, number: int) -> str:
        """Name an output for people."""
        return "the result" if len(self.reference.outputs) == 1 else f"result {number}"


class Subject:
    """One kernel of one op on one device.

    Parameters
    ----------
    op
        The op.
    kernel
        The kernel's record.
    device
        Where its tensors are.
    handle
        The op's public handle, which takes ``backend=``; None leaves that route out.
    reachable
        Whether the kernel's selector names this kernel and no better one.
    thorough
        Whether time does not matter.
    seed
        For the random part; None is the fixed one.

    """

    def __init__(
        self,
        *,
        op: BaseFusedOp,
        kernel: KernelSpec,
        device: torch.device,
        handle: Function | None = None,
        reachable: bool = True,
        thorough: bool = False,
        seed: int | None = None,
    ) -> None:
        self.op = op
        self.kernel = kernel
        self.device = device
        self.handle = handle
        self.reachable = reachable
        self.thorough = thorough
        self.seed = seed
        self.material = Material(op, kernel.dtypes)
        self.notes: list[str] = []
        self.surveys: dict[str, object] = {}
        self._deadline = float("inf")
        self._begun = 0.0
        self._spent = 0.0
        self._pace: float | None = None
        self._arguments: dict[Call, dict[str, Any]] = {}
        self._references: dict[Call, Reference] = {}
        self._invalid: set[Call] = set()

    # -- time ----------------------------------------------------------------------------------

    def begin(self, seconds: float) -> None:
        """Start a rule that may take so long; it runs a few calls in any case."""
        self.notes = []
        self._begun = time.perf_counter()
        plenty = self._spent < _ALL_SECONDS
        allowed = seconds * _THOROUGH if self.thorough else seconds if plenty else _LAST_SECONDS
        self._deadline = self._begun + allowed

    def end(self) -> None:
        """End the rule."""
        self._spent += time.perf_counter() - self._begun

    @property
    def out_of_time(self) -> bool:
        """Whether the rule under way has used its time."""
        return time.perf_counter() > self._deadline

    def in_time(self, calls: Iterable[Call], at_least: int = _AT_LEAST) -> Iterator[Call]:
        """Give calls until the rule has used its time, but some in any case."""
        for number, call in enumerate(calls):
            if number >= at_least and self.out_of_time:
                self.notes.append(f"stopped at its time limit after {number} calls")
                return
            yield call

    def affords(self, size: int, seconds: float = _CALL_SECONDS) -> bool:
        """Say whether a call of a size takes less than so long, guessed from a smaller one; else note it."""
        if self.thorough or size <= _TRIAL:
            return True
        if self._pace is None:
            self._pace = self._measured() / _TRIAL
        if self._pace * size < seconds:
            return True
        note = "the largest sizes were left out: a call takes too long here"
        self.notes += [] if note in self.notes else [note]
        return False

    def _measured(self) -> float:
        combination = next(iter(self.material.combinations), ())
        taken = 0.0
        for seed in (1, 2):  # the first one loads and compiles
            begun = time.perf_counter()
            if not self.attempt(Call(size=_TRIAL, seed=seed, dtypes=combination)):
                return 0.0
            taken = time.perf_counter() - begun
        return taken

    # -- ways in -------------------------------------------------------------------------------

    @functools.cached_property
    def function(self) -> Function:
        """The kernel itself."""
        return self.kernel.load()

    @functools.cached_property
    def routes(self) -> dict[str, Function]:
        """The ways to call the kernel: directly, and through the op's handle."""
        routes: dict[str, Function] = {DIRECT: self.function}
        if self.handle is not None and self.reachable:
            routes[HANDLE] = functools.partial(self.handle, backend=self.kernel.selector)
        return routes

    def split(self, arguments: Mapping[str, Any], *, by_keyword: bool = False) -> tuple[list[Any], dict[str, Any]]:
        """Arrange arguments as a caller would: positional ones by position."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        positional = not by_keyword
        for name, parameter in self.material.signature.parameters.items():
            if name not in arguments:
                positional = False
            elif positional and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                args.append(arguments[name])
            else:
                kwargs[name] = arguments[name]
        return args, kwargs

    # -- one call ------------------------------------------------------------------------------

    def prepare(self, call: Call, device: torch.device | None = None) -> tuple[dict[str, Any], dict[str, Placed]]:
        """Make a call's arguments on a device, freshly.

        Raises
        ------
        NotApplicable
            If a tensor has no such layout, or the kernel does not take such arguments.

        """
        values = dict(self._values(call))
        layouts = dict(call.layouts)
        for name, layout in call.buffers:
            if name not in values:
                values[name] = self._buffer(call, name)
            layouts.setdefault(name, layout)
        left_out = self.kernel.leaves_out & values.keys()
        if left_out:
            raise NotApplicable(f"the kernel leaves out {', '.join(sorted(left_out))}")
        if not layouts.keys() <= values.keys():
            raise NotApplicable("the call has no such argument")
        placed: dict[str, Placed] = {}
        arguments: dict[str, Any] = {}
        for name, value in values.items():
            if not isinstance(value, Tensor):
                arguments[name] = value
                continue
            layout = layouts.get(name, PLAIN)
            found = self._place(value, name, layout, device or self.device)
            if found is None:
                raise NotApplicable(f"{name} has no such layout")
            placed[name] = found
            arguments[name] = found.tensor
        return arguments, placed

    def _values(self, call: Call) -> dict[str, Any]:
        """Make the values of a call, kept where they are small: they are copied when placed."""
        recipe = call.but(layouts=(), buffers=(), by_keyword=False)
        known = self._arguments.get(recipe)
        if known is None:
            known = self.material.arguments(recipe)
            tensors = [value for value in known.values() if isinstance(value, Tensor)]
            if sum(one.numel() for one in tensors) < _KEPT_ELEMENTS:
                if len(self._arguments) >= _KEPT_REFERENCES:
                    self._arguments.clear()
                self._arguments[recipe] = known
        return known

    def _place(self, value: Tensor, name: str, layout: str, device: torch.device) -> Placed | None:
        background = canary(value) if name in self.material.writes else None
        return place(value, layout, device, background=background)

    def _buffer(self, call: Call, name: str) -> Tensor:
        plain = call.but(layouts=(), buffers=())
        outputs = self.reference(plain).outputs
        like = outputs[self.material.writes[name]]
        dtype: torch.dtype = getattr(torch, dict(call.dtypes)[name])
        buffer = torch.empty(like.shape, dtype=dtype)
        fill(buffer.view(-1), canary(buffer))
        return buffer

    def reference(self, call: Call) -> Reference:
        """Run native for a call, on the CPU.

        Raises
        ------
        NotApplicable
            If the op itself refuses the call.

        """
        call = call.but(by_keyword=False)
        if call in self._invalid:
            raise NotApplicable("the op itself refuses such a call")
        known = self._references.get(call)
        if known is not None:
            return known
        arguments, placed = self.prepare(call, torch.device("cpu"))
        args, kwargs = self.split(arguments)
        try:
            result = self._native(args, kwargs)
        except (ArgumentTypeError, ArgumentValueError) as refusal:
            self._invalid.add(call)
            raise NotApplicable(f"the op itself refuses such a call: {refusal}") from None
        watched = (*self.material.writes, *self.op.mutates)
        reference = Reference(
            outputs=result if isinstance(result, tuple) else () if result is None else (result,),
            is_tuple=isinstance(result, tuple),
            buffers={name: placed[name].after() for name in watched if name in placed},
        )
        if sum(one.numel() for one in reference.outputs if isinstance(one, Tensor)) < _KEPT_ELEMENTS:
            if len(self._references) >= _KEPT_REFERENCES:
                self._references.clear()
            self._references[call] = reference
        return reference

    def _native(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if self.handle is not None:
            return self.handle(*args, backend="native", **kwargs)
        return self.op.forward_native(*args, **kwargs)

    def refusal(self, arguments: Mapping[str, Any]) -> str | None:
        """Ask the kernel's ``rejects``; the answer is what it is, right or wrong."""
        if self.kernel.rejects is None:
            return None
        args, kwargs = self.split(arguments)
        answer: str | None = self.kernel.rejects(*args, **kwargs)
        return answer

    def observe(self, call: Call, route: str = DIRECT, reference: Reference | None = None) -> Observation:
        """Run a call and note what happened.

        Raises
        ------
        NotApplicable
            If the op has no such call.
        Declined
            If the kernel passed it on.
        Violation
            If the kernel raised.

        """
        reference = reference or self.reference(call)
        arguments, placed = self.prepare(call)
        return self.seen(call, placed, self.invoke(route, call, arguments), reference, route)

    def attempt(self, call: Call) -> bool:
        """Run a call directly and say whether it came to a result; what it raises, other rules tell."""
        try:
            self.observe(call)
        except (Declined, NotApplicable, Violation):
            return False
        return True

    def seen(
        self, call: Call, placed: Mapping[str, Placed], result: Any, reference: Reference, route: str = DIRECT
    ) -> Observation:
        """Put together what was observed of a call."""
        return Observation(subject=self, call=call, route=route, placed=placed, result=result, reference=reference)

    def invoke(self, route: str, call: Call, arguments: Mapping[str, Any]) -> Any:
        """Run the kernel through a route, telling its refusals from its faults."""
        args, kwargs = self.split(arguments, by_keyword=call.by_keyword)
        try:
            reason = self.refusal(arguments)
        except Exception as error:
            raise Violation(f"rejects raises {_told(error)}", call, route) from error
        if reason is not None:
            raise Declined(f"rejects says {reason!r}")
        try:
            return self.routes[route](*args, **kwargs)
        except NotSupported as error:
            raise Declined(f"raises NotSupported: {error}") from None
        except NoKernelError as error:
            if self.is_passed_over(error):
                raise Declined("the kernel is passed over") from None
            raise Violation(f"raises {_told(error)}", call, route) from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise Violation(f"raises {_told(error)}", call, route) from error

    def is_passed_over(self, error: NoKernelError) -> bool:
        """Say whether the handle had a reason to pass the kernel over: NotSupported, or a buffer's dtype."""
        text = str(error)
        return "not supported: " in text or any(f" of {name} not in (" in text for name in self.material.writes)

    # -- many calls ----------------------------------------------------------------------------

    def every(self, calls: Iterable[Call], judge: Judge, *, routes: Iterable[str] | None = None) -> None:
        """Run calls through every route and hold each against a judge.

        Raises
        ------
        Violation
            For the smallest call that is judged wrong.
        NotApplicable
            If no call could be run.

        """
        wanted = tuple(self.routes) if routes is None else tuple(routes)
        ran, why = 0, "the op has no such call"
        for call in self.in_time(calls):
            for route in wanted:
                try:
                    fault = self._fault(call, route, judge)
                except (NotApplicable, Declined) as reason:
                    why = str(reason)
                    break
                ran += 1
                if fault is not None:
                    raise self.smallest(call, route, judge, fault)
        if not ran:
            raise NotApplicable(why)

    def _fault(self, call: Call, route: str, judge: Judge) -> Violation | None:
        try:
            what = judge(self.observe(call, route))
        except Violation as violation:
            return violation
        return None if what is None else Violation(what, call, route)

    def smallest(self, call: Call, route: str, judge: Judge, fault: Violation) -> Violation:
        """Look for a simpler call that the same judge finds wrong, and give the fault of that."""
        until = time.perf_counter() + _SHRINK_SECONDS
        shrinking = True
        while shrinking:
            shrinking = False
            for candidate in call.smaller():
                if time.perf_counter() > until:
                    return fault
                try:
                    found = self._fault(candidate, route, judge)
                except (NotApplicable, Declined):
                    continue
                if found is not None:
                    call, fault, shrinking = candidate, found, True
                    break
        return fault

    # -- words ---------------------------------------------------------------------------------

    def show(self, call: Call | str | None) -> str:
        """Write a call the way one would type it, values where they are few."""
        if not isinstance(call, Call):
            return call or ""
        try:
            arguments, placed = self.prepare(call, torch.device("cpu"))
        except NotApplicable:
            return str(call)
        name = self.op.op.rpartition(".")[2] or type(self.op).__name__
        parts = []
        layouts = dict((*call.layouts, *call.buffers))
        for parameter in self.material.signature.parameters:
            if parameter in arguments:
                value = arguments[parameter]
                text = _shown(value) if parameter in placed else repr(value)
                layout = layouts.get(parameter, PLAIN)
                note = "" if layout == PLAIN else f" ({layout})"
                parts.append(f"{parameter}={text}{note}")
        origin = "" if call.source == VALUES else f"  # {call.source}"
        if call.source == "sample":
            origin = f"  # sample of size {call.size}, seed {call.seed}"
        return f"{name}({', '.join(parts)}){origin}"


def canary(like: Tensor) -> Tensor:
    """Give values that no result is likely to have, in the dtype of a tensor."""
    if like.dtype.is_floating_point or like.dtype.is_complex:
        return torch.tensor([-77.25, -78.5, -79.75]).to(like.dtype)
    if like.dtype is torch.bool:
        return torch.tensor([True, False])
    return torch.tensor([77, 78, 79] if not _signed(like.dtype) else [-77, -78, -79]).to(like.dtype)


def _signed(dtype: torch.dtype) -> bool:
    return torch.iinfo(dtype).min < 0


def _shown(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    strides = "" if tensor.is_contiguous() else f", strides {tuple(tensor.stride())}"
    if tensor.numel() <= _SHOWN:
        return f"{tensor.tolist()} {dtype}{strides}"
    return f"{dtype} {list(tensor.shape)}{strides}"


def _told(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
