"""The Triton kernels of the index ops on CPU tensors, in Triton's interpreter, against the model.

Triton decides at import whether it interprets, so the tests below run in a process of their own,
which the last one starts. What `opgraft_triton_kernels.attention` offers is what is tested.
"""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys

import index_cases
import pytest
import torch
from fenced_memory import spread_out
from index_check import check
from torch.utils._python_dispatch import TorchDispatchMode

from opgraft_triton_kernels import attention
from opgraft_triton_kernels.launcher import Launcher

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run in the interpreter by the last test")

LAYOUTS = ("contiguous", "offset", "strided", "transposed")
NAMES = tuple(name for name in index_cases.NAMES if name in attention.__all__)

every_op = pytest.mark.parametrize("name", NAMES)


def kernel(name):
    return getattr(attention, name)


def launchers(name):
    module = importlib.import_module(f"opgraft_triton_kernels.attention._{name}")
    return [value for value in vars(module).values() if isinstance(value, Launcher)]


def of(name):
    """Leave a test out while the package does not offer the op."""
    return pytest.mark.skipif(name not in NAMES, reason=f"there is no kernel of {name} yet")


def same_as_native(name, arguments):
    native = index_cases.OPS[name].forward_native(**arguments)
    result = kernel(name)(**arguments)
    pairs = zip(native, result, strict=True) if isinstance(native, tuple) else [(native, result)]
    for expected, actual in pairs:
        assert expected.dtype == actual.dtype
        assert torch.equal(expected, actual)


@every_op
def test_a_kernel_has_the_signature_of_its_op(name):
    def parameters(function):
        return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]

    assert parameters(index_cases.OPS[name].forward_native) == parameters(kernel(name))


@every_op
def test_the_documentation_says_all_there_is_to_say(name):
    text = inspect.getdoc(kernel(name))
    for section in ("Parameters", "Returns", "Numerics", "Source"):
        assert f"{section}\n{'-' * len(section)}" in text


@interpreted
@every_op
def test_a_kernel_equals_the_model_on_edge_cases_of_every_dtype_mix(name):
    for dtypes in index_cases.dtype_mixes(name):
        for _, arguments in index_cases.edge_cases(name, dtypes):
            check(kernel(name), name, arguments)


@interpreted
@every_op
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_a_kernel_equals_the_model_on_edge_cases_in_other_layouts(name, layout):
    dtypes = next(iter(index_cases.dtype_mixes(name)))
    for _, arguments in index_cases.edge_cases(name, dtypes):
        check(kernel(name), name, index_cases.laid_out(arguments, layout), layout=layout)


@interpreted
@every_op
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kernel_equals_the_model_on_random_cases(name, layout):
    for seed in range(12):
        check(kernel(name), name, index_cases.random_case(name, seed), layout=layout)


@interpreted
@every_op
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_kernel_equals_native_on_samples(name, dtype):
    dtypes = dict.fromkeys(index_cases.OPS[name].format_signature.supported_dtypes, dtype)
    for size in (0, 1, 2, 3, 127, 128, 129, 2048):
        same_as_native(name, index_cases.sample(name, size, dtypes, seed=size))


@interpreted
@every_op
def test_a_kernel_is_deterministic(name):
    dtypes = dict.fromkeys(index_cases.OPS[name].format_signature.supported_dtypes, torch.int32)
    arguments = index_cases.sample(name, 2048, dtypes)
    for _ in range(3):
        same_as_native(name, arguments)


