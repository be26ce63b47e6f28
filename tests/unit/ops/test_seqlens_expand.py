"""What ``attention.seqlens_expand`` means."""

from __future__ import annotations

import torch

from opgraft.ops import attention


def call(queries, lengths, **options):
    vectors = [torch.tensor(values, dtype=torch.int64) for values in (queries, lengths)]
    return attention.seqlens_expand(*vectors, backend="native", **options).tolist()


def test_each_query_token_sees_one_more_than_the_one_before():
    assert [8, 9, 10, 5] == call([3, 0, 1], [10, 7, 5], total=4)


def test_no_length_is_negative():
    assert [0, 0, 0, 1, 2] == call([5], [2], total=5)
    assert [0, 0] == call([2], [-(2**63)], total=2)


def test_entries_behind_the_last_request_are_zero_in_a_buffer_too():
    out = torch.full((4,), -77, dtype=torch.int32)
    assert [7, 8, 0, 0] == call([2], [8], total=4, out=out)
    assert [0, 0] == call([], [], total=2)


def test_tokens_beyond_the_total_are_dropped():
    assert [7, 8, 3] == call([2, 5], [8, 7], total=3)


def test_a_long_request_is_written_whole():
    assert list(range(2, 131074)) == call([131072], [131073], total=131072)


def test_lengths_at_the_end_of_int64_do_not_wrap_round():
    assert [2**31 - 2, 2**31 - 1] == call([2], [2**31 - 1], total=2)
    assert [1, 0, 0] == call([1, 2**63 - 1], [1, 5], total=3)


def test_it_equals_a_count_by_token():
    generator = torch.Generator().manual_seed(1)
    queries = torch.randint(0, 17, (512,), generator=generator)
    lengths = torch.randint(0, 99, (512,), generator=generator)
    counted = [
        max(length - count + 1 + token, 0)
        for count, length in zip(queries.tolist(), lengths.tolist(), strict=True)
        for token in range(count)
    ]
    assert counted == call(queries.tolist(), lengths.tolist(), total=len(counted))
