"""The ops as torch.library operators: ``torch.ops.opgraft.<group>_<name>``.

Each op is defined once, whatever is reloaded: the operator looks the op up when it is called.
``.default`` takes no caller buffer, ``.out`` all of them, ``.<buffer>_only`` one of several; each
returns the outputs that no buffer receives.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.library import infer_schema

from opgraft.checked import as_outputs
from opgraft.errors import RegistrationError

if TYPE_CHECKING:
    from opgraft.arguments import Values
    from opgraft.fused_op import BaseFusedOp
    from opgraft.handle import Handle

NAMESPACE: Final = "opgraft"
# A reload of this module finds them here again: torch defines an operator once.
_library: Any = globals().get("_library") or torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_handles: dict[str, Handle] = globals().get("_handles", {})
_ANNOTATIONS: Final = {"Tensor": torch.Tensor, "int": int, "float": float, "bool": bool, "str": str}


def define(op: BaseFusedOp, handle: Handle) -> None:
    """Define an op's operators, and let ``torch.compile`` see them instead of the choice.

    An op whose parameters have no torch schema stays without operators; it is inlined.

    Parameters
    ----------
    op
        A registered op.
    handle
        Its handle, which outlives it.

    """
    name, buffers = op.op.replace(".", "_"), tuple(op.arguments().writes)
    subsets = [taken for size in range(len(buffers) + 1) for taken in itertools.combinations(buffers, size)]
    if name not in _handles:
        try:
            schemas = [(taken, *_schema(op, taken)) for taken in subsets]
        except (RegistrationError, ValueError):  # torch's infer_schema raises the latter
            return
        for taken, names, schema in schemas:
            _define(op, name, taken, names, schema)
    _handles[name] = handle
    packet = getattr(torch.ops.opgraft, name)
    op.torch_function = _traced(op, {taken: getattr(packet, _overload(op, taken) or "default") for taken in subsets})


def _overload(op: BaseFusedOp, taken: Sequence[str]) -> str:
    all_of_them = len(taken) == len(op.arguments().writes)
    return ("out" if all_of_them else f"{'_'.join(taken)}_only") if taken else ""


def _schema(op: BaseFusedOp, taken: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Give the parameters' names in the schema's order, and the schema."""
    arguments, parameters = op.arguments(), []
    for p in arguments.with_backend().parameters.values():
        if p.name in taken:
            parameters.append(p.replace(annotation=torch.Tensor, default=p.empty))
        elif p.name not in arguments.writes:
            # torch differentiates by positional parameters alone.
            moved = arguments.floats and p.name in arguments.required + arguments.optional
            kind = p.POSITIONAL_OR_KEYWORD if moved else p.kind
            parameters.append(p.replace(annotation=_annotation(op, p), kind=kind))
    parameters.sort(key=lambda p: (p.kind is p.KEYWORD_ONLY, p.kind is not p.KEYWORD_ONLY and p.default is not p.empty))

    def prototype() -> None:
        """Carry a signature."""

    fresh = len(_fresh(op, taken))
    returns = torch.Tensor if fresh == 1 else tuple[(torch.Tensor,) * fresh] if fresh else None  # type: ignore[misc]
    prototype.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    return tuple(p.name for p in parameters), infer_schema(prototype, mutates_args=(*taken, *op.mutates))


def _annotation(op: BaseFusedOp, parameter: inspect.Parameter) -> Any:
    if parameter.name == "backend":
        return str | None
    if not isinstance(parameter.annotation, str) and parameter.annotation is not parameter.empty:
        return parameter.annotation
    words = [word.strip().removeprefix("torch.") for word in str(parameter.annotation).split("|")]
    found = [_ANNOTATIONS.get(word) for word in words if word != "None"]
    if len(found) != 1 or found[0] is None:
        raise RegistrationError(f"{op.label}: {parameter} has an annotation that torch cannot express")
    return found[0] | None if "None" in words else found[0]


