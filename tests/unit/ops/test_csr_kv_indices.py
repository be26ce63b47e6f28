"""What ``attention.csr_kv_indices`` means, the chunked-prefix form included."""

from __future__ import annotations

import model_index_ops as model
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opgraft.ops import attention

TABLE = torch.arange(100, 124, dtype=torch.int32).view(4, 6)


def call(rows, lengths, indptr, starts=None, table=TABLE, **options):
    given = None if starts is None else torch.tensor(starts)
    vectors = [torch.tensor(values, dtype=torch.int64) for values in (rows, lengths, indptr)]
    return attention.csr_kv_indices(table, *vectors, given, backend="native", **options)


def test_runs_of_requests_lie_end_to_end():
    assert [112, 113, 106, 107, 108] == call([2, 1], [2, 3], [0, 2, 5], total=5).tolist()


def test_the_chunked_prefix_form_is_the_same_op_with_starts():
    generator = torch.Generator().manual_seed(2)
    table = torch.randint(0, 2**20, (9, 300), generator=generator, dtype=torch.int32)
    rows = torch.randint(0, 9, (20,), generator=generator)
    starts = torch.randint(0, 200, (20,), generator=generator)
    lengths = torch.randint(0, 90, (20,), generator=generator)
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    out = torch.full((int(cu[-1]) + 3,), -77, dtype=torch.int32)
    expected = model.chunked_prefix_kv_indices(
        table.tolist(), rows.tolist(), starts.tolist(), lengths.tolist(), cu.tolist(), out.tolist()
    )
    result = attention.csr_kv_indices(table, rows, lengths, cu, starts, out=out)
    assert result is out
    assert expected == out.tolist()


def test_a_page_table_gives_the_slots_of_its_pages():
    pages = torch.tensor([[7, 3], [5, -1]])
    result = call([0, 1], [5, 6], [0, 5, 11], [2, 1], table=pages, page_size=4, total=11)
    assert [30, 31, 12, 13, 14, 21, 22, 23, -1, -1, -1] == result.tolist()


def test_a_negative_entry_is_passed_on_at_page_size_one_and_absent_otherwise():
    table = torch.tensor([[-2, -1, 5]])
    assert [-2, -1, 5] == call([0], [3], [0, 3], table=table, total=3).tolist()
    assert [-1, -1, -1, -1, 10, 11] == call([0], [6], [0, 6], table=table, page_size=2, total=6).tolist()


def test_the_token_map_comes_last_and_knows_its_end():
    table = torch.tensor([[0, 1, 2, 3, -1]])
    mapping = torch.tensor([40, -9, 60])
    assert [40, -9, 60, -1, -1] == call([0], [5], [0, 5], table=table, token_map=mapping, total=5).tolist()


def test_positions_outside_the_table_are_absent_and_never_another_row():
    result = call([1, 3], [4, 3], [0, 4, 7], [4, -1], total=7)
    assert [110, 111, -1, -1, -1, 118, 119] == result.tolist()


def test_requests_outside_the_pool_are_absent():
    result = call([-1, 4, 2**62], [1, 2, 1], [0, 1, 3, 4], total=4)
    assert [-1, -1, -1, -1] == result.tolist()


def test_gaps_and_what_lies_behind_keep_their_values():
    out = torch.full((9,), -77, dtype=torch.int64)
    call([0, 1], [2, 1], [1, 5, 6], out=out)
    assert [-77, 100, 101, -77, -77, 106, -77, -77, -77] == out.tolist()


def test_what_does_not_fit_the_buffer_is_dropped():
    whole = torch.full((8,), -77, dtype=torch.int32)
    call([0, 1], [4, 4], [-2, 4, 8], out=whole[:6])
    assert [102, 103, -77, -77, 106, 107, -77, -77] == whole.tolist()


def test_only_the_offsets_of_runs_that_have_something_count():
    out = torch.full((6,), -77, dtype=torch.int32)
    call([0, 1, 2, 3], [2, 0, 3, -4], [0, 0, 2, 0, 0], out=out)
    assert [100, 101, 112, 113, 114, -77] == out.tolist()


def test_runs_may_lie_in_any_order():
    out = torch.full((6,), -77, dtype=torch.int32)
    call([0, 1, 2], [2, 3, 1], [4, 1, 0, 0], out=out)
    assert [112, 106, 107, 108, 100, 101] == out.tolist()


def test_a_total_sizes_the_result_and_the_rest_is_absent():
    assert [100, 101, -1, -1] == call([0], [2], [0, 2], total=4).tolist()
    assert [100] == call([0], [2], [0, 2], total=1).tolist()


def test_without_total_the_last_offset_sizes_the_result():
    assert [100, 101, -1] == call([0], [2], [0, 3]).tolist()
    assert [] == call([0], [2], [0, -5]).tolist()


def test_an_id_that_does_not_fit_wraps_as_an_integer_cast_does():
    table = torch.tensor([[2**32 + 5, 2**31]])
    assert [5, -(2**31)] == call([0], [2], [0, 2], table=table, total=2).tolist()
    wide = torch.zeros(2, dtype=torch.int64)
    assert [2**32 + 5, 2**31] == call([0], [2], [0, 2], table=table, out=wide).tolist()


class Reads(TorchDispatchMode):
    """Counts the values that are read back to the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("options", "reads"), [({"total": 5}, 0), ({"out": torch.zeros(5, dtype=torch.int32)}, 0), ({}, 1)]
)
def test_a_value_is_read_back_only_where_the_size_depends_on_it(options, reads):
    native = attention.csr_kv_indices.op.forward_native
    vectors = [torch.tensor(values) for values in ([2, 1], [2, 3], [0, 2, 5])]
    with Reads() as mode:
        native(TABLE, *vectors, **options)
    assert reads == mode.count


def test_a_size_that_is_read_is_a_symbol_in_an_exported_program():
    class Stream(torch.nn.Module):
        def forward(self, table, rows, lengths, indptr):
            return attention.csr_kv_indices(table, rows, lengths, indptr)

    vectors = [torch.tensor(values) for values in ([2, 1], [2, 3], [0, 2, 5])]
    program = torch.export.export(Stream(), (TABLE, *vectors), strict=False)
    again = [torch.tensor(values) for values in ([3, 0], [1, 2], [0, 1, 3])]
    assert [118, 100, 101] == program.module()(TABLE, *again).tolist()
