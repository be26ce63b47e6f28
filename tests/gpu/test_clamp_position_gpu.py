"""``attention.clamp_position`` on a real CUDA device: each kernel alone, and the op."""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch
import triton

import opgraft
import opgraft_cuda.nvrtc
from opgraft import NotSupported
from opgraft_cuda import clamp_position as cuda_kernel
from opgraft_triton_kernels.attention import _clamp_position as triton_kernel
from opgraft_triton_kernels.launcher import TESTED_TRITON, Launcher

OP = "attention.clamp_position"
KERNELS = {
    "op": opgraft.ops.attention.clamp_position,
    "triton": triton_kernel.clamp_position,
    "jit": cuda_kernel.clamp_position,
}
DTYPES = [torch.int32, torch.int64]
SIZES = [0, 1, 2, 63, 64, 65, 255, 511, 512, 513, 1023, 1025, 4096, 2**17 + 3, 2**20, 2**24]
CANARY = -77

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
direct = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) not in TESTED_TRITON, reason="this Triton launches as usual"
)
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
every_kernel = pytest.mark.parametrize("kernel", list(KERNELS.values()), ids=list(KERNELS))
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def meaning(seq_lens):
    return torch.maximum(seq_lens, torch.ones_like(seq_lens)).to(torch.int64) - 1


def lengths(size, dtype=torch.int32, device="cuda"):
    return torch.randint(-3, 2**31 - 1, (size,), dtype=dtype, device=device)


def same(expected, actual):
    assert actual.dtype == torch.int64
    assert actual.device == expected.device
    assert torch.equal(expected, actual)


@every_kernel
@every_dtype
@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_formula_for_every_size(kernel, dtype, size):
    seq_lens = lengths(size, dtype)
    before = seq_lens.clone()
    actual = kernel(seq_lens)
    same(meaning(seq_lens), actual)
    assert actual.is_contiguous()
    assert torch.equal(before, seq_lens)


@every_kernel
@every_dtype
def test_extreme_lengths_do_not_wrap_round(kernel, dtype):
    limits = torch.iinfo(dtype)
    values = [limits.min, limits.min + 1, -1, 0, 1, 2, limits.max]
    expected = torch.tensor([0, 0, 0, 0, 0, 1, limits.max - 1], device="cuda")
    same(expected, kernel(torch.tensor(values, dtype=dtype, device="cuda")))


@every_kernel
@every_dtype
@pytest.mark.parametrize("size", [1, 7, 513, 2**16 + 1])
def test_lengths_may_lie_anywhere(kernel, dtype, size):
    whole = lengths(4 * size + 8, dtype)
    for seq_lens in (
        whole[::3][:size],
        whole[5::2][:size],
        whole[:1].expand(size),
        whole[: 2 * size].view(size, 2)[:, 1],
        whole[: 2 * size].view(2, size).t()[:, 0],
    ):
        same(meaning(seq_lens), kernel(seq_lens))


@every_kernel
@every_dtype
def test_misaligned_tensors_are_right_after_aligned_ones(kernel, dtype):
    whole = lengths(5000, dtype)
    buffer = torch.empty(5000, dtype=torch.int64, device="cuda")
    for size in (4096, 1000, 1001):
        for start in (0, 1, 0, 2, 3, 4, 5, 8, 16):
            seq_lens = whole[start : start + size]
            same(meaning(seq_lens), kernel(seq_lens))
            for shift in (0, 1, 2):
                out = buffer[shift : shift + size]
                assert out is kernel(seq_lens, out=out)
                same(meaning(seq_lens), out)


@every_kernel
@every_dtype
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_only_the_buffer_is_written(kernel, dtype, stride):
    for size in (1, 64, 513, 4097):
        seq_lens = lengths(size, dtype)
        whole = torch.full((stride * size + 4,), CANARY, device="cuda")
        out = whole[2 : 2 + stride * size : stride]
        assert out is kernel(seq_lens, out=out)
        expected = torch.full_like(whole, CANARY)
        expected[2 : 2 + stride * size : stride] = meaning(seq_lens)
        assert torch.equal(expected, whole)


