"""What ``attention.extend_positions`` means."""

from __future__ import annotations

import torch

from opgraft.ops import attention


def call(prefixes, lengths, **options):
    vectors = [torch.tensor(values, dtype=torch.int32) for values in (prefixes, lengths)]
    return attention.extend_positions(*vectors, backend="native", **options).tolist()


def test_new_tokens_follow_the_prefix_of_their_request():
    assert [7, 8, 0, 1, 2] == call([7, 9, 0], [2, 0, 3], total=5)


def test_without_prefixes_every_request_starts_at_zero():
    assert [0, 1, 0, 1, 2] == call([], [2, 3], total=5)


def test_negative_lengths_count_as_zero():
    assert [0, 1, 4] == call([-5, 9, 4], [2, -3, 1], total=3)


def test_positions_go_beyond_32_bit():
    prefixes, lengths = torch.tensor([2**31 - 1]), torch.tensor([2])
    assert [2**31 - 1, 2**31] == attention.extend_positions(prefixes, lengths, total=2).tolist()


def test_what_no_request_covers_is_zero_in_a_fresh_result_and_kept_in_a_buffer():
    assert [3, 0, 0] == call([3], [1], total=3)
    out = torch.full((3,), -77)
    assert [3, -77, -77] == call([3], [1], total=3, out=out)


def test_tokens_beyond_the_total_are_dropped():
    assert [3, 4, 8] == call([3, 8], [2, 4], total=3)
