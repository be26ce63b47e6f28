"""Field reports B: what goes wrong while a plugin is loaded, and who hears of it."""

from __future__ import annotations

import ast
import itertools
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from installation import NoHardware, Site, plugin_source

import opgraft

REPOSITORY = Path(__file__).resolve().parents[2]
NATIVE = torch.tensor([0, 0, 4])


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "opgraft"]


def test_b1_a_fault_is_told_with_distribution_version_entry_point_and_root_cause(process, site, caplog):
    module = site.plugin(
        "acme", "try:\n    import acme_driver\nexcept ImportError as e:\n    raise RuntimeError('no driver') from e"
    )
    made = process()
    assert torch.equal(NATIVE, made.call())
    assert [
        (
            f"backend 'acme' (made-up-acme 1.0) quarantined: loading {module} raised RuntimeError: no driver "
            "(caused by ModuleNotFoundError: No module named 'acme_driver')"
        )
    ] == warnings_of(caplog)
    shown = str(made.registry.handle("attention.clamp_position").op.dispatcher.select_on("cpu", "", "int32"))
    assert "quarantined: loading" in shown


def in_children(tmp_path, programs):
    """Run each program in a fork of one process that has imported torch; give what they print."""
    source = (
        "import os, torch\n"
        f"for program in {programs!r}:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        exec(program)\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-u", "-c", source],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert "" == done.stderr
    return done.stdout.splitlines()


def vendor(tmp_path, name, first_line):
    site = Site(tmp_path)
    site.module(f"{name}.plugin", plugin_source(name))
    site.module(f"{name}.kernels.clamp_position", "")
    (tmp_path / name / "__init__.py").write_text(first_line, encoding="utf-8")
    site.distribution(f"opgraft-{name}", {name: f"{name}.plugin"})


def test_b2_a_vendor_that_imports_the_core_in_its_first_line_is_active(tmp_path):
    lines = (
        "import opgraft; opgraft.forward",
        "import opgraft; opgraft.ops",
        "from opgraft import BaseFusedOp, registry",
    )
    names = [f"vendor{number}" for number in range(len(lines))]
    for name, line in zip(names, lines, strict=True):
        vendor(tmp_path, name, line)
    show = "import opgraft; print({r.name: r.status for r in opgraft.backends()}.get(%r))"
    programs = [f"import {module}\n{show % name}" for name in names for module in (name, "opgraft")]
    assert ["active"] * len(programs) == in_children(tmp_path, programs)


def test_b2_a_vendor_that_asks_for_backends_while_it_is_imported_hears_why_not(process, site):
    module = site.plugin("acme", "import reentrant; reentrant.ask()\n" + plugin_source("acme"))
    made = process()
    sys.modules["reentrant"] = types.SimpleNamespace(ask=made.registry.backends)
    try:
        record = made.backends["acme"]
    finally:
        del sys.modules["reentrant"]
    assert "quarantined" == record.status
    assert record.reason == (
        "discovery was re-entered: a plugin calls an op, or asks for the backends, while it is being loaded; do "
        "that on first use instead"
    )
    assert module not in sys.modules


def test_b2_a_plugin_that_registers_another_while_it_is_loaded_leaves_nothing_behind(process, site):
    class Other:
        @opgraft.hookimpl
        def opgraft_backend(self):
            return opgraft.Backend(name="other", platforms=("cpu",))

    made = process()
    sys.modules["reentrant"] = types.SimpleNamespace(register=lambda: made.registry.register_backend(Other()))
    site.plugin("acme", "import reentrant; reentrant.register()")
    try:
        assert {"acme": "quarantined"} == {name: record.status for name, record in made.backends.items()}
        made.registry.refresh()
        assert {"acme"} == made.backends.keys()
    finally:
        del sys.modules["reentrant"]


def test_b3_every_order_of_imports_gives_the_same_plan(tmp_path):
    vendor(tmp_path, "vendor", "import opgraft; from opgraft import hookimpl")
    steps = ("opgraft", "vendor", "vendor.kernels.clamp_position", "vendor.plugin")
    programs = [
        "".join(f"import {step}\n" for step in order) + "import opgraft\nprint(opgraft.plan().fingerprint)"
        for order in itertools.permutations(steps, 2)
    ]
    fingerprints = in_children(tmp_path, programs)
    assert (len(programs), 1) == (len(fingerprints), len(set(fingerprints)))


def test_b5_an_undefined_symbol_leaves_the_core_usable_and_one_variable_turns_the_backend_off(process, site, caplog):
    site.plugin("acme", "raise OSError('libacme.so: undefined symbol: acme_go')")
    assert process().backends["acme"].reason.endswith("OSError: libacme.so: undefined symbol: acme_go")
    caplog.clear()
    assert "denied" == process(DENY="acme").backends["acme"].status
    assert [] == warnings_of(caplog)


def test_b7_a_fault_in_one_hook_leaves_none_of_the_kernels(process, site):
    site.plugin("acme", plugin_source("acme", "@hookimpl\ndef opgraft_probe(): raise OSError('no driver')"))
    made = process()
    assert ("quarantined", ()) == (made.backends["acme"].status, made.backends["acme"].kernels)
    assert torch.equal(NATIVE, made.call())


