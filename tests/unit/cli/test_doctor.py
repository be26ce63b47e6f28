"""What doctor finds, each finding with its whole text."""

from __future__ import annotations

import json
import sys
import types

import pytest
from installation import Site, plugin_source
from typer.testing import CliRunner

import opgraft
from opgraft.cli import app
from opgraft.cli._findings import of_policy, of_records, ties
from opgraft.cli._isolated import crash
from opgraft.cli._metadata import metadata_findings, second_cores
from opgraft.discovery import Advertised, Finding, Installation, scan
from opgraft.hardware import CapabilityRequirement
from opgraft.policy import OrderRule, Policy
from opgraft.spec import BackendRecord, KernelBackend, KernelSpec

OP = "attention.clamp_position"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Give a folder that is all there is on ``sys.path``."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return Site(tmp_path)


def found():
    return metadata_findings(scan())


# --------------------------------------------------------------------------------------- metadata


def test_a_clean_installation_has_no_findings(site):
    site.distribution("opgraft-acme", {"acme": "opgraft_acme"})
    site.distribution("unrelated", {"x": "y"}, group="console_scripts")
    site.distribution("torch-acme", {"x": "y"}, group="torch.backends")
    assert [] == found()


def test_a1_two_copies_of_one_distribution_are_shown_with_both_places(site):
    one = site.distribution("opgraft-acme", {"acme": "opgraft_acme"})
    two = site.distribution("opgraft-acme", {"acme": "opgraft_acme"}, kind="egg-info")
    (finding,) = found()
    assert "opgraft-acme" == finding.subject
    assert finding.message.startswith("2 copies of its metadata: ")
    assert str(one) in finding.message
    assert str(two) in finding.message


def test_a3_an_empty_metadata_folder_is_named(site):
    (site.path / "opgraft_acme-1.0.dist-info").mkdir()
    site.distribution("opgraft-acme", {"acme": "opgraft_acme"}, version="1.1")
    assert [
        Finding(
            str(site.path / "opgraft_acme-1.0.dist-info"),
            "metadata without content, left over from an uninstall; delete the folder, or install again",
        )
    ] == found()
    assert ["acme"] == [entry.name for entry in scan().entries]


@pytest.mark.parametrize("group", ["opgraft.backend", "opgraft_backends", "opgraft.plugins", "opgrft.backends"])
def test_a9_a_misspelt_group_is_named_with_the_right_one(site, group):
    folder = site.distribution("opgraft-acme", {"acme": "opgraft_acme"}, group=group)
    assert [Finding(folder.name, f"unknown entry-point group {group!r}; did you mean 'opgraft.backends'?")] == found()


def record(folder, *paths):
    (folder / "RECORD").write_text("".join(f"{path},sha256=x,1\n" for path in paths), encoding="utf-8")


def test_l1_a_file_of_two_distributions_is_found_if_one_of_them_is_a_backends(site):
    record(site.distribution("opgraft-acme", {"acme": "a"}), "shared/__init__.py", "shared/one.py")
    record(site.distribution("other", {}, group="x"), "shared/__init__.py", "shared/two.py")
    record(site.distribution("third", {}, group="x"), "elsewhere/__init__.py")
    record(site.distribution("fourth", {}, group="x"), "elsewhere/__init__.py")
    assert [
        Finding(str(site.path / "shared/__init__.py"), "installed by opgraft-acme and by other; the last one counts"),
        Finding("shared", "package of opgraft-acme and of other; one may hide the other"),
    ] == found()


def test_a_namespace_package_may_have_several_owners(site):
    record(site.distribution("opgraft-acme", {"acme": "a"}), "vendor/acme/__init__.py")
    record(site.distribution("other", {}, group="x"), "vendor/other/__init__.py")
    assert [] == found()


def test_c10_a_second_copy_of_the_core_is_found(site):
    record(site.distribution("opgraft", {}, group="x"), "opgraft/__init__.py")
    record(site.distribution("engine", {}, group="x"), "opgraft/__init__.py")
    assert "package of engine and of opgraft; one may hide the other" == found()[-1].message


