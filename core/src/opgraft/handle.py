"""What callers hold: one plain function per op, with the last choice kept inside it.

The function keeps a guard and a kernel. The guard is one C call that compares type, dispatch keys,
dtype, device and number of dims of the call's tensors with those of the call that was chosen for.
The pair is kept only while nothing else has a say, and taken back by whatever gains one: a
registration, a policy, a scope, a trace, a hook. ``docs/call-path.md`` tells the whole story.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from opgraft.arguments import Arguments, Values
from opgraft.errors import NotSupported

if TYPE_CHECKING:
    from opgraft.dispatch import Choice
    from opgraft.fused_op import BaseFusedOp
    from opgraft.kernel_registry import KernelRegistry

Kept = tuple[Callable[..., bool], Callable[..., Any]]


class OpFunction(Protocol):
    """What callers call; ``op`` is the op that it stands for."""

    op: BaseFusedOp

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the best kernel; takes the op's parameters and ``backend``."""


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
        arguments = op.arguments()
        buffers = tuple(arguments.writes)
        self.patterns = [arguments.required, *([arguments.required + buffers] if buffers else [])]
        self._keeps = bool(arguments.required) and not arguments.variadic
        self.function, self.keep = _build(self, op)
        self.bind(op)

    def bind(self, op: BaseFusedOp) -> None:
        """Make this the handle of an op: the first one, or one that replaces it."""
        self.op = op
        self.function.op = op
        self.drop()

    def drop(self) -> None:
        """Keep nothing."""
        for pattern in range(len(self.patterns)):
            self.keep(pattern, (_never, _never))

    def slow(self, values: Values, selector: str | None) -> Any:
        """Take a call that the kept choice does not cover, and keep its choice where it may."""
        op = self.op
        if op.has_hooks() or (op.is_torch_compile and selector is None):
            args, kwargs = op.arguments().split(values)
            return op(*args, **kwargs, backend=selector)
        dispatcher, turn = op.dispatcher, self.registry.turn
        key = dispatcher.key(values)
        if key is None or selector is not None:
            return dispatcher.call(values, selector)
        policy = self.registry.policy.current()
        choice = dispatcher.choice(key, values, policy, None)
        result = dispatcher.run(choice, values, policy, None)
        if self._keeps and not (policy.trace or policy.check):
            self._keep(choice, values, turn)
        return result

    def _keep(self, choice: Choice, values: Values, turn: int) -> None:
        """Keep a choice where nothing but its guard, shapes and ``validate`` have to be asked per call."""
        arguments, first = self.op.arguments(), choice.runners[0]
        given = {n: one for n, one in zip(arguments.names, values, strict=True) if one is not None}
        tensors = [one for one in given.values() if isinstance(one, Tensor)]
        pattern = next((i for i, names in enumerate(self.patterns) if len(names) == len(tensors)), None)
        if (
            pattern is not None
            and given.keys() >= {*self.patterns[pattern]}
            and choice.settled
            and first.rejects is None
            and not first.spec.leaves_out.difference(arguments.optional)
            and all(type(one) is Tensor for one in tensors)
        ):
            if choice.kept is None or not choice.kept[0](*tensors):
                choice.kept = tensor_guard(tensors), first.kernel
            self.registry.keep(self, turn, pattern, choice.kept)

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
    except (ImportError, TypeError):  # pragma: no cover - a torch whose guards look otherwise
        return _plain_guard(tensors)
    return check


def _plain_guard(tensors: list[Tensor]) -> Callable[..., bool]:
    facts = [(Tensor, one.dtype, one.device, one.dim(), one.requires_grad) for one in tensors]

    def check(*others: Any) -> bool:
        return facts == [
            (type(one), one.dtype, one.device, one.dim(), one.requires_grad) if type(one) is Tensor else None
            for one in others
        ]

    return check


def _never(*_: Any) -> bool:
    return False


def _build(handle: Handle, op: BaseFusedOp) -> tuple[OpFunction, Callable[[int, Kept], None]]:
    """Write the handle's function: the kept choices inlined, everything else behind them.

    Generated, because taking ``*args`` and calling on with them costs more than the guard.
    """
    arguments, validate = op.arguments(), getattr(type(op), "validate", None)
    name = op.op.partition(".")[2]
    body = "\n".join(
        _kept_call(arguments, i, tensors, validate is not None) for i, tensors in enumerate(handle.patterns)
    )
    source = f"""
        kept0 = kept1 = never
        def {name}{arguments.source(arguments.with_backend())}:
            if backend is None:
                {body if arguments.required and not arguments.variadic else "pass"}
            return slow(({arguments.listed}), backend)

        def keep(pattern, choice):
            nonlocal kept0, kept1
            if pattern:
                kept1 = choice
            else:
                kept0 = choice

        return {name}, keep"""
    build = arguments.compile("build", "(slow, failed, fits, validate, never)", source)["build"]
    check = functools.partial(validate, op) if validate else None
    function, keep = build(handle.slow, handle.failed, arguments.fits, check, (_never, _never))
    function.__signature__ = arguments.with_backend()
    function.__module__, function.__qualname__ = "opgraft.ops", op.op
    function.__doc__ = type(op).__doc__
    return function, keep


def _kept_call(arguments: Arguments, pattern: int, tensors: tuple[str, ...], validated: bool) -> str:  # noqa: FBT001
    """Write one kept choice: the guard on these tensors, no other tensor given, then the kernel."""
    absent = [n for n in arguments.optional if n not in tensors]
    condition = " and ".join(
        [*(f"{n} is None" for n in absent), *(f"{n} is not None" for n in tensors[len(arguments.required) :])]
    )
    named = [n for n in arguments.names if n in arguments.keyword_only and n not in absent]
    passed = ", ".join([*(n for n in arguments.names if n not in arguments.keyword_only), *(f"{n}={n}" for n in named)])
    fits = f" and fits({arguments.listed})" if len(tensors) > 1 else ""
    return f"""
                if {condition or "True"}:
                    guard, kernel = kept{pattern}
                    if guard({", ".join(tensors)}){fits}:
                        {f"validate({passed})" if validated else ""}
                        try:
                            return kernel({passed})
                        except Exception as error:
                            return failed(error, kernel, ({arguments.listed}))"""
