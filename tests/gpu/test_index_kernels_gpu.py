"""The Triton kernels of the index ops on a real CUDA device, against native on the host."""

from __future__ import annotations

import importlib
import random

import index_cases
import pytest
import torch
import triton

from opgraft.ops import attention as ops
from opgraft_triton_kernels import attention
from opgraft_triton_kernels.launcher import TESTED_TRITON, Launcher

DEVICE = "cuda"
CANARY = index_cases.CANARY
NAMES = tuple(name for name in index_cases.NAMES if name != "clamp_position")
BUFFERS = {"out", "out_lens"}

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
direct = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) not in TESTED_TRITON, reason="this Triton launches as usual"
)
every_op = pytest.mark.parametrize("name", NAMES)


def there(tensor):
    """Move a tensor with its strides, its offset and whatever lies around it."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(DEVICE, copy=True)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def moved(arguments):
    return {key: there(value) if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}


def copied(arguments):
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}


def results(value):
    return value if isinstance(value, tuple) else (value,)


def whole(tensor):
    """Everything in the tensor's storage."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage()).cpu()


def same_as_native(name, arguments):
    """Hold a call on the device against native: results, buffers, their surroundings, inputs."""
    on_device = moved(arguments)
    inputs = {key: whole(value) for key, value in on_device.items() if isinstance(value, torch.Tensor)}
    actual = results(getattr(attention, name)(**on_device))
    for key, before in inputs.items():
        mutated = key in BUFFERS or (name == "topk_valid_length" and arguments["repair"])
        if not mutated:
            assert torch.equal(before, whole(on_device[key])), key
    # Native writes into the buffers of the host, which so become what is expected of the device.
    expected = results(index_cases.OPS[name].forward_native(**arguments))
    for one, other in zip(expected, actual, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other.cpu())
    for key in inputs.keys() & (BUFFERS | {"topk"}):
        assert torch.equal(whole(arguments[key]), whole(on_device[key])), key


def large(name, size=None, seed=1):
    op = index_cases.OPS[name]
    dtypes = dict.fromkeys(op.format_signature.supported_dtypes, torch.int32)
    return index_cases.sample(name, size or op.sample_sizes[-1], dtypes, seed=seed)


@every_op
def test_a_kernel_equals_native_on_edge_cases_of_every_dtype_mix(name):
    for dtypes in index_cases.dtype_mixes(name):
        for _, arguments in index_cases.edge_cases(name, dtypes):
            arguments.setdefault("repair", False) if name == "topk_valid_length" else None
            same_as_native(name, arguments)


@every_op
@pytest.mark.parametrize("layout", ["offset", "strided", "transposed"])
def test_a_kernel_equals_native_in_other_layouts(name, layout):
    dtypes = next(iter(index_cases.dtype_mixes(name)))
    for _, arguments in index_cases.edge_cases(name, dtypes):
        arguments.setdefault("repair", False) if name == "topk_valid_length" else None
        same_as_native(name, index_cases.laid_out(arguments, layout))


@every_op
def test_a_kernel_equals_native_on_random_cases(name):
    for seed in range(200):
        arguments = index_cases.random_case(name, seed)
        arguments.setdefault("repair", False) if name == "topk_valid_length" else None
        same_as_native(name, arguments)


@every_op
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_kernel_equals_native_on_samples(name, dtype):
    op = index_cases.OPS[name]
    dtypes = dict.fromkeys(op.format_signature.supported_dtypes, dtype)
    for size in (0, 1, 65, *op.sample_sizes):
        arguments = index_cases.sample(name, size, dtypes, seed=size)
        arguments.setdefault("repair", False) if name == "topk_valid_length" else None
        same_as_native(name, arguments)


@every_op
def test_a_kernel_is_deterministic(name):
    arguments = moved(large(name))
    first = [one.clone() for one in results(getattr(attention, name)(**arguments))]
    for _ in range(20):
        for one, other in zip(first, results(getattr(attention, name)(**arguments)), strict=True):
            assert torch.equal(one, other)


# --------------------------------------------------------------------- rows, from the smallest up


