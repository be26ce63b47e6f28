"""What callers hold: one plain function per op, with the last choice kept inside it.

The function keeps a guard and a kernel. The guard is one C call that compares type, dispatch keys,
dtype, device and number of dims of the call's tensors with those of the call that was chosen for.
The pair is kept only while nothing else has a say, and taken back by whatever gains one: a
registration, a policy, a scope, a trace, a hook. ``docs/call-path.md`` tells the whole story.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.utils._python_dispatch
from torch import Tensor
from torch.autograd import forward_ad

from opgraft.arguments import Arguments, Values
from opgraft.errors import NotSupported

if TYPE_CHECKING:
    from opgraft.dispatch import Choice, Runner
    from opgraft.fused_op import BaseFusedOp
    from opgraft.kernel_registry import KernelRegistry

_MODES: Final = torch.utils._python_dispatch  # noqa: SLF001 - the guard does not see dispatch modes, and a flag costs least
_PLACES: Final = 2
"""Choices kept per pattern: code that alternates between two dtypes or devices finds both."""

Kept = tuple[Callable[..., bool], Callable[..., Any]]


class OpFunction(Protocol):
    """What callers call; ``op`` is the op that it stands for."""

    op: BaseFusedOp

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the best kernel; takes the op's parameters and ``backend``."""


class _Attributes(dict[str, Any]):
    """Attributes of a function that shows only those that ``functools.wraps`` may copy to another one.

    A wrapper with the others would be taken for the function inside a graph, and its own body left out.
    """

    def __iter__(self) -> Iterator[str]:
        return (name for name in super().__iter__() if not name.startswith("_torchdynamo"))

    def keys(self) -> list[str]:  # type: ignore[override]
        """List the same."""
        return [*self]


