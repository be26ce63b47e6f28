"""Checked mode: what a kernel returned, held against the op's format and its fake.

Metadata only; no value is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from opgraft.arguments import Values, dtype_name
from opgraft.errors import PluginError

if TYPE_CHECKING:
    from opgraft.fused_op import BaseFusedOp
    from opgraft.spec import KernelSpec


def check_result(op: BaseFusedOp, spec: KernelSpec, values: Values, result: Any) -> None:
    """Hold a result against dtype, shape, device, strides and aliasing as the op declares them.

    Raises
    ------
    PluginError
        Naming the kernel and its distribution.

    """
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    given = dict(zip(op.call_parameters().names, values, strict=True))
    inputs = [
        (name, one)
        for name, one in op.call_parameters().tensors_in(values)
        if name not in op.writes and name not in op.mutates
    ]
    device = inputs[0][1].device if inputs else None
    dtypes = op.argument_check().output_dtypes(values)
    expected = _fake(op, values)
    if dtypes and len(outputs) != len(dtypes):
        _fault(op, spec, f"returned {len(outputs)} outputs, expected {len(dtypes)}")
    buffers = {index: given.get(name) for name, index in op.writes.items()}
    for index, output in enumerate(outputs):
        which = f"output {index}" if len(outputs) > 1 else "the result"
        if not isinstance(output, torch.Tensor):
            if dtypes:
                _fault(op, spec, f"{which} must be a tensor, got {type(output).__name__}")
            continue
        buffer = buffers.get(index)
        if buffer is not None:
            if output is not buffer:
                _fault(op, spec, f"{which} must be the buffer that was passed, got another object")
            continue
        if dtypes and dtype_name(output.dtype) != dtypes[index]:
            got = dtype_name(output.dtype)
            _fault(op, spec, f"{which} must have dtype {dtypes[index]}, got {got}")
        if device is not None and output.device != device:
            _fault(op, spec, f"{which} must be on {device}, got {output.device}")
        if expected is not None:
            fake = expected[index]
            if output.shape != fake.shape:
                shapes = f"shape {tuple(fake.shape)}, got {tuple(output.shape)}"
                _fault(op, spec, f"{which} must have {shapes}")
            if output.stride() != fake.stride() and output.numel():
                strides = f"strides {fake.stride()}, got {output.stride()}"
                _fault(op, spec, f"{which} must have {strides}")
        for name, one in inputs:
            if output.numel() and torch._C._is_alias_of(output, one):  # noqa: SLF001
                _fault(op, spec, f"{which} shares memory with {name}, which the op does not declare")


def _fake(op: BaseFusedOp, values: Values) -> tuple[torch.Tensor, ...] | None:
    """Run native on meta tensors; None where a size is read from values."""
    if hasattr(op, "forward_fake") or not op.native_supported:
        return None
    metas = tuple(
        torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta")
        if isinstance(v, torch.Tensor)
        else v
        for v in values
    )
    args, kwargs = op.call_parameters().split(metas)
    try:
        with torch.no_grad():
            result = op.forward_native(*args, **kwargs)
    except (NotImplementedError, RuntimeError):
        return None
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _fault(op: BaseFusedOp, spec: KernelSpec, what: str) -> NoReturn:
    message = f"{op.label}: kernel {spec} broke its contract: {what}; its owner is {spec.owner}"
    raise PluginError(message)
