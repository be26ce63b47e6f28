"""What every op refuses before anything runs, with the full text of each message."""

from __future__ import annotations

import index_cases
import pytest
import torch

from opgraft import ArgumentTypeError, ArgumentValueError
from opgraft.ops import attention

LENGTHS = torch.tensor([2, 3])
TABLE = torch.arange(12, dtype=torch.int32).view(3, 4)
ROWS = torch.tensor([1, 2])
INDPTR = torch.tensor([0, 2, 5])
TOPK = torch.zeros(2, 3, dtype=torch.int32)

CSR = {"req_to_token": TABLE, "req_pool_indices": ROWS, "kv_lens": LENGTHS, "kv_indptr": INDPTR, "total": 5}
BLOCKS = {"req_to_token": TABLE, "req_pool_indices": ROWS, "kv_lens": LENGTHS, "page_size": 2, "max_pages": 2}
PAGES = {
    "req_to_token": TABLE,
    "req_pool_indices": ROWS,
    "seq_lens": LENGTHS,
    "prefill_lens": torch.tensor([0, 1, 1]),
    "window": 1,
    "max_kv": 4,
}
CALLS = {
    "clamp_position": {"seq_lens": LENGTHS},
    "csr_kv_indices": CSR,
    "block_table": BLOCKS,
    "prefill_aware_page_table": PAGES,
    "seqlens_expand": {"q_lens": LENGTHS, "kv_lens": LENGTHS, "total": 5},
    "compact_valid_indices": {"indices": TOPK},
    "topk_to_slots": {"table": TABLE[:2], "topk": TOPK},
    "topk_valid_length": {"topk": TOPK},
    "topk_to_slots_dcp": {"slots": TOPK, "world_size": 2, "rank": 1},
    "extend_positions": {"prefix_lens": LENGTHS, "extend_lens": LENGTHS, "total": 5},
    "cp_interleave_split": {"extend_lens": LENGTHS, "world_size": 2, "rank": 1},
}

INTS = {
    ("csr_kv_indices", "page_size"): (1, 2**31 - 1),
    ("csr_kv_indices", "total"): (0, 2**63 - 1),
    ("block_table", "page_size"): (1, 2**31 - 1),
    ("block_table", "max_pages"): (0, 2**63 - 1),
    ("block_table", "tail"): (-(2**31), 2**31 - 1),
    ("prefill_aware_page_table", "window"): (0, 2**63 - 1),
    ("prefill_aware_page_table", "max_kv"): (0, 2**63 - 1),
    ("seqlens_expand", "total"): (0, 2**63 - 1),
    ("topk_to_slots", "page_size"): (1, 2**31 - 1),
    ("topk_to_slots", "output_rows"): (0, 2**63 - 1),
    ("topk_valid_length", "minimum"): (0, 1),
    ("topk_to_slots_dcp", "world_size"): (1, 2**31 - 1),
    ("topk_to_slots_dcp", "rank"): (0, 2**63 - 1),
    ("extend_positions", "total"): (0, 2**63 - 1),
    ("cp_interleave_split", "world_size"): (1, 2**31 - 1),
    ("cp_interleave_split", "rank"): (0, 2**63 - 1),
}

