"""Every native against the model, and in every way in which torch looks at a function."""

from __future__ import annotations

import inspect
from typing import Any

import index_cases
import pytest
import torch
from index_check import check
from torch._subclasses.fake_tensor import FakeTensorMode

from opgraft.ops import attention

LAYOUTS = ("contiguous", "strided", "transposed")
SIGNATURES = {
    "clamp_position": "(seq_lens, *, out=None)",
    "csr_kv_indices": "(req_to_token, req_pool_indices, kv_lens, kv_indptr, kv_starts=None, *, page_size=1, token_map=None, total=None, out=None)",
    "block_table": "(req_to_token, req_pool_indices, kv_lens, kv_starts=None, *, page_size, max_pages=None, tail=None, out=None)",
    "prefill_aware_page_table": "(req_to_token, req_pool_indices, seq_lens, prefill_lens, *, window, max_kv=None, out=None, out_lens=None)",
    "seqlens_expand": "(q_lens, kv_lens, *, total, out=None)",
    "compact_valid_indices": "(indices, indptr=None, *, out=None)",
    "topk_to_slots": "(table, topk, *, cu_q=None, output_rows=None, page_size=1, out=None)",
    "topk_valid_length": "(topk, *, rule='last', minimum=1, repair=False)",
    "topk_to_slots_dcp": "(slots, *, world_size, rank)",
    "extend_positions": "(prefix_lens, extend_lens, *, total, out=None)",
    "cp_interleave_split": "(extend_lens, *, world_size, rank)",
}

every_op = pytest.mark.parametrize("name", index_cases.NAMES)


def native(name: str) -> Any:
    return index_cases.OPS[name].forward_native


def tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def copied(arguments: index_cases.Arguments) -> index_cases.Arguments:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}


def written_plainly(signature: inspect.Signature) -> str:
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(inspect.Signature(bare))


def test_the_catalogue_has_exactly_the_ops_of_the_specification():
    assert set(SIGNATURES) == set(index_cases.NAMES)


@every_op
def test_the_signature_is_the_specified_one(name):
    assert SIGNATURES[name] == written_plainly(inspect.signature(native(name)))


@every_op
def test_the_format_signature_speaks_of_every_tensor_parameter(name):
    op = index_cases.OPS[name]
    parameters = inspect.signature(op.forward_native).parameters.values()
    wanted = {p.name for p in parameters if "Tensor" in str(p.annotation)}
    assert wanted == set(op.format_signature.supported_dtypes)
    assert wanted == set(op.format_signature.shapes)


@every_op
def test_the_documentation_says_all_there_is_to_say(name):
    op = index_cases.OPS[name]
    text = inspect.getdoc(type(op))
    for section in ("Parameters", "Returns", "Raises", "*Numerics.*", "*Source.*", "Examples"):
        assert section in text
    for parameter in inspect.signature(op.forward_native).parameters:
        assert f"\n{parameter}\n" in text


@every_op
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_native_equals_the_model_on_edge_cases_of_every_dtype_mix(name, layout):
    for dtypes in index_cases.dtype_mixes(name):
        for _, arguments in index_cases.edge_cases(name, dtypes):
            check(native(name), name, index_cases.laid_out(arguments, layout), layout=layout)


@every_op
def test_a_native_equals_the_model_on_random_cases(name):
    for seed in range(150):
        layout = LAYOUTS[seed % 3]
        check(native(name), name, index_cases.random_case(name, seed), layout=layout)


@every_op
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_native_equals_the_model_on_samples(name, dtype):
    op = index_cases.OPS[name]
    dtypes = dict.fromkeys(op.format_signature.supported_dtypes, dtype)
    for size in (0, 1, 2, 63, 64, 65, 511, 1000, *op.sample_sizes[1:3]):
        check(native(name), name, index_cases.sample(name, size, dtypes))


@every_op
def test_every_case_passes_the_checks_of_the_call(name):
    handle = getattr(attention, name)
    for dtypes in index_cases.dtype_mixes(name):
        for _, arguments in index_cases.edge_cases(name, dtypes):
            handle(**copied(arguments), backend="native")


