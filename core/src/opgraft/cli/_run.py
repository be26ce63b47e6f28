"""``opgraft run``: call an op on values from the command line, and say which kernel ran."""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

import opgraft
from opgraft.cli._output import USAGE, WRONG, fail, say, say_json
from opgraft.errors import nearest
from opgraft.spec import DTYPES

if TYPE_CHECKING:
    import torch

    from opgraft.fused_op import BaseFusedOp

_WORDS: Final = {"true": True, "false": False, "none": None, "nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def run(
    op: Annotated[str, typer.Argument(metavar="OP", help="Op id, such as attention.clamp_position.")],
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE...", help="Arguments: 3, 1,2,3, [[1,2],[3,4]], true, none."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the tensors; default: the op's first.")] = "",
    device: Annotated[str, typer.Option(help="Device of the tensors, such as cuda:1.")] = "cpu",
    backend: Annotated[str, typer.Option(help="Selector of the kernel, such as cuda/triton.")] = "",
    trace: Annotated[bool, typer.Option("--trace", help="Show every call that was made.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run an op on values and say which kernel ran."""
    handle = opgraft.op(op)
    arguments = _read(handle.op, values or [], dtype, device)
    with opgraft.trace() as traced:
        result = handle(**arguments, backend=backend or None)
    record = traced.records[-1]
    results = result if isinstance(result, (tuple, list)) else [result]
    outputs = [_as_data(one) for one in results]
    if as_json:
        data: dict[str, Any] = {"op": op, "kernel": record.kernel, "outputs": outputs}
        if trace:
            data["trace"] = traced.summary()
        say_json(data)
        return
    say(f"{op} ran {record.kernel}")
    for output in outputs:
        if "dtype" in output:
            say(f"{output['dtype']} {tuple(output['shape'])} {output['device']}")
        say(str(output["values"]))
    if trace:
        say()
        for line in str(traced).splitlines():
            say(line)


def _as_data(value: Any) -> dict[str, Any]:
    import torch

    if not isinstance(value, torch.Tensor):
        return {"values": value}
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "device": str(value.device),
        "values": value.cpu().tolist(),
    }


def _read(op: BaseFusedOp, values: list[str], dtype: str, device: str) -> dict[str, Any]:
    """Turn ``NAME=VALUE`` into the op's arguments."""
    arguments = op.arguments()
    tensors = {*arguments.required, *arguments.optional}
    read: dict[str, Any] = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals:
            fail(f"an argument is NAME=VALUE, got {text!r}{nearest(text, arguments.names)}", USAGE)
        if name not in arguments.names:
            fail(f"{op.op} has no parameter {name!r}{nearest(name, arguments.names)}", USAGE)
        if name in read:
            fail(f"{name} is given twice", USAGE)
        read[name] = _value(name, value)
    if dtype and dtype not in DTYPES:
        fail(f"unknown dtype {dtype!r}{nearest(dtype, DTYPES)}", USAGE)
    place = _device(device)
    for name in tensors.intersection(read):
        if read[name] is not None:
            dims = len(arguments.dims.get(name, ()))
            read[name] = _tensor(name, read[name], _dtype(op, name, dtype), place, dims)
    missing = [p.name for p in arguments.signature.parameters.values() if p.default is p.empty and p.name not in read]
    if missing:
        fail(f"{op.op} needs {', '.join(f'{name}=...' for name in missing)} too", USAGE)
    return read


def _value(name: str, text: str) -> Any:
    """Read ``1,2,3``, ``[1,2,3]``, nested lists, numbers, and the words true, false, none."""
    stripped = text.strip()
    if stripped.lower() in _WORDS:
        return _WORDS[stripped.lower()]
    try:
        read = ast.literal_eval(stripped or "[]")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        if "," in stripped and "[" not in stripped:
            return [_value(name, part) for part in stripped.split(",") if part.strip()]
        return stripped
    return _lists(read)


def _lists(value: Any) -> Any:
    return [_lists(one) for one in value] if isinstance(value, (list, tuple)) else value


def _dtype(op: BaseFusedOp, name: str, asked: str) -> str:
    """Give the dtype asked for where the parameter may have it, else the first that it may have."""
    form = op.format_signature
    allowed = form.dtypes(name) if form is not None else None
    return asked if asked and (not allowed or asked in allowed or len(allowed) > 1) else (allowed or ("float32",))[0]


def _device(text: str) -> torch.device:
    import torch

    try:
        return torch.device(opgraft.registry.detector.device_type(text))
    except RuntimeError:
        known = {"cpu", "cuda"} | {key for record in opgraft.backends() for key in record.platforms}
        fail(f"unknown device {text!r}{nearest(text, known)}", USAGE)


def _tensor(name: str, value: Any, dtype: str, device: torch.device, dims: int) -> torch.Tensor:
    import torch

    for _ in range(dims - _depth(value)):
        value = [value]
    kind = getattr(torch, dtype)
    numbers = list(_flat(value))
    strange = [one for one in numbers if not isinstance(one, (bool, int, float))]
    if strange:
        _unreadable(name, f"{strange[0]!r} is no number")
    if not (kind.is_floating_point or kind.is_complex):
        for one in numbers:
            if isinstance(one, float):
                _unreadable(name, f"{one!r} is no {dtype}")
    try:
        tensor = torch.tensor(value, dtype=kind)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        _unreadable(name, f"it makes no {dtype} tensor: {error}")
    try:
        return tensor.to(device)
    except Exception as error:  # noqa: BLE001 - each device type has its own way to be absent
        fail(f"{name} cannot be put on {device}: {error}", WRONG)


def _unreadable(name: str, why: str) -> NoReturn:
    fail(f"{name}: the value cannot be read: {why}", USAGE)


def _depth(value: Any) -> int:
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def _flat(value: Any) -> Any:
    if isinstance(value, list):
        for one in value:
            yield from _flat(one)
    else:
        yield value
