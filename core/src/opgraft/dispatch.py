"""A selection turned into a direct call.

What can be known from devices, dtypes and which parameters are passed is decided once and looked
up; shapes are checked and ``rejects`` asked per call. ``handle.py`` goes one step further and
keeps the last choice.
"""

from __future__ import annotations

import atexit
import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.autograd import forward_ad

from opgraft.arguments import Values, dtype_name, tensors_of
from opgraft.checked import check_result
from opgraft.errors import NoKernelError, NotSupported, OpgraftError, PluginError, UnknownSelectorError, add_note
from opgraft.kernel_registry import LOGGER
from opgraft.selection import CallFacts, Selection, select
from opgraft.spec import OWN, KernelBackend, KernelSpec
from opgraft.tracing import TraceRecord

if TYPE_CHECKING:
    from opgraft.fused_op import BaseFusedOp
    from opgraft.kernel_registry import KernelRegistry
    from opgraft.policy import Policy

_dispatch_modes: Final[Callable[[], int]] = vars(torch._C)["_len_torch_dispatch_stack"]  # noqa: SLF001
_transform: Final[Callable[[], object]] = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001
"""Modes and functorch transforms at work, whose tensors have no memory; torch has no public reader of either."""
_PLAIN: Final = (Tensor, torch.nn.Parameter)
_SCALARS: Final = (int, float, bool, str)


