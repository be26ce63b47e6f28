"""What hardware a device is, and what a kernel may ask for."""

from __future__ import annotations

import pickle
import re

import pytest
import torch

from opgraft import ANY, CapabilityRequirement, DeviceFacts, RegistrationError
from opgraft.hardware import CHAINS, IN_TREE, Detector, arch_key, capability_set, unmet


def refused(message):
    return pytest.raises(RegistrationError, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize("platform", IN_TREE)
def test_every_listed_platform_has_a_requirement_without_a_window(platform):
    requirement = getattr(CapabilityRequirement, platform.upper())

    assert CapabilityRequirement(platform=platform) == requirement == CapabilityRequirement.device(platform)
    assert platform == str(requirement)
    assert requirement.unmet(platform, "") is None


def test_the_one_implicit_chain():
    assert {"hip": ("hip", "cuda")} == CHAINS


@pytest.mark.parametrize(
    ("arch", "key"),
    [("9.0", (9, 0)), ("12.1", (12, 1)), ("8", (8,)), ("", None), ("gfx942", None), ("9.x", None), ("9.", None)],
)
def test_dotted_archs_have_an_order(arch, key):
    assert key == arch_key(arch)
    assert arch_key("9.0") < arch_key("10.0") < arch_key("10.3")


@pytest.mark.parametrize(
    ("requirement", "text"),
    [
        (ANY, "any device"),
        (CapabilityRequirement.cuda(min_sm=(8, 0), max_sm=(9, 0)), "cuda 8.0..9.0"),
        (CapabilityRequirement.cuda(min_sm="8.0"), "cuda 8.0.."),
        (CapabilityRequirement.cuda(max_sm=(9, 0)), "cuda ..9.0"),
        (CapabilityRequirement.hip(archs={"gfx950", "gfx942"}), "hip gfx942|gfx950"),
        (CapabilityRequirement.hip(), "hip"),
        (CapabilityRequirement.device("acme", min_arch=(1,), archs="1.5"), "acme 1.. 1.5"),
    ],
)
def test_a_requirement_reads_as_what_it_asks_for(requirement, text):
    assert text == str(requirement)
    assert requirement == pickle.loads(pickle.dumps(requirement))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: CapabilityRequirement(platform="CUDA"),
            "a platform key is a lower-case word such as 'cuda', got 'CUDA'",
        ),
        (lambda: CapabilityRequirement(platform=None), "a platform key is a lower-case word such as 'cuda', got None"),
        (lambda: CapabilityRequirement.device(""), "a platform key is a lower-case word such as 'cuda', got ''"),
        (
            lambda: CapabilityRequirement.cuda(min_sm="sm_90"),
            "min_arch must be an arch such as '9.0' or (9, 0), got 'sm_90'",
        ),
        (
            lambda: CapabilityRequirement.cuda(max_sm="10.3a"),
            "max_arch must be an arch such as '9.0' or (9, 0), got '10.3a'",
        ),
        (lambda: CapabilityRequirement.cuda(min_sm=9.0), "min_arch must be an arch such as '9.0' or (9, 0), got 9.0"),
        (lambda: CapabilityRequirement.cuda(min_sm=(9, 0), max_sm=(8, 9)), "cuda: min_arch 9.0 is above max_arch 8.9"),
        (
            lambda: CapabilityRequirement.hip(archs={"gfx942:x"}),
            "hip: 'gfx942:x' is not an arch such as 'gfx942' or '9.0'",
        ),
        (lambda: CapabilityRequirement.hip(archs=[942]), "hip: 942 is not an arch such as 'gfx942' or '9.0'"),
    ],
)
def test_a_requirement_that_no_device_could_meet_is_refused(make, message):
    with refused(message):
        make()


WINDOW = CapabilityRequirement.cuda(min_sm=(8, 0), max_sm=(10, 3))
NAMES = CapabilityRequirement.hip(archs={"gfx942", "gfx950"})