def test_metadata_that_cannot_be_decoded_is_found_once(site):
    folder = site.distribution("opgraft-acme", {"acme": "a"})
    (folder / "entry_points.txt").write_bytes(b"\xff")
    (folder / "RECORD").write_bytes(b"\xff")
    (finding,) = found()
    assert finding.message.startswith("its metadata cannot be read: UnicodeDecodeError: ")


def test_c10_a_copy_of_the_core_under_another_name_is_found(monkeypatch):
    copy = types.ModuleType("engine.third_party.opgraft")
    copy.hookimpl, copy.__file__ = None, "/engine/third_party/opgraft/__init__.py"
    monkeypatch.setitem(sys.modules, copy.__name__, copy)
    assert [
        Finding(
            "engine.third_party.opgraft",
            "a second copy of the core, at /engine/third_party/opgraft/__init__.py; nothing here sees its plugins",
        )
    ] == list(second_cores())


# ---------------------------------------------------------------------------------------- records


@pytest.mark.parametrize("status", ["quarantined", "conflict", "incompatible"])
def test_a_faulty_backend_is_a_finding_with_its_owner(status):
    one = BackendRecord(name="acme", status=status, reason="why", distribution="opgraft-acme", version="1.0")
    assert [Finding("acme", f"{status} (opgraft-acme 1.0): why")] == list(of_records([one]))


@pytest.mark.parametrize("status", ["active", "inactive", "denied"])
def test_a_backend_that_is_as_it_should_be_is_none(status):
    assert [] == list(of_records([BackendRecord(name="acme", status=status, reason="why")]))


def test_refused_forwards_and_misspelt_hooks_are_findings():
    one = BackendRecord(name="acme", status="active", refused=("forward x",), findings=("hook y",))
    assert [Finding("acme", "forward x"), Finding("acme", "hook y")] == list(of_records([one]))


def kernel(backend, *, priority=50, built="triton", platform="cuda"):
    return KernelSpec(
        op=OP,
        backend=backend,
        kernel_backend=KernelBackend(built),
        target="module:function",
        priority=priority,
        capabilities=frozenset({CapabilityRequirement.device(platform)}),
    )


def active(name, **options):
    return BackendRecord(
        name=name, status="active", distribution=f"opgraft-{name}", version="1", kernels=(kernel(name, **options),)
    )


def test_c2_a_tie_between_two_backends_names_both():
    assert [
        Finding(
            "one",
            f"ties with two (opgraft-two 1) for {OP}: same platform, priority and kernel backend, so the name "
            "decides; say in OPGRAFT_ORDER which one you want",
        )
    ] == list(ties([active("one"), active("two")]))


@pytest.mark.parametrize("options", [{"priority": 51}, {"built": "jit"}, {"platform": "hip"}])
def test_kernels_that_differ_in_rank_or_platform_do_not_tie(options):
    assert [] == list(ties([active("one"), active("two", **options)]))


# ----------------------------------------------------------------------------------------- policy


def of(policy, *records):
    entries = (Advertised(name="acme", value="a", distribution="opgraft-acme"),)
    return [one.message for one in of_policy(policy, records, Installation(entries=entries))]


def test_words_of_the_policy_that_name_something_are_no_findings():
    policy = Policy(
        force="triton",
        order=(OrderRule("attention.*", ("acme", "native", "acme/plugin", "op/cuda")),),
        deny=frozenset({"opgraft_acme", "acme", "jit"}),
        plugins=frozenset({"opgraft-acme", "acme"}),
        require=("acme",),
    )
    assert [] == of(policy, BackendRecord(name="acme", status="active"))


def test_k1_a_word_of_the_policy_that_names_nothing_is_found_with_the_nearest():
    policy = Policy(
        force="tritn",
        order=(OrderRule("*", ("acne",)),),
        deny=frozenset({"acme/tritn"}),
        plugins=frozenset({"opgraft-acne"}),
        sources={"force": "OPGRAFT_FORCE", "order": "opgraft.toml"},
    )
    built = ", ".join(sorted({"acme", "native", "op", *KernelBackend.names()}))  # other tests may have registered some
    said = of(policy)
    assert (
        f"OPGRAFT_FORCE names 'tritn', which nothing here is called; did you mean 'triton'? Known: {built}" == said[0]
    )
    assert f"opgraft.toml names 'acne', which nothing here is called; did you mean 'acme'? Known: {built}" == said[1]
    assert said[2].startswith("default names 'acme/tritn', which nothing here is called")
    assert (
        "default names 'opgraft-acne', which nothing here is called; did you mean 'opgraft-acme'? "
        "Known: acme, native, op, opgraft-acme"
    ) == said[3]


