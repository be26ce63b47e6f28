"""The launcher on a made-up CUDA driver: Triton's compiler and C launcher are real, the GPU is a log of launches."""

from __future__ import annotations

import ctypes
import gc
import re
import subprocess
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel

from opgraft_triton_kernels import launcher as launcher_module
from opgraft_triton_kernels.launcher import TESTED_TRITON, Launcher

pytestmark = [
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
    pytest.mark.skipif(
        tuple(map(int, triton.__version__.split(".")[:2])) not in TESTED_TRITON, reason="this Triton launches as usual"
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the real driver is in the way"),
]

PARAMETERS = 5  # of the compiled kernels below: two pointers, one integer, Triton's two scratch pointers

DRIVER = r"""
#include "cuda.h"
#include <string.h>
struct Launch { unsigned long long function, grid[3], threads, stream, arguments[%(parameters)d]; };
struct Launch launches[4096];
int launch_count, loaded, unloaded;
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute a, CUdeviceptr p) { *(CUdeviceptr *)out = p; return 0; }
CUresult cuModuleLoadData(CUmodule *m, const void *image) { *m = (CUmodule)(long long)++loaded; return 0; }
CUresult cuModuleUnload(CUmodule m) { ++unloaded; return 0; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) { *f = (CUfunction)((long long)m + 7000); return 0; }
CUresult cuFuncGetAttribute(int *out, CUfunction_attribute a, CUfunction f) { *out = 1024; return 0; }
CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute a, CUdevice d) { *out = 65536; return 0; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)1; return 0; }
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra) {
  struct Launch *launch = &launches[__sync_fetch_and_add(&launch_count, 1)];
  launch->function = (unsigned long long)f;
  launch->grid[0] = config->gridDimX; launch->grid[1] = config->gridDimY; launch->grid[2] = config->gridDimZ;
  launch->threads = config->blockDimX;
  launch->stream = (unsigned long long)config->hStream;
  for (int i = 0; i < %(parameters)d; ++i) memcpy(&launch->arguments[i], params[i], 8);
  return 0;
}
"""


class Launch(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_uint64),
        ("grid", ctypes.c_uint64 * 3),
        ("threads", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * PARAMETERS),
    )


class FakeTensor:
    """As much of a tensor as a launch looks at."""

    def __init__(self, address=0x10000, dtype=torch.int32, device=0):
        self.address, self.dtype, self.device = address, dtype, torch.device("cuda", device)

    def data_ptr(self):
        return self.address

    def get_device(self):
        return self.device.index


class FakeGpu:
    """Two devices, a current one, and what was launched."""

    def __init__(self, library):
        self.library = library
        self.current = 0
        self.ordinary = 0

    def exchange(self, index):
        before, self.current = self.current, index
        return before

    @property
    def launches(self):
        count = ctypes.c_int.in_dll(self.library, "launch_count").value
        return [
            (one.grid[:], one.stream, one.arguments[:3])
            for one in (Launch * 4096).in_dll(self.library, "launches")[:count]
        ]

    @property
    def functions(self):
        count = ctypes.c_int.in_dll(self.library, "launch_count").value
        return [one.function for one in (Launch * 4096).in_dll(self.library, "launches")[:count]]

    @property
    def unloaded(self):
        return ctypes.c_int.in_dll(self.library, "unloaded").value


@pytest.fixture(scope="session")
def fake_libcuda(tmp_path_factory):
    nvidia = Path(triton.__file__).parent / "backends" / "nvidia"
    folder = tmp_path_factory.mktemp("fake_cuda")
    source = DRIVER % {"parameters": PARAMETERS}
    written = set(re.findall(r"CUresult (cu\w+)\(", source))
    asked = set(re.findall(r"\b(cu[A-Z]\w+)\(", (nvidia / "driver.c").read_text()))
    stubs = "".join(f"int {name}() {{ return 0; }}\n" for name in sorted(asked - written))
    (folder / "written.c").write_text(source)
    (folder / "stubs.c").write_text(stubs)
    library = folder / "libcuda.so.1"
    options = ["-w", "-shared", "-fPIC", "-fno-builtin", "-Wl,-soname,libcuda.so.1"]
    sources = [f"-I{nvidia / 'include'}", folder / "written.c", folder / "stubs.c"]
    subprocess.run(["cc", *options, "-o", library, *sources], check=True)
    (folder / "libcuda.so").symlink_to(library.name)
    # Found by its name from now on, by whatever asks the loader for it.
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL), folder