@every_op
def test_samples_are_what_they_say(name):
    op = index_cases.OPS[name]
    dtypes = dict.fromkeys(op.format_signature.supported_dtypes, torch.int64)
    assert sorted(op.sample_sizes) == list(op.sample_sizes)
    first = index_cases.sample(name, op.sample_sizes[1], dtypes, seed=9)
    again = index_cases.sample(name, op.sample_sizes[1], dtypes, seed=9)
    for key, value in first.items():
        if isinstance(value, torch.Tensor):
            assert dtypes[key] == value.dtype
            assert value.is_contiguous()
            assert torch.equal(value, again[key])
        else:
            assert again[key] == value


@every_op
def test_a_native_is_deterministic(name):
    dtypes = dict.fromkeys(index_cases.OPS[name].format_signature.supported_dtypes, torch.int32)
    arguments = index_cases.sample(name, 4096, dtypes)
    first = [result.clone() for result in tensors(native(name)(**copied(arguments)))]
    for _ in range(20):
        for one, other in zip(first, tensors(native(name)(**copied(arguments))), strict=True):
            assert torch.equal(one, other)


def described(results: tuple[torch.Tensor, ...]) -> list[tuple[Any, ...]]:
    return [(tuple(one.shape), one.dtype, one.stride()) for one in results]


def sized_cases(name: str, mixes: int = 2) -> Any:
    """Edge cases whose result has a size that needs no value."""
    for dtypes in list(index_cases.dtype_mixes(name))[:mixes]:
        for case, arguments in index_cases.edge_cases(name, dtypes):
            if not case.endswith("size read"):
                yield arguments


@every_op
def test_a_native_needs_no_data(name):
    for arguments in sized_cases(name):
        real = described(tensors(native(name)(**copied(arguments))))
        meta = {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
        assert real == described(tensors(native(name)(**meta)))


@every_op
def test_a_native_traces_with_fake_tensors(name):
    for arguments in sized_cases(name, mixes=1):
        real = described(tensors(native(name)(**copied(arguments))))
        with FakeTensorMode() as mode:
            fake = {
                key: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                for key, value in arguments.items()
            }
            assert real == described(tensors(native(name)(**fake)))


@every_op
def test_a_native_compiles_into_one_graph(name):
    torch.compiler.reset()
    compiled = torch.compile(native(name), fullgraph=True, dynamic=True, backend="aot_eager")
    dtypes = dict.fromkeys(index_cases.OPS[name].format_signature.supported_dtypes, torch.int32)
    for size in (300, 4096):
        check(compiled, name, index_cases.sample(name, size, dtypes))
    _, arguments = next(case for case in index_cases.edge_cases(name, dtypes) if "out" in case[1] or name in NO_BUFFER)
    check(compiled, name, arguments)


NO_BUFFER = {"topk_valid_length", "topk_to_slots_dcp", "cp_interleave_split"}


class Exported(torch.nn.Module):
    def __init__(self, function, numbers):
        super().__init__()
        self.function = function
        self.numbers = numbers

    def forward(self, given):
        return self.function(**given, **self.numbers)


@every_op
@pytest.mark.parametrize("how", ["native", "handle"])
def test_an_op_exports_with_dynamic_sizes(name, how):
    function = native(name) if how == "native" else getattr(attention, name)
    dtypes = dict.fromkeys(index_cases.OPS[name].format_signature.supported_dtypes, torch.int32)
    arguments = index_cases.sample(name, 4096, dtypes)
    given = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    numbers = {key: value for key, value in arguments.items() if key not in given}
    dynamic = {key: dict.fromkeys(range(value.dim()), torch.export.Dim.AUTO) for key, value in given.items()}
    program = torch.export.export(Exported(function, numbers), (given,), dynamic_shapes=(dynamic,), strict=False)

    def run(**arguments):
        return program.module()({key: arguments[key] for key in given})

    check(run, name, arguments)