@every_kernel
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_buffer_costs_no_allocation_and_nothing_waits_for_the_device(kernel):
    seq_lens, out = lengths(4096), torch.empty(4096, dtype=torch.int64, device="cuda")
    kernel(seq_lens, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel(seq_lens, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert before == torch.cuda.memory_stats()["allocation.all.allocated"]


@every_kernel
@every_dtype
def test_a_captured_graph_follows_its_inputs(kernel, dtype):
    seq_lens, out = lengths(1000, dtype), torch.empty(1000, dtype=torch.int64, device="cuda")
    skewed, fresh = lengths(2001, dtype)[1::2], None
    kernel(seq_lens, out=out)
    kernel(skewed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(seq_lens, out=out)
        fresh = kernel(skewed)
    for _ in range(3):
        seq_lens.copy_(lengths(1000, dtype))
        skewed.copy_(lengths(1000, dtype))
        out.fill_(CANARY)
        fresh.fill_(CANARY)
        graph.replay()
        same(meaning(seq_lens), out)
        same(meaning(skewed), fresh)


def test_the_op_may_be_captured_first_after_a_warm_up():
    seq_lens = lengths(321)
    opgraft.warmup(OP, seq_lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = opgraft.ops.attention.clamp_position(seq_lens)
    seq_lens.copy_(lengths(321))
    graph.replay()
    same(meaning(seq_lens), actual)


@every_kernel
def test_it_runs_on_the_current_stream(kernel):
    source = lengths(2**20)
    seq_lens, out = torch.zeros_like(source), torch.zeros(2**20, dtype=torch.int64, device="cuda")
    kernel(seq_lens, out=out)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # some 10 ms: work of another stream would come first
        seq_lens.copy_(source)
        kernel(seq_lens, out=out)
        actual = out.clone()
    stream.synchronize()
    same(meaning(source), actual)


@every_kernel
def test_threads_may_call_it_together_and_first(kernel):
    inputs = [lengths(1000 + number) for number in range(8)]
    outputs = [torch.empty(1000 + number, dtype=torch.int64, device="cuda") for number in range(8)]
    torch.cuda.synchronize()
    barrier = threading.Barrier(8)

    def call(number):
        barrier.wait()
        for _ in range(100):
            kernel(inputs[number], out=outputs[number])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seq_lens, out in zip(inputs, outputs, strict=True):
        same(meaning(seq_lens), out)


@two_devices
@every_kernel
def test_a_tensor_s_own_device_is_used_and_the_current_one_stays(kernel):
    for _ in range(2):
        for device in (1, 0):
            for seq_lens in (lengths(1000, device=device), lengths(2001, device=device)[1::2]):
                same(meaning(seq_lens), kernel(seq_lens))
                assert 0 == torch.cuda.current_device()
    with torch.cuda.device(1):
        seq_lens = lengths(1000, device=0)
        same(meaning(seq_lens), kernel(seq_lens))
        assert 1 == torch.cuda.current_device()


@every_kernel
def test_more_than_two_to_the_31_elements_are_reached(kernel):
    size = 2**31 + 5
    if torch.cuda.mem_get_info()[0] < 12 * size + 2**33:
        pytest.skip("needs 34 GB of device memory")
    seq_lens = torch.zeros(size, dtype=torch.int32, device="cuda")
    seq_lens[-7:] = torch.arange(7, dtype=torch.int32, device="cuda")
    actual = kernel(seq_lens)
    assert [0, 0, 1, 2, 3, 4, 5] == actual[-7:].tolist()
    actual.fill_(CANARY)
    kernel(seq_lens[:1].expand(size), out=actual)
    assert [0, 0] == [int(actual.max()), int(actual.min())]
    del actual, seq_lens
    gc.collect()
    torch.cuda.empty_cache()


@direct
def test_sizes_do_not_multiply_what_triton_compiles():
    for launcher in (triton_kernel.contiguous, triton_kernel.strided):
        launcher.variants.clear()
    for dtype in DTYPES:
        for _ in range(50):
            size = random.randint(1, 10_000)  # noqa: S311 - sizes, no secrets
            triton_kernel.clamp_position(lengths(size, dtype))
            triton_kernel.clamp_position(lengths(2 * size + 2, dtype)[::2])
    assert 2 == len(triton_kernel.contiguous.variants)
    assert 2 == len(triton_kernel.strided.variants)


@direct
def test_kept_code_outlives_triton_s_own_cache():
    kernel = triton_kernel.clamp_position_contiguous_kernel
    seq_lens = lengths(777)
    triton_kernel.clamp_position(seq_lens)
    kernel.device_caches.clear()
    gc.collect()
    same(meaning(seq_lens), triton_kernel.clamp_position(seq_lens))


@direct
def test_a_launch_hook_is_called_for_as_long_as_it_is_set():
    seen = []

    def enter(metadata):
        seen.append(metadata.get()["name"])

    seq_lens = lengths(777)
    triton_kernel.clamp_position(seq_lens)
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(enter)
    try:
        same(meaning(seq_lens), triton_kernel.clamp_position(seq_lens))
    finally:
        hook.remove(enter)
    triton_kernel.clamp_position(seq_lens)
    assert ["clamp_position_contiguous_kernel"] == seen


def test_an_untested_triton_launches_as_usual(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "99.0.0")
    usual = Launcher(triton_kernel.clamp_position_contiguous_kernel, BLOCK=512, num_warps=8)
    monkeypatch.setattr(triton_kernel, "contiguous", usual)
    for start in (0, 1, 0):
        seq_lens = lengths(2000)[start:]
        same(meaning(seq_lens), triton_kernel.clamp_position(seq_lens))
    assert {} == usual.variants


def test_a_cpu_tensor_is_refused_by_triton_itself():
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        triton_kernel.clamp_position(torch.ones(4, dtype=torch.int32))


def test_the_kernel_with_the_least_host_time_is_chosen():
    chosen = opgraft.explain(OP, lengths(64))
    assert "cuda/jit" == chosen.winner.selector
    assert "priority" == chosen.decided_by
    with opgraft.use(deny=["cuda/jit"]):
        assert "cuda/triton" == opgraft.explain(OP, lengths(64)).winner.selector


@every_dtype
@pytest.mark.parametrize("selector", ["cuda/jit", "cuda/triton", "triton", "cuda", "native"])
def test_every_selector_gives_the_same(dtype, selector):
    seq_lens = lengths(1000, dtype)
    op = opgraft.ops.attention.clamp_position
    same(meaning(seq_lens), op(seq_lens, backend=selector))
    with opgraft.use(force=selector):
        same(meaning(seq_lens), op(seq_lens))


def test_what_cannot_be_compiled_is_left_to_the_triton_kernel(monkeypatch):
    def refuse(*_):
        message = "no such arch"
        raise RuntimeError(message)

    monkeypatch.setattr(opgraft_cuda.nvrtc, "cubin", refuse)
    monkeypatch.setattr(cuda_kernel, "_SOURCE", opgraft_cuda.nvrtc.CudaSource("clamp_position.cu"))
    monkeypatch.setattr(cuda_kernel, "_kept", {})
    seq_lens = lengths(1000)
    out = torch.full((1000,), CANARY, device="cuda")
    with pytest.raises(NotSupported, match=r"clamp_position\.cu cannot be compiled for sm_"):
        cuda_kernel.clamp_position(seq_lens, out=out)
    assert [CANARY] == out.unique().tolist()
    same(meaning(seq_lens), opgraft.ops.attention.clamp_position(seq_lens))
