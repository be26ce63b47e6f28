"""torch.compile and torch.export over every op: no graph break, equal results, in both modes."""

from __future__ import annotations

import pytest
import torch
from simulated import offer, registry_on
from torch import Tensor, nn

import opgraft
from opgraft import ANY, BaseFusedOp, FormatSignature, KernelBackend

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch's compiler

CATALOGUE = [f"attention.{name}" for name in opgraft.ops.attention.__all__]
X = torch.tensor([3, 0, 5], dtype=torch.int32)


def call_of(op_id, size=48, dtype=0):
    """Give the op's function, arguments for it, and fresh buffers for its results."""
    function = opgraft.op(op_id)
    op, dtypes = function.op, {}
    for name in op.arguments().required + op.arguments().optional:
        known = op.format_signature.dtypes(name) or op.format_signature.outputs
        dtypes[name] = getattr(torch, known[dtype % len(known)])
    given = op.sample(size, dtypes=dtypes, generator=torch.Generator().manual_seed(7))
    results = outputs_of(function(**copied(given)))
    buffers = {name: torch.zeros_like(results[index]) for name, index in op.arguments().writes.items()}
    return function, given, buffers


def copied(given):
    return {name: one.clone() if isinstance(one, Tensor) else one for name, one in given.items()}


def outputs_of(result):
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def assert_equal(one, other):
    assert len(outputs_of(one)) == len(outputs_of(other))
    for left, right in zip(outputs_of(one), outputs_of(other), strict=True):
        assert left.dtype is right.dtype
        assert torch.equal(left, right)


