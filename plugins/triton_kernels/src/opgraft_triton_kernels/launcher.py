"""A launch of a Triton kernel that costs little more than the launch itself."""

from __future__ import annotations

import inspect
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

__all__ = ["TESTED_TRITON", "Launcher", "unspecialized"]

_ARGUMENTS_LAST: Final = "None, None, metadata, None, None, None, {arguments}"
_ARGUMENTS_AS_TUPLE: Final = "metadata, None, None, None, None, None, annotations, signature, ({arguments},)"
TESTED_TRITON: Final[Mapping[tuple[int, int], str]] = {
    (3, 5): _ARGUMENTS_LAST,
    (3, 6): _ARGUMENTS_LAST,
    (3, 7): _ARGUMENTS_AS_TUPLE,
    (3, 8): _ARGUMENTS_AS_TUPLE,
    (3, 9): _ARGUMENTS_AS_TUPLE,
}
"""Triton releases whose compiled kernels are launched directly: what their launch function takes
after grid, stream, function and the two launch attributes. Any other release launches as usual.
3.6 was tested on an H200, each of them with its own C launcher on a made-up CUDA driver."""

_LAUNCH: Final = """\
def launch(grid, {parameters}):
    device = {first}.get_device()
{addresses}
    variant = variants.get((device, {key}))
    if (
        variant is None
        or current_device() != device
        or knobs.launch_enter_hook is not enter_hook
        or knobs.launch_exit_hook is not exit_hook
        or enter_hook.calls
        or exit_hook.calls
        or pre_run_hooks
    ):
        ordinary((device, {key}), grid, {parameters})
        return
    compiled_launch, function, cooperative, pdl, metadata, annotations, signature = variant
    grid_x, grid_y, grid_z = grid
    compiled_launch(
        grid_x, grid_y, grid_z, raw_stream(device), function, cooperative, pdl, {passed}
    )
"""


def unspecialized(kernel: Callable[..., None]) -> Any:
    """Apply ``triton.jit`` so that what is compiled depends on no size, no stride and no alignment.

    Parameters
    ----------
    kernel
        The function. Only its tensors' dtypes and its parameters annotated ``tl.constexpr`` count.

    Returns
    -------
    JITFunction
        What `Launcher` takes; in Triton's interpreter, what that makes of it.

    """
    parameters = inspect.signature(kernel).parameters.values()
    run_time = [one.name for one in parameters if "constexpr" not in str(one.annotation)]
    return triton.jit(kernel, do_not_specialize=run_time)


