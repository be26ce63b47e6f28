"""A vendor's package comes and goes by pip, and the core sees it each time."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv

import pytest

INSTALL_LIMIT_S = 1200
OP = "attention.clamp_position"
CLAMP = """
import torch, opgraft
seq_lens = torch.tensor([0, 1, 5, -7], dtype=torch.int32, device={device!r})
position = opgraft.ops.attention.clamp_position(seq_lens)
print(position.cpu().tolist(), position.dtype, position.device)
"""


def test_a_fresh_environment_holds_nothing_of_this_checkout(environment):
    source = """
from importlib import metadata, util
names = {d.metadata["Name"].lower() for d in metadata.distributions()}
print(sorted(name for name in names if "opgraft" in name), util.find_spec("opgraft"))
print("torch" in names)
"""
    assert "[] None\nTrue\n" == environment.python(source)


def test_the_core_alone_finds_no_backend_and_native_runs(core_only):
    assert {"backends": []} == core_only.json("list")
    explained = core_only.json("explain", OP, "--device", "cpu", "--dtype", "int32")
    assert (OP, "native", "native") == (explained["op"], explained["winner"], explained["decided_by"])
    assert "[0, 0, 4, 0] torch.int64 cpu\n" == core_only.python(CLAMP.format(device="cpu"))


def test_importing_the_core_imports_neither_torch_nor_a_plugin(everything):
    source = """
import sys, opgraft
print(sorted(n for n in sys.modules if n.split(".")[0] == "torch" or n.startswith("opgraft_")))
"""
    assert "[]\n" == everything.python(source)


def test_the_module_runs_like_the_console_script(everything):
    by_script = everything.opgraft("list", "--json")
    by_module = everything.run(everything.interpreter, "-m", "opgraft", "list", "--json").stdout
    assert by_script == by_module


def test_every_distribution_installed_together_is_found_and_none_is_faulty(everything):
    statuses = {name: record["status"] for name, record in everything.backends().items()}
    hardware = {name: statuses.pop(name) for name in ("cuda", "hip", "opencl")}
    assert {"acme": "active", "cpu_reference": "active"} == statuses
    assert set(hardware.values()) <= {"active", "inactive"}


def test_listing_initialises_no_accelerator_and_imports_no_kernel(everything):
    source = """
import sys, opgraft
opgraft.backends()
import torch
kernels = ("triton", "opgraft_triton_kernels.attention", "opgraft_acme.kernels")
print(torch.cuda.is_initialized(), sorted(n for n in sys.modules if n.startswith(kernels)))
"""
    assert "False []\n" == everything.python(source)


def test_a_vendor_comes_is_chosen_on_its_own_device_and_goes_by_pip(environment, wheels):
    environment.install(wheels["opgraft"])
    assert {} == environment.backends()

    environment.install(wheels["opgraft-acme"])
    acme = environment.backends()["acme"]
    assert ("active", "opgraft-acme", ["acme"]) == (acme["status"], acme["distribution"], acme["platforms"])
    assert str(environment.root) in acme["location"]
    explained = environment.json("explain", OP, "--device", "acme", "--dtype", "int32")
    assert ("acme/plugin", "priority") == (explained["winner"].split()[0], explained["decided_by"])
    assert "[0, 0, 4, 0] torch.int64 acme:0\n" == environment.python(CLAMP.format(device="acme"))
    assert "[0, 0, 4, 0] torch.int64 cpu\n" == environment.python(CLAMP.format(device="cpu"))

    environment.uninstall("opgraft-acme")
    assert {} == environment.backends()
    assert "[0, 0, 4, 0] torch.int64 cpu\n" == environment.python(CLAMP.format(device="cpu"))


def test_a_plain_install_at_the_root_installs_the_core_alone(environment, projects):
    # hatchling is reached through the .pth, so pip need not build in an environment of its own.
    environment.install(projects["opgraft"], options=["--no-build-isolation"])
    names = environment.python(
        "from importlib import metadata\n"
        "names = {d.metadata['Name'] for d in metadata.distributions()}\n"
        "print(sorted(name for name in names if 'opgraft' in name))"
    )
    assert "['opgraft']\n" == names
    assert {} == environment.backends()


def test_the_installed_wheels_satisfy_each_other(everything):
    everything.pip("check")


@pytest.mark.slow_install
@pytest.mark.timeout(INSTALL_LIMIT_S)
def test_pip_resolves_and_installs_the_core_wheel_with_everything_it_needs(wheels, projects, run_checked):
    # Two gigabytes, so not under pytest's base folder, which outlives the run.
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--quiet"]
        constraints = str(projects["opgraft"] / "constraints.txt")
        probe = [*pip, "download", "--no-deps", "--dest", folder, "--constraint", constraints]
        if subprocess.run([*probe, "pluggy"], check=False, capture_output=True).returncode != 0:
            pytest.skip("pip reaches no package index from here")
        venv.create(f"{folder}/venv", symlinks=True, with_pip=False)
        interpreter = f"{folder}/venv/bin/python"
        asked = ["install", "--constraint", constraints, str(wheels["opgraft"])]
        run_checked([*pip, "--python", interpreter, *asked], timeout=INSTALL_LIMIT_S)
        listed = run_checked([f"{folder}/venv/bin/opgraft", "list", "--json"], cwd=folder)
        assert {"backends": []} == json.loads(listed.stdout)
