"""Statements 61 to 70: a selector forced on every op, as far as the op has it."""

from __future__ import annotations

import logging

import pytest
import torch
from simulated import offer, registry_on

from opgraft import ANY, BaseFusedOp, KernelBackend, NoKernelError, NotSupported, UnknownSelectorError
from opgraft.kernel_registry import KernelRegistry
from opgraft.policy import PolicyStore

X = torch.tensor([1], dtype=torch.int32)


class Scale(BaseFusedOp):
    op = "forced.scale"
    capabilities = {KernelBackend.JIT: ANY}

    def forward_native(self, x):
        return "native"

    def forward_jit(self, x):
        return "jit"

    def forward_triton(self, x):
        return "triton"

    def forward_cuda(self, x):
        return "cuda"


class Native(BaseFusedOp):
    op = "forced.native"

    def forward_native(self, x):
        return "native"


class NoNative(BaseFusedOp):
    op = "forced.no_native"
    native_supported = False

    def forward_native(self, x):
        raise AssertionError("the native that is absent on purpose ran")

    def forward_cuda(self, x):
        return "cuda"


@pytest.mark.parametrize("word", ["torch", "native"])
def test_061_forcing_native_makes_every_op_run_it_and_none_takes_it_back(word):
    registry = registry_on("cuda")
    ops = [op_class().attach(registry) for op_class in (Scale, Native)]

    registry.policy.set(force=word)
    forced = [op(X) for op in ops]
    registry.policy.set(force=None)

    assert (["native", "native"], ["jit", "native"]) == (forced, [op(X) for op in ops])


def test_062_forced_beats_kernels_platform_methods_and_order():
    registry = registry_on("cuda", OPGRAFT_FORCE="triton", OPGRAFT_ORDER="there,native")
    op = Scale().attach(registry)
    offer(registry, op.op, lambda x: "there", priority=1000)

    assert "triton" == op(X)
    assert "force" == op.dispatcher.explain((X,)).decided_by


def test_062_forced_beats_out_of_tree():
    registry = registry_on("acme", OPGRAFT_FORCE="native")
    registry.register_oot(Scale, lambda op, x: "registered", "acme")

    assert "native" == Scale().attach(registry)(X)


def test_063_a_native_that_is_absent_on_purpose_falls_through():
    op = NoNative().attach(registry_on("cuda", OPGRAFT_FORCE="native"))

    assert "cuda" == op(X)


def test_063_an_op_without_the_forced_kernel_falls_through():
    assert "native" == Native().attach(registry_on("cuda", OPGRAFT_FORCE="triton"))(X)


def test_063_a_kernel_that_the_device_does_not_fit_or_that_refuses_the_call_falls_through():
    registry = registry_on(OPGRAFT_FORCE="there")
    op = Scale().attach(registry)
    offer(registry, op.op, lambda x: "there", rejects=lambda x: "odd" if len(x) % 2 else None)

    assert ["jit", "there", "jit"] == [op(torch.zeros(size)) for size in (1, 2, 3)]

    selection = op.dispatcher.explain((torch.zeros(1),))
    assert ("there", "priority") == (selection.unforced, selection.decided_by)


def test_063_a_kernel_that_does_not_support_the_call_falls_through():
    def later(x):
        raise NotSupported("later")

    registry = registry_on(OPGRAFT_FORCE="there")
    offer(registry, Scale.op, later)

    assert "jit" == Scale().attach(registry)(X)


def test_064_one_warning_an_op_and_selector_in_a_process(caplog):
    registry = registry_on(OPGRAFT_FORCE="triton")
    Scale().attach(registry)
    first, second = Native().attach(registry), Native().attach(registry)

    with caplog.at_level(logging.WARNING, logger="opgraft"):
        for op in (first, second, first):
            op(X)
            op(X.to(torch.int64))

    assert [
        "forced.native has no kernel for the forced selector 'triton' (OPGRAFT_FORCE); native runs instead"
    ] == caplog.messages


def test_064_a_refusal_of_one_call_warns_once_too(caplog):
    registry = registry_on()
    op = Scale().attach(registry)
    offer(registry, op.op, lambda x: "there", rejects=lambda x: "never")

    with registry.policy.use(force="there"):
        op(X)
        op(X)

    assert [
        "forced.scale has no kernel for the forced selector 'there' (opgraft.use); op/jit runs instead"
    ] == caplog.messages


def test_064_strict_makes_it_an_error_before_anything_runs():
    registry = registry_on(OPGRAFT_FORCE="there", OPGRAFT_STRICT="1")
    op, ran = Native().attach(registry), []
    offer(registry, op.op, ran.append, rejects=lambda x: "never")

    with pytest.raises(NoKernelError) as caught:
        op(X)

    assert (
        "strict: forced.native has no kernel for the forced selector 'there' (OPGRAFT_FORCE)\n"
        "  there/jit           backend there  rejected: never\n"
        "  op/torch_compile    the op itself  not declared in capabilities; runs only when named\n"
        "  native              the op itself  wins by native"
    ) == str(caught.value)
    assert [] == ran


def test_065_not_implemented_raised_inside_the_forced_kernel_is_not_swallowed():
    class Broken(BaseFusedOp):
        def forward_native(self, x):
            return "native"

        def forward_triton(self, x):
            raise NotImplementedError("half of it")

    op = Broken().attach(registry_on(OPGRAFT_FORCE="triton"))

    with pytest.raises(NotImplementedError) as caught:
        op(X)

    assert "half of it" == str(caught.value)
    assert ["raised by kernel op/triton of op 'Broken'"] == caught.value.__notes__


def test_066_the_environment_is_read_at_first_use_and_at_refresh():
    environ = {}
    registry = KernelRegistry(policy=PolicyStore(environ=environ, folder="/nonexistent"), path=[])
    op = Scale().attach(registry)
    environ["OPGRAFT_FORCE"] = "native"

    assert "native" == op(X)

    environ["OPGRAFT_FORCE"] = "triton"

    assert "native" == op(X)

    registry.refresh()

    assert "triton" == op(X)


def test_067_a_word_that_nobody_knows_is_an_error_at_first_use():
    op = Scale().attach(registry_on(OPGRAFT_FORCE="tritn"))

    with pytest.raises(UnknownSelectorError, match=r"^unknown selector 'tritn'; did you mean 'triton'?"):
        op(X)


def test_067_a_selector_that_nothing_in_the_process_offers_is_an_error():
    op = Scale().attach(registry_on(OPGRAFT_FORCE="cute_dsl"))

    with pytest.raises(NoKernelError) as caught:
        op(X)

    assert "forced selector 'cute_dsl': no kernel in this process is offered by it" == str(caught.value)


def test_068_the_policy_tells_what_is_forced():
    registry = registry_on()

    assert registry.policy.current().force is None

    registry.policy.set(force="jit")

    assert "jit" == registry.policy.current().force


def test_069_070_forcing_takes_effect_on_used_ops_and_does_not_change_what_they_keep():
    registry = registry_on()
    Scale.publish(registry)
    function = registry.handle(Scale.op).function

    before = [function(X), function(X)]
    with registry.policy.use(force="triton"):
        within = [function(X), function(X)]
        with registry.policy.use(force="auto"):
            lifted = function(X)
    after = [function(X), function(X)]

    assert (["jit", "jit"], ["triton", "triton"], "jit", ["jit", "jit"]) == (before, within, lifted, after)


def test_what_is_forced_may_be_forbidden_too():
    registry = registry_on(OPGRAFT_FORCE="jit", OPGRAFT_DENY="jit")

    assert "native" == Scale().attach(registry)(X)
