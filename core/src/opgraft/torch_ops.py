"""The ops as torch.library operators: ``torch.ops.opgraft.<group>_<name>``.

Each op is defined once, whatever is reloaded: the operator looks the op up when it is called.
``.default`` takes no caller buffer; ``.out`` takes them all; an op with several buffers has one
more overload for each subset, named after the buffers that it takes.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.library import Library, infer_schema

from opgraft.errors import RegistrationError

if TYPE_CHECKING:
    from opgraft.dispatch import Handle
    from opgraft.fused_op import BaseFusedOp

NAMESPACE: Final = "opgraft"
_library: Final = Library(NAMESPACE, "FRAGMENT")
_handles: Final[dict[str, Handle]] = {}


def define(op: BaseFusedOp, handle: Handle) -> None:
    """Define an op's operators, and let ``torch.compile`` see them instead of the choice.

    An op whose parameters or outputs have no torch schema stays without; it is inlined.

    Parameters
    ----------
    op
        A registered op.
    handle
        Its handle, which outlives it.

    """
    name = op.op.replace(".", "_")
    new = name not in _handles
    _handles[name] = handle
    buffers = tuple(n for n in op.writes if n in op.call_parameters().names)
    if new:
        try:
            for taken in _subsets(buffers):
                _define_overload(op, name, buffers, taken)
        except (ValueError, RegistrationError):
            del _handles[name]
            return
    op.torch_function = handle.function._torchdynamo_inline = _traced(op, name, buffers)  # type: ignore[attr-defined]


def _subsets(buffers: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    sizes = range(len(buffers) + 1)
    return itertools.chain.from_iterable(itertools.combinations(buffers, n) for n in sizes)


def overload_name(buffers: tuple[str, ...], taken: tuple[str, ...]) -> str:
    """Name the overload that takes these caller buffers."""
    if not taken:
        return ""
    return "out" if taken == buffers else "_".join(taken) + "_only"


def _define_overload(
    op: BaseFusedOp, name: str, buffers: tuple[str, ...], taken: tuple[str, ...]
) -> None:
    fresh = _fresh_outputs(op, taken)
    prototype = _prototype(op, buffers, taken, fresh)
    schema = infer_schema(prototype, mutates_args=(*taken, *op.mutates))
    if len(fresh) == 0:
        schema = f"{schema.rpartition('->')[0]}-> ()"
    overload = overload_name(buffers, taken)
    qualified = f"{name}.{overload}" if overload else name
    _library.define(qualified + schema)

    def real(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        return _call(name, args, kwargs, fresh, backend, fake=False)

    def fake(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        return _call(name, args, kwargs, fresh, backend, fake=True)

    _library.impl(qualified, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{qualified}", fake, lib=_library)
    if not taken and not op.mutates and _may_need_grad(op):
        _differentiate(op, name, qualified)


def _call(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fresh: tuple[int, ...],
    backend: str | None,
    *,
    fake: bool,
) -> Any:
    """Run the op as it is now; return the outputs for which no buffer was passed."""
    op = _handles[name].op
    if fake:
        function = getattr(op, "forward_fake", op.forward_native)
        op.dispatcher.prepare(op.call_parameters().bind(*args, **kwargs))
        result = function(*args, **kwargs)
    else:
        values = op.call_parameters().bind(*args, **kwargs)
        result = op.dispatcher.call(values, backend, routed=True)
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    kept = tuple(outputs[i] for i in fresh)
    if not kept:
        return None
    return kept[0] if len(kept) == 1 else kept


def _may_need_grad(op: BaseFusedOp) -> bool:
    rule = op.format_signature.supported_dtypes if op.format_signature else ("float32",)
    names = [n for one in rule.values() for n in one] if isinstance(rule, Mapping) else rule
    return any("float" in name or "complex" in name for name in names)


def _outputs(op: BaseFusedOp) -> int:
    if op.format_signature is None or not op.format_signature.outputs:
        return 1
    return len(op.format_signature.outputs)


def _fresh_outputs(op: BaseFusedOp, taken: tuple[str, ...]) -> tuple[int, ...]:
    written = {op.writes[name] for name in taken}
    return tuple(i for i in range(_outputs(op)) if i not in written)


def _prototype(
    op: BaseFusedOp, buffers: tuple[str, ...], taken: tuple[str, ...], fresh: tuple[int, ...]
) -> Callable[..., Any]:
    """Make a function whose signature torch reads a schema from."""
    signature = op.call_parameters().signature
    parameters = []
    for p in signature.parameters.values():
        if p.name in buffers and p.name not in taken:
            continue
        if p.kind in {p.VAR_POSITIONAL, p.VAR_KEYWORD}:
            message = f"{op.label}: *{p.name} has no torch schema"
            raise RegistrationError(message)
        annotation = _annotation(op, p)
        default = p.default
        if p.name in taken:
            annotation, default = torch.Tensor, p.empty
        parameters.append(p.replace(annotation=annotation, default=default))
    parameters.append(
        inspect.Parameter(
            "backend", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=str | None
        )
    )
    returns: Any = torch.Tensor if len(fresh) == 1 else None
    if len(fresh) > 1:
        returns = tuple[(torch.Tensor,) * len(fresh)]  # type: ignore[misc]

    def prototype() -> None:
        """Carry a signature."""

    prototype.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    return prototype


_ANNOTATIONS: Final[Mapping[str, Any]] = {
    "Tensor": torch.Tensor,
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
}


def _annotation(op: BaseFusedOp, parameter: inspect.Parameter) -> Any:
    text = parameter.annotation
    if not isinstance(text, str):
        if text is parameter.empty:
            message = f"{op.label}: {parameter.name} has no annotation, so no torch schema"
            raise RegistrationError(message)
        return text
    words = [word.strip().removeprefix("torch.") for word in text.split("|")]
    found = [_ANNOTATIONS.get(word) for word in words if word != "None"]
    if len(found) != 1 or found[0] is None:
        message = f"{op.label}: {parameter.name} has annotation {text!r}, which torch cannot express"
        raise RegistrationError(message)
    return found[0] | None if "None" in words else found[0]


def _traced(
    op: BaseFusedOp, name: str, buffers: tuple[str, ...]
) -> Callable[..., Any]:
    """Write what stands for the handle inside a graph: the op's parameters, one operator call."""
    parameters = op.call_parameters()
    packet = getattr(torch.ops.opgraft, name)
    others = [n for n in parameters.names if n not in buffers]
    lines = []
    for taken in reversed(list(_subsets(buffers))):
        overload = overload_name(buffers, taken) or "default"
        passed = ", ".join(
            n if n not in parameters.keyword_only else f"{n}={n}"
            for n in parameters.names
            if n in others or n in taken
        )
        fresh = _fresh_outputs(op, taken)
        condition = " and ".join(f"{n} is not None" for n in taken)
        call = f"packet.{overload}({passed}, backend=backend)"
        names = {op.writes[n]: n for n in taken}
        pad = "        " if condition else "    "
        if condition:
            lines.append(f"    if {condition}:")
        if not taken:
            lines.append(f"{pad}return {call}")
        else:
            target = ", ".join(f"fresh{i}" for i in fresh)
            lines.append(f"{pad}{target} = {call}" if fresh else f"{pad}{call}")
            outputs = [names.get(i, f"fresh{i}") for i in range(_outputs(op))]
            lines.append(f"{pad}return {', '.join(outputs)}")
    body = "\n".join(lines)
    namespace = {**parameters.namespace(), "packet": packet}
    source = f"def {name}({parameters.source('backend=None')}):\n{body}\n"
    exec(source, namespace)  # noqa: S102
    function: Callable[..., Any] = namespace[name]
    return function


