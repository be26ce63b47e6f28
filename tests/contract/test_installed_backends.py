"""Rules on a backend as it is installed: made-up distributions, metadata folder and module, each wrong in one way."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from contract import made_up

from opgraft.testing.conformance import Options, Suite

_NUMBERS = itertools.count()
RANGES = ("opgraft>=0.1,<0.2", "torch>=2.9")
HONEST = """
from opgraft import Backend, KernelBackend, forward, hookimpl

@hookimpl
def opgraft_backend():
    return Backend(name="NAME", platforms=("cpu",))

@forward("attention.clamp_position", kernel_backend=KernelBackend.PLUGIN, priority=-1)
def clamp_position(seq_lens, *, out=None):
    import torch
    positions = torch.clamp(seq_lens.to(torch.int64), min=1) - 1
    return positions if out is None else out.copy_(positions)
"""


class Installer:
    """Writes made-up distributions into a folder on ``sys.path``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, source: str = HONEST, requirements=RANGES, module: str = "", extra: str = "") -> str:
        """Write a module and its metadata, and give the backend's name."""
        name = f"made_up_{next(_NUMBERS)}"
        module = module or f"opgraft_{name}"
        (self.folder / f"{module}.py").write_text(source.replace("NAME", name) + extra)
        info = self.folder / f"opgraft_{name}-1.0.dist-info"
        info.mkdir()
        lines = [f"Name: opgraft-{name}", "Version: 1.0", *(f"Requires-Dist: {one}" for one in requirements)]
        (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines, ""]))
        (info / "entry_points.txt").write_text(f"[opgraft.backends]\n{name} = {module}\n")
        return name

    def failures(self, name: str) -> dict[str, str]:
        """Give the rules on the backend itself that fail, each with its message."""
        made = made_up.registry(made_up.CLAMP)
        suite = Suite(name, Options(), registry=made)
        results = [check.result() for check in suite.checks() if not check.device]
        return {one.rule: one.message for one in results if one.is_bad}


@pytest.fixture
def installer(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return Installer(tmp_path)


def test_an_honest_distribution_fails_no_rule(installer):
    assert {} == installer.failures(installer.install())


@pytest.mark.parametrize("library", ["torch", "numpy", "triton"])
def test_a_plugin_that_imports_a_library_of_kernels_is_heavy(installer, library):
    name = installer.install(extra=f"\nimport {library}\n")

    assert library in installer.failures(name)["plugin_loads_light"]


def test_a_plugin_that_imports_torch_in_the_hook_that_names_it_is_heavy(installer):
    source = HONEST.replace("    return Backend(", "    import torch\n    return Backend(")

    assert "torch" in installer.failures(installer.install(source))["plugin_loads_light"]


def test_a_plugin_that_takes_its_time_is_heavy(installer):
    name = installer.install(extra="\nimport time\ntime.sleep(1.6)\n")

    assert "takes 1.6 s" in installer.failures(name)["plugin_loads_light"]


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ("import os; os.environ['ACME'] = '1'", "changes os.environ"),
        ("import sys; sys.path.append('/nowhere')", "changes sys.path"),
        ("import warnings; warnings.simplefilter('ignore')", "changes warnings.filters"),
        ("import logging; logging.basicConfig(level=10)", "changes the root logger"),
        ("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", "changes signal handlers"),
        ("import opgraft; opgraft.forward = print", "changes opgraft.forward"),
        ("print('Acme NPU ready')", "prints 'Acme NPU ready\\n'"),
    ],
)
def test_a_plugin_that_changes_the_process_when_it_is_loaded_is_told(installer, extra, told, monkeypatch):
    import opgraft

    forward, path, environment = opgraft.forward, list(sys.path), dict(os.environ)
    # Only the fresh process loads it: here it is asked for by metadata alone.
    name = installer.install(extra=f"\nif 'pytest' not in __import__('sys').modules:\n    {extra}\n")

    failures = installer.failures(name)

    assert (forward, path, environment) == (opgraft.forward, sys.path, dict(os.environ))
    assert {"loading_leaves_the_process_alone"} == failures.keys()
    assert told in failures["loading_leaves_the_process_alone"]


