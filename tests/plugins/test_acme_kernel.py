"""Acme's kernel on the pretend card. None of this needs opgraft."""

from __future__ import annotations

import re

import pytest
import torch

from opgraft_acme.kernels.clamp_position import clamp_position
from opgraft_acme.pretend_device import autoload
from opgraft_acme.pretend_device.processor import launch, launches

autoload()

DTYPES = [torch.int32, torch.int64]


def extremes(dtype):
    limits = torch.iinfo(dtype)
    return torch.tensor([limits.min, limits.min + 1, -1, 0, 1, 2, limits.max], dtype=dtype)


def expected_positions(seq_lens):
    return [max(length, 1) - 1 for length in seq_lens.tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_integer_does_not_wrap_and_the_result_is_int64(dtype):
    seq_lens = extremes(dtype).to("acme")

    positions = clamp_position(seq_lens)

    assert torch.int64 is positions.dtype
    assert seq_lens.device == positions.device
    assert expected_positions(extremes(dtype)) == positions.tolist()
    assert extremes(dtype).tolist() == seq_lens.tolist()


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
def test_any_stride_is_read(layout, dtype):
    positions = clamp_position(LAYOUTS[layout](extremes(dtype).to("acme")))

    assert expected_positions(LAYOUTS[layout](extremes(dtype))) == positions.tolist()
    assert positions.is_contiguous()


def test_out_is_returned_and_only_its_own_elements_are_written():
    seq_lens = extremes(torch.int32).to("acme")
    buffer = torch.full((20,), -7, device="acme")
    out = buffer[2:16:2]

    assert out is clamp_position(seq_lens, out=out)

    host = torch.full((20,), -7)
    host[2:16:2] = torch.tensor(expected_positions(extremes(torch.int32)))
    assert host.tolist() == buffer.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_elements_means_no_launch(dtype):
    before = launches()

    positions = clamp_position(torch.empty(0, dtype=dtype, device="acme"))
    out = torch.empty(0, dtype=torch.int64, device="acme")

    assert (0,) == positions.shape
    assert torch.int64 is positions.dtype
    assert out is clamp_position(out, out=out)
    assert before == launches()


def test_one_call_is_one_launch_and_large_inputs_are_right():
    seq_lens = torch.randint(-3, 2**31 - 1, (2**20 + 3,), dtype=torch.int32)
    before = launches()

    positions = clamp_position(seq_lens.to("acme"))

    assert before + 1 == launches()
    assert torch.equal(seq_lens.long().clamp(min=1) - 1, positions.cpu())


@pytest.mark.parametrize(
    ("tensor", "got"),
    [
        (torch.ones(2, dtype=torch.int64), "torch.int64 (2,) on cpu"),
        (torch.ones(2, device="acme"), "torch.float32 (2,) on acme:0"),
        (torch.ones(1, 2, dtype=torch.int32, device="acme"), "torch.int32 (1, 2) on acme:0"),
        (torch.ones(0, dtype=torch.int32, device="acme"), "torch.int32 (0,) on acme:0"),
    ],
)
def test_the_card_refuses_what_it_cannot_run_over(tensor, got):
    message = f"acme: a program runs over 1-D int32 or int64 tensors on acme:0 that have elements, got {got}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        launch(lambda elements: None, tensor)


def test_a_tensor_of_stride_0_is_read_only():
    def program(elements):
        elements[:] = [1, 2]

    with pytest.raises(TypeError, match="does not support item assignment"):
        launch(program, torch.zeros(1, dtype=torch.int64, device="acme").expand(2))
