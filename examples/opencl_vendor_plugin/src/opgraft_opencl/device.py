"""The OpenCL device that kernels run on, with the memory of CPU tensors as its own."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyopencl as cl

from opgraft import NotSupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_READ: Final = cl.mem_flags.READ_ONLY | cl.mem_flags.USE_HOST_PTR
_WRITE: Final = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR


class _Device(NamedTuple):
    context: Any
    queue: Any
    process: int


def find_platforms() -> tuple[Sequence[Any], str]:
    """Give the OpenCL platforms, and the reason where there are none; starts no device."""
    try:
        platforms = cl.get_platforms()
    except cl.LogicError as error:
        return (), f"no OpenCL platform found ({error}); `pip install opgraft-opencl[pocl]` has one"
    return platforms, ""


@functools.cache
def _device() -> _Device:
    """Start a device: one that shares the host's memory if there is one, else the first."""
    platforms, reason = find_platforms()
    devices = [device for platform in platforms for device in platform.get_devices()]
    if not devices:
        names = ", ".join(platform.name for platform in platforms)
        raise NotSupported(f"opgraft-opencl: {reason or f'no device on the platforms {names}'}")
    device = max(devices, key=lambda one: bool(one.host_unified_memory))
    context = cl.Context([device])
    return _Device(context, cl.CommandQueue(context), os.getpid())


@functools.cache
def _program(context: Any, source: str, options: str) -> Any:
    # OpenCL implementations keep compiled programs themselves; a second cache would only differ.
    return cl.Program(context, source).build(options, cache_dir=False)


def _window(tensor: Tensor) -> Any:
    """Give the memory from a 1-D tensor's first element to its last, as an array over it."""
    span = (tensor.numel() - 1) * tensor.stride(0) + 1
    return tensor.as_strided((span,), (1,)).numpy()


def launch(
    source: str, function: str, *, options: str = "", count: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> None:
    """Run an OpenCL function over CPU tensors where they lie, and wait for it.

    Parameters
    ----------
    source
        OpenCL C; compiled once a process and set of options.
    function
        Name of the kernel function. Its parameters are, for each input and then each output, a
        pointer to the first element and the stride in elements, a ``long``.
    options
        Compiler options.
    count
        Number of work items, at least 1.
    inputs, outputs
        1-D CPU tensors with elements, of any stride. An output is not an input.

    Raises
    ------
    NotSupported
        If there is no OpenCL device, or the process was forked from one that has used it.

    """
    context, queue, process = _device()
    if process != os.getpid():
        raise NotSupported(
            "opgraft-opencl: OpenCL was in use before this process was forked, and does not "
            "survive that; start the process with the 'spawn' method"
        )
    arguments: list[Any] = []
    written: list[tuple[Any, Any]] = []
    for tensor, flags in [(one, _READ) for one in inputs] + [(one, _WRITE) for one in outputs]:
        memory = _window(tensor)
        buffer = cl.Buffer(context, flags, hostbuf=memory)
        arguments += [buffer, np.int64(tensor.stride(0))]
        if flags is _WRITE:
            written.append((buffer, memory))
    # A kernel object carries its arguments, so every call has one of its own: threads do not mix.
    cl.Kernel(_program(context, source, options), function)(queue, (count,), None, *arguments)
    for buffer, memory in written:
        # What makes results visible in the tensor; no copy where device and host share memory.
        mapped, _ = cl.enqueue_map_buffer(queue, buffer, cl.map_flags.READ, 0, memory.shape, memory.dtype)
        mapped.base.release(queue)
    queue.finish()
