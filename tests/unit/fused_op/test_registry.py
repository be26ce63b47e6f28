"""Statements 106 to 114: ops and kernels as records, and where they are found."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from simulated import BrokenDetector, offer, registry_on

import opgraft
from opgraft import (
    ANY,
    BaseFusedOp,
    CapabilityRequirement,
    KernelBackend,
    KernelSpec,
    RegistrationError,
    UnknownOpError,
    register_fused_op,
)
from opgraft.kernel_registry import KernelRegistry

X = torch.tensor([1])


class Scale(BaseFusedOp):
    op = "registry.scale"
    capabilities = {KernelBackend.TRITON: CapabilityRequirement.CUDA}

    def forward_native(self, x):
        return "native"

    def forward_triton(self, x):
        return "triton"

    def forward_jit(self, x):
        return "jit"

    def forward_cuda(self, x):
        return "cuda"


def test_106_registering_an_op_gives_a_spec_for_each_method_and_returns_the_op():
    registry = registry_on()
    op = Scale().attach(registry)

    assert op is register_fused_op(op, "layers.norm", "scale")

    told = {
        spec.selector: (spec.target, spec.capabilities, spec.declared, spec.priority) for spec in registry.get(op.op)
    }
    any_device, cuda = frozenset({ANY}), frozenset({CapabilityRequirement.CUDA})
    assert {
        "op/jit": ("layers.norm:scale.forward_jit", any_device, False, 50),
        "op/triton": ("layers.norm:scale.forward_triton", cuda, True, 50),
        "op/torch_compile": ("layers.norm:scale.forward_native", any_device, False, 50),
        "native": ("layers.norm:scale.forward_native", any_device, True, 50),
        "op/cuda": ("layers.norm:scale.forward_cuda", any_device, True, 50),
    } == told


def test_107_registering_the_same_again_changes_nothing():
    registry = registry_on()
    op = register_fused_op(Scale().attach(registry), "layers", "scale")
    spec = offer(registry, op.op, "there.kernels:scale")
    before, generation = registry.get(op.op), registry.generation

    assert spec is registry.register(spec)
    assert spec == offer(registry, op.op, "there.kernels:scale")
    assert (before, generation) == (registry.get(op.op), registry.generation)

    register_fused_op(op, "layers", "scale")

    assert before == registry.get(op.op)


def test_108_another_target_for_the_same_kernel_is_a_conflict_and_changes_nothing():
    registry = registry_on()
    offer(registry, Scale.op, "there.kernels:scale")
    before = registry.get(Scale.op)

    with pytest.raises(RegistrationError) as caught:
        offer(registry, Scale.op, "elsewhere:scale")

    assert (
        "Conflicting kernel registration for op 'registry.scale', there/jit: 'elsewhere:scale' against "
        "'there.kernels:scale', which stays"
    ) == str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert before == registry.get(Scale.op)


def test_108_another_op_of_the_same_id_is_a_conflict_and_changes_nothing():
    registry = registry_on()
    first = register_fused_op(Scale().attach(registry), "layers", "scale")
    before = registry.get(Scale.op)

    with pytest.raises(RegistrationError) as caught:
        register_fused_op(Scale().attach(registry), "other_layers", "scale")

    assert (
        "Conflicting kernel registration for op 'registry.scale', op/jit: 'other_layers:scale.forward_jit' against "
        "'layers:scale.forward_jit', which stays"
    ) == str(caught.value)
    assert (before, first) == (registry.get(Scale.op), registry.handle(Scale.op).op)


def test_109_look_ups_give_copies_and_say_what_is_unknown():
    registry = registry_on()
    register_fused_op(Scale().attach(registry), "layers", "scale")

    assert ([], False) == (registry.get("registry.nothing"), registry.has("registry.nothing"))
    assert registry.has(Scale.op)
    assert [Scale.op] == registry.ops()

    registry.get(Scale.op).clear()
    registry.ops().clear()

    assert 5 == len(registry.get(Scale.op))
    assert "op/triton" == registry.get_backend(Scale.op, KernelBackend.TRITON).selector
    assert "native" == registry.get_backend(Scale.op, "torch").selector


def test_109_ops_are_sorted():
    registry = registry_on()
    for name in ("registry.b", "registry.c", "another.z", "registry.a"):
        type("Named", (Scale,), {"op": name}).publish(registry)

    assert ["another.z", "registry.a", "registry.b", "registry.c"] == registry.ops()


@pytest.mark.parametrize(
    ("op_id", "word", "message"),
    [
        (
            "registry.scale",
            "tritn",
            "op 'registry.scale' has no kernel of kernel backend 'tritn'; did you mean 'triton'? Known: jit, torch, torch_compile, triton",
        ),
        ("registry.no", "jit", "op 'registry.no' has no kernel of kernel backend 'jit'; Known: none"),
    ],
)
def test_109_a_kernel_that_is_not_there_is_a_look_up_error(op_id, word, message):
    registry = registry_on()
    register_fused_op(Scale().attach(registry), "layers", "scale")

    with pytest.raises(UnknownOpError, match=f"^{re.escape(message)}$"):
        registry.get_backend(op_id, word)


def test_109_an_op_that_is_not_there_is_a_look_up_error_with_the_nearest():
    registry = registry_on()
    Scale.publish(registry)

    with pytest.raises(UnknownOpError) as caught:
        registry.handle("registry.scales")

    assert ("unknown op 'registry.scales'; did you mean 'registry.scale'? Known: registry.scale") == str(caught.value)
    assert isinstance(caught.value, LookupError)


def test_110_a_target_is_imported_when_it_is_loaded_not_when_it_is_registered(tmp_path, monkeypatch):
    (tmp_path / "lazy_kernels.py").write_text("class Group:\n    @staticmethod\n    def scale(x): return 'lazy'\n")
    monkeypatch.syspath_prepend(tmp_path)
    op = Scale().attach(registry_on())
    spec = offer(op.registry, op.op, "lazy_kernels:Group.scale")

    assert "lazy_kernels" not in sys.modules
    assert "lazy" == op(X)
    assert sys.modules["lazy_kernels"].Group.scale is spec.load()


def test_110_a_missing_module_or_attribute_is_an_error_of_the_call_not_of_the_registration():
    op = Scale().attach(registry_on())
    missing = offer(op.registry, op.op, "no_such_module:scale")

    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'no_such_module'$"):
        missing.load()
    with pytest.raises(ModuleNotFoundError) as caught:
        op(X)
    assert ["raised by kernel there/jit of op 'registry.scale'"] == caught.value.__notes__
    with pytest.raises(AttributeError):
        KernelSpec(op="a.b", backend="there", kernel_backend="jit", target="math:no_such").load()


@pytest.mark.parametrize("target", ["there.kernels.scale", "there kernels:scale", ":scale", "there:", ""])
def test_110_a_target_without_a_colon_is_refused(target):
    with pytest.raises(RegistrationError) as caught:
        KernelSpec(op="a.b", backend="there", kernel_backend="jit", target=target)

    assert f"kernel there/jit of 'a.b': a target is 'module:attr', got {target!r}" == str(caught.value)


def test_111_selection_goes_by_the_ladder_and_is_told_for_hardware_that_is_not_here():
    op = Scale().attach(registry_on())

    assert ["op/triton", "op/cuda", "native"] == [
        op.dispatcher.select_on(platform).winner.selector for platform in ("cuda", "hip", "npu")
    ]


def test_112_a_target_that_is_text_is_imported_once(tmp_path, monkeypatch):
    (tmp_path / "counted_kernels.py").write_text(
        "loads = []\ndef __getattr__(name):\n    loads.append(name)\n    return lambda x: name\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    op = Scale().attach(registry_on())
    offer(op.registry, op.op, "counted_kernels:scale")

    assert ["scale"] * 2 == [op(X), op(X)]
    assert 1 == sys.modules["counted_kernels"].loads.count("scale")


def test_113_registering_an_op_without_an_id_is_refused():
    class Anonymous(BaseFusedOp):
        def forward_native(self, x):
            return x

    with pytest.raises(RegistrationError) as caught:
        register_fused_op(Anonymous(), "layers", "anonymous")

    assert "Anonymous has no op id; set op = 'group.name' to register it" == str(caught.value)


def test_114_one_detector_serves_platform_key_and_capabilities():
    op = Scale().attach(registry_on("cuda"))

    assert "triton" == op(X)
    assert {"platform_key", "facts"} == {*op.registry.detector.asked}


def test_114_what_is_found_of_a_device_is_not_pickled_and_not_read_at_import():
    registry = KernelRegistry(detector=BrokenDetector(), path=[])

    with pytest.raises(AssertionError, match=r"^asked for a platform key$"):
        Scale().attach(registry)(X)
    assert opgraft.registry is registry.__reduce__()[0]()
