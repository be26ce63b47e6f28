"""A selection turned into a direct call, and kept.

Three speeds, each a fallback of the one before it:

1. *kept*: the handle holds the last choice as one tuple, a guard and a kernel. The guard is one C
   call that compares type, dispatch keys, dtype, device and number of dims of the tensors with
   those of the call that was chosen for. It is kept only while nothing else has a say, and taken
   back by whatever gains one (a registration, a policy, a scope, a trace, a hook).
2. *known*: all that can be known from devices, dtypes and which parameters are passed is decided
   once and looked up; shapes are checked and ``rejects`` asked per call.
3. *chosen*: the ladder is walked.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from opgraft.arguments import Values, dtype_name, tensors_of
from opgraft.checked import check_result
from opgraft.errors import NoKernelError, NotSupported, PluginError, add_note
from opgraft.selection import CallFacts, Selection, select
from opgraft.spec import OWN, KernelBackend, KernelSpec
from opgraft.tracing import TraceRecord

if TYPE_CHECKING:
    from opgraft.fused_op import BaseFusedOp
    from opgraft.kernel_registry import KernelRegistry
    from opgraft.policy import Policy

_PLAIN: Final = (Tensor, torch.nn.Parameter)


@dataclass(slots=True, eq=False)
class Runner:
    """A kernel ready to be called; its target is resolved at its first call."""

    spec: KernelSpec
    kernel: Callable[..., Any] | None
    rejects: Callable[..., str | None] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel."""
        kernel = self.kernel
        if kernel is None:
            kernel = self.kernel = self.spec.load()
        return kernel(*args, **kwargs)

    def refusal(self, args: list[Any], kwargs: dict[str, Any]) -> str | None:
        """Ask the kernel why this call cannot run on it; None where it can."""
        if self.rejects is None:
            return None
        try:
            reason = self.rejects(*args, **kwargs)
        except Exception as error:
            add_note(error, f"raised by 'rejects' of kernel {self.spec}")
            raise
        if reason is not None and not (isinstance(reason, str) and reason):
            message = (
                f"'rejects' of kernel {self.spec} must return a reason or None, got {reason!r}"
            )
            raise PluginError(message)
        return reason


