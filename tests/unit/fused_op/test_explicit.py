"""Statements 52 to 60: ``backend=`` on the call is that kernel or an error."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from simulated import offer, registry_on

from opgraft import (
    ANY,
    BaseFusedOp,
    CapabilityRequirement,
    KernelBackend,
    NoKernelError,
    NotSupported,
    UnknownSelectorError,
)

X = torch.tensor([1], dtype=torch.int32)


class Scale(BaseFusedOp):
    op = "explicit.scale"
    capabilities = {KernelBackend.JIT: ANY, KernelBackend.AOT: CapabilityRequirement.CUDA}

    def forward_native(self, x):
        return "native"

    def forward_jit(self, x):
        return "jit"

    def forward_triton(self, x):
        return "triton"

    def forward_aot(self, x):
        return "aot"

    def forward_cuda(self, x):
        return "cuda"


@pytest.fixture
def op():
    return Scale().attach(registry_on())


def test_052_a_named_kernel_runs_though_it_is_not_declared_and_ranks_below(op):
    assert "jit" == op(X)
    assert "triton" == op(X, backend=KernelBackend.TRITON)


def test_052_a_named_kernel_overrides_policy_and_denial(op):
    with op.registry.policy.use(force="native", deny="triton", order="native"):
        assert "triton" == op(X, backend="triton")


def test_052_a_named_kernel_with_a_negative_priority_runs(op):
    offer(op.registry, op.op, lambda x: "there", priority=-1)

    assert "jit" == op(X)
    assert "there" == op(X, backend="there")


def test_052_a_declared_capability_that_the_device_fails_is_an_error_with_every_reason(op):
    with pytest.raises(NoKernelError) as caught:
        op(X, backend="aot")

    assert (
        "no kernel can run 'explicit.scale' by selector 'aot' with x: int32 (1,) on cpu\n"
        "  op/aot              the op itself  device is cpu, needs cuda\n"
        "  op/jit              the op itself  not named by 'aot'\n"
        "  op/triton           the op itself  not named by 'aot'\n"
        "  op/torch_compile    the op itself  not named by 'aot'\n"
        "  op/cuda             the op itself  device is cpu, this method is for cuda\n"
        "  native              the op itself  not named by 'aot'\n"
        "Change the call as a reason asks, or install a backend that covers it (`opgraft explain explicit.scale`)."
    ) == str(caught.value)
    assert isinstance(caught.value, NotImplementedError)


def test_053_a_kernel_backend_that_the_op_does_not_have_is_an_error_naming_both(op):
    with pytest.raises(NoKernelError, match=r"^no kernel can run 'explicit.scale' by selector 'cute_dsl' with "):
        op(X, backend="cute_dsl")


def test_053_a_word_that_nobody_knows_is_an_error_with_the_nearest(op):
    with pytest.raises(UnknownSelectorError) as caught:
        op(X, backend="tritn")

    assert (
        "unknown selector 'tritn'; did you mean 'triton'? "
        f"Known: {', '.join(sorted([*KernelBackend.names(), 'native', 'op']))}"
    ) == str(caught.value)
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize("word", ["there/tritn", "nobody/jit", "op/vulkan", "/jit", "op/", "", 3, True])
def test_053_half_a_selector_or_none_at_all_is_an_error_too(op, word):
    offer(op.registry, op.op, lambda x: "there")

    with pytest.raises(UnknownSelectorError, match=f"^unknown selector {re.escape(repr(word))}"):
        op(X, backend=word)


@pytest.mark.parametrize("word", ["torch", "native", KernelBackend.TORCH])
def test_054_torch_always_runs_native(op, word):
    assert "native" == op(X, backend=word)


class Squared(BaseFusedOp):
    def forward_native(self, x):
        return x * x


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch's own compiler
def test_055_torch_compile_compiles_native_once_an_instance():
    op = Squared().attach(registry_on())

    with torch.compiler.set_stance("force_eager"):
        results = [op(X + one, backend="torch_compile").item() for one in range(3)]
    compiled = op._compiled_native

    assert [1, 4, 9] == results
    with torch.compiler.set_stance("force_eager"):
        op(X, backend="op/torch_compile")
    assert compiled is op._compiled_native
    assert not hasattr(Squared(), "_compiled_native")


@pytest.mark.parametrize("word", [None, "auto"])
def test_056_none_and_auto_mean_nobody_asked(op, word):
    assert "jit" == op(X, backend=word)
    assert "op/jit" == op.dispatcher.explain((X,), word).winner.selector


def test_057_explicit_beats_forced(op):
    with op.registry.policy.use(force="jit"):
        assert ("triton", "jit") == (op(X, backend="triton"), op(X))


def test_057_explicit_beats_out_of_tree():
    op = Scale().attach(registry_on("acme"))
    op.registry.register_oot(Scale, lambda op, x: "registered", "acme")

    assert ("triton", "registered") == (op(X, backend="triton"), op(X))


def test_057_explicit_beats_compile_mode_and_pin(op):
    op.enter_torch_compile(1)

    assert ("triton", "native") == (op(X, backend="triton"), op(X))

    op.leave_torch_compile()
    op.pin("aot")

    assert "triton" == op(X, backend="triton")


def test_058_explicit_does_not_change_the_choice_that_is_kept():
    registry = registry_on()
    Scale.publish(registry)
    function = registry.handle(Scale.op).function

    assert ["jit", "triton", "jit", "native", "jit"] == [
        function(X, backend=word) for word in (None, "triton", None, "native", None)
    ]


@pytest.mark.parametrize("word", ["triton", "op/triton", KernelBackend.TRITON])
def test_059_strings_and_kernel_backends_are_accepted(op, word):
    assert "triton" == op(X, backend=word)


def test_059_a_selector_names_a_set_and_the_best_of_it_runs(op):
    offer(op.registry, op.op, lambda x: "slow", name="slow", priority=1)
    offer(op.registry, op.op, lambda x: "fast", name="fast", priority=2)
    offer(op.registry, op.op, lambda x: "aot", kernel_backend="aot", priority=1)

    assert ["fast", "fast", "aot"] == [op(X, backend=word) for word in ("there", "there/jit", "there/aot")]
    assert "jit" == op(X, backend="op")


def test_059_a_platform_method_is_named_like_a_kernel():
    op = Scale().attach(registry_on("hip"))

    assert "cuda" == op(X, backend="op/cuda")


def test_060_the_keyword_is_not_passed_on(op):
    def kernel(*args, **kwargs):
        return args, kwargs

    offer(op.registry, op.op, kernel)

    assert ((X,), {}) == op(X, backend="there")


def test_a_named_kernel_that_does_not_support_the_call_is_an_error(op):
    def later(x):
        raise NotSupported("odd length")

    offer(op.registry, op.op, later)

    with pytest.raises(NoKernelError) as caught:
        op(X, backend="there")

    assert "  there/jit           backend there  rejected: not supported: odd length\n" in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_named_kernel_that_rejects_the_call_is_an_error(op):
    offer(op.registry, op.op, lambda x: "there", rejects=lambda x: "too short")

    with pytest.raises(NoKernelError, match=r"there/jit .* rejected: too short\n"):
        op(X, backend="there")


def test_naming_nothing_pulls_in_no_compiler(op):
    before = set(sys.modules)
    op(X)

    assert not {name for name in set(sys.modules) - before if name.startswith("torch._dynamo")}
