"""CUDA C++ that is compiled when it is first used on a device, by NVRTC through cuda-bindings."""

from __future__ import annotations

import functools
import subprocess
import threading
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from triton.runtime.build import compile_module_from_src

from opgraft import NotSupported

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CudaSource", "cubin", "launch_function"]

_HERE = Path(__file__).parent


class CudaSource:
    """A file of CUDA C++ beside this module, and what it was compiled to.

    Parameters
    ----------
    file
        Name of the file. Its entry points are ``extern "C"``.

    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._modules: dict[int, Any] = {}
        self._reasons: dict[int, str] = {}

    def functions(self, device: int, *names: str) -> tuple[int, ...]:
        """Give the handles of entry points on a device, compiling the file if need be.

        Parameters
        ----------
        device
            Index of the CUDA device.
        names
            The entry points.

        Returns
        -------
        tuple of int
            A ``CUfunction`` for each, good for as long as the process lives.

        Raises
        ------
        opgraft.NotSupported
            If the file cannot be compiled for the device here. That is found out once: every later
            call for the device gets the same answer at once.

        """
        with self._lock, torch.cuda.device(device):
            if device not in self._modules and device not in self._reasons:
                self._load(device)
            if device in self._reasons:
                raise NotSupported(self._reasons[device])
            driver = import_module("cuda.bindings.driver")
            module = self._modules[device]
            return tuple(int(_answer(driver.cuModuleGetFunction(module, name.encode()))) for name in names)

    def _load(self, device: int) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}"
        try:
            code = cubin((_HERE / self._file).read_text(encoding="utf-8"), self._file, arch)
            driver = import_module("cuda.bindings.driver")
            if not int(_answer(driver.cuCtxGetCurrent())):
                context = _answer(driver.cuDevicePrimaryCtxRetain(device))
                _answer(driver.cuCtxSetCurrent(context))
            self._modules[device] = _answer(driver.cuModuleLoadData(code))
        except (ImportError, OSError, RuntimeError) as error:
            self._reasons[device] = f"{self._file} cannot be compiled for {arch} here: {error}"


def cubin(source: str, name: str, arch: str) -> bytes:
    """Compile CUDA C++ to the machine code of one arch.

    Parameters
    ----------
    source
        The text.
    name
        What to call it in messages.
    arch
        ``"sm_90"``.

    Returns
    -------
    bytes
        A cubin.

    Raises
    ------
    ImportError
        If cuda-bindings is not installed.
    RuntimeError
        If NVRTC is missing or refuses, with its log.

    """
    nvrtc = import_module("cuda.bindings.nvrtc")
    program = _answer(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytearray(_answer(nvrtc.nvrtcGetProgramLogSize(program)))
        _answer(nvrtc.nvrtcGetProgramLog(program, log))
        message = f"{status.name}: {log.rstrip(bytes(1)).decode(errors='replace').strip()}"
        raise RuntimeError(message)
    code = bytearray(_answer(nvrtc.nvrtcGetCUBINSize(program)))
    _answer(nvrtc.nvrtcGetCUBIN(program, code))
    _answer(nvrtc.nvrtcDestroyProgram(program))
    return bytes(code)


def launch_function() -> Callable[..., None]:
    """Give ``launch(function, device, blocks, threads, stream, *arguments)``.

    Returns
    -------
    callable
        Starts a kernel whose parameters are all 64 bits wide.

    Raises
    ------
    opgraft.NotSupported
        If it cannot be built. It needs what Triton itself needs for its first launch, a C compiler.

    """
    launch, reason = _built()
    if launch is None:
        raise NotSupported(reason)
    return launch


@functools.cache
def _built() -> tuple[Callable[..., None] | None, str]:
    source = (_HERE / "launch.c").read_text(encoding="utf-8")
    try:
        # Triton keeps what it builds in its cache, by the text of the source.
        module: Any = compile_module_from_src(source, "opgraft_cuda_launch")
    except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        return None, f"launch.c cannot be built here: {error}"
    return module.launch, ""


def _answer(returned: tuple[Any, ...]) -> Any:
    """Take the status off what a function of cuda-bindings returned."""
    status, *values = returned
    if int(status) != 0:
        message = f"CUDA answered {status.name}"
        raise RuntimeError(message)
    return values[0] if values else None
