"""What opgraft-hip says about itself, on a machine without its hardware."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import opgraft
from opgraft import Available, Unavailable
from opgraft_hip import plugin

OP = "attention.clamp_position"


def explained(arch, device="hip"):
    return opgraft.explain_for(OP, device=device, arch=arch, dtype="int32")


def reasons(selection, selector):
    return [one.reason for one in selection.candidates if one.kernel.selector == selector]


def test_it_is_named_as_its_entry_point():
    backend = plugin.opgraft_backend()
    assert ("hip", ("hip",)) == (backend.name, backend.platforms)


@pytest.mark.parametrize(
    ("built_for", "count", "expected"),
    [
        (None, 1, Unavailable("this torch was built without ROCm")),
        ("7.2", 0, Unavailable("torch sees no ROCm device")),
        ("7.2", 2, Available(2)),
    ],
)
def test_the_probe_asks_torch_s_build_and_its_device_count(built_for, count, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", built_for)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert expected == plugin.opgraft_probe()
    assert not torch.cuda.is_initialized()


def test_loading_it_imports_neither_torch_nor_a_kernel():
    program = (
        "import sys, opgraft_hip.plugin\n"
        "heavy = ('torch', 'triton', 'opgraft_triton_kernels.attention', 'opgraft_triton_kernels.launcher')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "[]\n" == done.stdout


@pytest.mark.parametrize("arch", ["gfx942", "gfx942:sramecc+:xnack-", "gfx950", "gfx1201"])
def test_its_kernel_is_chosen_for_the_archs_that_are_compiled(arch):
    assert "hip" == explained(arch).winner.backend


@pytest.mark.parametrize("arch", ["gfx90a", "gfx1151", "gfx9420", "9.0"])
def test_no_other_arch_is_claimed(arch):
    selection = explained(arch)
    assert "native" == selection.winner.selector
    assert [f"arch is {arch}, needs hip gfx1201|gfx942|gfx950"] == reasons(selection, "hip/triton")


def test_an_nvidia_device_is_not_its_own():
    selection = explained("9.0", device="cuda")
    assert ["device is cuda, needs hip gfx1201|gfx942|gfx950"] == reasons(selection, "hip/triton")