@pytest.fixture
def gpu(fake_libcuda, tmp_path_factory, monkeypatch):
    library, folder = fake_libcuda
    ctypes.c_int.in_dll(library, "launch_count").value = 0
    ctypes.c_int.in_dll(library, "unloaded").value = 0
    gpu = FakeGpu(library)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: gpu.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 100 + i, raising=False)
    monkeypatch.setattr(torch.cuda, "_exchange_device", gpu.exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", gpu.exchange)
    with triton.knobs.nvidia.scope(), triton.knobs.cache.scope():
        triton.knobs.nvidia.libcuda_path = str(folder)
        triton.knobs.cache.dir = str(tmp_path_factory.getbasetemp() / "triton_cache")
        from triton.backends.nvidia.driver import CudaDriver

        driver = CudaDriver()
        driver.get_device_capability = lambda _: (9, 0)
        driver.get_current_device = lambda: gpu.current
        driver.get_current_stream = lambda index: 100 + index
        monkeypatch.setattr(triton.runtime.driver, "_active", driver)
        loaded = weakref.WeakSet()
        load = CompiledKernel._init_handles
        monkeypatch.setattr(CompiledKernel, "_init_handles", lambda one: (loaded.add(one), load(one)))
        yield gpu
        for one in loaded:
            one.module = None  # nothing to unload once this driver is gone


def add_kernel():
    # A kernel of its own for each test: Triton's cache belongs to the kernel object.
    @triton.jit(do_not_specialize=["size"])
    def kernel(x_ptr, out_ptr, size: tl.int64, BLOCK: tl.constexpr):  # noqa: N803
        offsets = tl.arange(0, BLOCK)
        tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < size), mask=offsets < size)

    return kernel


@pytest.fixture
def kernel(gpu, monkeypatch):
    kernel = add_kernel()
    run = kernel.run

    def counted(*args, **kwargs):
        gpu.ordinary += 1
        return run(*args, **kwargs)

    monkeypatch.setattr(kernel, "run", counted)
    return kernel


@pytest.fixture
def launcher(kernel):
    return Launcher(kernel, BLOCK=64)


def test_the_first_call_is_triton_s_own_and_later_calls_do_the_same_without_it(gpu, launcher):
    x, out = FakeTensor(0x10000), FakeTensor(0x20000, torch.int64)
    launcher.launch((3, 2, 1), x, out, 70)
    launcher.launch((3, 2, 1), x, out, 70)
    launcher.launch((5, 1, 1), FakeTensor(0x30000), out, 2**40)
    assert 1 == gpu.ordinary
    assert [
        ([3, 2, 1], 100, [0x10000, 0x20000, 70]),
        ([3, 2, 1], 100, [0x10000, 0x20000, 70]),
        ([5, 1, 1], 100, [0x30000, 0x20000, 2**40]),
    ] == gpu.launches
    assert 1 == len(set(gpu.functions))


def test_code_compiled_for_aligned_tensors_never_sees_others(gpu, launcher):
    out = FakeTensor(0x20000, torch.int64)
    for address in (0x10000, 0x10004, 0x10010, 0x10008):
        launcher.launch((1, 1, 1), FakeTensor(address), out, 70)
    assert 2 == gpu.ordinary
    assert 2 == len(launcher.variants)
    first, second, third, fourth = gpu.functions
    assert first == third != second == fourth


def test_each_combination_of_dtypes_has_its_own_code(gpu, launcher):
    for x in (torch.int32, torch.int64):
        for out in (torch.int32, torch.int64):
            for _ in range(2):
                launcher.launch((1, 1, 1), FakeTensor(dtype=x), FakeTensor(dtype=out), 7)
    assert 4 == gpu.ordinary == len(launcher.variants) == len(set(gpu.functions))


