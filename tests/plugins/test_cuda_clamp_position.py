"""The CUDA C++ kernel of ``attention.clamp_position`` without a GPU.

The C that launches is real; the CUDA driver that it finds logs, and cuda-bindings is made up. Both
have to be there before the process starts: the last test starts one for all others.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

FAKES = os.environ.get("FAKE_CUDA_FOLDER")
faked = pytest.mark.skipif(not FAKES, reason="run by the last test, with a made-up CUDA driver")

DRIVER = r"""
#include <string.h>
typedef unsigned long long word;
struct { word function, blocks, threads, stream, arguments[8]; } launches[256];
int launch_count, context_is_current, answer;
int cuLaunchKernel(word function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty,
                   unsigned tz, unsigned shared, word stream, void **parameters, void **extra) {
  if (!context_is_current) return 201;
  if (answer) return answer;
  launches[launch_count].function = function;
  launches[launch_count].blocks = x;
  launches[launch_count].threads = threads;
  launches[launch_count].stream = stream;
  for (word i = 0; i < function % 10; ++i) memcpy(&launches[launch_count].arguments[i], parameters[i], 8);
  return ++launch_count, 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(long long)(device + 1); return 0; }
int cuCtxSetCurrent(void *context) { context_is_current = (int)(long long)context; return 0; }
int cuGetErrorString(int status, const char **text) { *text = "made up"; return 0; }
"""
BINDINGS_DRIVER = """
def cuCtxGetCurrent(): return 0, 1
def cuModuleLoadData(code): return 0, code
# The last digit says how many parameters the kernel has.
NAMES = {b"contiguous_int32": 1003, b"strided_int32": 1005, b"contiguous_int64": 2003, b"strided_int64": 2005}
def cuModuleGetFunction(module, name): return 0, NAMES[name]
"""
BINDINGS_NVRTC = """
import enum, types
class nvrtcResult(enum.IntEnum):
    NVRTC_SUCCESS = 0
    NVRTC_ERROR_COMPILATION = 6
compiled = []
def nvrtcCreateProgram(source, name, count, headers, names): return 0, source
def nvrtcCompileProgram(program, count, options):
    compiled.append(options[0].decode())
    return (nvrtcResult(6 if options[0].endswith(b"sm_99") else 0),)
def nvrtcGetProgramLogSize(program): return 0, 12
def nvrtcGetProgramLog(program, log): log[:] = b"no such arch" ; return (0,)
def nvrtcGetCUBINSize(program): return 0, 4
def nvrtcGetCUBIN(program, code): code[:] = b"code"; return (0,)
def nvrtcDestroyProgram(program): return (0,)
"""


class Launch(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_uint64),
        ("blocks", ctypes.c_uint64),
        ("threads", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 8),
    )


class FakeTensor:
    """As much of a tensor as the kernel looks at."""

    def __init__(self, address=0x10000, size=64, dtype=torch.int32, stride=1, device=0):
        self.address, self.size, self.dtype, self.step, self.index = (address, size, dtype, stride, device)

    def data_ptr(self):
        return self.address

    def numel(self):
        return self.size

    def get_device(self):
        return self.index

    def is_contiguous(self):
        return self.step == 1

    def stride(self, dimension):
        assert dimension == 0
        return self.step


class FakeGpu:
    """What the made-up driver logged, and the current device."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.current = 0
        self.exchanges = []
        self["launch_count"] = self["answer"] = 0
        self["context_is_current"] = 1

    def __setitem__(self, name, value):
        ctypes.c_int.in_dll(self.library, name).value = value

    def __getitem__(self, name):
        return ctypes.c_int.in_dll(self.library, name).value

    def exchange(self, index):
        before, self.current = self.current, index
        self.exchanges.append(index)
        return before

    @property
    def launches(self):
        log = (Launch * 256).in_dll(self.library, "launches")
        return [
            (one.function, one.blocks, one.threads, one.stream, one.arguments[: one.function % 10])
            for one in log[: self["launch_count"]]
        ]


