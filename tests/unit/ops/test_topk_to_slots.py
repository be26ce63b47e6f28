"""What ``attention.topk_to_slots`` means."""

from __future__ import annotations

import torch

from opgraft.ops import attention

TABLE = torch.arange(100, 112, dtype=torch.int32).view(3, 4)


def call(topk, table=TABLE, cu_q=None, **options):
    bounds = None if cu_q is None else torch.tensor(cu_q)
    positions = torch.tensor(topk)
    return attention.topk_to_slots(table, positions, cu_q=bounds, backend="native", **options).tolist()


def test_row_t_of_the_table_serves_query_t():
    assert [[103, 100], [105, 105], [110, -1]] == call([[3, 0], [1, 1], [2, -1]])


def test_with_bounds_a_row_serves_all_queries_of_its_request():
    result = call([[0], [1], [2], [3], [0]], cu_q=[0, 2, 2, 4])
    assert [[100], [101], [110], [111], [-1]] == result


def test_queries_before_the_first_request_have_none():
    assert [[-1], [101], [110]] == call([[0], [1], [2]], cu_q=[1, 2, 2, 9])


def test_positions_outside_the_table_are_absent():
    assert [[-1, -1, -1], [-1, 107, -1], [-1] * 3] == call([[4, -1, -9], [99, 3, 2**40], [4, 5, 6]])


def test_rows_behind_the_queries_are_absent_in_a_buffer_too():
    out = torch.full((5, 1), -77, dtype=torch.int32)
    assert [[100], [105], [110], [-1], [-1]] == call([[0], [1], [2]], output_rows=5, out=out)
    assert [[-1], [-1]] == attention.topk_to_slots(
        TABLE[:0], torch.empty((0, 1), dtype=torch.int64), output_rows=2
    ).tolist()


def test_a_page_table_gives_the_slots_of_its_pages():
    pages = torch.tensor([[7, -3]])
    assert [[29, 31, -1, -1, -1]] == call([[1, 3, 4, 7, 8]], table=pages, page_size=4)


def test_a_negative_entry_is_passed_on_at_page_size_one():
    assert [[-3, 7]] == call([[1, 0]], table=torch.tensor([[7, -3]]))


def test_selections_and_tables_may_be_strided():
    topk = torch.tensor([[3, 9, 0], [1, 9, 1], [2, 9, -1]])[:, ::2]
    slots = attention.topk_to_slots(TABLE.t().contiguous().t(), topk)
    assert slots.is_contiguous()
    assert [[103, 100], [105, 105], [110, -1]] == slots.tolist()