@pytest.mark.parametrize(
    ("requirement", "platform", "arch", "reason"),
    [
        (ANY, "acme", "", None),
        (WINDOW, "cuda", "10.3", None),
        (WINDOW, "cuda", "7.5", "arch is 7.5, needs cuda 8.0..10.3"),
        (WINDOW, "cuda", "12.0", "arch is 12.0, needs cuda 8.0..10.3"),
        (WINDOW, "cuda", "", "arch of the cuda device is unknown, needs cuda 8.0..10.3"),
        (WINDOW, "cuda", "gfx942", "arch is gfx942, needs cuda 8.0..10.3"),
        (WINDOW, "hip", "9.0", "device is hip, needs cuda 8.0..10.3"),
        (NAMES, "hip", "gfx942:sramecc+:xnack-", None),
        (NAMES, "hip", "gfx90a:xnack-", "arch is gfx90a, needs hip gfx942|gfx950"),
        (NAMES, "hip", "", "arch of the hip device is unknown, needs hip gfx942|gfx950"),
    ],
)
def test_why_a_device_does_not_satisfy_a_requirement(requirement, platform, arch, reason):
    assert reason == requirement.unmet(platform, arch)
    assert reason == unmet(frozenset({requirement}), platform, arch)


@pytest.mark.parametrize(
    ("platform", "arch", "reason"),
    [
        ("cuda", "9.0", None),
        ("hip", "gfx942", None),
        ("hip", "gfx90a", "device is hip gfx90a, needs cuda 8.0..10.3 or hip gfx942|gfx950"),
        ("npu", "", "device is npu, needs cuda 8.0..10.3 or hip gfx942|gfx950"),
    ],
)
def test_the_requirements_of_a_set_are_alternatives(platform, arch, reason):
    assert reason == unmet(frozenset({WINDOW, NAMES}), platform, arch)


@pytest.mark.parametrize("declared", [WINDOW, {WINDOW}, [WINDOW, WINDOW], (WINDOW,), iter([WINDOW])])
def test_a_capability_set_may_be_written_in_several_ways(declared):
    assert frozenset({WINDOW}) == capability_set(declared, "Op, jit")


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ((), "Op, jit: the capability set is empty; write ANY for any device"),
        ([WINDOW, "cuda"], "Op, jit: capabilities must be CapabilityRequirement or ANY, got 'cuda'"),
        ([{}], "Op, jit: capabilities must be CapabilityRequirement or ANY, got {}"),
        (9, "Op, jit: capabilities must be CapabilityRequirement or ANY, got 9"),
    ],
)
def test_a_capability_set_that_cannot_be_meant_is_refused(declared, message):
    with refused(message):
        capability_set(declared, "Op, jit")


class TestDetector:
    def test_the_cpu_and_meta_have_no_arch(self):
        detector = Detector()

        assert ("cpu", "meta", "acme") == tuple(detector.platform_key(torch.device(t)) for t in ("cpu", "meta", "acme"))
        assert DeviceFacts(name="cpu") == detector.facts(torch.device("cpu"))
        assert DeviceFacts(name="meta") == detector.facts(torch.device("meta"))

    def test_a_cuda_device_is_hip_on_a_rocm_build(self):
        expected = "hip" if torch.version.hip else "cuda"

        assert expected == Detector().platform_key(torch.device("cuda", 1))

    def test_hip_tensors_are_on_torchs_cuda_devices(self):
        assert ["cuda", "cuda", "acme"] == [Detector().device_type(key) for key in ("hip", "cuda", "acme")]

    def test_arch_and_name_are_read_of_the_device_itself(self):
        assert DeviceFacts(index=0, arch="1.0", name="Acme A1 (pretend)") == Detector().facts(torch.device("acme"))

    def test_amx_is_what_torch_says(self):
        assert isinstance(Detector().cpu_has_amx(), bool)

    def test_counts_are_torchs_with_the_reason_where_there_is_none(self):
        detector = Detector()

        assert (1, "") == detector.count("cpu")
        assert (1, "") == detector.count("acme")
        assert (0, "this torch knows no device 'vulkan9'") == detector.count("vulkan9")
        if not torch.version.hip:
            assert (0, "this torch was built without ROCm") == detector.count("hip")
        if not torch.version.cuda:
            assert (0, "this torch was built without CUDA") == detector.count("cuda")
        if not torch.xpu.is_available():
            assert (0, "torch sees no xpu device") == detector.count("xpu")