@pytest.fixture
def gpu(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: gpu.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 100 + i, raising=False)
    monkeypatch.setattr(torch.cuda, "_exchange_device", gpu.exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", gpu.exchange)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 9 * device))
    for name in [name for name in sys.modules if name.startswith("opgraft_cuda.")]:
        monkeypatch.delitem(sys.modules, name)
    return gpu


@pytest.fixture
def kernel(gpu):
    from opgraft_cuda.clamp_position import clamp_position

    return clamp_position


def out(size=64, **facts):
    return FakeTensor(**{"address": 0x20000, "size": size, "dtype": torch.int64, **facts})


@faked
@pytest.mark.parametrize(("dtype", "function"), [(torch.int32, 1003), (torch.int64, 2003)])
def test_contiguous_tensors_take_two_elements_a_thread(gpu, kernel, dtype, function):
    for size in (1, 512, 513, 2**33):
        target = out(size)
        assert target is kernel(FakeTensor(size=size, dtype=dtype), out=target)
    assert [
        (function, 1, 256, 100, [0x10000, 0x20000, 1]),
        (function, 1, 256, 100, [0x10000, 0x20000, 512]),
        (function, 2, 256, 100, [0x10000, 0x20000, 513]),
        (function, 2**24, 256, 100, [0x10000, 0x20000, 2**33]),
    ] == gpu.launches


@faked
@pytest.mark.parametrize(
    ("seq_lens", "target"),
    [
        ({"address": 0x10004}, {}),
        ({"address": 0x10008}, {}),
        ({}, {"address": 0x20008}),
        ({"stride": 0}, {}),
        ({"stride": 3}, {"stride": 2}),
    ],
)
def test_every_other_layout_takes_one_element_a_thread(gpu, kernel, seq_lens, target):
    kernel(FakeTensor(size=257, **seq_lens), out=out(257, **target))
    arguments = [
        seq_lens.get("address", 0x10000),
        target.get("address", 0x20000),
        257,
        seq_lens.get("stride", 1),
        target.get("stride", 1),
    ]
    assert [(1005, 2, 256, 100, arguments)] == gpu.launches


@faked
def test_nothing_is_compiled_or_launched_for_an_empty_batch(gpu, kernel):
    from cuda.bindings import nvrtc

    before = list(nvrtc.compiled)
    empty = torch.empty(0, dtype=torch.int32)
    assert torch.equal(torch.empty(0, dtype=torch.int64), kernel(empty))
    assert before == nvrtc.compiled
    assert [] == gpu.launches


@faked
def test_a_device_is_compiled_for_once(gpu, kernel):
    from cuda.bindings import nvrtc

    nvrtc.compiled.clear()
    for dtype in (torch.int32, torch.int64, torch.int32):
        kernel(FakeTensor(dtype=dtype), out=out())
    assert ["--gpu-architecture=sm_90"] == nvrtc.compiled


@faked
def test_the_tensor_s_own_device_is_used_and_the_current_one_stays(gpu, kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for device in (1, 0, 1):
        kernel(FakeTensor(device=device), out=out(device=device))
        assert 0 == gpu.current
    assert [101, 100, 101] == [launch[3] for launch in gpu.launches]
    exchanged = len(gpu.exchanges)
    kernel(FakeTensor(), out=out())
    assert exchanged == len(gpu.exchanges)


@faked
def test_a_thread_without_a_context_gets_one(gpu, kernel):
    kernel(FakeTensor(), out=out())
    gpu["context_is_current"] = 0
    kernel(FakeTensor(device=0), out=out())
    assert 1 == gpu["context_is_current"]
    assert 2 == len(gpu.launches)


@faked
def test_a_failed_launch_says_so(gpu, kernel):
    gpu["answer"] = 719
    with pytest.raises(RuntimeError) as error:
        kernel(FakeTensor(), out=out())
    assert "CUDA error 719 at launch: made up" == str(error.value)


@faked
def test_an_arch_that_the_compiler_does_not_know_is_refused_and_remembered(gpu, kernel):
    from cuda.bindings import nvrtc

    from opgraft import NotSupported

    nvrtc.compiled.clear()
    for _ in range(3):
        with pytest.raises(NotSupported) as error:
            kernel(FakeTensor(device=1), out=out(device=1))
        assert "clamp_position.cu cannot be compiled for sm_99 here: NVRTC_ERROR_COMPILATION: no such arch" == str(
            error.value
        )
    assert ["--gpu-architecture=sm_99"] == nvrtc.compiled
    assert [] == gpu.launches


@faked
@pytest.mark.parametrize("fault", [RuntimeError("no compiler"), OSError("no compiler"), ImportError("no compiler")])
def test_a_machine_without_a_c_compiler_is_refused_and_remembered(gpu, kernel, fault, monkeypatch):
    import opgraft_cuda.nvrtc
    from opgraft import NotSupported

    tries = []

    def build(source, name):
        tries.append(name)
        raise fault

    monkeypatch.setattr(opgraft_cuda.nvrtc, "compile_module_from_src", build)
    for _ in range(3):
        with pytest.raises(NotSupported) as error:
            kernel(FakeTensor(), out=out())
        assert "launch.c cannot be built here: no compiler" == str(error.value)
    assert ["opgraft_cuda_launch"] == tries


@faked
def test_threads_may_all_be_first(gpu, kernel):
    barrier = threading.Barrier(8)

    def call():
        barrier.wait()
        kernel(FakeTensor(), out=out())

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 8 == len(gpu.launches)


@faked
def test_the_launch_refuses_too_few_and_too_many_arguments(gpu, kernel):
    from opgraft_cuda.nvrtc import launch_function

    for count in (4, 14):
        with pytest.raises(TypeError) as error:
            launch_function()(*range(count))
        assert f"launch takes 5 to 13 arguments, got {count}" == str(error.value)
    with pytest.raises(OverflowError):
        launch_function()(1, 0, 1, 1, 0, -1)
    assert [] == gpu.launches


@faked
def test_it_is_offered_before_the_triton_kernel(gpu):
    import opgraft

    chosen = opgraft.explain_for("attention.clamp_position", device="cuda", arch="9.0", dtype="int32")
    ours = [one.kernel.selector for one in chosen.candidates if one.kernel.backend == "cuda"]
    assert ["cuda/jit", "cuda/triton"] == ours
    assert "cuda/jit" == chosen.winner.selector


@pytest.mark.skipif(FAKES is not None, reason="this is that process")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the real driver is in the way")
def test_all_of_it_passes_on_a_made_up_driver(tmp_path):
    bindings = tmp_path / "cuda" / "bindings"
    bindings.mkdir(parents=True)
    (bindings / "__init__.py").write_text("")
    (bindings / "driver.py").write_text(BINDINGS_DRIVER)
    (bindings / "nvrtc.py").write_text(BINDINGS_NVRTC)
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    options = ["-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *options, "-o", library, tmp_path / "driver.c"], check=True)
    environment = {
        **os.environ,
        "FAKE_CUDA_FOLDER": str(tmp_path),
        "LD_LIBRARY_PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "TRITON_CACHE_DIR": str(tmp_path / "triton_cache"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", Path(__file__)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "1 skipped" in done.stdout
