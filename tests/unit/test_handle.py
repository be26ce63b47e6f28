"""The function that callers hold, and the choice it keeps."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pickle
import pydoc
import sys
import textwrap
import threading

import pytest
import torch
from simulated import offer, registry_on, unchanged
from torch import Tensor, nn

import opgraft
from opgraft import ANY, BaseFusedOp, CapabilityRequirement, FormatSignature, NotSupported, UnknownOpError
from opgraft.handle import tensor_guard

X = torch.tensor([1, 2], dtype=torch.int32)
CLAMP = opgraft.ops.attention.clamp_position


class Twice(BaseFusedOp):
    """Multiply by two."""

    op = "handle.twice"
    format_signature = FormatSignature(supported_dtypes=("int32", "int64", "float32"), output_dtype="like:x")

    def forward_native(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return x * 2 if out is None else out.copy_(x * 2)


@pytest.fixture
def registry():
    registry = registry_on()
    Twice.publish(registry)
    return registry


@pytest.fixture
def function(registry):
    return registry.handle(Twice.op).function


@pytest.fixture
def process_registry():
    with unchanged(opgraft.registry) as registry:
        yield registry


def first(result):
    return result.flatten()[0].item()


def slow_calls(registry, op_id=Twice.op):
    """Count the calls that the kept choice does not cover."""
    handle = registry.handle(op_id)
    calls, slow = [], handle.slow
    handle._names["_slow"] = lambda values, selector: calls.append(values) or slow(values, selector)
    return calls


class TestTheFunction:
    def test_it_shows_the_parameters_and_one_more_keyword(self):
        assert "(seq_lens: 'Tensor', *, out: 'Tensor | None' = None, backend=None) -> 'Tensor'" == str(
            inspect.signature(CLAMP)
        )
        assert "attention.clamp_position" == CLAMP.__qualname__
        assert "clamp_position" == CLAMP.__name__
        assert "Give the zero-based position of each request's newest token." in pydoc.render_doc(CLAMP)

    def test_it_pickles_as_itself(self):
        assert CLAMP is pickle.loads(pickle.dumps(CLAMP))
        assert CLAMP is copy.deepcopy(CLAMP)
        assert CLAMP is opgraft.op("attention.clamp_position")

    def test_a_function_that_wraps_it_is_not_taken_for_it_inside_a_graph(self):
        @functools.wraps(CLAMP)
        def later(*args, **kwargs):
            return CLAMP(*args, **kwargs) + 100

        compiled = torch.compile(lambda x: later(x) * 1, backend="eager", fullgraph=True)

        assert [100, 101] == later(X).tolist() == compiled(X).tolist()
        assert (CLAMP.op, "_torchdynamo_inline" in vars(CLAMP)) == (later.op, True)
        assert not [name for name in vars(later) if name.startswith("_torchdynamo")]
        assert "op" in dir(CLAMP)

    def test_its_op_is_the_op(self, function):
        assert isinstance(function.op, Twice)

    def test_a_call_that_does_not_fit_is_pythons_own_error(self, function):
        with pytest.raises(TypeError, match=r"^handle.twice\(\) missing 1 required positional argument: 'x'$"):
            function()
        with pytest.raises(TypeError, match=r"^handle.twice\(\) got an unexpected keyword argument 'y'$"):
            function(X, y=1)

    def test_a_wrong_name_is_told_with_the_nearest(self):
        with pytest.raises(
            UnknownOpError, match=r"^unknown op 'attention.clamp'; did you mean 'attention.clamp_position'"
        ):
            opgraft.op("attention.clamp")
        with pytest.raises(AttributeError, match=r"^module 'opgraft.ops' has no attribute 'atention'$"):
            _ = opgraft.ops.atention

    def test_one_taken_before_a_backend_registers_reaches_it_afterwards(self, registry, function):
        assert [2, 2] == [first(function(X)), first(function(X))]

        offer(registry, Twice.op, lambda x, *, out=None: x * 3)

        assert [3, 3] == [first(function(X)), first(function(X))]


class TestTheModule:
    """``op(x)``: what torch runs around a module's forward, then the same choice."""

    def test_each_call_passes_its_hooks_once(self, registry):
        op = registry.handle(Twice.op).op
        op(X)
        seen = []
        with op.register_forward_hook(lambda *call: seen.append(call[1])):
            op(X)
            op(X)
        op(X)
        assert 2 == len(seen)

    def test_what_is_registered_or_pinned_later_counts(self, registry):
        op = registry.handle(Twice.op).op
        assert 2 == first(op(X))
        offer(registry, Twice.op, lambda x, *, out=None: x * 3)
        assert 3 == first(op(X))
        op.pin("native")
        assert 2 == first(op(X))
        op.unpin()
        assert 3 == first(op(X))

    def test_a_copy_chooses_for_itself(self, registry):
        op = Twice().attach(registry)
        op(X)
        other = copy.deepcopy(op)
        other.pin("native")
        offer(registry, Twice.op, lambda x, *, out=None: x * 3)
        assert [3, 2] == [first(op(X)), first(other(X))]

    @pytest.mark.parametrize("called_before", [False, True])
    def test_torch_compile_begins_with_it_or_with_what_holds_it(self, called_before):
        for layer in (Weighed(), nn.Sequential(Weighed()), Twice(), nn.Sequential(Twice())):
            expected = layer(X.float()) if called_before else None
            compiled = torch.compile(layer, backend="eager", fullgraph=True)
            assert torch.equal(compiled(X.float()), layer(X.float()) if expected is None else expected)

    def test_layers_of_one_kind_are_compiled_once(self):
        counter = torch._dynamo.testing.CompileCounter()
        torch._dynamo.reset()
        for layer in [Twice() for _ in range(4)]:
            layer(X.float())
            torch.compile(nn.Sequential(layer), backend=counter, fullgraph=True)(X.float())
        assert 1 == counter.frame_count

    def test_a_replica_computes_with_its_own_parameters(self):
        layer = Weighed()
        assert [1, 2] == layer(X).tolist()
        replica = layer._replicate_for_data_parallel()
        replica._parameters = {"weight": torch.tensor(3.0)}
        assert [3, 6] == replica(X).tolist()
        assert [1, 2] == layer(X).tolist()

    def test_a_forward_that_its_owner_wraps_is_called(self):
        layer = Weighed()
        layer.forward = lambda x: type(layer).forward(layer, x) + 1
        assert [2, 3] == layer(X).tolist() == layer(X).tolist()