class Launcher:
    """Launch one Triton kernel, keeping what was compiled.

    Triton's own ``kernel[grid](...)`` binds, specialises and looks up its arguments again at every
    call, which takes longer than the launch. A launcher looks at exactly what the compiled code
    depends on (device, dtypes, divisibility, constants), and hands the arguments to the compiled
    kernel. The first call of a variant, and every call for which the shortcut is not known to be
    right (see Notes), is Triton's ordinary one.

    Parameters
    ----------
    kernel
        A ``@triton.jit`` function. Parameters whose name ends in ``_ptr`` are tensors (None where
        the kernel's default is None); the first parameter is one. Those annotated ``tl.constexpr``
        are constants. All others are integers annotated with their width, ``tl.int32`` or
        ``tl.int64``.
    options
        Constants fixed for this launcher, and compile options such as ``num_warps``.

    Attributes
    ----------
    launch
        ``launch(grid, *arguments)``: the grid is three integers, none of them zero; the arguments
        are the kernel's parameters without the constants fixed here, by position. The launch goes
        to the current stream of the first tensor's device, whichever device is current. The caller
        answers for all tensors being on that device.
    variants
        What was compiled and is kept, by what it depends on.

    Raises
    ------
    TypeError
        If the kernel's parameters do not follow the rules above.

    Notes
    -----
    The ordinary launch is taken in Triton's interpreter, on a release not in `TESTED_TRITON`, on
    hardware other than CUDA (on ROCm the compiled code also depends on the size of a tensor's
    storage), by a kernel that needs scratch memory, while a launch hook is set, and while another
    device is current. Compile-time settings (``triton.knobs``) count as they are at a variant's
    first call. Nothing is tuned, or compiled again for arguments that were seen.

    On one H200 (torch 2.11, Triton 3.6, `clamp_position` of 64 int32) a call takes 14.6 us of host
    time with the ordinary launch, 8.4 us through ``CompiledKernel.run`` and 7.0 us as here.

    """

    __slots__ = ("_compiled", "_kernel", "_lock", "_names", "_options", "launch", "variants")

    launch: Callable[..., None]
    variants: dict[Hashable, tuple[Any, ...]]

    def __init__(self, kernel: Any, **options: Any) -> None:
        parameters = inspect.signature(kernel.fn).parameters
        self._kernel = kernel
        self._options = options
        self._names = [name for name in parameters if name not in options]
        self._compiled: list[Any] = []
        self._lock = threading.RLock()
        self.variants = {}
        self.launch = self._usual
        if isinstance(kernel, JITFunction):
            major, minor, *_ = triton.__version__.split(".")
            convention = TESTED_TRITON.get((int(major), int(minor)))
            source = self._source(kernel, convention or "")
            if convention is not None:
                self.launch = self._direct(kernel, source)

    def _usual(self, grid: tuple[int, int, int], *arguments: Any) -> Any:
        """Launch as Triton does, on the first tensor's device."""
        named = dict(zip(self._names, arguments, strict=True))
        with _device_guard(arguments[0]):
            return self._kernel[grid](**named, **self._options)

    def _ordinary(self, key: Hashable, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch as Triton does, and keep what it compiled."""
        if key in self.variants:
            self._usual(grid, *arguments)
            return
        # One thread compiles a variant; the others then find it in Triton's own cache.
        with self._lock:
            compiled = self._usual(grid, *arguments)
            variant = _variant(compiled)
            if variant is not None:
                # The handles die with the compiled kernel, which Triton's cache may drop.
                self._compiled.append(compiled)
                self.variants[key] = variant

    def _source(self, kernel: JITFunction[Any], convention: str) -> str:
        """Write the launch of this kernel's parameters out, so that no call loops over them."""
        whose = kernel.__name__
        if not self._names or not self._names[0].endswith("_ptr"):
            message = f"{whose}: the first parameter must be a tensor, named '..._ptr'"
            raise TypeError(message)
        addresses: list[str] = []
        key: list[str] = []
        arguments: list[str] = []
        for parameter in kernel.params:
            name = parameter.name
            aligned = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
            if parameter.is_constexpr:
                arguments.append("None")
                key += [name] if name in self._names else []
            elif name.endswith("_ptr"):
                optional = parameter.has_default and parameter.default is None
                unless = f"0 if {name} is None else " if optional else ""
                addresses.append(f"    {name}_address = {unless}{name}.data_ptr()")
                arguments.append(f"{name}_address")
                key += [f"{unless}{name}.dtype"]
                key += [f"{name}_address & 15 == 0"] if aligned else []
            elif parameter.annotation_type in {"i32", "i64"}:
                arguments.append(name)
                key += [] if parameter.do_not_specialize else [f"{name} == 1"]
                key += [f"{name} & 15 == 0"] if aligned else []
            else:
                message = (
                    f"{whose}: the integer {name!r} must be annotated tl.int32 or tl.int64, "
                    f"got {parameter.annotation!r}"
                )
                raise TypeError(message)
        return _LAUNCH.format(
            parameters=", ".join(self._names),
            first=self._names[0],
            addresses="\n".join(addresses),
            key=", ".join(key),
            passed=convention.format(arguments=", ".join(arguments)),
        )

    def _direct(self, kernel: JITFunction[Any], source: str) -> Callable[..., None]:
        knobs = triton.knobs.runtime
        names: dict[str, Any] = {
            "current_device": getattr(torch._C, "_cuda_getDevice", None),  # noqa: SLF001
            "enter_hook": type(knobs).launch_enter_hook,
            "exit_hook": type(knobs).launch_exit_hook,
            "knobs": knobs,
            "ordinary": self._ordinary,
            "pre_run_hooks": kernel.pre_run_hooks,
            "raw_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),  # noqa: SLF001
            "variants": self.variants,
        }
        exec(compile(source, f"<launch of {kernel.__name__}>", "exec"), names)  # noqa: S102
        launch: Callable[..., None] = names["launch"]
        return launch


def _variant(compiled: Any) -> tuple[Any, ...] | None:
    """Give what a direct launch takes, or None where this kernel has to be launched as usual."""
    if compiled is None or compiled.metadata.target.backend != "cuda":
        return None
    run = compiled.run
    needs_more = run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False)
    if needs_more:
        return None
    return (
        run.launch,
        compiled.function,
        run.launch_cooperative_grid,
        run.launch_pdl,
        compiled.packed_metadata,
        getattr(run, "arg_annotations", None),
        getattr(run, "kernel_signature", None),
    )


def _device_guard(tensor: torch.Tensor) -> AbstractContextManager[object]:
    device = tensor.device
    if device.index is None:
        return nullcontext()
    guard: AbstractContextManager[object] = torch.get_device_module(device).device(device.index)
    return guard
