"""What ``attention.clamp_position`` means."""

from __future__ import annotations

import pytest
import torch

from opgraft.ops import attention

BOTH = pytest.mark.parametrize("dtype", [torch.int32, torch.int64])


@BOTH
def test_positions_count_from_zero_and_are_int64_whatever_the_lengths_are(dtype):
    positions = attention.clamp_position(torch.tensor([0, 1, 5, 128], dtype=dtype))
    assert torch.int64 == positions.dtype
    assert [0, 0, 4, 127] == positions.tolist()


@BOTH
def test_the_smallest_integer_gives_zero_rather_than_wrapping_round(dtype):
    lowest = torch.iinfo(dtype).min
    assert [0, 0, 0] == attention.clamp_position(torch.tensor([lowest, lowest + 1, -1], dtype=dtype)).tolist()


@BOTH
def test_no_requests_give_no_positions(dtype):
    positions = attention.clamp_position(torch.empty(0, dtype=dtype))
    assert ((0,), torch.int64) == (tuple(positions.shape), positions.dtype)


@BOTH
def test_lengths_of_any_stride_give_contiguous_positions(dtype):
    lengths = torch.arange(20, dtype=dtype)[3::4]
    positions = attention.clamp_position(lengths)
    assert positions.is_contiguous()
    assert [2, 6, 10, 14, 18] == positions.tolist()
    assert [6, 6, 6] == attention.clamp_position(lengths[1:2].expand(3)).tolist()
