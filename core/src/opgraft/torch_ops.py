"""The ops as torch.library operators: ``torch.ops.opgraft.<group>_<name>``.

Each op is defined once, whatever is reloaded: the operator looks the op up when it is called.
``.default`` takes no caller buffer, ``.out`` takes all of them and returns the outputs that no
buffer receives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.library import infer_schema

from opgraft.checked import as_outputs
from opgraft.errors import ArgumentValueError, RegistrationError

if TYPE_CHECKING:
    from opgraft.fused_op import BaseFusedOp
    from opgraft.handle import Handle

NAMESPACE: Final = "opgraft"
_library: Final[Any] = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_handles: Final[dict[str, Handle]] = {}
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
    name = op.op.replace(".", "_")
    if name not in _handles:
        buffers = tuple(op.arguments().writes)
        try:
            schemas = {taken: _schema(op, taken) for taken in dict.fromkeys([(), buffers])}
        except (RegistrationError, ValueError):  # torch's infer_schema raises the latter
            return
        _handles[name] = handle
        for taken, schema in schemas.items():
            _define(op, f"{name}.out" if taken else name, name, taken, schema)
    op.torch_function = _traced(op, getattr(torch.ops.opgraft, name))
    handle.function._torchdynamo_inline = op.torch_function  # type: ignore[attr-defined] # noqa: SLF001


def _schema(op: BaseFusedOp, taken: tuple[str, ...]) -> str:
    parameters = []
    for p in op.arguments().with_backend().parameters.values():
        if p.name in taken:
            parameters.append(p.replace(annotation=torch.Tensor, default=p.empty))
        elif p.name not in op.arguments().writes:
            parameters.append(p.replace(annotation=_annotation(op, p)))

    def prototype() -> None:
        """Carry a signature."""

    fresh = len(_fresh(op, taken))
    returns = torch.Tensor if fresh == 1 else tuple[(torch.Tensor,) * fresh] if fresh else None  # type: ignore[misc]
    prototype.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    return infer_schema(prototype, mutates_args=(*taken, *op.mutates))


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


def _define(op: BaseFusedOp, overload: str, name: str, taken: tuple[str, ...], schema: str) -> None:
    fresh = _fresh(op, taken)

    def delivered(result: Any) -> Any:
        kept = tuple(as_outputs(result)[index] for index in fresh)
        return kept[0] if len(kept) == 1 else kept or None

    def real(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        current = _handles[name].op
        return delivered(current.dispatcher.call(current.arguments().bind(*args, **kwargs), backend, routed=True))

    def fake(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        del backend
        current = _handles[name].op
        values = current.arguments().bind(*args, **kwargs)
        current.arguments().check_format(values)
        args, kwargs = current.dispatcher.checked(values)  # type: ignore[assignment]
        return delivered(getattr(current, "forward_fake", current.forward_native)(*args, **kwargs))

    _library.define(overload + schema)
    _library.impl(overload, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{overload}", fake, lib=_library)
    if not taken and not op.mutates and _has_floats(op):
        _differentiate(name)


def _has_floats(op: BaseFusedOp) -> bool:
    rule = op.format_signature.supported_dtypes if op.format_signature else ("float32",)
    names = [name for one in rule.values() for name in one] if isinstance(rule, Mapping) else rule
    return any("float" in name or "complex" in name for name in names)


def _differentiate(name: str) -> None:
    """Differentiate a float op's operator through native."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
        del output
        ctx.places = [i for i, one in enumerate(inputs) if isinstance(one, torch.Tensor)]
        ctx.save_for_backward(*(inputs[i] for i in ctx.places))
        ctx.others = [None if i in ctx.places else one for i, one in enumerate(inputs)]
        ctx.keywords = {k: v for k, v in keyword_only_inputs.items() if k != "backend"}

    def backward(ctx: Any, *gradients: Any) -> Any:
        values = list(ctx.others)
        for place, one in zip(ctx.places, ctx.saved_tensors, strict=True):
            values[place] = one.detach().requires_grad_(one.is_floating_point() or one.is_complex())
        with torch.enable_grad():
            outputs = as_outputs(_handles[name].op.forward_native(*values, **ctx.keywords))
        flowing = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
        leaves = [i for i in ctx.places if values[i].requires_grad]
        wanted = [values[i] for i in leaves]
        found = torch.autograd.grad([o for o, _ in flowing], wanted, [g for _, g in flowing], allow_unused=True)
        by_place = dict(zip(leaves, found, strict=True))
        return tuple(by_place.get(i) for i in range(len(values)))

    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_library)


def _no_buffer(name: str, **_: Any) -> torch.Tensor:
    raise ArgumentValueError(f"{name} must be given inside a graph, since another buffer is")


def _traced(op: BaseFusedOp, packet: Any) -> Callable[..., Any]:
    """Make what stands for the op inside a graph: a call of its operator."""
    arguments = op.arguments()
    bind, names, buffers = arguments.bind, arguments.names, tuple(arguments.writes.items())
    outputs = len(op.format_signature.outputs or (0,)) if op.format_signature else 1
    fresh_buffer: Callable[..., torch.Tensor] = getattr(op, "fresh_buffer", _no_buffer)

    def traced(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        given = dict(zip(names, bind(*args, **kwargs), strict=True))
        taken = {name: given.pop(name) for name, _ in buffers}
        if all(one is None for one in taken.values()):
            return packet.default(**given, backend=backend)
        for name, one in taken.items():
            taken[name] = fresh_buffer(name, **given, **taken) if one is None else one
        fresh = iter(as_outputs(packet.out(**given, **taken, backend=backend)))
        written = {index: taken[name] for name, index in buffers}
        results = tuple(written[i] if i in written else next(fresh) for i in range(outputs))
        return results[0] if outputs == 1 else results

    return traced