class Weighed(BaseFusedOp):
    """Multiply by a parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))

    def forward_native(self, x: Tensor) -> Tensor:
        return x * self.weight


class Scaled(BaseFusedOp):
    """Multiply by two, and by a number."""

    op = "handle.scaled"

    def forward_native(self, x: Tensor, *, k: int = 1) -> Tensor:
        return x * 2


def test_a_choice_that_a_passed_keyword_decided_is_not_kept_for_calls_without_it():
    registry = registry_on()
    Scaled.publish(registry)
    function = registry.handle(Scaled.op).function
    offer(registry, Scaled.op, lambda x: x * 3, leaves_out=frozenset({"k"}))
    for _ in range(2):
        assert [3, 2, 3, 2] == [
            first(function(X)),
            first(function(X, k=2)),
            first(function(X)),
            first(function(X, k=7)),
        ]


class TestKeeping:
    def test_a_choice_is_kept_for_calls_alike(self, registry, function):
        function(X)
        calls = slow_calls(registry)

        for x in (X, X[:1], torch.zeros(99, dtype=torch.int32), X[::2]):
            function(x)

        assert [] == calls

    @pytest.mark.parametrize(
        "other",
        [
            X.to(torch.int64),
            X.view(1, 2),
            X.to("meta"),
            X.to("acme"),
            X.float().requires_grad_(),
            nn.Parameter(X.float()),
            torch.zeros(2, 2, dtype=torch.int32).to_sparse(),
        ],
    )
    def test_it_is_not_used_for_another_type_dtype_device_gradient_or_layout(self, registry, function, other):
        function(X)
        calls = slow_calls(registry)

        function(other)

        assert 1 == len(calls)

    def test_calls_with_a_buffer_are_kept_beside_those_without(self, registry, function):
        out = X.clone()
        function(X)
        function(X, out=out)
        calls = slow_calls(registry)

        for _ in range(2):
            function(X)
            assert out is function(X, out=out)

        assert [] == calls
        assert [2, 4] == out.tolist()

    def test_a_buffer_is_looked_at_for_each_call(self, function):
        for _ in range(2):
            function(X, out=X.clone())

        with pytest.raises(opgraft.ArgumentTypeError, match=r"^handle.twice: out must be int32, got int64$"):
            function(X, out=X.long())
        with pytest.raises(opgraft.ArgumentValueError, match=r"^handle.twice: out must be memory of its own, not x's"):
            function(X, out=X)

    def test_a_kernel_that_is_asked_for_each_call_is_kept_with_its_question(self, registry, function):
        def rejects(x, *, out=None):
            return "odd" if len(x) % 2 else None

        offer(registry, Twice.op, lambda x, *, out=None: x * 3, rejects=rejects)
        function(X)
        calls = slow_calls(registry)

        assert [3, 6] == function(X).tolist()
        assert [2, 2, 2] == function(torch.ones(3, dtype=torch.int32)).tolist()
        assert [3, 6] == function(X).tolist()
        assert [] == calls

    def test_what_a_kept_kernel_with_a_question_raises_names_it_once(self, registry, function):
        def fails(x, *, out=None):
            if x[0] == 0:
                raise ZeroDivisionError
            return x

        offer(registry, Twice.op, fails, rejects=lambda x, *, out=None: None)
        function(X)

        with pytest.raises(ZeroDivisionError) as error:
            function(torch.zeros_like(X))

        assert ["raised by kernel there/jit of op 'handle.twice'"] == error.value.__notes__

    def test_two_dtypes_in_turn_are_both_kept(self, registry, function):
        for _ in range(2):
            function(X)
            function(X.long())
        calls = slow_calls(registry)

        for _ in range(3):
            assert torch.int32 is function(X).dtype
            assert torch.int64 is function(X.long()).dtype

        assert [] == calls

    def test_nothing_is_kept_while_any_scope_is_alive(self, registry, function):
        calls = slow_calls(registry)

        with registry.policy.use():
            function(X)
            function(X)
        function(X)
        function(X)

        assert 3 == len(calls)

    def test_what_is_chosen_where_no_gradient_is_recorded_is_not_kept_for_where_one_is(self, registry, function):
        offer(registry, Twice.op, lambda x, *, out=None: x.detach() * 3)
        trained = torch.ones(2, requires_grad=True)

        with torch.no_grad():
            without = [first(function(trained)) for _ in range(3)]
        recorded = [first(function(trained)) for _ in range(3)]
        with torch.no_grad():
            again = first(function(trained))

        assert ([3, 3, 3], [2, 2, 2], 3) == (without, recorded, again)

    @pytest.mark.parametrize("variable", ["OPGRAFT_CHECK", "OPGRAFT_TRACE"])
    def test_nothing_is_kept_in_checked_mode_and_while_tracing(self, variable):
        registry = registry_on(OPGRAFT_CHECK="1") if variable == "OPGRAFT_CHECK" else registry_on()
        Twice.publish(registry)
        function = registry.handle(Twice.op).function
        calls = slow_calls(registry)

        with registry.tracing(registry.process_trace) if variable == "OPGRAFT_TRACE" else registry.policy.use():
            function(X)
            function(X)

        assert 2 == len(calls)

    def test_nothing_is_kept_for_a_layer_whose_weight_may_be_trained(self):
        class Layer(BaseFusedOp):
            op = "handle.layer"

            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(2))

            def forward_native(self, x: Tensor) -> Tensor:
                return x * self.weight

        registry = registry_on()
        Layer.publish(registry)
        function = registry.handle(Layer.op).function
        offer(registry, Layer.op, lambda x: x.detach(), capabilities=ANY)
        with torch.no_grad():
            assert [False, False] == [function(X).requires_grad, function(X).requires_grad]

        assert function(X).requires_grad

    def test_what_two_threads_keep_is_never_older_than_a_change(self, registry, function):
        wrong, done = [], threading.Event()

        def call():
            while not done.is_set():
                function(X)

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for index in range(40):
            offer(registry, Twice.op, lambda x, *, out=None, f=index: x * f, name=f"k{index:03}", priority=100 + index)
            wrong += [index] if first(function(X)) != index else []
            wrong += [index] if first(function(X)) != index else []
        done.set()
        for thread in threads:
            thread.join()

        assert [] == wrong


class TestHooks:
    @pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
    @pytest.mark.parametrize("kind", ["forward", "forward_pre", "backward", "full_backward", "full_backward_pre"])
    def test_a_hook_takes_the_kept_choice_back_and_its_removal_gives_it_again(self, registry, function, kind):
        seen, x = [], torch.ones(2, requires_grad="backward" in kind)
        function(x)
        function(x)

        removable = getattr(function.op, f"register_{kind}_hook")(lambda *_: seen.append(kind))
        for _ in range(2):
            result = function(x)
            if x.requires_grad:
                result.sum().backward()
        with_hook = len(seen)
        removable.remove()
        function(x)
        calls = slow_calls(registry)
        function(x)

        assert (2, 2, x.requires_grad) == (with_hook, len(seen), len(calls))

    def test_a_pre_hook_changes_what_the_kernel_sees_and_a_forward_hook_what_the_caller_gets(self, function):
        function.op.register_forward_pre_hook(lambda op, args: (args[0] * 10,))
        function.op.register_forward_hook(lambda op, args, result: result + 1)

        assert [21, 41] == function(X).tolist()

    def test_hooks_with_keywords_see_the_callers_buffer_and_not_the_selector(self, function):
        seen = []
        function.op.register_forward_hook(
            lambda op, args, kwargs, result: seen.append((len(args), [*kwargs])), with_kwargs=True
        )

        function(X, out=X.clone())
        function(X, backend="native")

        assert [(1, ["out", "backend"]), (1, ["backend"])] == seen

    def test_hooks_that_are_cleared_by_hand_are_gone(self, function):
        seen = []
        function.op.register_forward_hook(lambda *_: seen.append(1))
        function(X)
        function.op._forward_hooks.clear()
        function(X)

        assert [1] == seen

    def test_torchs_process_wide_hooks_count_only_where_the_module_is_called(self, function):
        seen = []
        removable = nn.modules.module.register_module_forward_hook(lambda op, args, result: seen.append(op))
        try:
            function(X)
            assert [] == seen
            function.op(X)
        finally:
            removable.remove()

        assert [function.op] == seen


class TestFailure:
    def test_a_kept_kernel_that_no_longer_supports_the_call_passes_it_on(self, registry, function):
        supported = [True]

        def kernel(x, *, out=None):
            if not supported:
                raise NotSupported("gone")
            return x * 3

        offer(registry, Twice.op, kernel)
        function(X)
        calls = slow_calls(registry)
        function(X)
        supported.clear()

        assert [] == calls
        assert [2, 2] == [first(function(X)), first(function(X))]

        supported.append(True)

        assert 3 == first(function(X))

    def test_an_error_passes_with_its_traceback(self, registry, function):
        fail = []

        def kernel(x, *, out=None):
            return 1 / 0 if fail else x

        offer(registry, Twice.op, kernel)
        function(X)
        fail.append(1)

        with pytest.raises(ZeroDivisionError) as caught:
            function(X)

        assert "kernel" == caught.traceback[-1].name


class TestGuard:
    def test_it_compares_type_dtype_device_dims_and_gradient(self):
        guard = tensor_guard([X, X.float()])

        assert guard(X[:1], torch.ones(9))
        assert not guard(X, X)
        assert not guard(X, torch.ones(1, 1))
        assert not guard(X, torch.ones(1, requires_grad=True))
        assert not guard(X, torch.ones(1, device="meta"))
        assert not guard(X, nn.Parameter(torch.ones(1)))
        assert not guard(X, None)


class Other:
    """Two classes of one qualified name, as a reload makes them."""

    @staticmethod
    def first():
        class Scaled(BaseFusedOp):
            """First."""

            op = "handle.scaled"

            def forward_native(self, x: Tensor, k: int = 2) -> Tensor:
                return x * k

            def validate(self, x, k=2):
                if k == 0:
                    raise ValueError("first")

        return Scaled

    @staticmethod
    def second():
        class Scaled(BaseFusedOp):
            """Second."""

            op = "handle.scaled"

            def forward_native(self, x: Tensor, by: float = 5.0, *, out: Tensor | None = None) -> Tensor:
                return x * by

            def validate(self, x, by=5.0, *, out=None):
                if by == 1:
                    raise ValueError("second")

        Scaled.__qualname__ = Scaled.__qualname__.replace("second", "first")
        return Scaled


class TestReplacement:
    def test_the_function_stays_and_follows_the_op_that_replaces_it(self):
        registry = registry_on()
        Other.first().publish(registry)
        function = registry.handle("handle.scaled").function
        assert [2, 6] == [first(function(X)), first(function(X, 6))]
        with pytest.raises(ValueError, match=r"^first$"):
            function(X, 0)

        Other.second().publish(registry)

        assert function is registry.handle("handle.scaled").function
        assert [5.0, 5.0, 0.0] == [first(function(X)), first(function(X)), first(function(X, by=0))]
        assert ["x", "by", "out", "backend"] == [*inspect.signature(function).parameters]
        assert "Second." == function.__doc__
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^second$"):
                function(X, 1)

    def test_publishing_the_same_class_again_keeps_the_op(self, registry, function):
        op = function.op

        assert registry.handle(Twice.op) is Twice.publish(registry)
        assert op is function.op

    def test_a_reloaded_module_of_ops_reaches_callers_that_hold_the_old_function(
        self, tmp_path, monkeypatch, process_registry
    ):
        source = """
            from __future__ import annotations
            from torch import Tensor
            from opgraft import BaseFusedOp, publish

            class Scaled(BaseFusedOp):
                op = "reloaded.scaled"

                def forward_native(self, x: Tensor) -> Tensor:
                    return x * FACTOR

            scaled = publish(Scaled)
        """
        path = tmp_path / "reloaded_ops.py"
        path.write_text(textwrap.dedent(source).replace("FACTOR", "2"))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        module = __import__("reloaded_ops")
        function = module.scaled
        compiled = torch.compile(lambda x: function(x), backend="eager", fullgraph=True)  # noqa: PLW0108 - one to trace
        assert [2, 2, 2] == [first(function(X)), first(function(X)), first(compiled(X))]

        path.write_text(textwrap.dedent(source).replace("FACTOR", "30"))
        importlib.reload(module)

        assert function is module.scaled
        assert [30, 30, 30] == [first(function(X)), first(function(X)), first(compiled(X))]
        assert function is opgraft.ops.reloaded.scaled
        assert function is pickle.loads(pickle.dumps(function))


@pytest.mark.parametrize(
    "native",
    [
        lambda self, kernel: "native",
        lambda self, *xs: "native",
        lambda self, **more: "native",
        staticmethod(lambda x: "native"),
        classmethod(lambda cls, x, y=1: "native"),
        lambda self, x, /: "native",
    ],
)
def test_natives_of_every_kind_are_called_through_function_and_module(native):
    op_class = type("Kind", (BaseFusedOp,), {"op": "handle.kind", "forward_native": native})
    registry = registry_on()
    op_class.publish(registry)
    function = registry.handle("handle.kind").function
    args, kwargs = ((), {"x": X}) if "more" in inspect.signature(function).parameters else ((X,), {})

    calls = [function, function, function.op]

    assert ["native"] * 3 == [call(*args, **kwargs) for call in calls]


def test_several_outputs_and_buffers_pass_as_they_are():
    class Sorted(BaseFusedOp):
        op = "handle.sorted"
        writes = {"values": 0, "indices": 1}

        def forward_native(self, x: Tensor, *, values: Tensor | None = None, indices: Tensor | None = None):
            made = x.sort()
            pairs = zip((values, indices), made, strict=True)
            return tuple(one if buffer is None else buffer.copy_(one) for buffer, one in pairs)

    registry = registry_on()
    Sorted.publish(registry)
    function = registry.handle(Sorted.op).function
    x, values, indices = torch.tensor([3, 1]), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)

    for given in ({}, {"values": values}, {"indices": indices}, {"values": values, "indices": indices}):
        for _ in range(2):
            got = function(x, **given)
            assert [[1, 3], [1, 0]] == [one.tolist() for one in got]
            assert all(got[Sorted.writes[name]] is buffer for name, buffer in given.items())


def test_a_kernel_for_another_device_is_never_kept_for_this_one():
    registry = registry_on()
    Twice.publish(registry)
    function = registry.handle(Twice.op).function
    offer(registry, Twice.op, lambda x, *, out=None: x.cpu() * 7, capabilities=CapabilityRequirement.device("acme"))
    there = X.to("acme")

    assert [2, 7, 2, 7, 7, 2] == [first(function(x)) for x in (X, there, X, there, there, X)]
