"""What opgraft-cuda says about itself, on a machine without its hardware."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import opgraft
from opgraft import Available, Unavailable
from opgraft_cuda import plugin

OP = "attention.clamp_position"


def explained(arch, device="cuda"):
    return opgraft.explain_for(OP, device=device, arch=arch, dtype="int32")


def reasons(selection, selector):
    return [one.reason for one in selection.candidates if one.kernel.selector == selector]


def test_it_is_named_as_its_entry_point():
    backend = plugin.opgraft_backend()
    assert ("cuda", ("cuda",)) == (backend.name, backend.platforms)


@pytest.mark.parametrize(
    ("built_for", "count", "expected"),
    [
        (None, 1, Unavailable("this torch was built without CUDA")),
        ("13.0", 0, Unavailable("torch sees no CUDA device")),
        ("13.0", 2, Available(2)),
    ],
)
def test_the_probe_asks_torch_s_build_and_its_device_count(built_for, count, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert expected == plugin.opgraft_probe()
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("package", ["cuda", "cuda/bindings"])
def test_loading_it_imports_neither_torch_nor_a_kernel(package, tmp_path):
    (tmp_path / package).mkdir(parents=True)
    for folder in {"cuda", package}:
        (tmp_path / folder / "__init__.py").touch()
    program = (
        "import sys, opgraft_cuda.plugin as plugin\n"
        "heavy = ('torch', 'triton', 'opgraft_triton_kernels.attention', 'opgraft_triton_kernels.launcher', 'cuda', 'opgraft_cuda.nvrtc')\n"
        "print([name for name in heavy if name in sys.modules], hasattr(plugin, 'clamp_position_jit'))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert f"[] {package == 'cuda/bindings'}\n" == done.stdout


@pytest.mark.parametrize("arch", ["8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"])
def test_its_kernel_is_chosen_within_the_window(arch):
    assert "cuda" == explained(arch).winner.backend


@pytest.mark.parametrize("arch", ["7.5", "12.2", "13.0", "gfx942", ""])
def test_no_arch_outside_the_window_is_claimed(arch):
    selection = explained(arch)
    assert "native" == selection.winner.selector
    shown = f"arch is {arch}" if arch else "arch of the cuda device is unknown"
    assert [f"{shown}, needs cuda 8.0..12.1"] == reasons(selection, "cuda/triton")


def test_a_rocm_device_is_not_its_own():
    selection = explained("gfx942", device="hip")
    assert ["device is hip, needs cuda 8.0..12.1"] == reasons(selection, "cuda/triton")
