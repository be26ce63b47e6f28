"""A selection turned into a call: what is asked once, what for each call, and what an error says."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import re
import sys
import threading

import pytest
import torch
from simulated import offer, registry_on
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import opgraft
from opgraft import (
    ANY,
    ArgumentTypeError,
    ArgumentValueError,
    BaseFusedOp,
    CapabilityRequirement,
    FormatSignature,
    KernelBackend,
    NoKernelError,
    NotSupported,
    PluginError,
    UnknownSelectorError,
)
from opgraft.ops.attention._clamp_position import ClampPosition

X = torch.tensor([1, 2], dtype=torch.int32)
F = torch.tensor([1.0, 2.0])


class Twice(BaseFusedOp):
    op = "dispatch.twice"

    def forward_native(self, x: Tensor, *, out: Tensor | None = None, k: int = 1) -> Tensor:
        return x * 2


def there(x, *, out=None, k=1):
    """A kernel whose result tells that it ran."""
    return x.detach() * 3


@pytest.fixture
def op():
    return Twice().attach(registry_on())


def first(result):
    return result.flatten()[0].item()


class TestRejects:
    def test_it_is_asked_for_each_call_with_the_calls_own_arguments(self, op):
        asked = []

        def rejects(x, *, out=None, k=1):
            asked.append((x.shape[0], out, k))
            return "odd" if x.shape[0] % 2 else None

        offer(op.registry, op.op, there, rejects=rejects)

        assert [3, 2, 3] == [first(op(torch.ones(n, dtype=torch.int32), k=n)) for n in (2, 1, 4)]
        assert [(2, None, 2), (1, None, 1), (4, None, 4)] == asked

    def test_one_that_raises_propagates_with_a_note(self, op):
        error = ValueError("no such layout")

        def rejects(x, **_):
            raise error

        offer(op.registry, op.op, there, rejects=rejects, name="k", distribution="opgraft-there", version="2")

        for call in (op, functools.partial(op.dispatcher.explain, (X, None, 1))):
            with pytest.raises(ValueError, match="no such layout") as caught:
                call(X) if call is op else call()
            assert error is caught.value
        assert ["raised by 'rejects' of kernel there/jit k (opgraft-there 2)"] == error.__notes__

    @pytest.mark.parametrize("answer", [True, False, 0, "", ["odd"], b"odd"])
    def test_one_that_returns_anything_but_a_reason_or_none_is_the_plugins_fault(self, op, answer):
        offer(op.registry, op.op, there, rejects=lambda x, **_: answer)

        with pytest.raises(PluginError) as caught:
            op(X)

        assert f"'rejects' of kernel there/jit must return a reason or None, got {answer!r}" == str(caught.value)

    def test_every_kernel_that_refused_is_told_when_nothing_is_left(self):
        class NoNative(Twice):
            op = "dispatch.no_native"
            native_supported = False

        op = NoNative().attach(registry_on())
        offer(op.registry, op.op, there, rejects=lambda x, **_: f"{len(x)} is odd" if len(x) % 2 else None, name="a")
        offer(op.registry, op.op, there, capabilities=CapabilityRequirement.NPU, name="b")

        assert 3 == first(op(X))
        with pytest.raises(NoKernelError) as caught:
            op(X[:1], k=7)
        assert (
            "no kernel can run 'dispatch.no_native' with x: int32 (1,), k=7 on cpu\n"
            "  there/jit         a  backend there  rejected: 1 is odd\n"
            "  there/jit         b  backend there  device is cpu, needs npu\n"
            "  op/torch_compile     the op itself  not declared in capabilities; runs only when named\n"
            "  native               the op itself  this op declares that it has no native\n"
            "Change the call as a reason asks, or install a backend that covers it "
            "(`opgraft explain dispatch.no_native`)."
        ) == str(caught.value)


class TestNotSupported:
    def test_it_passes_the_call_on(self, op):
        ran = []

        def later(x, **_):
            ran.append("later")
            raise NotSupported("only even")

        offer(op.registry, op.op, later, priority=60)
        offer(op.registry, op.op, there, name="there")

        assert [3, 3] == [first(op(X)), first(op(X))]
        assert ["later", "later"] == ran

    def test_of_every_kernel_it_is_an_error_with_every_reason(self):
        class Nothing(BaseFusedOp):
            def forward_native(self, x):
                raise NotSupported("never")

        with pytest.raises(NoKernelError) as caught:
            Nothing().attach(registry_on())(X)

        assert "  native              the op itself  rejected: not supported: never\n" in str(caught.value)

    def test_a_plain_not_implemented_error_does_not(self, op):
        def later(x, **_):
            raise NotImplementedError("half done")

        offer(op.registry, op.op, later)

        with pytest.raises(NotImplementedError) as caught:
            op(X)

        assert ("half done", NotImplementedError) == (str(caught.value), type(caught.value))


class TestWhatAChoiceDependsOn:
    def test_the_device_of_an_op_without_tensors_is_torchs_default(self):
        class Filled(BaseFusedOp):
            def forward_native(self, n: int) -> str:
                return "native"

            def forward_cuda(self, n: int) -> str:
                return "cuda"

        op = Filled().attach(registry_on("cuda"))
        before = op(3)
        with torch.device("meta"):
            within = op(3)

        assert ("cuda", "native", "cuda") == (before, within, op(3))

    def test_the_dtypes_of_tensors_in_a_list_count(self):
        class Sum(BaseFusedOp):
            op = "dispatch.sum"

            def forward_native(self, xs: list[Tensor], k: int = 1):
                return "native"

        op = Sum().attach(registry_on())
        offer(op.registry, op.op, lambda xs, k=1: "there", dtypes={"xs": ("int32",)})

        assert ["there", "native", "there", "there"] == [op(xs) for xs in ([X, X], [X, F], (X,), [])]
        with pytest.raises(ArgumentValueError, match="xs must be on cpu as xs is, got meta"):
            op([X, X.to("meta")])

    def test_a_keyword_that_a_kernel_leaves_out_counts_only_where_it_is_passed(self, op):
        offer(op.registry, op.op, lambda x: x * 3, leaves_out=frozenset({"out", "k"}))

        assert [3, 2, 3, 2] == [first(op(X)), first(op(X, k=2)), first(op(X, k=1)), first(op(X, out=X.clone()))]
        assert "does not take k, which this call passes" in str(op.dispatcher.explain((X, None, 2)))

    def test_a_parameter_counts_as_a_plain_tensor(self, op):
        offer(op.registry, op.op, there)

        assert 3 == first(op(nn.Parameter(F, requires_grad=False)))

    def test_another_registration_or_policy_is_another_choice(self, op):
        assert 2 == first(op(X))

        offer(op.registry, op.op, there)

        assert 3 == first(op(X))
        with op.registry.policy.use(deny="there"):
            assert 2 == first(op(X))
        assert 3 == first(op(X))


class TestGradients:
    @pytest.fixture
    def op(self):
        op = Twice().attach(registry_on())
        offer(op.registry, op.op, there)
        return op

    def test_an_input_that_requires_one_passes_over_kernels_that_record_none(self, op):
        trained = F.clone().requires_grad_()

        result = op(trained)

        assert (2, True) == (first(result), result.requires_grad)

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_where_none_is_recorded_the_kernel_runs(self, op, mode):
        trained = F.clone().requires_grad_()

        with mode():
            assert 3 == first(op(trained))
        assert 2 == first(op(trained))

    def test_a_differentiable_kernel_runs_and_its_gradient_flows(self, op):
        offer(op.registry, op.op, lambda x, **_: x * 5, differentiable=True, kernel_backend="aot")
        trained = F.clone().requires_grad_()

        op(trained).sum().backward()

        assert [5.0, 5.0] == trained.grad.tolist()

    def test_gradients_switched_on_within_no_grad_count(self, op):
        trained = F.clone().requires_grad_()

        with torch.no_grad(), torch.enable_grad():
            assert 2 == first(op(trained))

    def test_an_op_whose_own_weight_is_trained_asks_too(self):
        class Layer(BaseFusedOp):
            capabilities = {KernelBackend.TRITON: ANY}

            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(2, 2)

            def forward_native(self, x):
                return self.inner(x)

            def forward_triton(self, x):
                return "triton"

        layer = Layer().attach(registry_on())

        layer(F).sum().backward()

        assert layer.inner.bias.grad is not None
        assert "triton" == layer.requires_grad_(False)(F)
        layer.requires_grad_()
        with torch.no_grad():
            assert "triton" == layer(F)

    def test_an_inference_tensor_is_an_ordinary_one(self, op):
        with torch.inference_mode():
            x = F * 1

        assert 3 == first(op(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch's own forward mode
class TestOtherTensors:
    @pytest.fixture
    def op(self):
        op = Twice().attach(registry_on())
        offer(op.registry, op.op, lambda x, **_: pytest.fail("a kernel ran on a tensor that has no memory"))
        return op

    def test_meta_tensors_take_native(self, op):
        assert ("meta", (2,)) == (op(X.to("meta")).device.type, op(X.to("meta")).shape)

    def test_fake_tensors_see_native_of_an_op_that_torch_does_not_know(self, op):
        with FakeTensorMode() as mode:
            result = op(mode.from_tensor(F))

        assert isinstance(result, FakeTensor)

    def test_vmap_grad_and_jvp_see_native(self, op):
        assert [[2.0, 4.0], [2.0, 4.0]] == torch.vmap(op)(torch.stack([F, F])).tolist()
        assert [2.0, 2.0] == torch.func.grad(lambda x: op(x).sum())(F).tolist()
        assert [2.0, 2.0] == torch.func.jvp(op, (F,), (torch.ones(2),))[1].tolist()
        assert [[2.0, 0.0], [0.0, 2.0]] == torch.func.jacrev(op)(F).tolist()

    def test_forward_mode_sees_native_whatever_was_kept(self):
        registry = registry_on()
        Twice.publish(registry)
        offer(registry, Twice.op, there)
        function = registry.handle(Twice.op).function
        assert [3, 3] == [first(function(F)), first(function(F))]

        with forward_ad.dual_level():
            results = [call(forward_ad.make_dual(F, torch.ones(2))) for call in (function, function.op)]
            tangents = [forward_ad.unpack_dual(one).tangent.tolist() for one in results]

        assert [[2.0, 2.0], [2.0, 2.0]] == tangents
        assert 3 == first(function(F))

    def test_a_plain_tensor_captured_by_vmap_sees_native_too(self, op):
        assert [[3.0, 6.0]] == torch.vmap(lambda x: x + op(F))(F[None]).tolist()

    def test_make_fx_traces_native(self, op):
        graph = make_fx(lambda x: op(x))(F)  # noqa: PLW0108 - make_fx takes no keyword with a default

        assert ["mul"] == [node.target._opname for node in graph.graph.nodes if node.op == "call_function"]

    def test_fake_tensors_go_through_torchs_operator_of_a_registered_op(self):
        clamp = opgraft.ops.attention.clamp_position
        graph = make_fx(lambda x: clamp(x))(X)  # noqa: PLW0108 - as above

        assert [torch.ops.opgraft.attention_clamp_position.default] == [
            node.target for node in graph.graph.nodes if node.op == "call_function"
        ]
        with FakeTensorMode() as mode:
            results = clamp(mode.from_tensor(X)), clamp.op(mode.from_tensor(X))
        assert all(isinstance(one, FakeTensor) and one.dtype is torch.int64 for one in results)

    def test_a_choice_that_is_kept_is_not_used_while_a_dispatch_mode_is_at_work(self):
        clamp = opgraft.ops.attention.clamp_position
        clamp(X)
        clamp(X)
        graph = make_fx(lambda x: clamp(x))(X)  # noqa: PLW0108 - as above
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = clamp(X)

        assert torch.ops.opgraft.attention_clamp_position.default in {node.target for node in graph.graph.nodes}
        assert isinstance(fake, FakeTensor)
        assert [0, 1] == clamp(X).tolist()

    def test_a_subclass_goes_through_torchs_operator(self):
        class Noted(Tensor):
            seen = []

            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                cls.seen.append(func)
                return super().__torch_function__(func, types, args, kwargs or {})

        opgraft.ops.attention.clamp_position(X.as_subclass(Noted))

        assert torch.ops.opgraft.attention_clamp_position.default in Noted.seen


class TestScopes:
    @pytest.fixture
    def function(self):
        registry = registry_on()
        Twice.publish(registry)
        offer(registry, Twice.op, there, priority=-1)
        return registry.handle(Twice.op).function

    def test_a_generator_that_suspends_within_a_scope_takes_it_along(self, function):
        policy = function.op.registry.policy

        def results():
            with policy.use(force="there"):
                yield first(function(X))
                yield first(function(X))

        generator = results()

        assert (3, 3, 3) == (next(generator), first(function(X)), next(generator))
        generator.close()
        assert 2 == first(function(X))

    def test_a_context_that_was_copied_within_a_scope_keeps_it(self, function):
        with function.op.registry.policy.use(force="there"):
            within = contextvars.copy_context()

        outside = [first(function(X)) for _ in range(3)]

        assert ([2, 2, 2], 3, 2) == (outside, within.run(lambda: first(function(X))), first(function(X)))

    def test_a_thread_started_within_a_scope_is_outside_it(self, function):
        results = []

        with function.op.registry.policy.use(force="there"):
            thread = threading.Thread(target=lambda: results.append(first(function(X))))
            thread.start()
            thread.join()
            results.append(first(function(X)))

        assert [2, 3] == results

    def test_tasks_with_scopes_of_their_own_do_not_meet(self, function):
        policy = function.op.registry.policy

        async def results(word):
            found = set()
            for _ in range(5):
                with policy.use(force=word):
                    found.add(first(function(X)))
                    await asyncio.sleep(0)
                    found.add(first(function(X)))
                await asyncio.sleep(0)
            return found

        async def gathered():
            return await asyncio.gather(*(results(word) for word in ("there", "auto", "native", "there")))

        assert [{3}, {2}, {2}, {3}] == asyncio.run(gathered())

    def test_a_scope_restores_on_an_exception(self, function):
        with pytest.raises(ZeroDivisionError), function.op.registry.policy.use(force="there"):
            raise ZeroDivisionError

        assert 2 == first(function(X))

    def test_threads_with_different_policies_never_take_each_others_choice(self, function):
        wrong, interval = [], sys.getswitchinterval()

        def call(scope):
            for _ in range(60):
                if scope:
                    with function.op.registry.policy.use(force="there"):
                        wrong.extend(got for got in (first(function(X)) for _ in range(3)) if got != 3)
                else:
                    wrong.extend(got for got in (first(function(X)) for _ in range(3)) if got != 2)

        threads = [threading.Thread(target=call, args=(index % 2,)) for index in range(4)]
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)

        assert [] == wrong


class TestExplain:
    def test_it_runs_nothing_and_asks_rejects(self, op):
        def kernel(*args, **kwargs):
            pytest.fail("ran")

        offer(op.registry, op.op, kernel, rejects=lambda x, **_: "odd" if len(x) % 2 else None)

        assert ("there/jit", "native") == tuple(op.dispatcher.explain((x, None, 1)).winner.selector for x in (X, X[:1]))

    def test_it_describes_the_call(self, op):
        selection = op.dispatcher.explain((X, None, 123))

        assert "x: int32 (2,), k=123 on cpu" == selection.call
        assert (
            "x: int32 (2,), k='aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa on cpu"
            == op.dispatcher.explain((X, None, "a" * 100)).call
        )

    def test_it_follows_a_pin_and_a_selector(self, op):
        offer(op.registry, op.op, there)
        op.pin("native")

        assert ["native", "there/jit", "native"] == [
            op.dispatcher.explain((X, None, 1), word).winner.selector for word in (None, "there", "auto")
        ]

    def test_it_checks_the_arguments_and_the_words(self, op):
        with pytest.raises(ArgumentTypeError, match=r"^dispatch.twice: x must be a tensor, got int 3$"):
            op.dispatcher.explain((3, None, 1))
        with pytest.raises(UnknownSelectorError, match=r"^unknown selector 'thier'"):
            op.dispatcher.explain((X, None, 1), "thier")

    def test_for_hardware_that_is_not_here_dtype_and_arch_are_what_is_said(self, op):
        offer(op.registry, op.op, there, capabilities=CapabilityRequirement.cuda(min_sm=(8, 0)), dtypes=("int32",))
        cases = [("cuda", "9.0", "int32"), ("cuda", "9.0", "int64"), ("cuda", "9.0", ""), ("cuda", "", "int32")]

        selections = [op.dispatcher.select_on(*case) for case in cases]

        assert ["there/jit", "native", "there/jit", "native"] == [one.winner.selector for one in selections]
        assert "int32 tensors on cuda 9.0" == selections[0].call


class TestOrderWords:
    def test_a_word_in_an_order_that_nobody_knows_is_told_once(self, op, caplog):
        registry = registry_on(OPGRAFT_ORDER="thier")
        op.attach(registry)

        with caplog.at_level(logging.WARNING, logger="opgraft"):
            op(X)
            op(F)

        known = ", ".join(sorted({*KernelBackend.names(), "native", "op"}))
        assert [f"unknown selector 'thier'; Known: {known}, in the order set by OPGRAFT_ORDER"] == caplog.messages


class Validated(BaseFusedOp):
    op = "dispatch.validated"
    format_signature = FormatSignature(supported_dtypes=("int32",), output_dtype="int32", shapes={"x": ("n", "n")})

    def forward_native(self, x: Tensor, page: int = 1) -> Tensor:
        return x

    def validate(self, x, page=1):
        if page < 1:
            raise ArgumentValueError(f"{self.op}: page must be at least 1, got {page}")


@pytest.mark.parametrize("call", ["function", "module", "named", "within"])
def test_misuse_is_refused_before_any_launch_however_the_call_comes(call):
    registry, ran = registry_on(), []
    Validated.publish(registry)
    function = registry.handle(Validated.op).function
    offer(registry, Validated.op, lambda x, page=1: ran.append(1) or x)
    square = torch.zeros(2, 2, dtype=torch.int32)
    function(square)
    function(square)
    ran.clear()
    made = {
        "function": function,
        "module": function.op,
        "named": functools.partial(function, backend="there"),
        "within": function,
    }[call]

    with registry.tracing(registry.process_trace) if call == "within" else registry.policy.use():
        for args, message in [
            ((square, 0), "dispatch.validated: page must be at least 1, got 0"),
            ((square[:1],), "dispatch.validated: x must be of shape [n, n] with n = 1 as x has, got (1, 2)"),
            ((square[0],), "dispatch.validated: x must be of shape [n, n], got (2,)"),
        ]:
            with pytest.raises(ArgumentValueError, match=f"^{re.escape(message)}$"):
                made(*args)
        with pytest.raises(ArgumentTypeError, match=r"^dispatch.validated: x must be int32, got float32$"):
            made(square.float())
    assert [] == ran


def test_dtypes_stated_for_all_parameters_do_not_speak_of_caller_buffers():
    registry = registry_on()
    ClampPosition.publish(registry)
    offer(registry, ClampPosition.op, lambda seq_lens, *, out=None: out.fill_(7), dtypes=("int32",))
    function = registry.handle(ClampPosition.op).function
    out = torch.zeros(2, dtype=torch.int64)

    assert out is function(torch.tensor([1, 2], dtype=torch.int32), out=out)
    assert [7, 7] == out.tolist()
    assert [0, 1] == function(torch.tensor([1, 2]), out=out).tolist()
