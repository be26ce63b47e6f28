"""The CPU kernels against the model, on everything that breaks an index kernel."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import index_cases
import pytest
import torch
from fenced_memory import spread_out
from hypothesis import given, settings
from hypothesis import strategies as st
from index_check import check

from opgraft_cpu_reference import attention as kernels

TESTS = Path(__file__).parent.parent
LAYOUTS = ("contiguous", "strided", "transposed")

every_op = pytest.mark.parametrize("name", index_cases.NAMES)


def kernel(name):
    return getattr(kernels, name)


def test_there_is_a_kernel_for_every_op():
    assert list(index_cases.NAMES) == kernels.__all__


@every_op
def test_a_kernel_has_the_signature_of_its_op(name):
    assert inspect.signature(index_cases.OPS[name].forward_native) == inspect.signature(kernel(name))


@every_op
def test_the_documentation_says_all_there_is_to_say(name):
    text = inspect.getdoc(kernel(name))
    for section in ("Parameters", "Returns", "Raises", "*Numerics.*", "*Source.*"):
        assert section in text


@every_op
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kernel_equals_the_model_on_edge_cases_of_every_dtype_mix(name, layout):
    for dtypes in index_cases.dtype_mixes(name):
        for _, arguments in index_cases.edge_cases(name, dtypes):
            check(kernel(name), name, index_cases.laid_out(arguments, layout), layout=layout)


@every_op
@settings(max_examples=200, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), layout=st.sampled_from(LAYOUTS))
def test_a_kernel_equals_the_model_on_random_cases(name, seed, layout):
    check(kernel(name), name, index_cases.random_case(name, seed), layout=layout)


@every_op
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_kernel_equals_native_on_samples_of_every_size(name, dtype):
    op = index_cases.OPS[name]
    dtypes = dict.fromkeys(op.format_signature.supported_dtypes, dtype)
    for size in (0, 1, 2, 3, 127, 128, 129, 5000, 20_000, 70_000, *op.sample_sizes):
        arguments = index_cases.sample(name, size, dtypes, seed=size)
        expected = op.forward_native(**arguments)
        result = kernel(name)(**arguments)
        pairs = zip(expected, result, strict=True) if isinstance(result, tuple) else [(expected, result)]
        for one, other in pairs:
            assert torch.equal(one, other)


@every_op
def test_a_kernel_is_deterministic(name):
    dtypes = dict.fromkeys(index_cases.OPS[name].format_signature.supported_dtypes, torch.int32)
    arguments = index_cases.sample(name, 70_000, dtypes)
    first = kernel(name)(**arguments)
    for _ in range(20):
        again = kernel(name)(**arguments)
        pairs = zip(first, again, strict=True) if isinstance(again, tuple) else [(first, again)]
        assert all(torch.equal(one, other) for one, other in pairs)


@every_op
@pytest.mark.parametrize("implementation", ["native", "kernel"])
def test_torch_s_defaults_do_not_matter(name, implementation):
    op = index_cases.OPS[name]
    dtypes = dict.fromkeys(op.format_signature.supported_dtypes, torch.int32)
    call = op.forward_native if implementation == "native" else kernel(name)
    for size in (0, 3, 300, 20_000):
        arguments = index_cases.sample(name, size, dtypes)
        expected = op.forward_native(**arguments)
        with torch.device("meta"):
            result = call(**arguments)
        pairs = zip(expected, result, strict=True) if isinstance(result, tuple) else [(expected, result)]
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("implementation", ["native", "opgraft_cpu_reference.attention"])
def test_nothing_is_touched_beside_the_tensors(implementation):
    program = TESTS / "fenced_memory.py"
    ran = subprocess.run([sys.executable, program, implementation], capture_output=True, text=True, check=False)
    assert (0, "") == (ran.returncode, ran.stderr)
    assert int(ran.stdout) > 300


def requests(batch, longest, pool):
    generator = torch.Generator().manual_seed(batch)
    lengths = torch.randint(1, longest, (batch,), generator=generator, dtype=torch.int32)
    rows = torch.randint(0, pool, (batch,), generator=generator, dtype=torch.int32)
    return rows, lengths


def far_calls(table, batch):
    """Calls on a table of 3 rows of 300, most of which start at its last row."""
    rows, lengths = requests(batch, 290, 3)
    rows[::2] = 2
    indptr = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    request = {"req_to_token": table, "req_pool_indices": rows}
    prompts = torch.tensor([90, 40, 5], dtype=torch.int32)
    total = int(indptr[-1])
    runs = {**request, "kv_lens": lengths, "kv_indptr": indptr, "total": total}
    yield "csr_kv_indices", runs
    yield "csr_kv_indices", {**runs, "page_size": 2}
    yield "csr_kv_indices", {**runs, "kv_starts": lengths // 3}
    yield "block_table", {**request, "kv_lens": lengths, "page_size": 16, "max_pages": 18}
    sizes = {"seq_lens": lengths, "prefill_lens": prompts, "window": 60}
    yield "prefill_aware_page_table", {**request, **sizes, "max_kv": 150}
    topk = torch.arange(-1, 299, dtype=torch.int32).repeat(3, 1)
    yield "topk_to_slots", {"table": table, "topk": topk}
    cu_q = torch.tensor([0, 1, 1, 3], dtype=torch.int32)
    yield "topk_to_slots", {"table": table, "topk": topk, "cu_q": cu_q}


@pytest.mark.parametrize("batch", [3, 90])
@pytest.mark.parametrize("implementation", ["native", "kernel"])
@pytest.mark.parametrize("reach", [2**31 - 1, 2**31 + 1000, 2**33])
def test_addresses_beyond_32_bit_are_right(batch, implementation, reach):
    table = spread_out(torch.arange(900, dtype=torch.int32).view(3, 300), reach)
    for name, arguments in far_calls(table, batch):
        call = kernel(name) if implementation == "kernel" else index_cases.OPS[name].forward_native
        check(call, name, arguments)


@pytest.mark.parametrize("implementation", ["native", "kernel"])
def test_tables_of_more_than_32_bit_entries_are_read_right(implementation):
    pool = 2**22
    table = torch.arange(700, dtype=torch.int32).expand(pool, 700)
    assert table.numel() > 2**31
    rows = torch.tensor([pool - 1, 0, pool - 2, pool, 5], dtype=torch.int32)
    lengths = torch.tensor([300, 4, 699, 3, 1], dtype=torch.int32)
    indptr = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    request = {"req_to_token": table, "req_pool_indices": rows}
    calls = {
        "csr_kv_indices": {**request, "kv_lens": lengths, "kv_indptr": indptr, "total": 1007},
        "block_table": {**request, "kv_lens": lengths, "page_size": 64, "max_pages": 12},
    }
    for name, arguments in calls.items():
        call = kernel(name) if implementation == "kernel" else index_cases.OPS[name].forward_native
        check(call, name, arguments)


@pytest.mark.parametrize("batch", [1, 5, 60, 700])
def test_the_ways_of_one_kernel_meet(batch):
    """Runs are copied one by one or gathered together; both are right around the turning point."""
    generator = torch.Generator().manual_seed(batch)
    table = torch.randint(0, 2**20, (9, 2100), generator=generator, dtype=torch.int32)
    for longest in (2, 90, 2000):
        rows, lengths = requests(batch, longest, 9)
        indptr = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        total = int(indptr[-1])
        request = {"req_to_token": table, "req_pool_indices": rows}
        prompts = torch.randint(0, longest, (9,), generator=generator)
        sizes = {"seq_lens": lengths, "prefill_lens": prompts, "window": longest // 3}
        calls = {
            "csr_kv_indices": {**request, "kv_lens": lengths, "kv_indptr": indptr, "total": total},
            "block_table": {**request, "kv_lens": lengths, "page_size": 3, "max_pages": 600},
            "prefill_aware_page_table": {**request, **sizes, "max_kv": 1500},
            "seqlens_expand": {"q_lens": lengths, "kv_lens": lengths, "total": total},
            "extend_positions": {"prefix_lens": rows, "extend_lens": lengths, "total": total},
        }
        for name, arguments in calls.items():
            expected = index_cases.OPS[name].forward_native(**arguments)
            result = kernel(name)(**arguments)
            pairs = zip(expected, result, strict=True) if isinstance(result, tuple) else [(expected, result)]
            assert all(torch.equal(one, other) for one, other in pairs)


def test_offsets_of_runs_may_come_in_any_order():
    table = torch.arange(100, 124, dtype=torch.int32).view(4, 6)
    for batch in (3, 60):
        lengths = torch.full((batch,), 2)
        begins = torch.arange(batch).flip(0) * 2
        arguments = {
            "req_to_token": table,
            "req_pool_indices": torch.arange(batch) % 4,
            "kv_lens": lengths,
            "kv_indptr": torch.cat((begins, torch.zeros(1, dtype=torch.int64))),
            "out": torch.full((2 * batch + 3,), -77, dtype=torch.int32),
        }
        check(kernels.csr_kv_indices, "csr_kv_indices", arguments)


def test_bounds_that_do_not_ascend_neither_fail_nor_touch_the_inputs():
    table = torch.arange(9, dtype=torch.int32).view(3, 3)
    topk = torch.zeros(5, 2, dtype=torch.int32)
    cu_q = torch.tensor([3, -4, 9, 0])
    assert (5, 2) == tuple(kernels.topk_to_slots(table, topk, cu_q=cu_q).shape)
    assert [3, -4, 9, 0] == cu_q.tolist()
