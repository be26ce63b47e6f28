"""Statements 14 to 40: which kernel runs where nobody asks for one."""

from __future__ import annotations

import pytest
import torch
from simulated import offer, registry_on

from opgraft import ANY, BaseFusedOp, CapabilityRequirement, KernelBackend, RegistrationError
from opgraft.spec import DEFAULT_PRIORITY

X = torch.tensor([1])
PLATFORMS = ("cuda", "hip", "npu", "xpu", "musa", "cpu")


def kernel(name):
    return lambda self, x: name


class Native(BaseFusedOp):
    forward_native = kernel("native")


class Everywhere(Native):
    forward_cuda = kernel("cuda")
    forward_hip = kernel("hip")
    forward_npu = kernel("npu")
    forward_xpu = kernel("xpu")
    forward_musa = kernel("musa")
    forward_cpu = kernel("cpu")


class OnCuda(Native):
    forward_cuda = kernel("cuda")


def run(op_class, platform, arch="", **options):
    return op_class().attach(registry_on(platform, arch, **options))(X)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_014_to_019_a_platform_runs_its_own_method(platform):
    assert platform == run(Everywhere, platform, amx=True)


@pytest.mark.parametrize("platform", ["meta", "vulkan"])
def test_020_a_platform_without_a_method_runs_native(platform):
    assert "native" == run(Everywhere, platform)


def test_021_hip_without_its_own_method_runs_the_cuda_one():
    assert "cuda" == run(OnCuda, "hip")


def test_022_musa_without_its_own_method_runs_native_not_the_cuda_one():
    assert "native" == run(OnCuda, "musa")


@pytest.mark.parametrize("platform", ["npu", "xpu", "cpu"])
def test_023_other_platforms_without_their_own_method_run_native(platform):
    assert "native" == run(OnCuda, platform, amx=True)


def test_024_cuda_runs_the_cuda_method():
    assert "cuda" == run(OnCuda, "cuda")


def test_025_hip_prefers_its_own_method_to_the_cuda_one():
    assert "hip" == run(Everywhere, "hip")


@pytest.mark.parametrize(("amx", "expected"), [(False, "native"), (True, "cpu")])
def test_026_the_cpu_method_needs_amx(amx, expected):
    assert expected == run(Everywhere, "cpu", amx=amx)


def test_026_a_kernel_declared_for_the_cpu_needs_no_amx():
    class Declared(Native):
        capabilities = {KernelBackend.TRITON: CapabilityRequirement.CPU}
        forward_triton = kernel("triton")

    assert "triton" == run(Declared, "cpu")


def test_027_a_platform_method_counts_only_below_the_base_class():
    assert (True, False) == (hasattr(Native, "register_forward_hook"), Native.defines("register_forward_hook"))
    assert ([], []) == Native.own_methods()
    assert ([], ["cuda"]) == OnCuda.own_methods()


def test_027_a_platform_method_of_an_intermediate_class_or_a_mixin_counts():
    class Mixin:
        forward_npu = kernel("mixin")

    class Below(OnCuda):
        pass

    class Mixed(Mixin, Native):
        pass

    assert ("cuda", "mixin") == (run(Below, "cuda"), run(Mixed, "npu"))


class Jit(OnCuda):
    capabilities = {KernelBackend.JIT: CapabilityRequirement.CUDA}
    forward_jit = kernel("jit")


def test_028_a_declared_and_capable_kernel_beats_the_platform_method():
    assert "jit" == run(Jit, "cuda")


def test_029_a_declared_kernel_that_is_not_capable_leaves_the_call_to_the_platform_method():
    assert "cuda" == run(Jit, "hip")


class Undeclared(Native):
    forward_triton = kernel("triton")


def test_030_a_kernel_that_is_not_declared_is_never_chosen_unasked():
    assert "native" == run(Undeclared, "cuda")


def test_031_a_kernel_that_is_not_declared_runs_when_it_is_named():
    assert "triton" == Undeclared().attach(registry_on("cuda"))(X, backend="triton")


def test_032_a_declared_kernel_that_is_not_defined_is_skipped():
    class Missing(OnCuda):
        capabilities = {KernelBackend.TRITON: CapabilityRequirement.CUDA}

    assert "cuda" == run(Missing, "cuda")


class Unlisted(Native):
    priority = (KernelBackend.TRITON,)
    capabilities = {KernelBackend.JIT: ANY}
    forward_jit = kernel("jit")


def test_033_an_own_kernel_that_priority_does_not_list_is_never_chosen_unasked():
    assert "native" == run(Unlisted, "cuda")
    assert "jit" == Unlisted().attach(registry_on("cuda"))(X, backend="jit")


def test_033_a_backends_kernel_that_priority_does_not_list_ranks_last():
    class Listed(BaseFusedOp):
        op = "ladder.listed"
        priority = (KernelBackend.TRITON,)
        forward_native = kernel("native")

    op = Listed().attach(registry_on())
    offer(op.registry, Listed.op, lambda x: "jit", kernel_backend="jit")

    assert "jit" == op(X)

    offer(op.registry, Listed.op, lambda x: "triton", kernel_backend="triton")

    assert "triton" == op(X)


