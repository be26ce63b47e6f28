"""Checked mode: what a kernel returned, held against the op's format and its fake; metadata only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from opgraft.arguments import Values, dtype_name, is_alias_of
from opgraft.errors import PluginError

if TYPE_CHECKING:
    from opgraft.fused_op import BaseFusedOp
    from opgraft.spec import KernelSpec


def as_outputs(result: Any) -> tuple[Any, ...]:
    """Give one result or several as a tuple."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def check_result(op: BaseFusedOp, spec: KernelSpec, values: Values, result: Any) -> None:
    """Hold a result against dtype, shape, device, strides and aliasing as the op declares them.

    Raises
    ------
    PluginError
        Naming the kernel and its distribution.

    """
    for fault in _faults(op, values, as_outputs(result)):
        raise PluginError(f"{op.label}: kernel {spec} broke its contract: {fault}; tell its owner, {spec.owner}")


def _faults(op: BaseFusedOp, values: Values, outputs: tuple[Any, ...]) -> Iterator[str]:
    arguments = op.arguments()
    given = dict(zip(arguments.names, values, strict=True))
    inputs = [(n, one) for n, one in arguments.tensors(values) if n not in arguments.writes and n not in op.mutates]
    dtypes = arguments.output_dtypes(values)
    fakes = _fakes(op, values)
    expected_outputs = len(dtypes or fakes or outputs)
    if len(outputs) != expected_outputs:
        yield f"it returned {len(outputs)} outputs, expected {expected_outputs}"
    buffers = {index: given[name] for name, index in arguments.writes.items()}
    for index, output in enumerate(outputs):
        fake = fakes[index] if fakes else output
        if buffers.get(index) is not None:
            if output is not buffers[index]:
                yield f"output {index} must be the very buffer that was passed"
        elif not isinstance(output, torch.Tensor):
            if fakes is None or isinstance(fake, torch.Tensor):
                yield f"output {index} must be a tensor, got {type(output).__name__}"
        elif isinstance(fake, torch.Tensor):
            dtype = dtypes[index] if dtypes else dtype_name(fake.dtype)
            yield from (f"output {index} {fault}" for fault in _differences(output, fake, dtype, inputs))


def _differences(
    output: torch.Tensor, fake: torch.Tensor, dtype: str, inputs: list[tuple[str, torch.Tensor]]
) -> Iterator[str]:
    expected = {
        "dtype": dtype,
        "device": str(inputs[0][1].device if inputs else output.device),
        "shape": tuple(fake.shape),
        "strides": fake.stride() if output.numel() else output.stride(),
    }
    got = (dtype_name(output.dtype), str(output.device), tuple(output.shape), output.stride())
    for (what, wanted), found in zip(expected.items(), got, strict=True):
        if wanted != found:
            yield f"must have {what} {wanted}, got {found}"
    for name, one in inputs:
        if output.numel() and is_alias_of(output, one):
            yield f"shares memory with {name}, which the op does not declare"


def _fakes(op: BaseFusedOp, values: Values) -> tuple[Any, ...] | None:
    """Run native on meta tensors; None where a size is read from values."""
    if hasattr(op, "forward_fake") or not op.native_supported:
        return None
    args, kwargs = op.arguments().split(tuple(map(_meta, values)))
    try:
        with torch.no_grad():
            return as_outputs(op.forward_native(*args, **kwargs))
    except (NotImplementedError, RuntimeError):
        return None


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, Mapping):
        return {name: _meta(one) for name, one in value.items()}
    return type(value)(map(_meta, value)) if isinstance(value, (list, tuple)) else value
