"""Statements 1 to 13: an op is a module, written as one class."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch
from simulated import BrokenDetector, registry_on
from torch import nn

from opgraft import ANY, BaseFusedOp, FormatSignature, KernelBackend, RegistrationError
from opgraft.kernel_registry import KernelRegistry
from opgraft.policy import PolicyStore
from opgraft.spec import DEFAULT_PRIORITY

TWO = torch.tensor([2.0])


class Doubled(BaseFusedOp):
    def forward_native(self, x):
        return x * 2


class Switched(Doubled):
    """Runs its kernel where there is one; module level, so that it pickles."""

    priority = (KernelBackend.TRITON,)
    capabilities = {KernelBackend.TRITON: ANY}

    def __init__(self):
        super().__init__()
        self.factor = 3

    def forward_triton(self, x):
        return x * self.factor


def test_001_an_op_is_a_torch_module():
    assert isinstance(Doubled(), nn.Module)


def test_002_an_op_appears_in_its_parents_named_modules():
    parent = nn.Module()
    parent.scale = Doubled()

    assert {"": parent, "scale": parent.scale} == dict(parent.named_modules())


def test_003_a_forward_hook_sees_the_output_once_a_call():
    op, seen = Doubled().attach(registry_on()), []
    op.register_forward_hook(lambda module, args, output: seen.append((module, args, output.item())))

    op(TWO)

    assert [(op, (TWO,), 4.0)] == seen


def test_003_a_pre_hook_may_change_the_input():
    op = Doubled().attach(registry_on())
    op.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    assert 6.0 == op(TWO).item()


def test_004_an_op_without_a_native_cannot_be_instantiated():
    class Empty(BaseFusedOp):
        def forward_triton(self, x):
            return x

    with pytest.raises(TypeError) as caught:
        Empty()

    assert "Empty cannot be instantiated: it has no forward_native" == str(caught.value)


@pytest.mark.parametrize("platform", ["cuda", "hip", "npu", "xpu", "musa", "cpu", "acme", "meta"])
def test_005_an_op_with_a_native_alone_runs_it_on_every_platform(platform):
    assert 4.0 == Doubled().attach(registry_on(platform))(TWO).item()


def test_006_construction_detects_imports_and_compiles_nothing():
    registry = KernelRegistry(detector=BrokenDetector(), policy=PolicyStore(environ={"OPGRAFT_FORCE": "?"}))
    before = set(sys.modules)

    op = Switched().attach(registry)

    assert before == set(sys.modules)
    assert "_dispatcher" not in vars(op)


def test_007_importing_the_package_and_every_op_imports_no_kernel_library():
    code = (
        "import sys, opgraft, opgraft.ops, opgraft.fused_op\n"
        "kernels = ('triton', 'pyopencl', 'opgraft_', 'torch._dynamo', 'torch._inductor')\n"
        "print([name for name in sys.modules if name.startswith(kernels)])"
    )
    # Without torch's own entry points, by which the example's pretend device makes itself known to torch.
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment, text=True)

    assert "[]\n" == done.stdout


def test_008_an_op_contributes_no_parameters_and_no_buffers():
    op = Doubled()
    op.attach(registry_on())(TWO)

    assert {} == op.state_dict()
    assert [] == [*op.parameters(), *op.buffers()]


def test_009_id_priority_and_capabilities_are_class_attributes_with_defaults():
    assert ("", DEFAULT_PRIORITY, {}) == (BaseFusedOp.op, BaseFusedOp.priority, BaseFusedOp.capabilities)
    assert ("", DEFAULT_PRIORITY, {}) == (Doubled.op, Doubled.priority, Doubled.capabilities)


def test_010_overriding_forward_is_refused_where_it_is_declared():
    with pytest.raises(RegistrationError) as caught:

        class Own(Doubled):
            def forward(self, x):
                return x

    assert (
        "Own overrides forward, which chooses the kernel; define forward_native and forward_<kernel backend> instead"
    ) == str(caught.value)


def test_010_a_base_that_brings_a_forward_of_its_own_is_refused_too():
    with pytest.raises(RegistrationError, match=r"^Layer overrides forward, which chooses the kernel; "):

        class Layer(nn.Linear, BaseFusedOp):
            def forward_native(self, x):
                return x


def test_011_an_op_without_an_id_goes_by_its_class_name():
    op = Doubled().attach(registry_on())

    with op.registry.tracing(op.registry.process_trace) as trace:
        op(TWO)

    assert "Doubled" == op.label
    assert ["Doubled"] == [record.op for record in trace]
    with pytest.raises(TypeError, match=r"^Doubled\(\) missing 1 required positional argument: 'x'$"):
        op()


def test_012_another_base_before_the_op_keeps_its_order_and_both_initialisers_run():
    class Other:
        def __init__(self, *args, **kwargs):
            self.other = True
            super().__init__(*args, **kwargs)

    class Both(Other, Doubled):
        pass

    class Behind(Doubled, Other):
        pass

    both = Both()

    assert [Both, Other, Doubled, BaseFusedOp, nn.Module, object] == list(Both.__mro__)
    assert both.other
    assert Behind().other
    assert 4.0 == both.attach(registry_on())(TWO).item()


def test_013_a_copy_of_a_used_op_dispatches_to_itself():
    op = Switched().attach(registry_on())
    op(TWO)

    copied = copy.deepcopy(op)
    copied.factor = 10

    assert 20.0 == copied(TWO).item()
    assert 6.0 == op(TWO).item()
    assert op.registry is copied.registry
    assert copied.dispatcher is not op.dispatcher


def test_013_a_pickled_op_chooses_for_itself():
    op = Switched()
    op(TWO)

    copied = pickle.loads(pickle.dumps(op))
    copied.factor = 10

    assert (20.0, 6.0) == (copied(TWO).item(), op(TWO).item())


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))])
def test_013_a_copy_leaves_compile_mode_and_compiled_code_behind(duplicate):
    op = Switched()
    op(TWO, backend="native")
    op.enter_torch_compile(8)

    copied = duplicate(op)

    assert not copied.is_torch_compile
    assert 6.0 == copied(TWO).item()
    assert op.is_torch_compile
    assert 4.0 == op(TWO).item()


def test_013_a_copy_keeps_pin_and_hooks():
    op, seen = Switched().attach(registry_on()), []
    op.pin("native")
    op.register_forward_hook(lambda *_: seen.append("hook"))

    copied = copy.deepcopy(op)

    assert 4.0 == copied(TWO).item()
    assert ["hook"] == seen


class WrongDeclarations:
    """Each wrong declaration and what is said of it."""

    signature = FormatSignature(supported_dtypes=("int32",), output_dtype="int32")
    native = staticmethod(lambda self, x: x)
    cases = {
        "kernel backend in priority": (
            {"priority": ("tritn",)},
            "unknown kernel backend 'tritn'; did you mean 'triton'? Known: {known}",
        ),
        "kernel backend in differentiable": (
            {"differentiable": ("tritn",)},
            "unknown kernel backend 'tritn'; did you mean 'triton'? Known: {known}",
        ),
        "kernel backend in capabilities": (
            {"capabilities": {"tritn": ANY}},
            "unknown kernel backend 'tritn'; did you mean 'triton'? Known: {known}",
        ),
        "empty capability set": (
            {"capabilities": {"triton": set()}},
            "Wrong, triton: the capability set is empty; write ANY for any device",
        ),
        "capability that is none": (
            {"capabilities": {"triton": "cuda"}},
            "Wrong, triton: capabilities must be CapabilityRequirement or ANY, got 'c'",
        ),
        "id without a group": (
            {"op": "clamp"},
            "an op id is 'group.name' in lower case, without underscore in the group, got 'clamp'",
        ),
        "id that is a keyword": (
            {"op": "attention.pass"},
            "an op id is 'group.name' in lower case, without underscore in the group, got 'attention.pass'",
        ),
        "format signature of another type": (
            {"format_signature": "int32"},
            "Wrong: format_signature must be a FormatSignature, got 'int32'",
        ),
        "format of a parameter that is not there": (
            {"format_signature": FormatSignature(supported_dtypes={"y": ("int32",)}, output_dtype="like:z")},
            "Wrong: it names ['y', 'z'], its parameters are ['x']",
        ),
        "buffer that is not there": (
            {"writes": {"out": 0, "indices": 1}},
            "Wrong: it names ['indices'], its parameters are ['x']",
        ),
        "buffer of an output that is not there": (
            {"writes": {"out": 1}, "format_signature": FormatSignature(supported_dtypes={}, output_dtype="int64")},
            "Wrong: writes['out'] must be the index of an output below 1, got 1",
        ),
        "buffer of no index": (
            {"writes": {"out": True}},
            "Wrong: writes['out'] must be the index of an output, got True",
        ),
        "capabilities of no kernel backend": (
            {"capabilities": {ANY}},
            f"Wrong: capabilities must be a mapping from kernel backends to requirements, got { {ANY}!r}",
        ),
        "mutated parameter that is not there": ({"mutates": ("y",)}, "Wrong: it names ['y'], its parameters are ['x']"),
        "parameter called backend": (
            {"forward_native": lambda self, x, backend: x},
            "Wrong: 'backend' is the keyword by which a caller names kernels, its parameters are ['backend', 'x']",
        ),
    }


@pytest.mark.parametrize("name", WrongDeclarations.cases)
def test_a_wrong_declaration_fails_where_it_is_written(name):
    body, message = WrongDeclarations.cases[name]

    with pytest.raises(RegistrationError) as caught:
        type("Wrong", (BaseFusedOp,), {"forward_native": lambda self, x: x} | body)

    assert message.replace("{known}", ", ".join(sorted(KernelBackend.names()))) == str(caught.value)


def test_a_class_that_is_refused_harms_no_other():
    with pytest.raises(RegistrationError) as refused:
        type("Refused", (BaseFusedOp,), {"forward_native": lambda self, x: x, "capabilities": {ANY}})
    assert [one for one in BaseFusedOp.__subclasses__() if one.__name__ == "Refused"]  # alive in the error's frames
    assert BaseFusedOp.kernels_of_all_classes()
    del refused