class Recorder:
    """A backend of torch.compile that keeps the names of what each graph calls."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, _):
        self.graphs.append([getattr(node.target, "__name__", str(node.target)) for node in graph.graph.nodes])
        return graph


class Calls(nn.Module):
    """Holds an op, with arguments that are no tensors fixed."""

    def __init__(self, op, **fixed):
        super().__init__()
        self.op = op
        self.fixed = fixed

    def forward(self, **given):
        return self.op(**given, **self.fixed)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.parametrize("op_id", CATALOGUE)
class TestEveryOp:
    def test_opaque_it_compiles_without_a_break_and_equals_eager(self, op_id):
        function, given, buffers = call_of(op_id)
        recorder = Recorder()

        compiled = torch.compile(lambda **given: function(**given), backend=recorder, fullgraph=True)  # noqa: PLW0108

        assert_equal(function(**copied(given)), compiled(**copied(given)))
        assert [1] == [sum(name.startswith("attention_") for name in graph) for graph in recorder.graphs]
        if buffers:
            assert_equal(function(**copied(given), **copied(buffers)), compiled(**copied(given), **copied(buffers)))

    def test_there_are_no_graph_breaks(self, op_id):
        function, given, _ = call_of(op_id)

        explained = torch._dynamo.explain(lambda **given: function(**given))(**copied(given))  # noqa: PLW0108

        assert (0, 1) == (explained.graph_break_count, explained.graph_count)

    def test_in_compile_mode_it_is_inlined_and_equals_eager(self, op_id):
        function, given, _ = call_of(op_id)
        recorder, eager = Recorder(), function(**copied(given), backend="native")
        module = nn.Sequential(function.op)

        with opgraft.torch_compile_mode(module, 16):
            compiled = torch.compile(lambda **given: function(**given), backend=recorder, fullgraph=True)  # noqa: PLW0108
            assert_equal(eager, compiled(**copied(given)))

        assert not [name for graph in recorder.graphs for name in graph if "opgraft" in name]
        assert not function.op.is_torch_compile

    def test_opcheck_passes_for_every_overload(self, op_id):
        function, given, buffers = call_of(op_id)
        packet = getattr(torch.ops.opgraft, op_id.replace(".", "_"))
        arguments = function.op.arguments()
        required = [name for name in given if name not in arguments.keyword_only]
        overloads = {"default": {}, **({"out": buffers} if buffers else {})}
        if len(buffers) > 1:
            overloads |= {f"{name}_only": {name: one} for name, one in buffers.items()}

        for overload, taken in overloads.items():
            args = tuple(copied(given)[name] for name in required)
            kwargs = {name: one for name, one in copied(given).items() if name not in required} | copied(taken)
            results = torch.library.opcheck(getattr(packet, overload), args, kwargs)
            assert {"SUCCESS"} == set(results.values()), overload
        assert {*overloads} == {*packet.overloads()}

    @pytest.mark.parametrize("strict", [True, False])
    def test_it_is_exported_opaque(self, op_id, strict):
        function, given, _ = call_of(op_id)
        tensors = {name: one for name, one in given.items() if isinstance(one, Tensor)}
        fixed = {name: one for name, one in given.items() if name not in tensors}

        exported = torch.export.export(Calls(function, **fixed), (), copied(tensors), strict=strict)

        targets = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
        assert f"opgraft.{op_id.replace('.', '_')}.default" in targets
        assert_equal(function(**copied(given)), exported.module()(**copied(tensors)))


CLAMP = opgraft.ops.attention.clamp_position


class TestOpaque:
    @pytest.mark.parametrize(
        "made",
        [
            lambda: torch.compile(CLAMP, backend="eager", fullgraph=True),
            lambda: torch.compile(CLAMP.op, backend="eager", fullgraph=True),
            lambda: torch.compile(nn.Sequential(CLAMP.op), backend="eager", fullgraph=True),
            lambda: torch.compile(
                lambda x: opgraft.ops.attention.clamp_position(x) + 0, backend="eager", fullgraph=True
            ),
            lambda: torch.compile(
                lambda x: opgraft.op("attention.clamp_position")(x) + 0, backend="eager", fullgraph=True
            ),
            lambda: torch.compile(lambda x: next(map(CLAMP, [x])), backend="eager", fullgraph=True),
        ],
    )
    def test_however_the_op_is_reached(self, made):
        assert [2, 0, 4] == made()(X).tolist()

    def test_with_sizes_that_vary_it_is_compiled_once_more_at_most(self):
        recorder = Recorder()
        compiled = torch.compile(lambda x: CLAMP(x) + 1, backend=recorder, fullgraph=True)

        results = [compiled(torch.arange(n)).shape[0] for n in (3, 4, 5, 9, 17)]

        assert ([3, 4, 5, 9, 17], True) == (results, len(recorder.graphs) <= 2)

    def test_exported_with_a_size_that_varies(self):
        class Positions(nn.Module):
            def forward(self, x):
                return CLAMP(x)

        exported = torch.export.export(Positions(), (X,), dynamic_shapes=({0: torch.export.Dim("batch")},))

        assert [0, 1, 2, 3, 4, 5, 6] == exported.module()(torch.arange(1, 8, dtype=torch.int32)).tolist()

    def test_inductor_takes_it_as_it_is(self):
        compiled = torch.compile(lambda x: CLAMP(x) * 2, fullgraph=True)

        assert [4, 0, 8] == compiled(X).tolist()

    def test_a_named_kernel_is_named_inside_the_graph_too(self):
        compiled = torch.compile(lambda x: CLAMP(x, backend=KernelBackend.TORCH), backend="eager", fullgraph=True)

        with opgraft.trace() as trace:
            compiled(X)

        assert ["native"] == [record.kernel for record in trace]

    def test_a_buffer_is_filled_and_returned(self):
        out = torch.zeros(3, dtype=torch.int64)
        compiled = torch.compile(lambda x, out: CLAMP(x, out=out) + 1, backend="aot_eager", fullgraph=True)

        assert ([3, 1, 5], [2, 0, 4]) == (compiled(X, out).tolist(), out.tolist())


class TestTransforms:
    @pytest.mark.parametrize("function", [CLAMP, CLAMP.op])
    def test_vmap_inside_a_graph_gives_what_it_gives_outside(self, function):
        batch = torch.stack([X, X + 1])
        compiled = torch.compile(lambda x: torch.vmap(function)(x), backend="eager", fullgraph=True)  # noqa: PLW0108

        assert [[2, 0, 4], [3, 0, 5]] == torch.vmap(function)(batch).tolist() == compiled(batch).tolist()

    def test_a_gradient_taken_inside_a_graph_passes_the_positions_by(self):
        def gradient(x, y):
            return torch.func.grad(lambda y: (y * CLAMP(x)).sum())(y)

        compiled = torch.compile(gradient, backend="eager", fullgraph=True)

        assert [2.0, 0.0, 4.0] == gradient(X, torch.ones(3)).tolist() == compiled(X, torch.ones(3)).tolist()


class Chosen(BaseFusedOp):
    op = "compiled.chosen"
    format_signature = FormatSignature(supported_dtypes=("float32",), output_dtype="like:x")
    capabilities = {KernelBackend.TRITON: ANY}

    def forward_native(self, x: Tensor) -> Tensor:
        return x * 2

    def forward_triton(self, x: Tensor) -> Tensor:
        return x.detach() * 3


REGISTRY = registry_on(operators="opgraft.torch_ops")
CHOSEN = Chosen.publish(REGISTRY).function
Y = torch.ones(2)


class TestChoice:
    def test_the_chosen_kernel_runs_and_a_compiled_graph_follows_pin_policy_and_registration(self):
        compiled = torch.compile(lambda x: CHOSEN(x) + 0, backend="aot_eager", fullgraph=True)
        results = [compiled(Y)[0].item()]

        with REGISTRY.policy.use(force="native"):
            results.append(compiled(Y)[0].item())
        CHOSEN.op.pin("native")
        results.append(compiled(Y)[0].item())
        CHOSEN.op.unpin()
        offer(REGISTRY, Chosen.op, lambda x: x * 5, dtypes=("float64",))
        results.append(compiled(Y)[0].item())

        assert [3.0, 2.0, 2.0, 3.0] == results

    def test_gradients_flow_through_native_and_equal_eager_ones(self):
        eager, graph = Y.clone().requires_grad_(), Y.clone().requires_grad_()

        CHOSEN(eager).sum().backward()
        torch.compile(CHOSEN, backend="aot_eager", fullgraph=True)(graph).sum().backward()

        assert [2.0, 2.0] == eager.grad.tolist() == graph.grad.tolist()

    @pytest.mark.parametrize("call", ["function", "module"])
    def test_hooks_are_honoured_inside_a_graph(self, call):
        made = CHOSEN if call == "function" else CHOSEN.op
        removable = CHOSEN.op.register_forward_hook(lambda op, args, result: result + 100)
        try:
            compiled = torch.compile(lambda x: made(x), backend="eager", fullgraph=True)  # noqa: PLW0108
            assert 103.0 == compiled(Y)[0].item()
        finally:
            removable.remove()
        torch._dynamo.reset()  # torch guards on no module hooks

        assert 3.0 == compiled(Y)[0].item()


class TestInlined:
    def test_an_instance_that_is_not_registered_is_inlined_as_native(self):
        recorder, op = Recorder(), Chosen().attach(registry_on())
        compiled = torch.compile(op, backend=recorder, fullgraph=True)

        assert 2.0 == compiled(Y)[0].item()
        assert not [name for graph in recorder.graphs for name in graph if "opgraft" in name]

    @pytest.mark.parametrize(
        ("word", "expected"),
        [
            ("triton", 3.0),
            ("op/triton", 3.0),
            (KernelBackend.TRITON, 3.0),
            ("native", 2.0),
            ("torch", 2.0),
            ("auto", 2.0),
            ("torch_compile", 2.0),
            (None, 2.0),
        ],
    )
    def test_its_own_kernels_may_be_named(self, word, expected):
        op = Chosen().attach(registry_on())
        compiled = torch.compile(lambda x: op(x, backend=word), backend="eager", fullgraph=True)

        assert expected == compiled(Y)[0].item()

    def test_a_handle_of_another_registry_is_inlined_too(self):
        class Elsewhere(Chosen):
            op = "compiled.elsewhere"

        registry = registry_on()
        Elsewhere.publish(registry)
        function = registry.handle(Elsewhere.op).function
        offer(registry, Elsewhere.op, lambda x: x * 7, priority=99)

        compiled = torch.compile(function, backend="eager", fullgraph=True)

        assert (7.0, 2.0) == (function(Y)[0].item(), compiled(Y)[0].item())

    def test_a_whole_model_compiles_in_both_modes_without_a_break(self):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(2, 2)
                self.registered = CHOSEN.op
                self.own = Chosen().attach(registry_on())

            def forward(self, x):
                lens = CLAMP(x.to(torch.int32))
                return self.own(self.registered(self.linear(x))) + lens

        model = Model().requires_grad_(False)
        eager = model(Y)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(Y)
        explained = torch._dynamo.explain(model)(Y)
        with opgraft.torch_compile_mode(model, 8):
            inlined_eager = model(Y)
            torch._dynamo.reset()
            inlined = torch.compile(model, backend="aot_eager", fullgraph=True)(Y)
            again = torch._dynamo.explain(model)(Y)

        assert torch.allclose(eager * 2 / 3, compiled)  # the instance that torch does not know is inlined as native
        assert torch.allclose(inlined_eager, inlined)
        assert (0, 0) == (explained.graph_break_count, again.graph_break_count)