def test_sizes_do_not_multiply_the_variants(gpu, launcher):
    for size in (1, 2, 16, 17, 2**31, 2**40):
        launcher.launch((1, 1, 1), FakeTensor(), FakeTensor(), size)
    assert 1 == gpu.ordinary == len(launcher.variants)


def test_constants_may_be_given_with_each_call(gpu, kernel):
    launcher = Launcher(kernel)
    for block in (64, 128, 64, 128):
        launcher.launch((1, 1, 1), FakeTensor(), FakeTensor(), 7, block)
    assert 2 == gpu.ordinary == len(launcher.variants)
    first, second, third, fourth = gpu.functions
    assert first == third != second == fourth


def test_a_tensor_may_be_absent_where_the_kernel_says_so(gpu):
    @triton.jit(do_not_specialize=["size"])
    def copy(x_ptr, size: tl.int64, map_ptr=None, out_ptr=None):
        if map_ptr is not None:
            tl.store(out_ptr, tl.load(x_ptr + tl.load(map_ptr)) + size)

    launcher = Launcher(copy)
    launcher.launch((1, 1, 1), FakeTensor(), 3, None, FakeTensor())
    launcher.launch((1, 1, 1), FakeTensor(), 3, FakeTensor(), FakeTensor())
    assert 2 == len(launcher.variants)


def test_what_selects_code_here_is_what_selects_it_in_triton(gpu):
    @triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["out_ptr", "step"])
    def kernel(x_ptr, out_ptr, index_ptr, size: tl.int64, stride: tl.int64, step: tl.int32):
        tl.store(out_ptr, tl.load(x_ptr + tl.load(index_ptr)) + size + stride + step)

    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    specialise = create_function_from_signature(kernel.signature, kernel.params, backend)
    source = Launcher(kernel)._source(kernel, "{arguments}")
    key = eval(  # noqa: S307
        "lambda x_ptr, out_ptr, index_ptr, size, stride, step, x_ptr_address, out_ptr_address,"
        " index_ptr_address: (" + re.search(r"\(device, (.*)\)\)\n", source)[1] + ")"
    )
    ours, theirs = {}, {}
    for a in (0, 4, 16):
        for b in (0, 8):
            for c in (0, 8):
                for dtype in (torch.int32, torch.int64):
                    for numbers in ((1, 1, 1), (5, 16, 16), (16, 7, 7), (2**40, 2**33, 48)):
                        addresses = (0x1000 + a, 0x2000 + b, 0x3000 + c)
                        tensors = [FakeTensor(address, dtype) for address in addresses]
                        case = (*addresses, dtype, *numbers)
                        ours[case] = key(*tensors, *numbers, *addresses)
                        theirs[case] = tuple(specialise(*tensors, *numbers)[1])
    # One key never stands for two of Triton's, and none of Triton's for two keys.
    pairs = {(ours[case], theirs[case]) for case in ours}
    assert len(pairs) == len(set(ours.values())) == len(set(theirs.values()))


def test_a_tensor_s_own_device_is_used_and_the_current_one_stays(gpu, launcher):
    for device in (1, 0, 1):
        launcher.launch((1, 1, 1), FakeTensor(device=device), FakeTensor(device=device), 7)
        assert 0 == gpu.current
    assert [101, 100, 101] == [stream for _, stream, _ in gpu.launches]
    assert {0, 1} == {key[0] for key in launcher.variants}
    gpu.current = 1
    before = gpu.ordinary
    launcher.launch((1, 1, 1), FakeTensor(device=1), FakeTensor(device=1), 7)
    assert before == gpu.ordinary
    assert 101 == gpu.launches[-1][1]


def test_a_launch_hook_is_called_for_as_long_as_it_is_set(gpu, launcher):
    hooks = triton.knobs.runtime
    seen = []

    def enter(metadata):
        seen.append(metadata.get()["name"])

    def call():
        launcher.launch((1, 1, 1), FakeTensor(), FakeTensor(), 7)

    call()
    for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook):
        hook.add(enter)
        call()
        hook.remove(enter)
    call()
    assert ["kernel", "kernel"] == seen
    with hooks.scope():
        hooks.launch_enter_hook = enter
        call()
    call()
    assert ["kernel"] * 3 == seen
    assert 4 == gpu.ordinary
    assert 6 == len(gpu.launches)


