"""The functions a caller and an operator use, on the process's own registry."""

from __future__ import annotations

import re

import pytest
import torch
from simulated import unchanged
from torch import nn

import opgraft
from opgraft import (
    ArgumentTypeError,
    BaseFusedOp,
    CapabilityRequirement,
    FormatSignature,
    KernelBackend,
    UnknownOpError,
)

OP = "attention.clamp_position"
X = torch.tensor([1, 5], dtype=torch.int32)


class Loose(BaseFusedOp):
    """Has no format, and a gate."""

    op = "apiunit.loose"
    capabilities = {KernelBackend.JIT: CapabilityRequirement.cuda(min_sm=(9, 0))}

    def forward_native(self, x):
        return "native"

    def forward_jit(self, x):
        return "jit"


@pytest.fixture(scope="module", autouse=True)
def _loose():
    with unchanged(opgraft.registry):
        opgraft.register_fused_op(Loose(), __name__, "loose")
        yield


def test_an_op_by_its_id_is_the_function_of_the_catalogue():
    assert opgraft.ops.attention.clamp_position is opgraft.op(OP)
    with pytest.raises(UnknownOpError, match=r"^unknown op 'attention.clamp_positon'; did you mean"):
        opgraft.op("attention.clamp_positon")


def test_ops_of_a_group_of_its_own_are_reached_by_attribute():
    assert "native" == opgraft.ops.apiunit.loose(X)
    assert ["loose"] == dir(opgraft.ops.apiunit)
    with pytest.raises(AttributeError, match=r"^unknown op 'apiunit.lose'; did you mean 'apiunit.loose'?"):
        _ = opgraft.ops.apiunit.lose


def test_explain_tells_of_a_real_call_and_of_hardware_that_is_not_here():
    here = opgraft.explain(OP, X, backend="native")
    there = [opgraft.explain_for("apiunit.loose", device="cuda", arch=arch).winner.selector for arch in ("9.0", "8.0")]

    assert ("native", "call", "seq_lens: int32 (2,) on cpu") == (here.winner.selector, here.decided_by, here.call)
    assert ["op/jit", "native"] == there
    assert isinstance(here, opgraft.Selection)
    assert all(isinstance(one, opgraft.Candidate) for one in here.candidates)


def test_explain_takes_the_calls_own_keywords():
    out = torch.zeros(2, dtype=torch.int64)

    assert "seq_lens: int32 (2,), out: int64 (2,) on cpu" == opgraft.explain(OP, seq_lens=X, out=out).call


def test_a_feature_suffix_of_an_arch_is_left_out():
    with_suffix = opgraft.explain_for(OP, device="hip", arch="gfx942:sramecc+:xnack-")

    assert opgraft.explain_for(OP, device="hip", arch="gfx942").candidates == with_suffix.candidates


@pytest.mark.parametrize(
    ("op_id", "dtype", "message"),
    [
        (OP, "float32", "attention.clamp_position: dtype must be int32 or int64, got float32"),
        ("apiunit.loose", "int33", "apiunit.loose: unknown dtype int33"),
    ],
)
def test_a_dtype_that_the_op_does_not_take_is_a_type_error(op_id, dtype, message):
    with pytest.raises(ArgumentTypeError, match=f"^{re.escape(message)}$"):
        opgraft.explain_for(op_id, dtype=dtype)


def test_a_dtype_may_be_written_as_torch_writes_it():
    assert "int32 tensors on cpu" == opgraft.explain_for(OP, dtype="torch.int32").call
    assert "int8 tensors on cpu" == opgraft.explain_for("apiunit.loose", dtype="int8").call


def test_what_is_asked_for_each_call_is_marked_where_there_is_no_call():
    class Gated(BaseFusedOp):
        op = "apiunit.gated"
        format_signature = FormatSignature(supported_dtypes=("int32",), output_dtype=None)

        def forward_native(self, x):
            return x

    opgraft.register_fused_op(Gated(), __name__, "gated")
    opgraft.registry.register(
        opgraft.KernelSpec(
            op=Gated.op, backend="late", kernel_backend="jit", target=lambda x: x, rejects=lambda x: None
        )
    )

    assert "late/jit" in str(opgraft.explain_for(Gated.op))
    assert "wins by priority; conditional: asked per call" in str(opgraft.explain_for(Gated.op))


def test_warmup_is_a_call():
    assert [0, 4] == opgraft.warmup(OP, X).tolist()
    assert [0, 4] == opgraft.warmup(OP, seq_lens=X, backend="native").tolist()


def test_policies_are_set_shown_exported_and_applied():
    opgraft.set_policy(deny="somebody")
    try:
        exported = opgraft.export_policy()

        assert (frozenset({"somebody"}), ["somebody"]) == (opgraft.get_policy().deny, exported["deny"])
        with opgraft.use(force="native") as policy:
            assert ("native", policy) == (opgraft.get_policy().force, opgraft.get_policy())
    finally:
        opgraft.set_policy(deny=None)

    assert frozenset() == opgraft.get_policy().deny


def test_a_trace_records_and_what_the_process_recorded_is_empty():
    with opgraft.trace(capacity=1) as trace:
        opgraft.ops.attention.clamp_position(X, backend="native")
        opgraft.ops.attention.clamp_position(X, backend="native")

    assert (["native"], [2]) == ([one.kernel for one in trace], [row["calls"] for row in trace.summary()])
    assert [] == [*opgraft.get_trace()]


def test_a_module_tree_is_put_into_compile_mode():
    model = nn.Sequential(nn.Identity(), Loose())

    with opgraft.torch_compile_mode(model, num_tokens=3):
        within = model[1].is_torch_compile

    assert (True, False) == (within, model[1].is_torch_compile)


def test_backends_are_records():
    assert all(isinstance(one, opgraft.BackendRecord) for one in opgraft.backends())
    assert sorted(one.name for one in opgraft.backends()) == [one.name for one in opgraft.backends()]