@dataclass(slots=True, eq=False)
class Runner:
    """A kernel ready to be called, and what has to be asked before each call."""

    spec: KernelSpec
    kernel: Callable[..., Any]
    rejects: Callable[..., str | None] | None

    def refusal(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """Ask why this call cannot run on the kernel; None where it can."""
        if self.rejects is None:
            return None
        try:
            reason = self.rejects(*args, **kwargs)
        except Exception as error:
            add_note(error, f"raised by 'rejects' of kernel {self.spec}")
            raise
        if reason is not None and not (isinstance(reason, str) and reason):
            raise PluginError(f"'rejects' of kernel {self.spec} must return a reason or None, got {reason!r}")
        return reason


@dataclass(slots=True, eq=False)
class Choice:
    """A selection and its kernels, for all calls of the same key."""

    selection: Selection
    runners: tuple[Runner, ...]
    settled: bool = True  # False once a kernel has passed a call on
    kept: tuple[Callable[..., bool], Callable[..., Any]] | None = None


Reasons = Mapping[KernelSpec | str, str]
"""Kernels that cannot run a call, and why."""

_Choices = dict[Any, Choice]
_Held = tuple[int, "Policy | None", _Choices, "weakref.WeakKeyDictionary[Policy, _Choices]"]
"""Generation of the registry, policy, what is known under it, and what under every policy; one value, so that
a thread that reads it never pairs one policy with the choices of another."""


class Dispatcher:
    """One op's way from a call to a kernel.

    Parameters
    ----------
    op
        The op; its own methods are candidates, bound to this very instance.
    registry
        Where the other candidates are.

    """

    def __init__(self, op: BaseFusedOp, registry: KernelRegistry) -> None:
        self.op = op
        self.registry = registry
        self.arguments = op.arguments()
        self.validate: Callable[..., None] | None = getattr(op, "validate", None)
        self._held: _Held = -1, None, {}, weakref.WeakKeyDictionary()

    def call(
        self, values: Values, selector: str | None = None, *, routed: bool = False, refused: Reasons | None = None
    ) -> Any:
        """Run the best kernel for these values.

        Parameters
        ----------
        values
            In the order of the op's parameters.
        selector
            The call's ``backend=``.
        routed
            True inside the torch operator, where nothing is routed to it again.
        refused
            Kernels that have been asked already and have refused this very call, each with its reason.

        """
        key = self.key(values, routed=routed)
        if key is None:
            return self._route(values, selector)
        policy = self.registry.policy.current()
        return self.run(self.choice(key, values, policy, selector), values, policy, selector, refused)

    def choice(self, key: tuple[Any, ...], values: Values, policy: Policy, selector: str | None) -> Choice:
        """Look the choice for a key up, or walk the ladder for it."""
        generation, held = self.registry.generation, self._held
        if held[0] != generation:
            held = generation, None, {}, weakref.WeakKeyDictionary()
        if held[1] is not policy:
            held = self._held = generation, policy, held[3].setdefault(policy, {}), held[3]
        known = held[2]
        selector = self.op.pinned if selector is None or selector == "auto" else selector
        found = known.get((selector, key))
        if found is None:
            found = known[selector, key] = self._choose(key, values, selector, policy)
        return found

    def key(self, values: Values, *, routed: bool = False) -> tuple[Any, ...] | None:
        """Give all that a choice depends on, or None where torch.ops has to take the call."""
        if not routed and (_dispatch_modes() or _transformed()):
            return None
        recording, device = torch.is_grad_enabled(), None
        needs_grad = recording and self.op.has_state() and any(one.requires_grad for one in self.op.parameters())
        parts: list[Any] = []
        for value, default in zip(values, self.arguments.defaults, strict=True):
            if value is default:
                parts.append(None)
                continue
            kind = type(value)
            parts.append(kind)
            if kind in _SCALARS:
                continue
            for one in (value,) if kind in _PLAIN else tensors_of(value):
                if not routed and type(one) not in _PLAIN:
                    return None
                if device is None:
                    device = one.device
                elif one.device != device:
                    self.arguments.check_format(values)
                needs_grad = needs_grad or (recording and one.requires_grad)
                parts.append(one.dtype)
        return device or torch.get_default_device(), needs_grad, *parts

    def _route(self, values: Values, selector: str | None) -> Any:
        """Let torch's dispatcher see a call on fake tensors and other subclasses; vmap and the like see native."""
        args, kwargs = self.arguments.split(values)
        if self.op.torch_function is None or _transformed():
            return self.op.forward_native(*args, **kwargs)
        return self.op.torch_function(*args, **kwargs, backend=selector)

    def run(
        self, choice: Choice, values: Values, policy: Policy, selector: str | None, refused: Reasons | None = None
    ) -> Any:
        """Run the first kernel of a choice that does not refuse these very values."""
        args, kwargs = self.checked(values)
        refusals = dict(refused or {})
        for runner in choice.runners:
            reason = refusals.get(runner.spec) or runner.refusal(args, kwargs)
            if reason is not None:
                refusals[runner.spec] = reason
                continue
            if refusals:
                self._tell_unforced(choice.selection.without(refusals), policy)
            try:
                result = runner.kernel(*args, **kwargs)
            except NotSupported as error:
                refusals[runner.spec] = f"not supported: {error}"
                choice.settled = False
                continue
            except Exception as error:
                self.note(error, runner.spec)
                raise
            if policy.check:
                check_result(self.op, runner.spec, values, result)
            if policy.trace or self.registry.traces:
                self._record(runner.spec, values)
            return result
        told = replace(choice.selection.without(refusals), call=self._describe(values))
        raise self._no_kernel(told, selector)

    def checked(self, values: Values) -> tuple[list[Any], dict[str, Any]]:
        """Check shapes and what the op itself validates; give the values as a call."""
        args, kwargs = self.arguments.split(values)
        self.arguments.check_shapes(values)
        if self.validate is not None:
            self.validate(*args, **kwargs)
        return args, kwargs

    def note(self, error: BaseException, spec: KernelSpec) -> None:
        """Say on an exception whose kernel raised it."""
        add_note(error, f"raised by kernel {spec} of op {self.op.label!r}")

    def blame(self, error: BaseException, kernel: Callable[..., Any]) -> None:
        """Do the same for a kernel that a handle kept."""
        choices = [choice for known in self._held[3].values() for choice in list(known.values())]
        for runner in (runner for choice in choices for runner in choice.runners if runner.kernel is kernel):
            self.note(error, runner.spec)

    def _record(self, spec: KernelSpec, values: Values) -> None:
        tensors = tuple(f"{one.dtype}{list(one.shape)}" for _, one in self.arguments.tensors(values))
        record = TraceRecord(op=self.op.label, kernel=spec.label, tensors=tensors)
        for trace in self.registry.traces or (self.registry.process_trace,):
            trace.add(record)
        if not self.registry.traces and self.registry.tell_once("trace"):
            atexit.register(lambda: sys.stderr.write(f"{self.registry.process_trace}\n"))

    # Choosing.

    def _choose(self, key: tuple[Any, ...], values: Values, selector: str | None, policy: Policy) -> Choice:
        self.arguments.check_format(values)
        self._refuse_capture(values)
        self.registry.usable()
        selection = self._selection(key, values, selector, policy)
        if selection.winner is None:
            raise self._no_kernel(selection, selector)
        self._tell_unforced(selection, policy)
        return Choice(selection, tuple(self.runner(spec) for spec in selection.runners))

    def _selection(self, key: tuple[Any, ...], values: Values, selector: str | None, policy: Policy) -> Selection:
        facts = self._facts(key, values)
        self._check_words(selector, policy, self.op.own_kernels(facts.platform))
        return self.select(facts, self._describe(values), policy, selector)

    def _refuse_capture(self, values: Values) -> None:
        """Choose nothing, and so import and compile nothing, while a CUDA graph is being captured."""
        on_cuda = any(one.is_cuda for _, one in self.arguments.tensors(values))
        if on_cuda and torch.cuda.is_current_stream_capturing():
            raise OpgraftError(
                f"{self.op.label} is used for the first time inside graph capture; call "
                f"opgraft.warmup({self.op.label!r}, ...) with such arguments before capturing"
            )

    def _check_words(self, selector: str | None, policy: Policy, own: tuple[KernelSpec, ...]) -> None:
        """Refuse a selector that nobody knows; in an order it is only told, since a cluster shares the file."""
        registry = self.registry
        if selector is not None and (unknown := registry.unknown_selector(selector, own)):
            raise UnknownSelectorError(unknown)
        if selector is None and policy.force is not None:
            registry.check_force(policy.force, [*own, *self.op.kernels_of_all_classes()])
        for word in policy.selectors_for(self.op.label):
            unknown = registry.unknown_selector(word, own)
            if unknown and registry.tell_once("order", word):
                LOGGER.warning("%s, in the order set by %s", unknown, policy.sources.get("order"))

    def select(
        self, facts: CallFacts, call: str, policy: Policy, selector: str | None = None, *, hardware: bool = True
    ) -> Selection:
        """Give the selection for a call; without ``hardware``, as if that of inactive backends were here."""
        op, records = self.op, self.registry.backends()
        return select(
            op=op.label,
            call=call,
            facts=facts,
            kernels=[*op.own_kernels(facts.platform), *self.registry.candidates(op.op, hardware=hardware)],
            priority=op.priority,
            policy=policy,
            selector=selector,
            records=[record for record in records if hardware or record.status != "inactive"],
            native_supported=op.native_supported,
        )

    def select_on(self, platform: str, arch: str = "", dtype: str = "", *, hardware: bool = True) -> Selection:
        """Give the selection for a kind of device; per-call refusals stay open."""
        facts = CallFacts(platform=platform, arch=arch, dtypes=(("", dtype),) if dtype else (), amx=self._amx(platform))
        call = f"{dtype} tensors on {platform} {arch}".strip()
        return self.select(facts, call, self.registry.policy.current(), self.op.pinned, hardware=hardware)

    def explain(self, values: Values, selector: str | None = None) -> Selection:
        """Give the selection for a real call, per-call refusals included; runs nothing."""
        self.arguments.check_format(values)
        selector = self.op.pinned if selector in {None, "auto"} else selector
        key = self.key(values, routed=True) or ()
        selection = self._selection(key, values, selector, self.registry.policy.current())
        args, kwargs = self.checked(values)
        refusals = {spec: self.runner(spec).refusal(args, kwargs) for spec in selection.runners}
        return selection.without({spec: reason for spec, reason in refusals.items() if reason is not None})

    def _facts(self, key: tuple[Any, ...], values: Values) -> CallFacts:
        platform, arch = self.registry.place(key[0])
        return CallFacts(
            platform=platform,
            arch=arch,
            dtypes=tuple((name, dtype_name(one.dtype)) for name, one in self.arguments.tensors(values)),
            passed=self.arguments.keyword_only.intersection(self.arguments.given(values)),
            buffers=frozenset(self.arguments.writes),
            needs_grad=key[1],
            amx=self._amx(platform),
        )

    def _amx(self, platform: str) -> bool:
        return platform == "cpu" and self.registry.detector.cpu_has_amx()

    def _describe(self, values: Values) -> str:
        given = self.arguments.given(values)
        parts = [
            f"{n}: {dtype_name(v.dtype)} {tuple(v.shape)}" if isinstance(v, Tensor) else f"{n}={v!r:.40}"
            for n, v in given.items()
        ]
        device = next((f" on {v.device}" for v in given.values() if isinstance(v, Tensor)), "")
        return ", ".join(parts) + device

    def runner(self, spec: KernelSpec) -> Runner:
        """Make a kernel ready to be called; a target that is a string is imported at its first call."""
        op = self.op
        if spec.backend != OWN:
            return Runner(spec, spec.target if callable(spec.target) else _late(spec), spec.rejects)
        if callable(spec.target):
            return Runner(spec, functools.partial(spec.target, op), None)
        if spec.kernel_backend is KernelBackend.TORCH_COMPILE and not hasattr(op, op.method_of(spec)):
            return Runner(spec, op.compiled_native, None)
        gate = None if spec.platform or spec.selector == "native" else getattr(op, "rejects", None)
        rejects = gate and functools.partial(gate, spec.kernel_backend)
        return Runner(spec, getattr(op, op.method_of(spec)), rejects)

    def _tell_unforced(self, selection: Selection, policy: Policy) -> None:
        word, label = selection.unforced, self.op.label
        if not word:
            return
        message = f"{label} has no kernel for the forced selector {word!r} ({policy.sources.get('force')})"
        if policy.strict:
            raise NoKernelError(f"strict: {message}\n{selection.table()}")
        if self.registry.tell_once("force", label, word):
            LOGGER.warning("%s; %s runs instead", message, selection.winner)

    def _no_kernel(self, selection: Selection, selector: str | None) -> NoKernelError:
        asked = "" if selector is None else f" by selector {selector!r}"
        error = NoKernelError(
            f"no kernel can run {self.op.label!r}{asked} with {selection.call}\n{selection.table()}\n"
            f"Change the call as a reason asks, or install a backend that covers it "
            f"(`opgraft explain {self.op.label}`)."
        )
        named = (selector or "").partition("/")[0]
        error.__cause__ = next((one.error for one in self.registry.backends() if one.name == named), None)
        return error


def _transformed() -> bool:
    return _transform() is not None or forward_ad._current_level >= 0  # noqa: SLF001 - no public reader


def _late(spec: KernelSpec) -> Callable[..., Any]:
    load = functools.cache(spec.load)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return load()(*args, **kwargs)

    return kernel