def test_a_requirement_that_is_not_met_is_found_with_the_reason():
    policy = Policy(require=("acme", "acne"), sources={"require": "OPGRAFT_REQUIRE"})
    assert [
        "OPGRAFT_REQUIRE requires 'acme', which is inactive: no device",
        "OPGRAFT_REQUIRE requires 'acne', which is not installed; did you mean 'acme'? Known: acme",
    ] == of(policy, BackendRecord(name="acme", status="inactive", reason="no device"))


def test_a_rule_that_matches_no_op_is_found_with_the_nearest():
    policy = Policy(order=(OrderRule("attention.clamp_positio", ("acme",)),))
    (said,) = of(policy, BackendRecord(name="acme", status="active"))
    assert said.startswith(
        "default has a rule for 'attention.clamp_positio', which matches no op; did you mean 'attention.clamp_position'"
    )


# ---------------------------------------------------------------------------------- child process


def isolated(site, source, seconds=60.0):
    entry = Advertised(name="acme", value=site.module("made_up_isolated", source))
    with site.on_path():
        return crash(entry, seconds, {})


def test_a_plugin_that_loads_and_one_that_raises_end_no_process(tmp_path):
    assert "" == isolated(Site(tmp_path), plugin_source("acme"))
    assert "" == isolated(Site(tmp_path), "raise SystemExit(3)")


def test_a_segmentation_fault_is_the_plugins(tmp_path):
    said = isolated(Site(tmp_path), "import ctypes\nctypes.string_at(0)")
    assert said.startswith("loading and probing it was ended by SIGSEGV; it said: ")


def test_an_exit_behind_pythons_back_is_the_plugins(tmp_path):
    said = isolated(Site(tmp_path), "import os\nos.write(2, b'no driver\\n')\nos._exit(7)")
    assert "loading and probing it ended the process with exit code 7; it said: no driver" == said


def test_a_hang_is_the_plugins(tmp_path):
    said = isolated(Site(tmp_path), "import time\ntime.sleep(60)", seconds=1.0)
    assert "loading and probing it did not end within 1 s" == said


# ---------------------------------------------------------------------------------------- command


def test_the_report_names_policy_devices_and_places_and_exits_by_its_findings():
    result = CliRunner().invoke(app, ["doctor"])
    for title in ("Environment", "Policy", "Backends", "Metadata"):
        assert title in result.stdout.splitlines()
    for record in opgraft.backends():
        assert f"  {record.name}: {record.location}" in result.stdout.splitlines()
    (last,) = (line for line in result.stdout.splitlines() if line.startswith("Findings: "))
    assert ("Findings: none" == last) == (0 == result.exit_code)


def test_the_report_as_json_has_the_designed_keys():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    data = json.loads(result.stdout)
    assert ["findings", "backends", "policy", "environment"] == list(data)
    assert bool(data["findings"]) == (1 == result.exit_code)
    assert {"value": None, "source": "default"} == data["policy"]["force"]
    assert [record.name for record in opgraft.backends()] == [record["name"] for record in data["backends"]]
    assert "torch" in data["environment"]


def test_what_stops_discovery_is_a_finding(tmp_path):
    opgraft.set_policy(lock=str(tmp_path / "opgraft.lock"))
    try:
        result = CliRunner().invoke(app, ["doctor", "--json"])
    finally:
        opgraft.set_policy(lock=None)
    message = f"{tmp_path / 'opgraft.lock'}, a lock, cannot be read: No such file or directory"
    assert {"subject": "discovery", "message": message} in json.loads(result.stdout)["findings"]
    assert 1 == result.exit_code


def test_k3_a_setting_of_the_api_is_shown_with_its_source():
    with opgraft.use(force="native"):
        result = CliRunner().invoke(app, ["doctor"])
    assert "  force    native  opgraft.use" in result.stdout.splitlines()