def test_a_probe_that_imports_its_kernels_is_told(installer):
    probe = (
        "\nfrom opgraft import Available\n@hookimpl\ndef opgraft_probe():\n    import triton\n    return Available(1)\n"
    )

    assert {"probe_is_quiet": "opgraft_probe imports triton"} == installer.failures(installer.install(extra=probe))


def test_a_probe_that_finds_what_torch_does_not_see_is_told(installer):
    probe = "\nfrom opgraft import Available\n@hookimpl\ndef opgraft_probe():\n    return Available(8)\n"
    name = installer.install(HONEST.replace('platforms=("cpu",)', 'platforms=("acme2",)'), extra=probe)

    message = "the backend is active, and this torch knows no device 'acme2'"
    assert {"probe_agrees_with_torch": message} == installer.failures(name)


@pytest.mark.parametrize(
    ("requirements", "message"),
    [
        ((), "the metadata names no requirement on opgraft"),
        (("torch>=2.9",), "the metadata names no requirement on opgraft"),
        (("opgraft>=0.1",), "the metadata names no requirement on torch"),
        (("opgraft>=0.1", "torch"), "the requirement on torch has no version range, such as '>=2.10'"),
        (("opgraft", "torch>=2.9"), "the requirement on opgraft has no version range, such as '>=2.10'"),
        (("opgraft>=0.1", "torch>=2.9; extra == 'gpu'"), "the metadata names no requirement on torch"),
    ],
)
def test_metadata_has_to_name_ranges(installer, requirements, message):
    assert {"metadata_names_its_ranges": message} == installer.failures(installer.install(requirements=requirements))


def test_a_top_level_package_that_python_has_itself_is_refused(installer):
    name = installer.install(module="this")

    assert "the top-level package 'this' is a module of Python itself" == installer.failures(name)["package_is_its_own"]


def test_a_forward_of_an_unknown_op_is_told(installer):
    name = installer.install(HONEST.replace("attention.clamp_position", "attention.clamp_positions"))
    failures = installer.failures(name)

    assert {"every_forward_is_accepted", "offers_a_kernel"} == failures.keys()
    assert "attention.clamp_positions" in failures["every_forward_is_accepted"]


def test_a_forward_with_other_parameters_is_told(installer):
    name = installer.install(HONEST.replace("(seq_lens, *, out=None)", "(lengths, *, out=None)"))

    assert {"every_forward_is_accepted", "offers_a_kernel"} == installer.failures(name).keys()


def test_a_misspelt_hook_is_told(installer):
    extra = "\n@hookimpl\ndef opgraft_prope():\n    return None\n"

    failures = installer.failures(installer.install(extra=extra))

    assert {"hooks_are_known"} == failures.keys()
    assert "opgraft_prope" in failures["hooks_are_known"]


def test_a_backend_without_kernels_is_told(installer):
    name = installer.install(HONEST.partition("@forward")[0])

    message = "the backend offers no kernel; mark one with @opgraft.forward(...)"
    assert {"offers_a_kernel": message} == installer.failures(name)


def test_a_plugin_that_raises_is_told_with_its_cause(installer):
    name = installer.install(extra="\nraise OSError('undefined symbol: acme_launch')\n")
    failures = installer.failures(name)

    assert "backend_loads" in failures
    assert "undefined symbol: acme_launch" in failures["backend_loads"]


def test_a_backend_that_the_policy_denies_is_told(installer):
    name = installer.install()
    made = made_up.registry(made_up.CLAMP)
    made.policy.set(deny=name)
    results = [check.result() for check in Suite(name, registry=made).checks()]

    assert ["backend_loads"] == [one.rule for one in results if one.is_bad]


def test_the_command_fails_a_dishonest_distribution_with_exit_code_1(installer, tmp_path):
    name = installer.install(HONEST.replace("min=1) - 1", "min=0)"))
    done = subprocess.run(
        [sys.executable, "-m", "opgraft", "conformance", name, "--json"],
        capture_output=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        text=True,
    )
    data = json.loads(done.stdout)

    assert 1 == done.returncode
    assert "" == done.stderr
    assert not data["passed"]
    failed = {one["rule"]: one for one in data["results"] if one["outcome"] == "failed"}
    assert "every_size" in failed
    assert "clamp_position(seq_lens=[1] int32)" == failed["every_small_number"]["example"]
