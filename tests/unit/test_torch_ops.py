"""The ops as torch's operators: schemas, overloads, gradients, reloads."""

from __future__ import annotations

import importlib

import pytest
import torch
from simulated import registry_on
from torch import Tensor

import opgraft
import opgraft.ops
from opgraft import BaseFusedOp, FormatSignature, torch_ops

REGISTRY = registry_on(operators="opgraft.torch_ops")
X = torch.tensor([3, 1, 2], dtype=torch.int32)
ANY_FLOAT = ("float32", "float64")


def schema(name):
    packet = getattr(torch.ops.opgraft, name)
    return {overload: str(getattr(packet, overload)._schema) for overload in packet.overloads()}


def registered(op_class):
    """Define an op in a registry that torch knows; the process's own stays as it is."""
    return op_class.publish(REGISTRY).function


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


class Sorted(BaseFusedOp):
    op = "torchops.sorted"
    writes = {"values": 0, "indices": 1}
    format_signature = FormatSignature(supported_dtypes={"x": ("int32",)}, output_dtype=("like:x", "int64"))

    def forward_native(self, x: Tensor, *, values: Tensor | None = None, indices: Tensor | None = None):
        made = x.sort()
        pairs = zip((values, indices), made, strict=True)
        return tuple(one if buffer is None else buffer.copy_(one) for buffer, one in pairs)


class Halved(BaseFusedOp):
    """Changes its input."""

    op = "torchops.halved"
    mutates = ("x",)
    format_signature = FormatSignature(supported_dtypes=("int32",), output_dtype="int64")

    def forward_native(self, x: Tensor, by: int = 2) -> Tensor:
        x.div_(by, rounding_mode="floor")
        return x.long()


