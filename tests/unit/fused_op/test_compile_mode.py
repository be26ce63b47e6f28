"""Statements 85 to 97: the protocol by which an op is inlined while a graph is compiled."""

from __future__ import annotations

import pytest
import torch
from simulated import offer, registry_on
from torch import Tensor, nn

import opgraft
from opgraft import ANY, BaseFusedOp, KernelBackend, PolicyError

X = torch.tensor([1.0, 2.0])
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch's compiler


class Scale(BaseFusedOp):
    op = "mode.scale"
    capabilities = {KernelBackend.JIT: ANY}

    def forward_native(self, x: Tensor) -> Tensor:
        return x * 2

    def forward_jit(self, x: Tensor) -> Tensor:
        return x * 3

    def forward_triton(self, x: Tensor) -> Tensor:
        return x * 5


class TopK(Scale):
    """Keeps the optimised path where there is more than one token."""

    op = "mode.topk"

    def _torch_compile_forward(self, num_tokens):
        return self.forward_native if num_tokens == 1 else None


def factor(op, **options):
    return op(X, **options)[0].item()


@pytest.fixture
def op():
    return Scale().attach(registry_on())


def test_085_entering_switches_to_native_and_sets_the_flag(op):
    assert (False, 3.0) == (op.is_torch_compile, factor(op))

    op.enter_torch_compile(8)

    assert (True, 2.0) == (op.is_torch_compile, factor(op))


def test_086_leaving_restores_the_former_choice_and_clears_the_flag(op):
    op.enter_torch_compile(8)
    op.leave_torch_compile()

    assert (False, 3.0) == (op.is_torch_compile, factor(op))


def test_087_entering_twice_and_leaving_once_restores_the_original(op):
    op.enter_torch_compile(8)
    op.enter_torch_compile(1)
    op.leave_torch_compile()

    assert (False, 3.0) == (op.is_torch_compile, factor(op))


def test_088_leaving_twice_or_without_entering_does_nothing(op):
    op.leave_torch_compile()

    assert 3.0 == factor(op)

    op.enter_torch_compile(1)
    op.leave_torch_compile()
    op.leave_torch_compile()

    assert (False, 3.0) == (op.is_torch_compile, factor(op))


def test_089_after_entering_before_the_first_call_the_choice_is_made_normally(op):
    op.enter_torch_compile(1)
    op.leave_torch_compile()

    assert 3.0 == factor(op)


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 2.0), (2, 3.0), (512, 3.0)])
def test_090_a_hook_that_gives_none_keeps_the_optimised_path(num_tokens, expected):
    op = TopK().attach(registry_on())
    op.enter_torch_compile(num_tokens)

    assert expected == factor(op)


def test_090_a_hook_may_give_a_function_of_its_own():
    class Own(Scale):
        def _torch_compile_forward(self, num_tokens):
            return lambda x: x * num_tokens

    op = Own().attach(registry_on())
    op.enter_torch_compile(7)

    assert 7.0 == factor(op)


def test_091_entering_chooses_at_once_and_calls_choose_nothing():
    class Counted(TopK):
        choices = 0

        def own_kernels(self, platform=""):
            self.choices += 1
            return super().own_kernels(platform)

    op = Counted().attach(registry_on())
    op.enter_torch_compile(2)
    once = op.choices

    assert 3.0 == factor(op)
    assert once == op.choices > 0


def test_091_a_backends_kernel_is_kept_too():
    op = TopK().attach(registry_on())
    offer(op.registry, op.op, lambda x: x * 11, priority=99)
    op.enter_torch_compile(2)

    assert 11.0 == factor(op)


def test_092_entering_reads_the_policy():
    op = Scale().attach(registry_on(OPGRAFT_STRICT="maybe"))

    with pytest.raises(PolicyError):
        op.enter_torch_compile(1)

    assert not op.is_torch_compile


def test_093_what_is_forced_or_named_still_applies(op):
    with op.registry.policy.use(force="triton"):
        op.enter_torch_compile(1)

        assert 5.0 == factor(op)

        op.leave_torch_compile()
    op.enter_torch_compile(1)

    assert (3.0, 2.0) == (factor(op, backend="jit"), factor(op))


def test_094_a_pinned_op_is_restored_to_its_pin(op):
    op.pin("triton")
    op.enter_torch_compile(1)
    within = factor(op)
    op.leave_torch_compile()

    assert (5.0, 5.0) == (within, factor(op))


class Tree(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = Scale().attach(registry_on())
        self.again = self.shared
        self.deep = nn.Sequential(nn.Identity(), TopK().attach(registry_on()))

    def forward(self, x):
        return self.deep(self.shared(x) + self.again(x))


def test_095_a_module_tree_is_toggled_once_shared_instances_included():
    entered = []

    class Noted(Scale):
        def enter_torch_compile(self, num_tokens):
            entered.append(num_tokens)
            super().enter_torch_compile(num_tokens)

    tree = Tree()
    tree.shared = tree.again = Noted().attach(registry_on())

    with opgraft.torch_compile_mode(tree, 4) as given:
        within = tree(X)[0].item()

    assert (tree, [4]) == (given, entered)
    assert ((2 + 2) * 3, (3 + 3) * 3) == (within, tree(X)[0].item())


def test_095_what_was_in_compile_mode_before_stays_in_it():
    tree = Tree()
    tree.shared.enter_torch_compile(1)

    with opgraft.torch_compile_mode(tree, 4):
        pass

    assert (True, False) == (tree.shared.is_torch_compile, tree.deep[1].is_torch_compile)


def test_095_an_exception_restores_every_op():
    class Refuses(Scale):
        def _torch_compile_forward(self, num_tokens):
            raise ValueError(num_tokens)

    tree = nn.Sequential(Scale().attach(registry_on()), Refuses().attach(registry_on()))

    with pytest.raises(ValueError, match=r"^4$"), opgraft.torch_compile_mode(tree, 4):
        raise AssertionError("entered")

    assert [False, False] == [op.is_torch_compile for op in tree]
    assert 3.0 == factor(tree[0])


def test_096_a_module_in_compile_mode_compiles_without_a_break_and_equals_eager():
    tree, graphs = Tree(), []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    torch._dynamo.reset()
    with opgraft.torch_compile_mode(tree, 1):
        eager = tree(X)
        compiled = torch.compile(tree, backend=backend, fullgraph=True)(X)
        explained = torch._dynamo.explain(tree)(X)

    assert torch.equal(eager, compiled)
    assert [
        ["<built-in function mul>", "<built-in function mul>", "<built-in function add>", "<built-in function mul>"]
    ] == graphs
    assert (0, 1) == (explained.graph_break_count, explained.graph_count)


def test_097_native_is_not_wrapped_in_a_compilation_of_its_own(op):
    op.enter_torch_compile(1)

    assert op.forward_native == op._compile_forward
    assert "_compiled_native" not in vars(op)


def test_a_handle_follows_its_op_into_compile_mode_and_back():
    registry = registry_on()
    Scale.publish(registry)
    function = registry.handle(Scale.op).function
    before = [factor(function), factor(function)]

    function.op.enter_torch_compile(1)
    within = [factor(function), factor(function), factor(function, backend="jit"), factor(function, backend="auto")]
    function.op.leave_torch_compile()

    assert ([3.0, 3.0], [2.0, 2.0, 3.0, 3.0], [3.0, 3.0]) == (before, within, [factor(function), factor(function)])
