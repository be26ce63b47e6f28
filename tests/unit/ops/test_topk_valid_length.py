"""What ``attention.topk_valid_length`` means."""

from __future__ import annotations

import torch

from opgraft.ops import attention


def selection():
    return torch.tensor([[4, -1, 6, -1], [-1, -2, -1, -1], [1, 2, 3, 4]], dtype=torch.int32)


def call(topk, **options):
    return attention.topk_valid_length(topk, backend="native", **options).tolist()


def test_the_last_valid_entry_sets_the_length_and_one_is_the_least():
    assert [3, 1, 4] == call(selection())
    assert [3, 0, 4] == call(selection(), minimum=0)


def test_valid_entries_alone_may_be_counted():
    assert [2, 1, 4] == call(selection(), rule="count")
    assert [2, 0, 4] == call(selection(), rule="count", minimum=0)


def test_a_repair_makes_empty_rows_readable_and_touches_nothing_else():
    topk = selection()
    assert [3, 0, 4] == call(topk, minimum=0, repair=True)
    assert [[4, -1, 6, -1], [0, -2, -1, -1], [1, 2, 3, 4]] == topk.tolist()


def test_without_repair_the_selection_is_only_read():
    topk = selection()
    call(topk, rule="count")
    assert torch.equal(selection(), topk)


def test_no_columns_give_the_least_length():
    assert [1, 1] == call(torch.empty((2, 0), dtype=torch.int64), repair=True)
    assert [] == call(torch.empty((0, 3), dtype=torch.int64))


def test_a_repair_reaches_rows_of_any_stride():
    whole = torch.full((3, 4), -1)
    call(whole.t()[1:3], repair=True)
    assert [[-1, 0, 0, -1], [-1, -1, -1, -1], [-1, -1, -1, -1]] == whole.tolist()