class TritonFirst(Native):
    priority = (KernelBackend.TRITON, KernelBackend.JIT)
    capabilities = {KernelBackend.TRITON: ANY, KernelBackend.JIT: {ANY}}
    forward_triton = kernel("triton")
    forward_jit = kernel("jit")


class JitFirst(TritonFirst):
    priority = (KernelBackend.JIT, KernelBackend.TRITON)


def test_034_priority_decides_between_two_eligible_kernels():
    assert ("triton", "jit") == (run(TritonFirst, "cuda"), run(JitFirst, "cuda"))


def test_035_torch_in_priority_is_ignored_and_native_stays_last():
    class TorchFirst(OnCuda):
        priority = (KernelBackend.TORCH, KernelBackend.TRITON)
        capabilities = {KernelBackend.TRITON: CapabilityRequirement.NPU}
        forward_triton = kernel("triton")

    assert ("cuda", "triton") == (run(TorchFirst, "cuda"), run(TorchFirst, "npu"))


def test_036_torch_compile_is_chosen_only_where_priority_lists_it_and_needs_no_declaration():
    class Compiled(Native):
        priority = (KernelBackend.TORCH_COMPILE,)
        forward_torch_compile = kernel("own")

    class CompiledNative(Native):
        priority = (KernelBackend.TORCH_COMPILE,)

    assert KernelBackend.TORCH_COMPILE not in DEFAULT_PRIORITY
    assert KernelBackend.TORCH_COMPILE is CompiledNative().attach(registry_on()).auto_selected_backend()
    assert "own" == run(Compiled, "cpu")
    assert Native().attach(registry_on()).auto_selected_backend() is None


def test_037_the_default_priority_is_part_of_the_contract():
    assert ("plugin", "aot", "jit", "cute_dsl", "triton", "torch") == DEFAULT_PRIORITY


def test_037_an_open_ended_kernel_backend_may_be_declared_once_it_is_registered():
    with pytest.raises(RegistrationError, match=r"^unknown kernel backend 'flydsl'; Known: "):
        KernelBackend("flydsl")
    flydsl = KernelBackend.register("flydsl")

    class Fly(Native):
        priority = (flydsl,)
        capabilities = {flydsl: ANY}
        forward_flydsl = kernel("flydsl")

    assert flydsl is KernelBackend("flydsl")
    assert "flydsl" == run(Fly, "cpu")


def test_038_requirements_of_a_set_are_alternatives():
    class Either(Native):
        capabilities = {KernelBackend.TRITON: {CapabilityRequirement.NPU, CapabilityRequirement.XPU}}
        forward_triton = kernel("triton")

    assert ["triton", "triton", "native"] == [run(Either, platform) for platform in ("npu", "xpu", "cuda")]


@pytest.mark.parametrize("declared", [ANY, {ANY}, [ANY], (CapabilityRequirement.CUDA, ANY)])
def test_038_any_device_is_written_out(declared):
    class Any(Native):
        capabilities = {KernelBackend.TRITON: declared}
        forward_triton = kernel("triton")

    assert ["triton"] * 3 == [run(Any, platform) for platform in ("cpu", "cuda", "acme")]


def test_038_an_empty_set_is_refused():
    with pytest.raises(
        RegistrationError, match=r"^Empty, triton: the capability set is empty; write ANY for any device$"
    ):

        class Empty(Native):
            capabilities = {KernelBackend.TRITON: frozenset()}


class Window(Native):
    capabilities = {
        KernelBackend.TRITON: {
            CapabilityRequirement.cuda(min_sm=(8, 0), max_sm=(9, 0)),
            CapabilityRequirement.hip(archs={"gfx942"}),
            CapabilityRequirement.device("acme", min_arch="1.2"),
        }
    }
    forward_triton = kernel("triton")


@pytest.mark.parametrize(
    ("platform", "arch", "expected"),
    [
        ("cuda", "7.5", "native"),
        ("cuda", "8.0", "triton"),
        ("cuda", "8.9", "triton"),
        ("cuda", "9.0", "triton"),
        ("cuda", "10.0", "native"),
        ("cuda", "12.0", "native"),
        ("cuda", "", "native"),
        ("cuda", "gfx942", "native"),
        ("hip", "gfx942", "triton"),
        ("hip", "gfx942:sramecc+:xnack-", "triton"),
        ("hip", "gfx950", "native"),
        ("acme", "1.1", "native"),
        ("acme", "1.2", "triton"),
        ("acme", "1.10", "triton"),
    ],
)
def test_039_the_arch_window_is_inclusive_and_an_unknown_arch_is_outside(platform, arch, expected):
    assert expected == run(Window, platform, arch)


def test_039_an_unbounded_requirement_takes_an_unknown_arch():
    assert "jit" == run(Jit, "cuda", "")


def test_040_a_single_requirement_instead_of_a_set_is_tolerated():
    assert {KernelBackend.JIT: frozenset({CapabilityRequirement.CUDA})} == Jit.capabilities