def test_a_hook_of_the_kernel_sees_every_call(gpu, kernel, launcher):
    seen = []
    launcher.launch((1, 1, 1), FakeTensor(), FakeTensor(), 7)
    kernel.add_pre_run_hook(lambda *args, **kwargs: seen.append(kwargs["size"]))
    launcher.launch((1, 1, 1), FakeTensor(), FakeTensor(), 8)
    assert [8] == seen


def test_a_triton_that_was_not_tested_launches_as_usual(gpu, kernel, monkeypatch):
    monkeypatch.setattr(triton, "__version__", "99.1.0+git123")
    launcher = Launcher(kernel, BLOCK=64)
    for _ in range(2):
        launcher.launch((2, 1, 1), FakeTensor(device=1), FakeTensor(device=1), 7)
    assert 2 == gpu.ordinary
    assert {} == launcher.variants
    assert [([2, 1, 1], 101, [0x10000, 0x10000, 7])] * 2 == gpu.launches


def test_compiled_code_stays_loaded_when_triton_drops_it(gpu, kernel, launcher):
    launcher.launch((1, 1, 1), FakeTensor(), FakeTensor(), 7)
    kernel.device_caches.clear()
    gc.collect()
    assert 0 == gpu.unloaded
    launcher.launch((1, 1, 1), FakeTensor(), FakeTensor(), 7)
    assert 1 == gpu.ordinary
    assert 1 == len(set(gpu.functions))


def test_threads_share_what_one_of_them_compiled(gpu, launcher):
    barrier = threading.Barrier(8)

    def call(number):
        barrier.wait()
        for _ in range(50):
            launcher.launch((1, 1, 1), FakeTensor(), FakeTensor(), number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 == len(launcher.variants)
    assert [50] * 8 == [sum(arguments[2] == number for _, _, arguments in gpu.launches) for number in range(8)]


def test_an_error_of_the_launch_reaches_the_caller_and_keeps_nothing(gpu, launcher):
    class Broken(FakeTensor):
        def data_ptr(self):
            message = "no storage"
            raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="no storage"):
        launcher.launch((1, 1, 1), Broken(), FakeTensor(), 7)
    assert {} == launcher.variants
    assert [] == gpu.launches


@pytest.mark.parametrize(
    "changed", [{"backend": "hip"}, {"global_scratch_size": 8}, {"profile_scratch_size": 8}, {"gsan_enabled": True}]
)
def test_a_kernel_that_needs_more_than_its_arguments_is_launched_as_usual(changed):
    facts = {
        "backend": "cuda",
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        "gsan_enabled": False,
        "launch": None,
        "launch_cooperative_grid": False,
        "launch_pdl": False,
    }

    def compiled(facts):
        target = SimpleNamespace(backend=facts["backend"])
        metadata = SimpleNamespace(target=target)
        return SimpleNamespace(metadata=metadata, run=SimpleNamespace(**facts), function=1, packed_metadata=())

    assert launcher_module._variant(compiled(facts)) is not None
    assert launcher_module._variant(compiled(facts | changed)) is None
    assert launcher_module._variant(None) is None


def test_an_integer_without_a_width_is_refused_by_name():
    @triton.jit
    def kernel(x_ptr, size):
        tl.store(x_ptr, size)

    with pytest.raises(TypeError) as error:
        Launcher(kernel)
    assert "kernel: the integer 'size' must be annotated tl.int32 or tl.int64, got ''" == str(error.value)


def test_a_kernel_without_a_tensor_in_front_is_refused():
    @triton.jit
    def kernel(size: tl.int32, x_ptr):
        tl.store(x_ptr, size)

    with pytest.raises(TypeError) as error:
        Launcher(kernel)
    assert "kernel: the first parameter must be a tensor, named '..._ptr'" == str(error.value)