class Scaled(BaseFusedOp):
    """Float, with a tensor that is passed by keyword alone, and one that may be missing."""

    op = "torchops.scaled"
    format_signature = FormatSignature(supported_dtypes=ANY_FLOAT, output_dtype="like:x")

    def forward_native(self, x: Tensor, power: int = 2, *, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        result = x**power * scale
        return result if bias is None else result + bias


class Joined(BaseFusedOp):
    """Takes what torch's schemas know but annotations in strings hide, so that torch does not know it."""

    op = "torchops.joined"

    def forward_native(self, xs: list[Tensor]) -> Tensor:
        return torch.cat(xs)


class Pair(BaseFusedOp):
    op = "torchops.pair"
    format_signature = FormatSignature(supported_dtypes=ANY_FLOAT, output_dtype=("like:x", "int64"))

    def forward_native(self, x: Tensor, /, flag: bool = True, mode: str = "a", eps: float | None = None):
        return x.sin(), x.argsort()


SORTED, HALVED, SCALED, JOINED, PAIR = (registered(one) for one in (Sorted, Halved, Scaled, Joined, Pair))


class TestSchemas:
    def test_clamp_position(self):
        assert {
            "default": "opgraft::attention_clamp_position(Tensor seq_lens, *, str? backend=None) -> Tensor",
            "out": "opgraft::attention_clamp_position.out(Tensor seq_lens, *, Tensor(a1!) out, str? backend=None) -> ()",
        } == schema("attention_clamp_position")

    def test_an_overload_for_every_set_of_buffers(self):
        assert {
            "default": "opgraft::torchops_sorted(Tensor x, *, str? backend=None) -> (Tensor, Tensor)",
            "out": (
                "opgraft::torchops_sorted.out(Tensor x, *, Tensor(a1!) values, Tensor(a2!) indices, "
                "str? backend=None) -> ()"
            ),
            "values_only": (
                "opgraft::torchops_sorted.values_only(Tensor x, *, Tensor(a1!) values, str? backend=None) -> Tensor"
            ),
            "indices_only": (
                "opgraft::torchops_sorted.indices_only(Tensor x, *, Tensor(a1!) indices, str? backend=None) -> Tensor"
            ),
        } == schema("torchops_sorted")

    def test_mutated_parameters_numbers_words_and_positional_only_ones(self):
        assert {
            "default": "opgraft::torchops_halved(Tensor(a0!) x, SymInt by=2, *, str? backend=None) -> Tensor"
        } == schema("torchops_halved")
        assert {
            "default": (
                'opgraft::torchops_pair(Tensor x, bool flag=True, str mode="a", float? eps=None, *, '
                "str? backend=None) -> (Tensor, Tensor)"
            )
        } == schema("torchops_pair")

    def test_a_float_op_has_its_tensors_by_position_since_torch_differentiates_by_it(self):
        assert {
            "default": (
                "opgraft::torchops_scaled(Tensor x, Tensor scale, SymInt power=2, Tensor? bias=None, *, "
                "str? backend=None) -> Tensor"
            )
        } == schema("torchops_scaled")

    def test_an_op_that_has_no_schema_stays_without_an_operator_and_is_inlined(self):
        assert not hasattr(torch.ops.opgraft, "torchops_joined")
        assert JOINED.op.torch_function is None
        assert [3, 1, 2, 3, 1, 2] == compiled(JOINED)([X, X]).tolist()
        assert [3, 1, 2] == JOINED([X]).tolist()


class TestCalls:
    @pytest.mark.parametrize("given", [(), ("values",), ("indices",), ("values", "indices")])
    def test_buffers_inside_a_graph_are_filled_and_returned(self, given):
        buffers = {"values": torch.zeros(3, dtype=torch.int32), "indices": torch.zeros(3, dtype=torch.int64)}
        taken = {name: buffers[name] for name in given}

        values, indices = compiled(SORTED)(X, **taken)

        assert ([1, 2, 3], [1, 2, 0]) == (values.tolist(), indices.tolist())
        assert all(buffers[name].tolist() == {"values": [1, 2, 3], "indices": [1, 2, 0]}[name] for name in given)

    def test_a_mutated_input_is_changed_inside_a_graph(self):
        x = X.clone()

        result = compiled(HALVED)(x)

        assert ([1, 0, 1], [1, 0, 1]) == (x.tolist(), result.tolist())

    def test_an_operator_may_be_called_directly_and_runs_the_best_kernel(self):
        operator = torch.ops.opgraft.torchops_scaled
        x, scale = torch.tensor([2.0]), torch.tensor([3.0])

        assert [12.0] == operator(x, scale).tolist()
        assert [24.0] == operator(x, scale=scale, power=3).tolist()
        assert [12.0] == operator(x, scale, backend="native").tolist()
        with pytest.raises(opgraft.UnknownSelectorError, match=r"^unknown selector 'natve'; did you mean 'native'?"):
            operator(x, scale, backend="natve")

    def test_a_kernel_inside_the_operator_is_not_routed_to_it_again(self):
        class Noted(Tensor):
            pass

        result = torch.ops.opgraft.attention_clamp_position(X.as_subclass(Noted))

        assert [2, 0, 1] == result.tolist()


class TestGradients:
    x, scale = torch.tensor([0.5, -2.0], dtype=torch.float64), torch.tensor([3.0, 0.1], dtype=torch.float64)

    def inputs(self):
        return [one.clone().requires_grad_() for one in (self.x, self.scale, self.x)]

    @pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
    def test_the_operator_differentiates_through_native_as_often_as_is_asked(self, check):
        operator = torch.ops.opgraft.torchops_scaled

        assert check(lambda x, scale: operator(x, scale, power=3), self.inputs()[:2])
        assert check(lambda x, scale, bias: operator(x, scale, bias=bias), self.inputs())
        assert check(lambda x: torch.ops.opgraft.torchops_pair(x)[0], self.inputs()[:1])

    def test_an_input_that_requires_none_gets_none(self):
        x, scale, _ = self.inputs()
        torch.ops.opgraft.torchops_scaled(x, scale.detach()).sum().backward()

        assert (True, None) == (x.grad is not None, scale.grad)

    def test_compiled_gradients_equal_eager_ones(self):
        torch._dynamo.reset()
        eager, graph = self.inputs(), self.inputs()
        SCALED(eager[0], scale=eager[1], bias=eager[2]).sum().backward()
        compiled(SCALED)(graph[0], scale=graph[1], bias=graph[2]).sum().backward()

        assert [one.grad.tolist() for one in eager] == [one.grad.tolist() for one in graph]

    def test_an_op_of_integers_has_no_gradient_and_warns_of_nothing(self):
        result = torch.ops.opgraft.attention_clamp_position(X)

        assert not result.requires_grad


@pytest.mark.parametrize(
    ("operator", "args", "kwargs"),
    [
        ("torchops_sorted.default", (X,), {}),
        ("torchops_sorted.values_only", (X,), {"values": torch.zeros(3, dtype=torch.int32)}),
        (
            "torchops_sorted.out",
            (X,),
            {"values": torch.zeros(3, dtype=torch.int32), "indices": torch.zeros(3, dtype=torch.int64)},
        ),
        ("torchops_halved.default", (X.clone(),), {"by": 3}),
        (
            "torchops_scaled.default",
            (torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)),
            {"bias": torch.ones(2)},
        ),
        ("torchops_pair.default", (torch.ones(2, requires_grad=True),), {}),
    ],
)
def test_opcheck_passes(operator, args, kwargs):
    packet, overload = operator.split(".")

    results = torch.library.opcheck(getattr(getattr(torch.ops.opgraft, packet), overload), args, kwargs)

    assert {"SUCCESS"} == set(results.values())


def test_a_wrong_argument_inside_a_graph_is_told_as_outside_it():
    with pytest.raises(Exception, match=r"attention.clamp_position: seq_lens must be int32 or int64, got float32"):
        compiled(opgraft.ops.attention.clamp_position)(torch.ones(2))


def test_a_reload_of_the_module_defines_nothing_twice_and_loses_nothing():
    before = torch_ops._library
    function = opgraft.ops.attention.clamp_position

    importlib.reload(torch_ops)
    importlib.reload(opgraft.ops.attention)
    importlib.reload(opgraft.ops)

    assert before is torch_ops._library
    assert function is opgraft.ops.attention.clamp_position
    assert [2, 0, 1] == torch.ops.opgraft.attention_clamp_position(X).tolist()
    registered(type("Late", (BaseFusedOp,), {"op": "torchops.late", "forward_native": Halved.forward_native}))
    assert "default" in torch.ops.opgraft.torchops_late.overloads()