def rows(name, lengths, width, columns, seed=0):
    """Arguments with buffers: the widest capacity, of which each call uses what it needs."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(lengths)
    lens = torch.tensor(lengths, dtype=torch.int32)
    table = torch.randint(0, 2**30, (batch + 1, columns), dtype=torch.int32, generator=generator)
    requests = torch.randperm(batch, generator=generator).to(torch.int32) + 1
    arguments = {"req_to_token": table, "req_pool_indices": requests}
    if name == "csr_kv_indices":
        indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32)
        out = torch.full((width,), CANARY, dtype=torch.int32)
        return {**arguments, "kv_lens": lens, "kv_indptr": indptr, "out": out}
    out = torch.full((batch, width), CANARY, dtype=torch.int32)
    if name == "block_table":
        return {**arguments, "kv_lens": lens, "page_size": 64, "out": out}
    prompts = torch.randint(0, max(columns // 2, 1), (batch + 1,), dtype=torch.int32, generator=generator)
    out_lens = torch.full((batch,), CANARY, dtype=torch.int32)
    return {**arguments, "seq_lens": lens, "prefill_lens": prompts, "window": 3001, "out": out, "out_lens": out_lens}


MIXES = {
    "1 x 131072": [131072],
    "8 x 131072": [131072] * 8,
    "64 x 32768": [32768] * 64,
    "512 x 4096": [4096] * 512,
    "1 x 131072 and 255 x 64": [64] * 100 + [131072] + [64] * 155,
    "empty": [0] * 17,
    "random": random.Random(5).sample(range(20_000), 300),  # noqa: S311 - sizes, no secrets
}
every_mix = pytest.mark.parametrize("lengths", list(MIXES.values()), ids=list(MIXES))
every_table = pytest.mark.parametrize("name", ["csr_kv_indices", "block_table", "prefill_aware_page_table"])


@every_table
@every_mix
@pytest.mark.parametrize("room", [0, 37, 100_000])
def test_rows_of_any_lengths_are_written_whole(name, lengths, room):
    longest = max(lengths)
    width = sum(lengths) + room if name == "csr_kv_indices" else min(longest + room, 140_000)
    width = width // 64 + 2 if name == "block_table" else width
    same_as_native(name, rows(name, lengths, width, max(longest, 1) + room % 64))


@every_table
def test_a_captured_graph_follows_its_inputs_without_allocating(name):
    batch, columns = 96, 9000
    width = {"csr_kv_indices": batch * columns, "block_table": 200, "prefill_aware_page_table": columns}[name]
    arguments = moved(rows(name, [1000] * batch, width, columns))
    kernel = getattr(attention, name)
    kernel(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Torch itself allocates a little when a capture begins.
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        kernel(**arguments)
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert before == after
    draw = random.Random(3)  # noqa: S311 - sizes, no secrets
    for most in (1000, 10, 9000, 0, 5000):
        lengths = [draw.randrange(most + 1) for _ in range(batch)]
        arguments_now = rows(name, lengths, width, columns, seed=most)
        for key, value in arguments_now.items():
            if isinstance(value, torch.Tensor):
                arguments[key].copy_(value)
        graph.replay()
        index_cases.OPS[name].forward_native(**arguments_now)
        for key in BUFFERS & arguments_now.keys():
            assert torch.equal(arguments_now[key], arguments[key].cpu())


@every_op
def test_a_call_can_be_captured_and_replayed(name):
    arguments = moved(large(name, index_cases.OPS[name].sample_sizes[2]))
    kernel = getattr(attention, name)
    expected = [one.clone() for one in results(kernel(**arguments))]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = results(kernel(**arguments))
    for one in actual:
        one.fill_(CANARY)
    graph.replay()
    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one, other)


@every_op
def test_the_op_chooses_the_kernel(name):
    arguments = moved(large(name, index_cases.OPS[name].sample_sizes[1]))
    handle = getattr(ops, name)
    expected = results(handle(**copied(arguments), backend="native"))
    actual = results(handle(**copied(arguments), backend="cuda/triton"))
    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one, other)


@every_table
def test_tables_of_more_than_two_to_the_31_entries_are_read(name):
    columns = 2**21
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GB of device memory")
    arguments = rows(name, [3000, 70], 9000, 3000)
    small, requests = arguments["req_to_token"], torch.tensor([1029, 1], dtype=torch.int32)
    table = torch.empty((1030, columns), dtype=torch.int32, device=DEVICE)
    table[1, :3000] = small[1].to(DEVICE)
    table[1029, -3000:] = small[2].to(DEVICE)
    option = {"kv_starts": torch.tensor([columns - 3000, 0])} if name != "prefill_aware_page_table" else {}
    if name == "prefill_aware_page_table":
        table[1029, :3000] = small[2].to(DEVICE)
        arguments["prefill_lens"] = torch.zeros(1030, dtype=torch.int32)
        arguments["window"] = 3000
    on_device = moved({**arguments, **option, "req_pool_indices": requests, "req_to_token": small})
    on_device["req_to_token"] = table
    getattr(attention, name)(**on_device)
    index_cases.OPS[name].forward_native(**{**arguments, "req_pool_indices": torch.tensor([2, 1])})
    assert torch.equal(arguments["out"], on_device["out"].cpu())


def launchers(name):
    module = importlib.import_module(f"opgraft_triton_kernels.attention._{name}")
    return [value for value in vars(module).values() if isinstance(value, Launcher)]


@direct
@every_op
def test_sizes_do_not_multiply_what_triton_compiles(name):
    draw = random.Random(8)  # noqa: S311 - sizes, no secrets
    for launcher in launchers(name):
        launcher.variants.clear()
    for number in range(50):
        if name in ("csr_kv_indices", "block_table", "prefill_aware_page_table"):
            batch, columns = draw.randrange(1, 600), draw.randrange(1, 5000)
            lengths = [draw.randrange(columns + 1) for _ in range(batch)]
            width = sum(lengths) + 1 if name == "csr_kv_indices" else draw.randrange(1, 3000)
            arguments = rows(name, lengths, width, columns)
        else:
            arguments = large(name, draw.randrange(1, 60_000), seed=number)
        getattr(attention, name)(**moved(arguments))
    for launcher in launchers(name):
        assert len(launcher.variants) <= 2