def _differentiate(op: BaseFusedOp, name: str, qualified: str) -> None:
    """Differentiate a float op's operator through native."""

    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
    ) -> None:
        del output
        places = [i for i, one in enumerate(inputs) if isinstance(one, torch.Tensor)]
        ctx.save_for_backward(*(inputs[i] for i in places))
        ctx.places = places
        ctx.others = [None if i in places else one for i, one in enumerate(inputs)]
        ctx.keywords = {k: v for k, v in keyword_only_inputs.items() if k != "backend"}

    def backward(ctx: Any, *gradients: Any) -> Any:
        values = list(ctx.others)
        for place, one in zip(ctx.places, ctx.saved_tensors, strict=True):
            wanted = one.is_floating_point() or one.is_complex()
            values[place] = one.detach().requires_grad_(wanted)
        with torch.enable_grad():
            result = _handles[name].op.forward_native(*values, **ctx.keywords)
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        pairs = zip(outputs, gradients, strict=True)
        flowing = [(o, g) for o, g in pairs if g is not None and o.requires_grad]
        leaves = [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]
        found = iter(
            torch.autograd.grad(
                [o for o, _ in flowing], leaves, [g for _, g in flowing], allow_unused=True
            )
        )
        return tuple(
            next(found) if isinstance(v, torch.Tensor) and v.requires_grad else None for v in values
        )

    torch.library.register_autograd(
        f"{NAMESPACE}::{qualified}", backward, setup_context=setup_context, lib=_library
    )
