"""What ``attention.block_table`` means."""

from __future__ import annotations

import torch

from opgraft.ops import attention

TABLE = torch.arange(64, 96, dtype=torch.int32).view(2, 16)


def call(rows, lengths, starts=None, table=TABLE, **options):
    given = None if starts is None else torch.tensor(starts)
    vectors = [torch.tensor(values, dtype=torch.int64) for values in (rows, lengths)]
    return attention.block_table(table, *vectors, given, backend="native", **options)


def canary(rows, columns):
    return torch.full((rows, columns), -77, dtype=torch.int32)


def test_a_started_page_counts_whole_and_the_tail_is_absent():
    result = call([0, 1], [9, 8], page_size=4, max_pages=4)
    assert [[16, 17, 18, -1], [20, 21, -1, -1]] == result.tolist()


def test_only_the_first_token_of_a_page_is_read():
    table = torch.full((1, 8), 2**30, dtype=torch.int32)
    table[0, 0], table[0, 4] = 8, 21
    assert [[2, 5]] == call([0], [8], table=table, page_size=4, max_pages=2).tolist()


def test_with_a_buffer_the_tail_keeps_its_values_unless_one_is_asked_for():
    assert [[16, -77], [20, 21]] == call([0, 1], [1, 8], page_size=4, out=canary(2, 2)).tolist()
    assert [[16, 0], [20, 21]] == call([0, 1], [1, 8], page_size=4, tail=0, out=canary(2, 2)).tolist()
    assert [[16, 7]] == call([0], [1], page_size=4, tail=7, max_pages=2).tolist()


def test_an_empty_row_keeps_its_values():
    assert [[-77, -77], [-77, -77]] == call([0, 1], [0, -3], page_size=4, out=canary(2, 2)).tolist()


def test_a_row_that_is_too_long_stays_in_its_row():
    whole = canary(4, 4)
    call([0, 1], [16, 16], page_size=4, out=whole[1:3, :3])
    assert [[-77] * 4, [16, 17, 18, -77], [20, 21, 22, -77], [-77] * 4] == whole.tolist()


def test_a_negative_slot_is_absent_and_never_page_zero():
    table = torch.tensor([[-1, -1, -2, -2, -(2**31), 0]], dtype=torch.int32)
    assert [[-1, -1, -1]] == call([0], [6], table=table, page_size=2, max_pages=3).tolist()
    assert [[-1, -1, -1]] == call([0], [3], [2], table=table, page_size=1, max_pages=3).tolist()


def test_positions_outside_the_table_are_absent():
    assert [[19, -1, -1]] == call([0], [12], [12], page_size=4, max_pages=3).tolist()
    assert [[-1, 16, 17]] == call([0], [12], [-4], page_size=4, max_pages=3).tolist()


def test_requests_outside_the_pool_are_absent():
    assert [[-1], [-1]] == call([-1, 2], [4, 4], page_size=4, max_pages=1).tolist()


def test_any_page_size_will_do():
    assert [[9, 10, 11]] == call([0], [16], page_size=7, max_pages=3).tolist()
    assert [[0]] == call([1], [16], page_size=2**31 - 1, max_pages=1).tolist()


def test_the_longest_length_rounds_up_without_wrapping_round():
    result = call([0], [2**63 - 1], page_size=2**31 - 1, max_pages=2)
    assert [[0, -1]] == result.tolist()
