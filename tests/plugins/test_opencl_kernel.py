"""The OpenCL kernel on a real OpenCL device, over CPU tensors."""

from __future__ import annotations

import os
import re
import threading

import pytest
import torch

pytest.importorskip("pyopencl", reason="pyopencl is not installed")

from opgraft import NotSupported
from opgraft_opencl import device
from opgraft_opencl.kernels.clamp_position import clamp_position

pytestmark = pytest.mark.skipif(
    not device.find_platforms()[0], reason=device.find_platforms()[1] or "there is a platform"
)

DTYPES = [torch.int32, torch.int64]


def extremes(dtype):
    limits = torch.iinfo(dtype)
    return torch.tensor([limits.min, limits.min + 1, -1, 0, 1, 2, limits.max], dtype=dtype)


def expected_positions(seq_lens):
    return [max(length, 1) - 1 for length in seq_lens.tolist()]


LAYOUTS = {
    "contiguous": lambda t: t,
    "step": lambda t: t[::2],
    "offset": lambda t: t[3:],
    "expanded": lambda t: t[5:6].expand(4),
    "column": lambda t: t[:6].view(3, 2)[:, 1],
    "single element of a column": lambda t: t.view(7, 1)[5],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_stride_is_read_and_the_smallest_integer_does_not_wrap(layout, dtype):
    seq_lens = LAYOUTS[layout](extremes(dtype))

    positions = clamp_position(seq_lens)

    assert torch.int64 is positions.dtype
    assert positions.is_contiguous()
    assert expected_positions(seq_lens) == positions.tolist()
    assert LAYOUTS[layout](extremes(dtype)).tolist() == seq_lens.tolist()


def test_out_is_returned_and_only_its_own_elements_are_written():
    seq_lens = extremes(torch.int32)
    buffer, expected = torch.full((20,), -7), torch.full((20,), -7)
    out = buffer[2:16:2]
    expected[2:16:2] = torch.tensor(expected_positions(seq_lens))

    assert out is clamp_position(seq_lens, out=out)
    assert expected.tolist() == buffer.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_elements_means_no_launch(dtype, monkeypatch):
    monkeypatch.setattr(device, "_device", lambda: pytest.fail("the device was asked for"))
    out = torch.empty(0, dtype=torch.int64)

    positions = clamp_position(torch.empty(0, dtype=dtype))

    assert (0,) == positions.shape
    assert torch.int64 is positions.dtype
    assert out is clamp_position(torch.empty(0, dtype=dtype), out=out)


def test_the_default_device_of_the_caller_does_not_matter():
    seq_lens = torch.tensor([5, 0])

    with torch.device("meta"):
        positions = clamp_position(seq_lens)

    assert [4, 0] == positions.tolist()


def test_a_large_input_is_right():
    seq_lens = torch.randint(-3, 2**31 - 1, (2**20 + 3,), dtype=torch.int32)

    assert torch.equal(seq_lens.long().clamp(min=1) - 1, clamp_position(seq_lens))


def test_the_device_works_in_the_tensors_own_memory():
    source = """
    kernel void places(global const long *given, long given_stride,
                       global long *out, long out_stride)
    {
        out[0] = (long)given;
        out[out_stride] = (long)out;
    }
    """
    given, out = torch.zeros(8, dtype=torch.int64)[3::2], torch.zeros(6, dtype=torch.int64)[1::3]

    device.launch(source, "places", count=1, inputs=[given], outputs=[out])

    assert [given.data_ptr(), out.data_ptr()] == out.tolist()


def test_threads_do_not_mix_their_calls():
    wrong = []

    def work(seed):
        for size in range(1, 60):
            seq_lens = torch.arange(size) + seed
            if not torch.equal(seq_lens - 1, clamp_position(seq_lens)):
                wrong.append((seed, size))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 1000, 10**6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [] == wrong


def test_a_process_forked_after_use_is_refused_instead_of_left_hanging(monkeypatch):
    seq_lens = torch.tensor([3])
    clamp_position(seq_lens)
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)

    with pytest.raises(NotSupported) as caught:
        clamp_position(seq_lens)

    assert (
        "opgraft-opencl: OpenCL was in use before this process was forked, and does not survive that; "
        "start the process with the 'spawn' method"
    ) == str(caught.value)


class NoPlatform:
    class LogicError(Exception):
        pass

    def get_platforms(self):
        raise self.LogicError("clGetPlatformIDs failed: PLATFORM_NOT_FOUND_KHR")


class Platform:
    name = "Bare"

    def get_devices(self):
        return []


def test_where_no_platform_is_the_reason_says_so(monkeypatch):
    monkeypatch.setattr(device, "cl", NoPlatform())
    device._device.cache_clear()

    reason = (
        "no OpenCL platform found (clGetPlatformIDs failed: PLATFORM_NOT_FOUND_KHR); "
        "`pip install opgraft-opencl[pocl]` has one"
    )

    assert ((), reason) == device.find_platforms()
    with pytest.raises(NotSupported, match=f"^opgraft-opencl: {re.escape(reason)}$"):
        clamp_position(torch.tensor([1]))


def test_a_platform_without_a_device_is_named(monkeypatch):
    monkeypatch.setattr(device, "find_platforms", lambda: ([Platform(), Platform()], ""))
    device._device.cache_clear()

    with pytest.raises(NotSupported) as caught:
        clamp_position(torch.tensor([1]))

    assert "opgraft-opencl: no device on the platforms Bare, Bare" == str(caught.value)