class Handle:
    """What stays of an op for its callers, whatever is registered or looked at again.

    ``function`` is what ``opgraft.ops.<group>.<name>`` is: the op's parameters and ``backend``.

    Parameters
    ----------
    op
        The op.
    registry
        Where it is registered.

    """

    def __init__(self, op: BaseFusedOp, registry: KernelRegistry) -> None:
        self.op_id = op.op
        self.registry = registry
        self._names: dict[str, Any] = {}
        self.bind(op)

    def bind(self, op: BaseFusedOp) -> None:
        """Make this the handle of an op: the first one, or one that replaces it, whatever its parameters are.

        The function is generated, because taking ``*args`` and calling on with them costs more than the guard.
        """
        self.op, arguments = op, op.arguments()
        buffers = tuple(arguments.writes)
        self._patterns = [arguments.required, *([arguments.required + buffers] if buffers else [])]
        validate: Callable[..., None] | None = getattr(op, "validate", None)
        kept = "".join(
            _kept_call(arguments, i, tensors, "_validate" if validate else "")
            for i, tensors in enumerate(self._patterns)
        )
        body = f"{kept if arguments.keeps else ''}\n    return _slow(({arguments.listed}), backend)"
        name = op.op.partition(".")[2]
        made = arguments.compile(name, arguments.source(arguments.with_backend()), body)
        made.update(_slow=self.slow, _failed=self.failed, _fits=arguments.fits, _validate=validate)
        made.update(_modes=_MODES, _forward_ad=forward_ad)
        self._names = self._names or made
        function: Any = self._names[name]
        for part in ("__code__", "__defaults__", "__kwdefaults__"):
            setattr(function, part, getattr(made[name], part))
        self._names.update({**made, name: function})
        function.__signature__, function.__doc__ = arguments.with_backend(), type(op).__doc__
        function.__module__, function.__qualname__, function.op = "opgraft.ops", op.op, op
        # What torch.compile takes in its place: inside a graph, and where it is given the function itself.
        traced: Any = lambda *args, **kwargs: self._traced(*args, **kwargs)  # noqa: E731, PLW0108 - torch wants a function
        shown = {"_torchdynamo_inline": traced, "_torchdynamo_orig_callable": traced}
        function.__dict__ = _Attributes({**vars(function), **shown, "_torchdynamo_wrapper_id": id(function)})
        self.function: OpFunction = function
        self.drop()

    def drop(self) -> None:
        """Keep nothing."""
        for name in [f"_kept{pattern}_{place}" for pattern in range(len(self._patterns)) for place in range(_PLACES)]:
            self._names[name] = (_never, _never)

    def keep(self, pattern: int, choice: Kept) -> None:
        """Keep a choice for calls of a pattern, in front of the one that is kept already."""
        names = [f"_kept{pattern}_{place}" for place in range(_PLACES)]
        kept = [choice, *(one for one in map(self._names.__getitem__, names) if one is not choice)]
        self._names.update(zip(names, kept, strict=False))

    def _whole(self, selector: str | None) -> bool:
        """Say whether the module itself has to take the call."""
        return self.op.has_hooks() or (self.op.is_torch_compile and selector is None)

    def _traced(self, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        """Stand for the function inside a graph."""
        operator = None if self._whole(backend) else self.op.torch_function
        return (operator or self.op)(*args, backend=backend, **kwargs)

    def slow(self, values: Values, selector: str | None) -> Any:
        """Take a call that the kept choice does not cover, and keep its choice where it may."""
        op, turn = self.op, self.registry.turn
        if self._whole(selector):
            args, kwargs = op.arguments().split(values)
            return op(*args, **kwargs, backend=selector)
        dispatcher, registry = op.dispatcher, self.registry
        key = dispatcher.key(values)
        if key is None:
            return dispatcher.call(values, selector)
        policy = registry.policy.current()
        choice = dispatcher.choice(key, values, policy, selector)
        result = dispatcher.run(choice, values, policy, selector)
        if selector is None and dispatcher.arguments.keeps and registry.keeps(policy) and not op.has_state():
            self._keep(choice, values, turn)
        return result

    def _keep(self, choice: Choice, values: Values, turn: int) -> None:
        """Keep a choice where nothing but its guard, shapes and ``validate`` have to be asked per call."""
        arguments, first = self.op.arguments(), choice.runners[0]
        given = {n: one for n, one in zip(arguments.names, values, strict=True) if one is not None}
        tensors = [one for one in given.values() if isinstance(one, Tensor)]
        pattern = next((i for i, names in enumerate(self._patterns) if len(names) == len(tensors)), None)
        passed = arguments.given(values).keys() - {*arguments.optional}
        if (
            pattern is not None
            and given.keys() >= {*self._patterns[pattern]}
            and choice.settled
            and not first.spec.leaves_out.difference(arguments.optional)
            and not choice.selection.left_out & passed  # a call without them may be another kernel's
            and all(type(one) is Tensor and not one.requires_grad for one in tensors)  # no guard sees the grad mode
        ):
            if choice.kept is None or not choice.kept[0](*tensors):
                choice.kept = tensor_guard(tensors), self._gated(first) if first.rejects else first.kernel
            self.registry.keep(self, turn, pattern, choice.kept)

    def _gated(self, runner: Runner) -> Callable[..., Any]:
        """Ask a kernel's ``rejects`` before each call; a call that it refuses is chosen for anew."""

        def kernel(*args: Any, **kwargs: Any) -> Any:
            dispatcher, reason = self.op.dispatcher, runner.refusal(args, kwargs)
            if reason is not None:
                return dispatcher.call(dispatcher.arguments.bind(*args, **kwargs), refused={runner.spec: reason})
            try:
                return runner.kernel(*args, **kwargs)
            except Exception as error:
                dispatcher.note(error, runner.spec)
                raise

        return kernel

    def failed(self, error: Exception, kernel: Callable[..., Any], values: Values) -> Any:
        """Take over where a kept kernel raised: pass the call on, or say whose it was and raise."""
        if isinstance(error, NotSupported):
            self.registry.drop_kept()
            return self.slow(values, None)
        self.op.dispatcher.blame(error, kernel)
        raise error


def tensor_guard(tensors: list[Tensor]) -> Callable[..., bool]:
    """Make a predicate: tensors of the same type, keys, dtype, device and number of dims.

    One C call takes 0.10 µs for one tensor; reading type, dtype, device and dims as properties
    takes 0.16 µs and leaves dispatch keys out (Python 3.11, torch 2.13, minimum of 60 rounds).
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        free: Any = [[None] * one.dim() for one in tensors]
        check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=free, dynamic_dims_strides=free).check
    except (ImportError, TypeError):  # pragma: no cover - a torch whose guards look otherwise keeps nothing
        return _never
    return check


def _never(*_: Any) -> bool:
    return False


def _kept_call(arguments: Arguments, pattern: int, tensors: tuple[str, ...], validate: str) -> str:
    """Write one kept choice: the guard on these tensors, no other tensor given, then the kernel."""
    absent = [n for n in arguments.optional if n not in tensors]
    given = tensors[len(arguments.required) :]
    condition = "".join([*(f" and {n} is None" for n in absent), *(f" and {n} is not None" for n in given)])
    dual = " and _forward_ad._current_level < 0" if arguments.floats else ""
    positional = [n for n in arguments.names if n not in arguments.keyword_only]
    named = [f"{n}={n}" for n in arguments.names if n in arguments.keyword_only and n not in absent]
    passed = ", ".join([*positional, *named])
    fits = f" and _fits({arguments.listed})" if arguments.relates(tensors) else ""
    return f"""
    if backend is None and not _modes._is_in_torch_dispatch_mode{dual}{condition}:""" + "".join(
        f"""
        _guard, _kernel = _kept{pattern}_{place}
        if _guard({", ".join(tensors)}){fits}:
            {validate and f"{validate}({passed})"}
            try:
                return _kernel({passed})
            except Exception as _error:
                return _failed(_error, _kernel, ({arguments.listed}))"""
        for place in range(_PLACES)
    )