MISUSES = [
    ("csr_kv_indices", {"req_to_token": TABLE.t().contiguous().t()}, "req_to_token must have column stride 1, got 3"),
    ("block_table", {"req_to_token": TABLE[:, ::2]}, "req_to_token must have column stride 1, got 2"),
    ("block_table", {"out": torch.zeros(2, 2, dtype=torch.int32).t()}, "out must have column stride 1, got 2"),
    ("block_table", {"out": torch.zeros(2, 3, dtype=torch.int32)}, "max_pages must be 3, the columns of out, got 2"),
    (
        "prefill_aware_page_table",
        {"req_to_token": TABLE[:, :1].expand(3, 4)},
        "req_to_token must have column stride 1, got 0",
    ),
    (
        "prefill_aware_page_table",
        {"out": torch.zeros(2, 3, dtype=torch.int32)},
        "max_kv must be 3, the columns of out, got 4",
    ),
    (
        "prefill_aware_page_table",
        {"prefill_lens": LENGTHS},
        "prefill_lens must have at least 3 entries, one for each row of req_to_token, got 2",
    ),
    ("seqlens_expand", {"out": torch.zeros(4, dtype=torch.int32)}, "out must have 5 entries (total), got 4"),
    ("extend_positions", {"out": torch.zeros(6, dtype=torch.int64)}, "out must have 5 entries (total), got 6"),
    (
        "extend_positions",
        {"prefix_lens": INDPTR},
        "prefix_lens must have 2 entries, as extend_lens has, or none, got 3",
    ),
    (
        "topk_to_slots",
        {"table": TABLE},
        "table must have 2 rows, one for each row of topk, where cu_q is not given, got 3",
    ),
    ("topk_to_slots", {"output_rows": 1}, "output_rows must be at least 2, the rows of topk, got 1"),
    ("topk_to_slots", {"output_rows": 4, "out": torch.zeros(3, 3, dtype=torch.int32)}, "out must have 4 rows, got 3"),
    ("topk_to_slots", {"out": torch.zeros(3, 3, dtype=torch.int32)}, "out must have 2 rows, got 3"),
    ("topk_valid_length", {"rule": "first"}, "rule must be 'last' or 'count', got 'first'"),
    (
        "topk_valid_length",
        {"topk": TOPK[:1].expand(2, 3), "repair": True},
        "topk must have entries of their own where repair is on, got strides (0, 1) for shape (2, 3)",
    ),
    ("topk_to_slots_dcp", {"rank": 2}, "rank must be below world_size 2, got 2"),
    ("cp_interleave_split", {"rank": 7}, "rank must be below world_size 2, got 7"),
]

TYPES = [
    ("block_table", {"max_pages": None}, "max_pages must be an int where out is not given, got None"),
    ("prefill_aware_page_table", {"max_kv": None}, "max_kv must be an int where out is not given, got None"),
    ("topk_valid_length", {"repair": 1}, "repair must be a bool, got int"),
]


def call(name, **changes):
    return getattr(attention, name)(**CALLS[name] | changes, backend="native")


@pytest.mark.parametrize("name", index_cases.NAMES)
def test_the_plain_call_is_accepted(name):
    call(name)


@pytest.mark.parametrize(("name", "parameter"), INTS)
@pytest.mark.parametrize(("value", "kind"), [(True, "bool"), (torch.tensor(1), "Tensor"), (1.0, "float"), ("1", "str")])
def test_a_number_that_is_no_int_is_refused(name, parameter, value, kind):
    with pytest.raises(ArgumentTypeError) as caught:
        call(name, **{parameter: value})
    assert f"attention.{name}: {parameter} must be an int, got {kind}" == str(caught.value)


@pytest.mark.parametrize(("name", "parameter"), INTS)
def test_a_number_out_of_range_is_refused(name, parameter):
    low, high = INTS[name, parameter]
    with pytest.raises(ArgumentValueError) as caught:
        call(name, **{parameter: low - 1})
    expected = f"attention.{name}: {parameter} must be at least {low}, got {low - 1}"
    assert expected == str(caught.value)
    with pytest.raises(ArgumentValueError) as caught:
        call(name, **{parameter: high + 1})
    expected = f"attention.{name}: {parameter} must be at most {high}, got {high + 1}"
    assert expected == str(caught.value)


@pytest.mark.parametrize(("name", "changes", "message"), MISUSES)
def test_what_does_not_fit_together_is_refused(name, changes, message):
    with pytest.raises(ArgumentValueError) as caught:
        call(name, **changes)
    assert f"attention.{name}: {message}" == str(caught.value)


@pytest.mark.parametrize(("name", "changes", "message"), TYPES)
def test_what_is_of_another_kind_is_refused(name, changes, message):
    with pytest.raises(ArgumentTypeError) as caught:
        call(name, **changes)
    assert f"attention.{name}: {message}" == str(caught.value)


def test_a_column_alone_may_have_any_stride():
    table = TABLE[:, ::4]
    assert (4, 1) == (table.stride(1), table.shape[1])
    result = call("csr_kv_indices", req_to_token=table, kv_lens=torch.tensor([1, 1]))
    assert [4, -1, 8, -1, -1] == result.tolist()