@dataclass(slots=True, eq=False)
class Choice:
    """A selection and its kernels, for all calls of the same key."""

    selection: Selection
    runners: tuple[Runner, ...]
    kept: tuple[Callable[..., bool], Callable[..., Any]] | None = None
    settled: bool = True  # False once a kernel has passed a call on


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
        self.parameters = op.call_parameters()
        self.check = op.argument_check()
        self.validate: Callable[..., None] | None = getattr(op, "validate", None)
        self._generation = -1
        self._choices: weakref.WeakKeyDictionary[Policy, dict[Any, Choice]]
        self._policy: Policy | None = None
        self._known: dict[Any, Choice] = {}

    # -- known -------------------------------------------------------------------------------

    def call(
        self,
        values: Values,
        selector: str | None = None,
        *,
        routed: bool = False,
        handle: Handle | None = None,
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
        handle
            Whose kept choice may be renewed.

        """
        op, registry = self.op, self.registry
        key = self._key(values, routed=routed)
        if key is None:
            return self._route(values, selector)
        turn = registry.turn
        policy = registry.policy.current()
        selector = op.pinned if selector is None or selector == "auto" else selector
        known = self._known_for(policy)
        choice = known.get((selector, key))
        if choice is None:
            choice = self.choose(values, selector, policy)
            known[selector, key] = choice
        result = self._run(choice, values, policy, selector)
        if handle is not None and selector is None and not (policy.trace or policy.check):
            self._keep(handle, turn, choice, values)
        return result

    def _key(self, values: Values, *, routed: bool) -> tuple[Any, ...] | None:
        """Give all that a choice depends on, or None where torch.ops has to take the call."""
        recording = torch.is_grad_enabled()
        device = None
        needs_grad = False
        parts: list[Any] = []
        if not routed and torch._C._len_torch_dispatch_stack():  # noqa: SLF001 - no public reader
            return None
        for value, default in zip(values, self.parameters.defaults, strict=True):
            kind = type(value)
            if kind in _PLAIN or (routed and isinstance(value, Tensor)):
                if device is None:
                    device = value.device
                elif value.device != device:
                    self.check.format(values)
                parts.append(value.dtype)
                needs_grad = needs_grad or (recording and value.requires_grad)
            elif value is default:
                parts.append(None)
            elif isinstance(value, Tensor):
                return None
            elif kind in {list, tuple, dict}:
                nested = tensors_of(value)
                if not routed and any(type(one) not in _PLAIN for one in nested):
                    return None
                device = device or (nested[0].device if nested else None)
                needs_grad = needs_grad or any(recording and one.requires_grad for one in nested)
                parts.append(tuple((one.dtype, one.device) for one in nested))
            else:
                parts.append(kind)
        return device, needs_grad, *parts

    def _known_for(self, policy: Policy) -> dict[Any, Choice]:
        if self._generation != self.registry.generation:
            self._generation = self.registry.generation
            self._choices = weakref.WeakKeyDictionary()
            self._policy = None
        if policy is not self._policy:
            self._known = self._choices.setdefault(policy, {})
            self._policy = policy
        return self._known

    def _route(self, values: Values, selector: str | None) -> Any:
        """Let torch's dispatcher see a call on fake tensors and other subclasses."""
        args, kwargs = self.parameters.split(values)
        function = self.op.torch_function
        if function is None:
            return self.op.forward_native(*args, **kwargs)
        return function(*args, **kwargs, backend=selector)

    def _run(self, choice: Choice, values: Values, policy: Policy, selector: str | None) -> Any:
        op = self.op
        args, kwargs = self.parameters.split(values)
        self.check.shapes(values)
        if self.validate is not None:
            self.validate(*args, **kwargs)
        refusals: dict[KernelSpec, str] = {}
        for runner in choice.runners:
            reason = runner.refusal(args, kwargs)
            if reason is not None:
                refusals[runner.spec] = reason
                continue
            try:
                result = runner(*args, **kwargs)
            except NotSupported as error:
                refusals[runner.spec] = f"not supported: {error}"
                choice.settled = False
                continue
            except Exception as error:
                self.note(error, runner.spec)
                raise
            if policy.check:
                check_result(op, runner.spec, values, result)
            if policy.trace or self.registry.traces:
                self._record(runner.spec, values)
            return result
        raise self._no_kernel(choice.selection.without(refusals), selector)

    def prepare(self, values: Values) -> None:
        """Check a call that no kernel will run: one on fake tensors."""
        args, kwargs = self.parameters.split(values)
        self.check.format(values)
        self.check.shapes(values)
        if self.validate is not None:
            self.validate(*args, **kwargs)

    def _record(self, spec: KernelSpec, values: Values) -> None:
        tensors = tuple(
            f"{one.dtype}{list(one.shape)}"
            for _, one in self.parameters.tensors_in(values)
        )
        record = TraceRecord(op=self.op.label, kernel=spec.label, tensors=tensors)
        for trace in self.registry.traces or (self.registry.process_trace,):
            trace.add(record)

    # -- chosen ------------------------------------------------------------------------------

    def choose(self, values: Values, selector: str | None, policy: Policy) -> Choice:
        """Walk the ladder for these values, and make its winners ready to be called."""
        self.check.format(values)
        registry, op = self.registry, self.op
        registry.usable()
        own = op.own_kernels()
        if selector is not None:
            registry.check_selector(selector, own)
        elif policy.force is not None:
            registry.check_force(policy.force, (*own, *op.kernels_of_other_classes()))
        selection = self.select(self.facts(values), self.describe(values), selector, policy)
        if selection.unforced:
            self._unforced(selection, policy)
        if selection.winner is None:
            raise self._no_kernel(selection, selector)
        return Choice(selection, tuple(self._runner(spec) for spec in selection.runners))

    def select(
        self,
        facts: CallFacts,
        call: str,
        selector: str | None,
        policy: Policy,
        *,
        hardware: bool = True,
    ) -> Selection:
        """Give the selection for a call, or for hardware that is not here."""
        op, registry = self.op, self.registry
        kernels = [*op.own_kernels(facts.platform), *registry.candidates(op.op, hardware=hardware)]
        records = registry.backends()
        if not hardware:
            records = tuple(r for r in records if r.status != "inactive")
        return select(
            op=op.label,
            call=call,
            facts=facts,
            kernels=kernels,
            priority=op.priority,
            policy=policy,
            selector=selector,
            records=records,
            native_supported=op.native_supported,
        )

    def resolved(self, facts: CallFacts, *, strict: bool) -> Callable[..., Any] | None:
        """Give the kernel for a device, so that nothing is chosen inside a trace.

        With ``strict``, only a forced or pinned one; None where there is none.
        """
        policy = self.registry.policy.current()
        call = f"a call on {facts.platform}"
        selection = self.select(facts, call, self.op.pinned, policy)
        if selection.winner is None or (strict and selection.decided_by not in {"call", "force"}):
            return None
        runner = self._runner(selection.winner)
        return runner.kernel or selection.winner.load()

    def facts(self, values: Values) -> CallFacts:
        """Read what selection may know of a call."""
        tensors = [one for _, one in self.parameters.tensors_in(values)]
        device = tensors[0].device if tensors else torch.get_default_device()
        platform, arch = self.registry.place(device)
        rows = zip(self.parameters.names, values, strict=True)
        recording = torch.is_grad_enabled()
        return CallFacts(
            platform=platform,
            arch=arch,
            device=str(device),
            dtypes=tuple((n, dtype_name(v.dtype)) for n, v in rows if isinstance(v, Tensor)),
            passed=self.parameters.passed(values),
            needs_grad=recording and any(one.requires_grad for one in tensors),
            amx=platform == "cpu" and self.registry.detector.cpu_has_amx(),
        )

    def describe(self, values: Values) -> str:
        """Write a call for people: ``seq_lens: int32 (4,) on cpu``."""
        rows = list(zip(self.parameters.names, values, self.parameters.defaults, strict=True))
        parts = [
            f"{name}: {dtype_name(v.dtype)} {tuple(v.shape)}"
            if isinstance(v, Tensor)
            else f"{name}={v!r:.40}"
            for name, v, default in rows
            if v is not default
        ]
        devices = {str(v.device) for _, v, _ in rows if isinstance(v, Tensor)}
        return ", ".join(parts) + (f" on {' and '.join(sorted(devices))}" if devices else "")

    def explain(self, values: Values, selector: str | None = None) -> Selection:
        """Give the selection for a real call, per-call refusals included; runs nothing."""
        policy = self.registry.policy.current()
        self.check.format(values)
        self.check.shapes(values)
        selector = selector if selector is not None else self.op.pinned
        selection = self.select(self.facts(values), self.describe(values), selector, policy)
        args, kwargs = self.parameters.split(values)
        refusals = {}
        for spec in selection.runners:
            reason = self._runner(spec).refusal(args, kwargs)
            if reason is not None:
                refusals[spec] = reason
        return selection.without(refusals)

    def _runner(self, spec: KernelSpec) -> Runner:
        op = self.op
        if spec.backend != OWN:
            kernel = None if isinstance(spec.target, str) else spec.target
            return Runner(spec, kernel, spec.rejects)
        if spec.platform and not isinstance(spec.target, str):
            return Runner(spec, functools.partial(spec.target, op), None)
        if spec.kernel_backend is KernelBackend.TORCH_COMPILE and not spec.platform:
            return Runner(spec, op.compiled_native(), None)
        gate = op.rejects if hasattr(op, "rejects") and spec.selector != "native" else None
        by = None if spec.platform or gate is None else functools.partial(gate, spec.kernel_backend)
        return Runner(spec, getattr(op, op.method_of(spec)), by)

    def _unforced(self, selection: Selection, policy: Policy) -> None:
        word, label = selection.unforced, self.op.label
        source = policy.sources.get("force", "")
        message = f"{label} has no kernel for the forced selector {word!r} ({source})"
        if policy.strict:
            raise NoKernelError(f"strict: {message}\n{selection.table()}")
        if self.registry.warn_once("force", label, word):
            self.registry.logger.warning("%s; it runs %s instead", message, selection.winner)

    def _no_kernel(self, selection: Selection, selector: str | None) -> NoKernelError:
        asked = f" by selector {selector!r}" if selector is not None else ""
        message = (
            f"no kernel can run {self.op.label!r}{asked} with {selection.call}\n"
            f"{selection.table()}\nChange the call as a reason asks, or install a backend that "
            f"covers it (`opgraft explain {self.op.label}`)."
        )
        error = NoKernelError(message)
        named = (selector or "").partition("/")[0]
        error.__cause__ = next(
            (r.error for r in self.registry.backends() if r.name == named and r.error), None
        )
        return error

    # -- kept --------------------------------------------------------------------------------

    def _keep(self, handle: Handle, turn: int, choice: Choice, values: Values) -> None:
        """Keep a choice on the handle where nothing but its guard has to be asked per call."""
        tensors = handle.guarded(values)
        first = choice.runners[0]
        if (
            tensors is None
            or not choice.settled
            or first.rejects is not None
            or first.kernel is None
            or self.validate is not None
            or first.spec.leaves_out.difference(self.parameters.optional)
            or any(type(one) is not Tensor for one in tensors)
        ):
            return
        if choice.kept is None or not choice.kept[0](*tensors):
            choice.kept = tensor_guard(tensors), first.kernel
        self.registry.keep(handle, turn, choice.kept)

    def note(self, error: BaseException, spec: KernelSpec) -> None:
        """Say on an exception whose kernel raised it."""
        add_note(error, f"raised by kernel {spec} of op {self.op.label!r}")

    def failed(self, error: Exception, kernel: Callable[..., Any], values: Values) -> Any:
        """Deal with what a kept kernel raised: pass the call on, or note and raise."""
        if isinstance(error, NotSupported):
            self.registry.drop_kept()
            return self.call(values)
        for choice in list(self._known.values()):
            for runner in choice.runners:
                if runner.kernel is kernel:
                    self.note(error, runner.spec)
                    raise error
        raise error


def tensor_guard(tensors: list[Tensor]) -> Callable[..., bool]:
    """Make a predicate: tensors of the same type, keys, dtype, device and number of dims.

    One C call instead of a property read for each of these (0.10 against 0.16 µs for one tensor,
    and it covers dispatch keys and dims as well).
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        free: list[list[int | None]] = [[None] * one.dim() for one in tensors]
        guards = TensorGuards(*tensors, dynamic_dims_sizes=free, dynamic_dims_strides=free)
        check: Callable[..., bool] = guards.check
    except (ImportError, TypeError):  # pragma: no cover - a torch whose guards look otherwise
        facts = [(one.dtype, one.device, one.dim()) for one in tensors]

        def check(*others: Any) -> bool:
            return len(others) == len(facts) and all(
                type(one) is Tensor and (one.dtype, one.device, one.dim()) == known
                for one, known in zip(others, facts, strict=True)
            )

    return check


def _never(*_: Any) -> bool:
    return False


class Handle:
    """What stays of an op for its callers: one function that is valid for ever.

    ``function`` is what ``opgraft.ops.<group>.<name>`` is: the op's parameters and ``backend``.

    Parameters
    ----------
    op
        The op.
    registry
        Where it is registered.

    """

    def __init__(self, op: BaseFusedOp, registry: KernelRegistry) -> None:
        parameters = op.call_parameters()
        self.registry = registry
        self._required = [parameters.names.index(name) for name in parameters.required]
        self._optional = [parameters.names.index(name) for name in parameters.optional]
        dims = [d for n in parameters.required for d, _ in op.argument_check().dims.get(n, ())]
        alone = len(set(dims)) == len(dims)
        self._can_keep = bool(self._required) and not parameters.is_variadic and alone
        self.function, self._set = _build(self, op)
        self.bind(op)

    def bind(self, op: BaseFusedOp) -> None:
        """Make this the handle of an op: of the first one, or of one that replaces it."""
        self.op = op
        self.drop()
        self.function.op = op  # type: ignore[attr-defined]

    def keep(self, choice: tuple[Callable[..., bool], Callable[..., Any]]) -> None:
        """Hold a choice until it is dropped."""
        self._set(choice)

    def drop(self) -> None:
        """Hold nothing."""
        self._set((_never, _never))

    def guarded(self, values: Values) -> list[Tensor] | None:
        """Give the tensors that a kept choice would be guarded by; None where none may be kept."""
        if not self._can_keep or any(values[i] is not None for i in self._optional):
            return None
        return [values[i] for i in self._required]

    def slow(self, values: Values, selector: str | None) -> Any:
        """Take a call that the kept choice does not cover."""
        op = self.op
        if op.has_hooks():
            args, kwargs = op.call_parameters().split(values)
            return op(*args, **kwargs, backend=selector)
        if op.is_torch_compile and selector is None:
            args, kwargs = op.call_parameters().split(values)
            return op.forward(*args, **kwargs)
        return op.dispatcher.call(values, selector, handle=self)

    def failed(self, error: Exception, kernel: Callable[..., Any], values: Values) -> Any:
        """Take over where a kept kernel raised."""
        return self.op.dispatcher.failed(error, kernel, values)


def _build(
    handle: Handle, op: BaseFusedOp
) -> tuple[Callable[..., Any], Callable[[tuple[Any, Any]], None]]:
    """Write the handle's function: the kept choice inlined, everything else behind it.

    Generated, because ``*args`` alone costs a third of the whole budget.
    """
    parameters = op.call_parameters()
    group, _, name = op.op.partition(".")
    values = "".join(f"{one}, " for one in parameters.names)
    guarded = ", ".join(parameters.required)
    absent = "".join(f" and {one} is None" for one in parameters.optional)
    inner = [one for one in parameters.names if one not in parameters.optional]
    passed = ", ".join(f"{n}={n}" if n in parameters.keyword_only else n for n in inner)
    positional = [n for n in parameters.optional if n not in parameters.keyword_only]
    if positional:
        before = [n for n in parameters.names if n not in parameters.keyword_only]
        only = [f"{n}={n}" for n in inner if n in parameters.keyword_only]
        passed = ", ".join([*before, *only])
    fast = f"""
        if backend is None{absent}:
            guard, kernel = kept
            if guard({guarded}):
                try:
                    return kernel({passed})
                except Exception as error:
                    return failed(error, kernel, ({values}))
"""
    usable = bool(guarded) and not parameters.is_variadic
    source = f"""
def build(slow, failed, kept):
    def {name}({parameters.source("backend=None")}):{fast if usable else ""}
        return slow(({values}), backend)

    def keep(choice):
        nonlocal kept
        kept = choice

    return {name}, keep
"""
    namespace = parameters.namespace()
    exec(source, namespace)  # noqa: S102
    function, keep = namespace["build"](handle.slow, handle.failed, (_never, _never))
    backend = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY, default=None)
    shown = list(parameters.signature.parameters.values())
    at = len(shown) - (1 if shown and shown[-1].kind is shown[-1].VAR_KEYWORD else 0)
    shown[at:at] = [backend]
    function.__signature__ = parameters.signature.replace(parameters=shown)
    function.__module__ = f"opgraft.ops.{group}"
    function.__qualname__ = name
    function.__doc__ = type(op).__doc__
    function.handle = handle
    return function, keep
