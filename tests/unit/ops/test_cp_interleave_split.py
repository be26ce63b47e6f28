"""What ``attention.cp_interleave_split`` means."""

from __future__ import annotations

import pytest
import torch

from opgraft.ops import attention


def call(lengths, world_size, rank, dtype=torch.int64):
    shares, requests = attention.cp_interleave_split(
        torch.tensor(lengths, dtype=dtype), world_size=world_size, rank=rank, backend="native"
    )
    return shares.tolist(), requests.tolist()


def test_requests_without_a_share_are_left_out():
    assert ([3, 2, 0], [0, 2, -1]) == call([5, 1, 4], 2, 0)
    assert ([2, 1, 2], [0, 1, 2]) == call([5, 1, 4], 2, 1)
    assert ([1, 0, 0], [2, -1, -1]) == call([0, 0, 1], 2, 0)


def test_negative_lengths_count_as_zero():
    assert ([1, 1, 0], [0, 2, -1]) == call([1, -5, 2], 2, 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_shares_have_the_dtype_of_the_lengths(dtype):
    shares, requests = attention.cp_interleave_split(torch.tensor([5, 1], dtype=dtype), world_size=2, rank=0)
    assert (dtype, torch.int32) == (shares.dtype, requests.dtype)


def test_a_world_of_one_owns_everything():
    assert ([5, 4, 0], [0, 2, -1]) == call([5, 0, 4], 1, 0)


def test_the_ranks_share_all_tokens_among_them():
    generator = torch.Generator().manual_seed(8)
    lengths = torch.randint(0, 40, (31,), generator=generator).tolist()
    for world_size in (1, 2, 3, 4, 8):
        owned = [0] * 31
        for rank in range(world_size):
            for share, request in zip(*call(lengths, world_size, rank), strict=True):
                if request >= 0:
                    owned[request] += share
        assert lengths == owned


def test_sums_beyond_64_bit_do_not_matter():
    longest = 2**63 - 1
    assert ([2**62, 2**62 - 1, 0], [0, 2, -1]) == call([longest, 1, longest - 1], 2, 0)
