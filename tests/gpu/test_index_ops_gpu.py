"""The index ops on a real CUDA device: the portable kernels, chosen through the op, against native on the CPU.

An op that the backend does not offer yet is left out.
"""

from __future__ import annotations

import importlib
import inspect
import random

import index_cases
import pytest
import torch
import triton

import opgraft
from opgraft_triton_kernels.launcher import TESTED_TRITON, Launcher

SELECTOR = "cuda/triton"
LAYOUTS = ("contiguous", "offset", "strided", "transposed")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
direct = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) not in TESTED_TRITON, reason="this Triton launches as usual"
)


def offered(name):
    selection = opgraft.explain_for(f"attention.{name}", device="cuda", arch="9.0", dtype="int32")
    return any(one.kernel.selector == SELECTOR for one in selection.candidates)


every_op = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(not offered(name), reason=f"{SELECTOR} has no {name} yet"))
        for name in index_cases.NAMES
    ],
)
every_dtype = pytest.mark.parametrize("dtype", [torch.int32, torch.int64])


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


def on_gpu(value):
    """Move to the device with the same strides, as views of a larger allocation where they are."""
    if not isinstance(value, torch.Tensor):
        return value
    size = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
    start = value.storage_offset()
    room = torch.full((start + size,), 12345, dtype=value.dtype, device="cuda")
    return room.as_strided(value.shape, value.stride(), start).copy_(value)


def moved(arguments):
    return {key: on_gpu(value) for key, value in arguments.items()}


def owned(arguments):
    """Copy what may be written to, so that native and kernel begin with the same."""
    return {
        key: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)
        if isinstance(value, torch.Tensor) and 0 not in value.stride()
        else value
        for key, value in arguments.items()
    }


def run(name, arguments):
    return getattr(opgraft.ops.attention, name)(**arguments, backend=SELECTOR)


def same(expected, actual):
    """Hold results against those of the CPU: dtype, shape and every value."""
    for one, other in zip(outputs(expected), outputs(actual), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert "cuda" == other.device.type
        assert torch.equal(one, other.cpu())


def compare(name, arguments):
    """Run one call on both, and hold results, buffers and inputs against native's."""
    here, there = owned(arguments), moved(arguments)
    expected = index_cases.OPS[name].forward_native(**here)
    actual = run(name, there)
    same(expected, actual)
    for one in outputs(actual):
        assert one.is_contiguous() or any(one is value for value in there.values())
    for key, value in here.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, there[key].cpu()), f"{key} differs afterwards"


def written(name):
    """Give the parameters of the op that are buffers, and the output that each receives."""
    op = index_cases.OPS[name]
    parameters = inspect.signature(op.forward_native).parameters
    return {key: index for key, index in op.writes.items() if key in parameters}


def dtypes_of(name, dtype):
    return dict.fromkeys(index_cases.OPS[name].format_signature.supported_dtypes, dtype)


def buffers(name, expected):
    """Give a buffer for every output that the op can write to."""
    results = outputs(expected)
    return {key: torch.full_like(results[index], index_cases.CANARY) for key, index in written(name).items()}


def sized(name, size, dtype, seed):
    """Draw a sample, with buffers: the call of a captured graph."""
    arguments = index_cases.sample(name, size, dtypes_of(name, dtype), seed=seed)
    expected = index_cases.OPS[name].forward_native(**owned(arguments))
    return {**arguments, **buffers(name, expected)}


@every_op
@every_dtype
def test_the_op_equals_native_at_every_sample_size(name, dtype):
    for size in (0, 1, 2, 3, 127, 128, 129, 5000, 70_000, *index_cases.OPS[name].sample_sizes):
        compare(name, index_cases.sample(name, size, dtypes_of(name, dtype), seed=size))
        compare(name, sized(name, size, dtype, seed=size))


@every_op
def test_the_op_equals_native_on_edge_cases_of_every_dtype_mix(name):
    for dtypes in index_cases.dtype_mixes(name):
        for _, arguments in index_cases.edge_cases(name, dtypes):
            compare(name, arguments)