@interpreted
@of("seqlens_expand")
@of("extend_positions")
@pytest.mark.parametrize("batch", [1, 2, 511, 512, 513, 1025])
def test_any_number_of_requests_shares_the_tokens(batch):
    generator = torch.Generator().manual_seed(batch)
    lengths = torch.randint(0, 5, (batch,), generator=generator)
    lengths[batch // 2] = 3000
    total = int(lengths.sum())
    for room in (total - 7, total, total + 1500):
        same_as_native("seqlens_expand", {"q_lens": lengths, "kv_lens": lengths + 90, "total": room})
        same_as_native("extend_positions", {"prefix_lens": lengths, "extend_lens": lengths, "total": room})


@interpreted
@of("seqlens_expand")
@of("extend_positions")
def test_one_request_may_have_all_tokens():
    lengths, total = torch.tensor([0, 131072, 0], dtype=torch.int32), 131072
    same_as_native("seqlens_expand", {"q_lens": lengths, "kv_lens": lengths + 5, "total": total})
    same_as_native("extend_positions", {"prefix_lens": lengths, "extend_lens": lengths, "total": total})


@interpreted
@of("compact_valid_indices")
@pytest.mark.parametrize(("rows", "columns"), [(1, 5000), (3, 2051), (2050, 3), (2051, 1)])
def test_a_selection_of_any_shape_is_compacted(rows, columns):
    generator = torch.Generator().manual_seed(rows)
    indices = torch.randint(-3, 9, (rows, columns), generator=generator, dtype=torch.int32)
    places = torch.nn.functional.pad((indices >= 0).sum(1).cumsum(0) + 2, (1, 0), value=2)
    same_as_native("compact_valid_indices", {"indices": indices})
    # In the interpreter every row costs its time; these need many programs, those do not.
    if rows < 100:
        same_as_native("compact_valid_indices", {"indices": indices, "indptr": places})
        for size in (0, rows * columns // 2, rows * columns + 9):
            out = torch.full((size,), index_cases.CANARY)
            check(attention.compact_valid_indices, "compact_valid_indices", {"indices": indices, "out": out})


@interpreted
@of("topk_to_slots")
@pytest.mark.parametrize("requests", [1, 511, 512, 513, 1030])
def test_a_query_finds_its_request_among_any_number(requests):
    generator = torch.Generator().manual_seed(requests)
    queries = (torch.randint(0, 32, (requests,), generator=generator) == 0).long()
    cu_q = torch.nn.functional.pad(queries.cumsum(0), (1, 0))
    tokens = int(cu_q[-1]) + 2
    topk = torch.randint(-1, 9, (tokens, 3), generator=generator)
    table = torch.arange(requests * 7, dtype=torch.int32).view(requests, 7)
    same_as_native("topk_to_slots", {"table": table, "topk": topk, "cu_q": cu_q, "output_rows": tokens + 3})


@interpreted
@of("topk_to_slots")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("columns", [2**31, 2**32, 2**32 + 7])
def test_a_table_may_be_wider_than_an_index(columns, page_size, dtype):
    table = torch.tensor([[7], [9]], dtype=torch.int32).expand(2, columns)
    topk = torch.tensor([[0, 5, -1, 2**31 - 1], [6, -2, 1, 2**30]], dtype=dtype)
    same_as_native("topk_to_slots", {"table": table, "topk": topk, "page_size": page_size})


# The interpreter takes an int as 64-bit only where 32 bit cannot hold it, whatever the kernel declares: a product with
# a smaller stride may wrap round there that does not on a device.
FAR = 2**31


@interpreted
@of("topk_to_slots")
def test_slots_beyond_32_bit_addresses_are_read():
    table = spread_out(torch.arange(900, dtype=torch.int32).view(3, 300))
    topk = torch.arange(-1, 299, dtype=torch.int32).repeat(3, 1)
    same_as_native("topk_to_slots", {"table": table, "topk": topk})
    far = spread_out(torch.arange(900, dtype=torch.int32).view(2, 450))
    assert far.stride(0) > FAR
    same_as_native("topk_to_slots", {"table": far, "topk": topk, "cu_q": torch.tensor([0, 1, 3])})


@interpreted
@pytest.mark.parametrize("name", [name for name in NAMES if name in ("compact_valid_indices", "topk_to_slots_dcp")])
def test_selections_beyond_32_bit_addresses_are_read(name):
    selection = spread_out(torch.arange(-100, 800, dtype=torch.int32).view(2, 450))
    assert selection.stride(0) > FAR
    options = {"indices": selection} if name == "compact_valid_indices" else {"slots": selection}
    options |= {} if name == "compact_valid_indices" else {"world_size": 3, "rank": 1}
    same_as_native(name, options)


@interpreted
@of("topk_valid_length")
@pytest.mark.parametrize("rule", ["last", "count"])
def test_rows_beyond_32_bit_addresses_are_measured_and_repaired(rule):
    selection = torch.arange(-100, 800, dtype=torch.int32).view(3, 300)
    selection[2] = -1
    topk = spread_out(selection)
    expected = index_cases.OPS["topk_valid_length"].forward_native(selection, rule=rule, repair=True)
    assert torch.equal(expected, attention.topk_valid_length(topk, rule=rule, repair=True))
    assert torch.equal(selection, topk)


ONE_LAUNCH = (
    "seqlens_expand",
    "extend_positions",
    "topk_to_slots",
    "topk_valid_length",
    "topk_to_slots_dcp",
    "cp_interleave_split",
)


class Launches(TorchDispatchMode):
    """Count what torch itself launches: every operation but an allocation."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.__name__.startswith(("empty", "new_empty", "detach")):
            self.seen.append(func.__name__)
        return func(*args, **kwargs or {})


def launched(name, arguments, monkeypatch):
    """List the launches of one call, without running any kernel."""
    with Launches() as launches:
        for launcher in launchers(name):
            monkeypatch.setattr(launcher, "launch", lambda grid, *_: launches.seen.append(grid))
        kernel(name)(**arguments)
    monkeypatch.undo()
    return launches.seen


@pytest.mark.parametrize("name", [name for name in ONE_LAUNCH if name in NAMES])
def test_one_launch_is_enough_at_any_size(name, monkeypatch):
    op = index_cases.OPS[name]
    dtypes = dict.fromkeys(op.format_signature.supported_dtypes, torch.int32)
    for size in (64, 2048, 5000, *op.sample_sizes):
        (grid,) = launched(name, index_cases.sample(name, size, dtypes), monkeypatch)
        assert 3 == len(grid)
        assert min(grid) > 0


@of("compact_valid_indices")
@pytest.mark.parametrize("rows", [1, 3, 20_000])
def test_counting_takes_one_launch_more_and_so_does_filling(rows, monkeypatch):
    indices = torch.zeros(rows, 30, dtype=torch.int32)
    out, indptr = torch.empty(30 * rows, dtype=torch.int32), torch.zeros(rows + 1, dtype=torch.int64)
    launches = {
        call: len(launched("compact_valid_indices", {"indices": indices, **arguments}, monkeypatch))
        for call, arguments in {
            "places": {"indptr": indptr, "out": out},
            "places, no buffer": {"indptr": indptr},
            "no places": {"out": out},
            "neither": {},
        }.items()
    }
    assert {"places": 1, "places, no buffer": 2, "no places": 2, "neither": 2} == launches


@every_op
def test_nothing_is_launched_for_an_empty_call(name):
    # Not interpreted: without a GPU any launch would be an error.
    for dtypes in index_cases.dtype_mixes(name):
        same_as_native(name, index_cases.sample(name, 0, dtypes))


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.timeout(1500)
def test_all_of_it_passes_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    assert " passed" in done.stdout