def _fresh(op: BaseFusedOp, taken: tuple[str, ...]) -> list[int]:
    """List the outputs that no buffer receives."""
    outputs = len(op.format_signature.outputs) if op.format_signature else 1
    written = {op.arguments().writes[name] for name in taken}
    return [index for index in range(outputs or 1) if index not in written]


def _define(op: BaseFusedOp, name: str, taken: tuple[str, ...], names: tuple[str, ...], schema: str) -> None:
    fresh, overload = _fresh(op, taken), ".".join(filter(None, (name, _overload(op, taken))))

    def delivered(result: Any) -> Any:
        kept = tuple(as_outputs(result)[index] for index in fresh)
        return kept[0] if len(kept) == 1 else kept or None

    def real(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        current = _handles[name].op
        return delivered(current.dispatcher.call(_values(current, names, args, kwargs), backend, routed=True))

    def fake(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        del backend
        current = _handles[name].op
        values = _values(current, names, args, kwargs)
        current.arguments().check_format(values)
        args, kwargs = current.dispatcher.checked(values)  # type: ignore[assignment]
        return delivered(getattr(current, "forward_fake", current.forward_native)(*args, **kwargs))

    _library.define(overload + schema)
    _library.impl(overload, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{overload}", fake, lib=_library)
    if not taken and not op.mutates and op.arguments().floats:
        _differentiate(name, names)


def _values(op: BaseFusedOp, names: tuple[str, ...], args: Sequence[Any], kwargs: dict[str, Any]) -> Values:
    given, arguments = dict(zip(names, args, strict=False)) | kwargs, op.arguments()
    return tuple(given.get(n, default) for n, default in zip(arguments.names, arguments.defaults, strict=True))


def _differentiate(name: str, names: tuple[str, ...]) -> None:
    """Differentiate a float op's operator through native, as often as is asked."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
        del output
        ctx.places = [i for i, one in enumerate(inputs) if isinstance(one, torch.Tensor)]
        ctx.save_for_backward(*(inputs[i] for i in ctx.places))
        ctx.others = [None if i in ctx.places else one for i, one in enumerate(inputs)]
        ctx.keywords = keyword_only_inputs

    def backward(ctx: Any, *gradients: Any) -> Any:
        op, given, again = _handles[name].op, list(ctx.others), torch.is_grad_enabled()
        with torch.enable_grad():
            for place, one in zip(ctx.places, ctx.saved_tensors, strict=True):
                given[place] = one.view_as(one) if one.requires_grad else one
            args, kwargs = op.arguments().split(_values(op, names, given, ctx.keywords))
            outputs = as_outputs(op.forward_native(*args, **kwargs))
        flowing = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
        leaves = [i for i in ctx.places if given[i].requires_grad]
        ends, wanted = [o for o, _ in flowing], [given[i] for i in leaves]
        found = torch.autograd.grad(ends, wanted, [g for _, g in flowing], create_graph=again, allow_unused=True)
        by_place = dict(zip(leaves, found, strict=True))
        return tuple(by_place.get(i) for i in range(len(given)))

    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_library)


def _traced(op: BaseFusedOp, overloads: dict[tuple[str, ...], Any]) -> Callable[..., Any]:
    """Make what stands for the op inside a graph: a call of its operator."""
    arguments = op.arguments()
    outputs = len(op.format_signature.outputs or (0,)) if op.format_signature else 1

    def traced(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        given = dict(zip(arguments.names, arguments.bind(*args, **kwargs), strict=True))
        buffers = {index: given.pop(name) for name, index in arguments.writes.items()}
        taken = {name: buffers[index] for name, index in arguments.writes.items() if buffers[index] is not None}
        fresh = iter(as_outputs(overloads[tuple(taken)](**given, **taken, backend=backend)))
        results = tuple(next(fresh) if buffers.get(i) is None else buffers[i] for i in range(outputs))
        return results[0] if outputs == 1 else results

    return traced