@every_op
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_the_op_equals_native_on_edge_cases_in_other_layouts(name, layout):
    for dtypes in index_cases.dtype_mixes(name):
        for _, arguments in index_cases.edge_cases(name, dtypes):
            compare(name, index_cases.laid_out(arguments, layout))


@every_op
def test_the_op_equals_native_on_random_cases(name):
    for seed in range(150):
        compare(name, index_cases.random_case(name, seed))


@every_op
def test_only_the_buffers_are_written(name):
    size = 2000
    arguments = sized(name, size, torch.int32, seed=1)
    here, there, rooms = owned(arguments), moved(arguments), {}
    for key in written(name):
        shape = arguments[key].shape
        room = torch.full([n + 6 for n in shape], index_cases.CANARY, dtype=arguments[key].dtype, device="cuda")
        inner = tuple(slice(3, 3 + n) for n in shape)
        there[key], rooms[key] = room[inner], (room, inner)
    expected = index_cases.OPS[name].forward_native(**here)
    result = run(name, there)
    same(expected, result)
    for key, index in written(name).items():
        assert there[key] is outputs(result)[index]
        room, inner = rooms[key]
        canaries = torch.full_like(room, index_cases.CANARY)
        canaries[inner] = room[inner]
        assert torch.equal(canaries, room)


@every_op
def test_twenty_runs_give_the_same(name):
    arguments = sized(name, 70_000, torch.int32, seed=2)
    expected = index_cases.OPS[name].forward_native(**owned(arguments))
    for _ in range(20):
        same(expected, run(name, moved(arguments)))


@every_op
@every_dtype
def test_a_captured_graph_follows_its_inputs(name, dtype):
    size = 5000
    # Beside other values: lengths of nought, and lengths beyond all room. Sizes stay as captured.
    cases = [sized(name, size, dtype, seed) for seed in (3, 4, 5)]
    first = cases[0]
    empty = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value for key, value in first.items()}
    longer = {
        key: value.clone().mul_(3) if isinstance(value, torch.Tensor) and key.endswith("lens") else value
        for key, value in first.items()
    }
    there = moved(first)
    run(name, there)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(name, there)
    # Runs that lie at given places would overlap if they grew, which is undefined.
    replayed = (*cases[1:], empty, first) if "kv_indptr" in first else (*cases[1:], empty, longer, first)
    for arguments in replayed:
        here = {}
        for key, value in first.items():
            given = arguments[key]
            fits = isinstance(given, torch.Tensor) and given.shape == value.shape
            here[key] = given.clone() if fits else value.clone() if isinstance(value, torch.Tensor) else value
            if isinstance(value, torch.Tensor):
                if key in written(name):
                    here[key].fill_(index_cases.CANARY)
                there[key].copy_(here[key])
        graph.replay()
        torch.cuda.synchronize()
        same(index_cases.OPS[name].forward_native(**here), result)


@every_op
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_buffers_cost_no_allocation_and_nothing_waits_for_the_device(name):
    arguments = moved(sized(name, 5000, torch.int32, seed=6))
    results = outputs(run(name, arguments))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = outputs(run(name, arguments))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert len(results) == len(again)
    if len(written(name)) == len(results):
        assert 0 == allocated


@direct
@every_op
def test_no_mix_of_sizes_multiplies_what_triton_compiles(name):
    module = importlib.import_module(f"opgraft_triton_kernels.attention._{name}")
    launchers = [value for value in vars(module).values() if isinstance(value, Launcher)]
    assert launchers
    for number, dtypes in enumerate(index_cases.dtype_mixes(name)):
        draw = random.Random(number)  # noqa: S311 - sizes, no secrets
        for launcher in launchers:
            launcher.variants.clear()
        for _ in range(50):
            size = draw.choice((draw.randint(1, 64), draw.randint(65, 4096), draw.randint(4097, 60_000)))
            arguments = index_cases.sample(name, size, dtypes, seed=draw.randrange(2**30))
            run(name, moved(arguments))
        assert max(len(launcher.variants) for launcher in launchers) <= 2