def test_b8_a_wrong_forward_is_refused_alone_and_told(process, site, caplog):
    site.plugin("acme", plugin_source("acme", "@forward('moe.gate', kernel_backend='plugin')\ndef gate(x): ..."))
    made = process()
    assert "acme" == made.call()
    assert [
        (
            "backend 'acme' (made-up-acme 1.0) forward 'gate' for 'moe.gate' is refused: unknown op; "
            "Known: attention.clamp_position"
        )
    ] == warnings_of(caplog)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("raise OSError('no driver')", "quarantined: loading {module} raised OSError: no driver"),
        (
            plugin_source("acme", "@forward('moe.gate', kernel_backend='plugin')\ndef gate(x): ..."),
            "forward 'gate' for 'moe.gate' is refused: unknown op; Known: attention.clamp_position",
        ),
    ],
    ids=["quarantine", "refused forward"],
)
def test_b8_strict_raises_at_first_use(process, site, source, fault):
    module = site.plugin("acme", source)
    made = process(STRICT="1")
    for _ in range(2):
        with pytest.raises(opgraft.PluginError) as caught:
            made.call()
        assert f"strict: backend 'acme' (made-up-acme 1.0) {fault.format(module=module)}" == str(caught.value)


def test_b8_strict_raises_on_a_conflict_and_never_on_missing_hardware(process, site):
    site.plugin("npus", plugin_source("npus", platform="npu"))
    assert torch.equal(NATIVE, process(NoHardware(), STRICT="1").call())
    for name in ("one", "two"):
        site.distribution(name, {"acme": "a_module_that_nobody_has"})
    with pytest.raises(
        opgraft.PluginError, match=r"strict: backend 'acme' \(one, two 1\.0\) conflict: claimed by one 1\.0"
    ):
        process(STRICT="1").call()


def test_b9_a_required_backend_that_is_broken_raises_with_the_root_cause(process, site):
    module = site.plugin("acme", "import acme_driver")
    with pytest.raises(opgraft.PluginError) as caught:
        process(REQUIRE="acme").call()
    assert (
        f"backend 'acme' (made-up-acme 1.0) is quarantined: loading {module} raised ModuleNotFoundError: No module "
        "named 'acme_driver', and it is required"
    ) == str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_b9_a_required_backend_that_is_absent_raises_with_the_nearest(process, site):
    site.plugin("acme")
    with pytest.raises(opgraft.PluginError) as caught:
        process(REQUIRE="acne").call()
    assert "backend 'acne' is required and not installed; did you mean 'acme'? Known: acme" == str(caught.value)


def test_b10_a_kernel_that_cannot_be_loaded_says_so_and_not_that_there_is_no_device(process, site):
    site.plugin("acme", plugin_source("acme").replace("return 'acme'", "raise OSError('undefined symbol: acme_go')"))
    with pytest.raises(OSError, match="undefined symbol: acme_go") as caught:
        process().call()
    (note,) = caught.value.__notes__
    assert "acme/plugin" in note
    assert "made-up-acme 1.0" in note


@pytest.mark.parametrize("requirement", ["torch<2.0", "torch>=99", "opgraft>=99"])
def test_b11_b12_a_backend_made_for_other_versions_is_never_imported(process, site, requirement):
    module = site.plugin("acme", requires=[requirement])
    record = process().backends["acme"]
    assert "incompatible" == record.status
    assert record.reason.startswith(f"needs {requirement}, found ")
    assert module not in sys.modules


def test_b12_a_disabled_backend_is_never_imported(process, site):
    module = site.plugin("acme", "raise SystemExit('imported')")
    for variables in ({"DENY": "acme"}, {"DENY": "made-up-acme"}, {"PLUGINS": ""}, {"PLUGINS": "other"}):
        assert "denied" == process(**variables).backends["acme"].status
    assert module not in sys.modules


def test_b13_absent_hardware_is_no_fault_and_forcing_it_raises_with_the_reason(process, site, caplog):
    site.plugin("npus", plugin_source("npus", platform="npu"))
    made = process(NoHardware())
    assert torch.equal(NATIVE, made.call())
    assert ("inactive", "no npu device") == (made.backends["npus"].status, made.backends["npus"].reason)
    assert [] == warnings_of(caplog)
    with pytest.raises(opgraft.NoKernelError) as caught:
        process(NoHardware(), FORCE="npus").call()
    assert "backend 'npus' (made-up-npus 1.0) is inactive: no npu device, and it is forced" == str(caught.value)


def module_level_calls(path):
    """Give the dotted names of what a module calls while it is imported."""
    waiting = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def test_b15_no_module_of_the_core_or_a_plugin_asks_for_devices_while_it_is_imported():
    asking = ("is_available", "device_count", "current_device", "get_device_properties", "get_device_capability")
    found = [
        f"{path.relative_to(REPOSITORY)}: {name}"
        for folder in ("core/src", "plugins", "examples")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        for name in module_level_calls(path)
        if name.rpartition(".")[2] in asking
    ]
    assert [] == found
