"""The OpenCL plugin through opgraft: never chosen unasked, honest about what is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import opgraft

pytest.importorskip("pyopencl", reason="pyopencl is not installed")

from opgraft_opencl import device, plugin

OP = "attention.clamp_position"
README = Path(__file__).parents[2] / "examples" / "opencl_vendor_plugin" / "README.md"
clamp_position = opgraft.ops.attention.clamp_position
needs_platform = pytest.mark.skipif(
    not device.find_platforms()[0], reason=device.find_platforms()[1] or "there is a platform"
)


@pytest.fixture
def seq_lens():
    return torch.tensor([5, 0, -3], dtype=torch.int32)


def run_python(code):
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, check=False, text=True)


@needs_platform
def test_it_runs_when_the_call_asks_for_it(seq_lens):
    assert [4, 0, 0] == clamp_position(seq_lens, backend="opencl").tolist()
    assert "opencl/jit" == opgraft.explain(OP, seq_lens, backend="opencl").winner.selector


@needs_platform
@pytest.mark.parametrize("how", [{"order": f"{OP}=opencl"}, {"force": "opencl"}])
def test_it_runs_when_the_policy_asks_for_it(how, seq_lens):
    with opgraft.use(**how):
        assert "opencl/jit" == opgraft.explain(OP, seq_lens).winner.selector
        assert [4, 0, 0] == clamp_position(seq_lens).tolist()


@needs_platform
def test_it_is_never_chosen_unasked(seq_lens):
    selection = opgraft.explain(OP, seq_lens)
    reasons = [one.reason for one in selection.candidates if str(one.kernel).startswith("opencl/jit")]

    assert "opencl" != selection.winner.backend
    assert ["priority -10 is negative; runs only when named"] == reasons


@needs_platform
def test_out_is_written_and_returned(seq_lens):
    out = torch.zeros(6, dtype=torch.int64)[::2]

    assert out is clamp_position(seq_lens, out=out, backend="opencl")
    assert [4, 0, 0] == out.tolist()


def test_the_plugin_module_loads_without_torch_and_without_opencl():
    done = run_python(
        "import sys, opgraft_opencl.plugin\n"
        "print([name for name in ('torch', 'pyopencl', 'opgraft_opencl.device') "
        "if name in sys.modules])"
    )

    assert ("[]\n", "") == (done.stdout, done.stderr)


def test_the_probe_counts_platforms_and_starts_no_device(monkeypatch):
    class Platform:
        def get_devices(self):
            raise AssertionError

    monkeypatch.setattr(device, "find_platforms", lambda: ([Platform(), Platform()], ""))

    assert opgraft.Available(2) == plugin.opgraft_probe()


def test_the_probe_gives_the_reason_where_there_is_no_platform(monkeypatch):
    monkeypatch.setattr(device, "find_platforms", lambda: ((), "no OpenCL platform found"))

    assert opgraft.Unavailable("no OpenCL platform found") == plugin.opgraft_probe()


@needs_platform
def test_a_forked_child_can_use_opencl_after_its_parent_has_looked():
    done = run_python(f"""
import os, opgraft, signal, torch
assert "active" == next(one.status for one in opgraft.backends() if one.name == "opencl")
child = os.fork()
if child == 0:
    signal.alarm(60)
    call = opgraft.ops.{OP}
    os._exit(call(torch.tensor([8]), backend="opencl").item())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")

    assert ("7\n", "") == (done.stdout, done.stderr)


@needs_platform
def test_a_child_forked_after_use_takes_another_kernel_and_does_not_hang():
    done = run_python(f"""
import os, opgraft, signal, torch
call = opgraft.ops.{OP}
with opgraft.use(order="*=opencl"):
    call(torch.tensor([8]))
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(call(torch.tensor([8])).item())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")

    assert ("7\n", "") == (done.stdout, done.stderr)


@needs_platform
def test_the_readmes_command_prints_what_it_shows():
    text = README.read_text(encoding="utf-8")
    ((words, output),) = re.findall(r"^\$ opgraft (run .*)\n((?:[^$].*\n)*)", text, re.MULTILINE)

    command = [sys.executable, "-m", "opgraft", *words.split()]
    done = subprocess.run(command, capture_output=True, check=True, text=True)

    assert output == done.stdout


@needs_platform
def test_the_readmes_call_runs():
    (call,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)

    exec(call, {})  # noqa: S102 - what a reader pastes