@pytest.mark.parametrize("name", index_cases.NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int16])
def test_every_tensor_of_another_dtype_is_refused(name, dtype):
    tensors = [key for key, value in CALLS[name].items() if isinstance(value, torch.Tensor)]
    for parameter in tensors:
        with pytest.raises(ArgumentTypeError, match=f"attention.{name}: {parameter} must be "):
            call(name, **{parameter: CALLS[name][parameter].to(dtype)})


@pytest.mark.parametrize("name", index_cases.NAMES)
def test_every_tensor_of_another_rank_is_refused(name):
    tensors = [key for key, value in CALLS[name].items() if isinstance(value, torch.Tensor)]
    for parameter in tensors:
        with pytest.raises(ArgumentValueError, match=f"attention.{name}: {parameter} must "):
            call(name, **{parameter: CALLS[name][parameter][None]})


@pytest.mark.parametrize("name", index_cases.NAMES)
def test_every_argument_that_is_no_tensor_is_refused(name):
    tensors = [key for key, value in CALLS[name].items() if isinstance(value, torch.Tensor)]
    for parameter in tensors:
        with pytest.raises(ArgumentTypeError, match=f"attention.{name}: {parameter} must be a tensor"):
            call(name, **{parameter: CALLS[name][parameter].tolist()})


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("csr_kv_indices", "kv_lens"),
        ("csr_kv_indices", "kv_indptr"),
        ("csr_kv_indices", "kv_starts"),
        ("block_table", "kv_lens"),
        ("block_table", "kv_starts"),
        ("prefill_aware_page_table", "seq_lens"),
        ("seqlens_expand", "kv_lens"),
        ("compact_valid_indices", "indptr"),
        ("topk_to_slots", "cu_q"),
    ],
)
def test_a_vector_for_another_batch_is_refused(name, parameter):
    with pytest.raises(ArgumentValueError, match=rf"attention.{name}: .*, got \("):
        call(name, **{parameter: torch.arange(9)})


@pytest.mark.parametrize(
    ("name", "buffer", "shape"),
    [
        ("clamp_position", "out", (3,)),
        ("block_table", "out", (3, 2)),
        ("prefill_aware_page_table", "out", (1, 4)),
        ("prefill_aware_page_table", "out_lens", (3,)),
        ("topk_to_slots", "out", (2, 4)),
    ],
)
def test_a_buffer_of_another_shape_is_refused(name, buffer, shape):
    dtype = torch.int64 if name == "clamp_position" else torch.int32
    with pytest.raises(ArgumentValueError, match=f"attention.{name}: {buffer} must "):
        call(name, **{buffer: torch.zeros(shape, dtype=dtype)})


@pytest.mark.parametrize(
    ("name", "buffer", "shape"),
    [
        ("clamp_position", "out", (2,)),
        ("csr_kv_indices", "out", (5,)),
        ("block_table", "out", (2, 2)),
        ("prefill_aware_page_table", "out", (2, 4)),
        ("prefill_aware_page_table", "out_lens", (2,)),
        ("seqlens_expand", "out", (5,)),
        ("compact_valid_indices", "out", (6,)),
        ("topk_to_slots", "out", (2, 3)),
        ("extend_positions", "out", (5,)),
    ],
)
def test_a_buffer_of_another_dtype_is_refused(name, buffer, shape):
    wrong = torch.int32 if name in {"clamp_position", "extend_positions"} else torch.int16
    with pytest.raises(ArgumentTypeError, match=f"attention.{name}: {buffer} must be "):
        call(name, **{buffer: torch.zeros(shape, dtype=wrong)})


def test_the_size_is_not_read_from_tensors_without_data():
    meta = {key: value.to("meta") for key, value in CSR.items() if isinstance(value, torch.Tensor)}
    with pytest.raises(ArgumentValueError) as caught:
        attention.csr_kv_indices(**meta)
    expected = "attention.csr_kv_indices: total must be given for tensors without data, got None"
    assert expected == str(caught.value)
