"""The backend ``cpu_reference`` as opgraft sees it."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from importlib import metadata

import index_cases
import pytest
import torch

import opgraft
from opgraft.ops import attention


def record():
    return next(one for one in opgraft.backends() if one.name == "cpu_reference")


def test_the_backend_is_active_and_offers_every_op():
    assert ("active", "opgraft-cpu-reference", ("cpu",)) == (record().status, record().distribution, record().platforms)
    assert {f"attention.{name}" for name in index_cases.NAMES} == {k.op for k in record().kernels}


def test_every_kernel_gives_way_to_any_other_backend():
    assert {0} == {kernel.priority for kernel in record().kernels}


def test_the_distribution_names_its_ranges():
    assert {"opgraft>=0.1,<0.2", "torch>=2.9"} == {
        requirement.replace("<0.2,>=0.1", ">=0.1,<0.2") for requirement in metadata.requires("opgraft-cpu-reference")
    }


@pytest.mark.parametrize("name", index_cases.NAMES)
def test_a_cpu_tensor_is_served_by_this_backend(name):
    dtypes = dict.fromkeys(index_cases.OPS[name].format_signature.supported_dtypes, torch.int32)
    arguments = index_cases.sample(name, 64, dtypes)
    selection = opgraft.explain(f"attention.{name}", **arguments)
    assert ("cpu_reference/aot", "priority") == (selection.winner.selector, selection.decided_by)


def test_finding_the_backend_imports_no_kernel():
    program = (
        "import sys, json, opgraft\n"
        "names = [one.name for one in opgraft.backends() if one.status == 'active']\n"
        "print(json.dumps(['cpu_reference' in names, 'opgraft_cpu_reference.attention' in sys.modules]))\n"
        "import torch\n"
        "opgraft.ops.attention.clamp_position(torch.tensor([1]))\n"
        "print(json.dumps('opgraft_cpu_reference.attention' in sys.modules))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [[True, False], True] == [json.loads(line) for line in ran.stdout.splitlines()]


def test_loading_the_plugin_alone_imports_no_torch():
    program = "import sys, opgraft_cpu_reference.plugin; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "False\n" == ran.stdout


def test_a_call_imports_nothing_once_a_kernel_has_run(monkeypatch):
    lengths = torch.tensor([1, 5])
    attention.clamp_position(lengths, backend="cpu_reference")
    attention.clamp_position(lengths)
    imported = []
    original = builtins.__import__

    def noticed(name, *args, **kwargs):
        imported.append(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", noticed)
    attention.clamp_position(lengths)
    attention.clamp_position(lengths, backend="cpu_reference")
    assert [] == imported


def test_a_name_that_the_kernels_lack_is_an_attribute_error():
    from opgraft_cpu_reference import plugin

    with pytest.raises(AttributeError, match="no_such_kernel"):
        _ = plugin.kernels.no_such_kernel
    for marker in ("_private", "opgraft_offer"):
        with pytest.raises(AttributeError, match=rf"^{marker}$"):
            getattr(plugin.kernels, marker)
