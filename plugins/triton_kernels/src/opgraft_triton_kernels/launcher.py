"""A launch of a Triton kernel that costs little more than the launch itself."""

from __future__ import annotations

import inspect
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

__all__ = ["TESTED_TRITON", "Launcher"]

TESTED_TRITON: Final = frozenset({(3, 6), (3, 9)})
"""Triton releases whose compiled kernels may be launched directly; every other one gets the ordinary launch."""

_GENERATED: Final = """\
def launch(grid, {parameters}):
    device = {first}.get_device()
{addresses}
    variant = variants.get((device, {key}))
    if (
        variant is None
        or current_device() != device
        or runtime.launch_enter_hook is not enter_hook
        or runtime.launch_exit_hook is not exit_hook
        or enter_hook.calls
        or exit_hook.calls
        or pre_run_hooks
    ):
        ordinary(device, (device, {key}), grid, {parameters})
        return
    grid_x, grid_y, grid_z = grid
    run, function, metadata = variant
    run(grid_x, grid_y, grid_z, raw_stream(device), function, metadata, None, None, None, {arguments})
"""


class Launcher:
    """Launch one Triton kernel, keeping what was compiled.

    Triton's own ``kernel[grid](...)`` binds, specialises and looks up its arguments again at every call, which takes
    longer than the launch. A launcher looks at exactly what the compiled code depends on (device, dtypes, pointer
    alignment, constants), and hands the arguments to the compiled kernel. The first call of a variant, and every call
    for which the shortcut is not known to be right (see Notes), is Triton's ordinary one.

    Parameters
    ----------
    kernel
        A ``@triton.jit`` function. Parameters whose name ends in ``_ptr`` are tensors (``None`` is allowed where the
        kernel's default is ``None``; the first one is always a tensor), those annotated ``tl.constexpr`` are
        constants, all others are integers annotated with their width (``tl.int32`` or ``tl.int64``).
    options
        Constants fixed for this launcher, and compile options such as ``num_warps``.

    Attributes
    ----------
    launch
        ``launch(grid, *arguments)``: the grid is three integers, none of them zero, and the arguments are the kernel's
        parameters without the constants fixed here, by position. The launch goes to the current stream of the first
        tensor's device, whichever device is current; the caller answers for all tensors being on that device.
    variants
        What was compiled and is kept, by what it depends on.

    Raises
    ------
    TypeError
        If the kernel's parameters do not follow the rules above.

    Notes
    -----
    The ordinary launch is taken in Triton's interpreter, on a Triton release not in `TESTED_TRITON`, on hardware
    other than CUDA (on ROCm the compiled code also depends on the size of a tensor's storage), while a launch hook is
    set, and while another device is current. Compile-time settings of Triton (`triton.knobs`) count as they are at a
    variant's first call. Nothing is ever tuned or compiled again for arguments that were seen.
    """

    __slots__ = ("_fixed", "_kernel", "_lock", "_names", "launch", "variants")

    launch: Callable[..., None]
    variants: dict[Hashable, tuple[Any, Any, Any]]

    def __init__(self, kernel: Any, **options: Any) -> None:
        parameters = inspect.signature(kernel.fn).parameters
        self._kernel = kernel
        self._fixed = options
        self._names = tuple(name for name in parameters if name not in options)
        self._lock = threading.Lock()
        self.variants = {}
        self.launch = self._direct(kernel) if _may_launch_directly(kernel) else self._interpreted_or_untested

    def _interpreted_or_untested(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        with _device_guard(arguments[0]):
            self._kernel[grid](**dict(zip(self._names, arguments, strict=True)), **self._fixed)

    def _ordinary(self, device: int, key: Hashable, grid: tuple[int, int, int], *arguments: Any) -> None:
        # One thread compiles a variant; the others then find it in Triton's own cache.
        with self._lock, _device_guard(arguments[0]):
            compiled = self._kernel[grid](**dict(zip(self._names, arguments, strict=True)), **self._fixed)
            if device >= 0 and isinstance(compiled, CompiledKernel) and compiled.metadata.target.backend == "cuda":
                self.variants[key] = (compiled.run, compiled.function, compiled.packed_metadata)

    def _direct(self, kernel: JITFunction[Any]) -> Callable[..., None]:
        """Write the launch function for this kernel's parameters, so that no call loops over them."""
        addresses: list[str] = []
        key: list[str] = []
        arguments: list[str] = []
        for parameter in kernel.params:
            name = parameter.name
            if parameter.is_constexpr:
                arguments.append(repr(self._fixed[name]) if name in self._fixed else name)
                if name not in self._fixed:
                    key.append(name)
                continue
            specialised = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
            if not name.endswith("_ptr"):
                if parameter.annotation_type not in {"i32", "i64"}:
                    message = f"{kernel.__name__}: annotate the integer {name!r} with tl.int32 or tl.int64"
                    raise TypeError(message)
                arguments.append(name)
                if specialised:
                    key += [f"{name} == 1", f"{name} % 16 == 0"]
                continue
            address = f"{name}_address"
            arguments.append(address)
            if parameter.has_default and parameter.default is None:
                addresses.append(f"    {address} = 0 if {name} is None else {name}.data_ptr()")
                key.append(f"{name} if {name} is None else {name}.dtype")
            else:
                addresses.append(f"    {address} = {name}.data_ptr()")
                key.append(f"{name}.dtype")
            if specialised:
                key.append(f"{address} & 15 == 0")
        if not self._names or not self._names[0].endswith("_ptr"):
            message = f"{kernel.__name__}: the first parameter must be a tensor, named '..._ptr'"
            raise TypeError(message)
        source = _GENERATED.format(
            parameters=", ".join(self._names),
            first=self._names[0],
            addresses="\n".join(addresses),
            key=", ".join(key),
            arguments=", ".join(arguments),
        )
        runtime = triton.knobs.runtime
        namespace: dict[str, Any] = {
            "current_device": getattr(torch._C, "_cuda_getDevice", None),
            "enter_hook": runtime.launch_enter_hook,
            "exit_hook": runtime.launch_exit_hook,
            "ordinary": self._ordinary,
            "pre_run_hooks": kernel.pre_run_hooks,
            "raw_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),
            "runtime": runtime,
            "variants": self.variants,
        }
        exec(compile(source, f"<launch of {kernel.__name__}>", "exec"), namespace)  # noqa: S102
        launch: Callable[..., None] = namespace["launch"]
        return launch


def _may_launch_directly(kernel: object) -> bool:
    release = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return isinstance(kernel, JITFunction) and release in TESTED_TRITON


def _device_guard(tensor: torch.Tensor) -> AbstractContextManager[object]:
    if tensor.device.index is None:
        return nullcontext()
    guard: AbstractContextManager[object] = torch.get_device_module(tensor.device).device(tensor.device.index)
    return guard
