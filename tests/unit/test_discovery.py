"""What is found in metadata, and what is decided before anything is imported."""

from __future__ import annotations

import random
import sys

import importlib_metadata
import pytest
from installation import CATALOGUE, NoHardware, Site, plugin_source

from opgraft.discovery import Advertised, Installation, discover, scan, unmet
from opgraft.policy import Policy

VERSIONS = {"opgraft": "0.1.0", "torch": "2.13.0+cpu"}


@pytest.fixture
def site(tmp_path):
    """Give an empty folder for ``sys.path``."""
    return Site(tmp_path)


# ------------------------------------------------------------------------------------------- scan


def test_an_empty_path_advertises_nothing(tmp_path):
    assert ((), ()) == (scan([str(tmp_path)]).entries, scan([str(tmp_path)]).findings)


def test_an_entry_point_is_found_with_all_that_the_metadata_says(site):
    folder = site.distribution("opgraft-acme", {"acme": "opgraft_acme.plugin"}, requires=["torch>=2.9"])
    assert (
        Advertised(
            name="acme",
            value="opgraft_acme.plugin",
            distribution="opgraft-acme",
            version="1.0",
            location=str(folder),
            locations=(str(folder),),
            requirements=("torch>=2.9",),
        ),
    ) == scan([str(site.path)]).entries


def test_scanning_imports_nothing_of_a_plugin(site):
    module = site.plugin("acme")
    with site.on_path():
        scan()
        assert module not in sys.modules


def test_entries_come_in_the_order_of_their_names(site):
    site.distribution("z", {"b": "b", "a": "a"})
    site.distribution("a", {"c": "c"})
    assert ["a", "b", "c"] == [entry.name for entry in scan([str(site.path)]).entries]


def test_an_egg_info_says_as_much_as_a_dist_info(site):
    site.distribution("acme", {"acme": "acme"}, kind="egg-info", requires=["torch>=2.9"])
    (entry,) = scan([str(site.path)]).entries
    assert ("acme", "1.0", ("torch>=2.9",)) == (entry.distribution, entry.version, entry.requirements)


def test_name_and_version_come_from_the_folder_where_there_is_no_metadata_file(site):
    folder = site.distribution("made-up", {"acme": "acme"}, version="2.5")
    (folder / "METADATA").unlink()
    (entry,) = scan([str(site.path)]).entries
    assert ("made_up", "2.5") == (entry.distribution, entry.version)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"\xff\xfe", "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"[opgraft.backends]\nno equals sign\n", "TypeError: "),
    ],
    ids=["encoding", "syntax"],
)
def test_broken_entry_points_of_one_distribution_are_a_finding_and_hide_no_other(site, content, cause):
    folder = site.distribution("broken", {"broken": "broken"})
    (folder / "entry_points.txt").write_bytes(content)
    site.distribution("fine", {"fine": "fine"})
    found = scan([str(site.path)])
    assert ["fine"] == [entry.name for entry in found.entries]
    (finding,) = found.findings
    assert str(folder) == finding.subject
    assert finding.message.startswith(f"its metadata cannot be read: {cause}")


def test_a_finder_that_raises_is_a_finding(site, monkeypatch):
    def distributions(**kwargs):
        yield from ()
        raise RuntimeError("no metadata today")

    monkeypatch.setattr(importlib_metadata, "distributions", distributions)
    (finding,) = scan().findings
    assert ("sys.meta_path", "looking for metadata raised RuntimeError: no metadata today") == (
        finding.subject,
        finding.message,
    )


def test_a_distribution_installed_since_is_found(site):
    path = [str(site.path)]
    assert () == scan(path).entries
    site.distribution("acme", {"acme": "acme"})
    assert ["acme"] == [entry.name for entry in scan(path).entries]


def test_versions_of_the_core_and_of_torch_are_those_of_their_metadata():
    assert {name: importlib_metadata.version(name) for name in ("opgraft", "torch")} == scan().versions


# --------------------------------------------------------------------------------- versions needed


@pytest.mark.parametrize(
    ("requirement", "torch", "reason"),
    [
        ("torch<2.10", "2.13.0", "needs torch<2.10, found 2.13.0"),
        ("torch (>=2.14)", "2.13.0+cpu", "needs torch>=2.14, found 2.13.0+cpu"),
        ("Torch>=2.9,<2.13", "2.13.0", "needs Torch<2.13,>=2.9, found 2.13.0"),
        ("torch>=2.13", "2.13.0a0+git123", ""),
        ("torch>=2.13", "2.13.0.dev20260101", ""),
        ("torch<2.13", "2.13.0a0", "needs torch<2.13, found 2.13.0a0"),
        ("torch!=2.13.0", "2.13.0rc1", "needs torch!=2.13.0, found 2.13.0rc1"),
        ("torch==2.13.0", "2.13.0+cu130", ""),
        ("torch==2.13.0+cu130", "2.13.0+cu130", ""),
        ("torch==2.13.0+cu130", "2.13.0+cpu", "needs torch==2.13.0+cu130, found 2.13.0+cpu"),
        ("torch===2.13.0+cu130", "2.13.0+cu130", ""),
        ("torch==2.13.0rc1", "2.13.0rc1", ""),
        ("torch>=2.13.0.post1", "2.13.0.post1", ""),
        ("torch~=2.12", "2.13.0.dev1", ""),
        ("torch", "2.13.0", ""),
        ("torch @ https://example.org/torch.whl", "2.13.0", ""),
        ("torch>=99; extra == 'gpu'", "2.13.0", ""),
        ("torch>=99; python_version < '3'", "2.13.0", ""),
        ("torch>=99; python_version > '3'", "2.13.0", "needs torch>=99, found 2.13.0"),
        ("torch>>2", "2.13.0", "its requirement 'torch>>2' cannot be read"),
        ("torch>=99", "", ""),
        ("torch>=99", "some build", ""),
        ("numpy>=99", "2.13.0", ""),
        ("not a requirement at all", "2.13.0", ""),
    ],
)
def test_what_a_requirement_says_of_the_installed_torch(requirement, torch, reason):
    assert reason == unmet([requirement], {"torch": torch, "opgraft": "0.1.0"})


def test_every_requirement_that_is_not_met_is_named():
    assert "needs opgraft>=9, found 0.1.0; needs torch<2.10, found 2.13.0+cpu" == unmet(
        ["opgraft>=9", "torch<2.10", "torch>=2"], VERSIONS
    )


def test_a_core_without_metadata_meets_every_requirement():
    assert "" == unmet(["opgraft>=9"], {"opgraft": "", "torch": "2.13.0"})


# ---------------------------------------------------------------------------- judged before import


def judge(*entries, **policy):
    found = discover(Installation(entries=entries, versions=VERSIONS), Policy(**policy), CATALOGUE, NoHardware())
    return found.records


def advertised(name, distribution, value="a_module_that_nobody_has", **more):
    return Advertised(name=name, value=value, distribution=distribution, version="1.0", **more)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (name, f"illegal name {name!r}: a backend is named by a lower-case word, no Python keyword")
        for name in ("my-npu", "class", "", "a b", "Acme", "9npu", "_npu", "ünpu")
    ]
    + [
        (name, f"illegal name {name!r}: this word is reserved")
        for name in ("native", "auto", "none", "all", "op", "torch", "triton", "cute_dsl")
    ],
)
def test_an_illegal_name_is_quarantined_and_its_distribution_named(name, reason):
    (record,) = judge(advertised(name, "vendor-a"))
    assert ("quarantined", reason, "vendor-a") == (record.status, record.reason, record.distribution)


def test_two_distributions_with_one_name_are_in_conflict_and_neither_is_loaded():
    (record,) = judge(advertised("npu", "vendor-a"), advertised("npu", "vendor-b", "other"))
    assert (
        "npu",
        "conflict",
        (
            "claimed by vendor-a 1.0 (a_module_that_nobody_has), vendor-b 1.0 (other); none is used: name one "
            "distribution in OPGRAFT_PLUGINS, or the others in OPGRAFT_DENY"
        ),
        "vendor-a, vendor-b",
    ) == (record.name, record.status, record.reason, record.distribution)


@pytest.mark.parametrize(
    "policy", [{"plugins": frozenset({"vendor-b"})}, {"deny": frozenset({"vendor_a"})}], ids=["allow-list", "denial"]
)
def test_a_policy_that_leaves_one_distribution_settles_a_conflict(site, policy):
    module = site.module("vendor_b_plugin", plugin_source("npu"))
    site.distribution("vendor-a", {"npu": "a_module_that_nobody_has"})
    site.distribution("vendor-b", {"npu": module})
    record = site.records(Policy(**policy))["npu"]
    assert ("active", "vendor-b") == (record.status, record.distribution)


def test_a_policy_that_names_the_backend_alone_settles_no_conflict():
    (record,) = judge(advertised("npu", "vendor-a"), advertised("npu", "vendor-b"), plugins=frozenset({"npu"}))
    assert "conflict" == record.status


def test_one_distribution_that_states_two_values_for_a_name_is_in_conflict_with_itself():
    (record,) = judge(advertised("npu", "vendor-a"), advertised("npu", "vendor-a", "other"))
    assert ("conflict", "vendor-a") == (record.status, record.distribution)


def test_a_denied_backend_is_never_imported(site):
    module = site.plugin("acme")
    with site.on_path():
        records = site.records(Policy(deny=frozenset({"acme"}), sources={"deny": "OPGRAFT_DENY"}))
        assert ("denied", "'acme' is denied by OPGRAFT_DENY") == (records["acme"].status, records["acme"].reason)
        assert module not in sys.modules


def test_an_incompatible_backend_is_never_imported(site):
    module = site.plugin("acme", requires=["torch<2.0", "opgraft"])
    with site.on_path():
        record = site.records()["acme"]
        assert ("incompatible", f"needs torch<2.0, found {importlib_metadata.version('torch')}") == (
            record.status,
            record.reason,
        )
        assert module not in sys.modules


def test_denial_comes_before_the_judgement_of_versions(site):
    site.plugin("acme", requires=["torch<2.0"])
    assert "denied" == site.records(Policy(deny=frozenset({"acme"})))["acme"].status


def test_the_order_of_entries_never_matters(site):
    modules = {name: site.module(f"shuffled_{name}", plugin_source(name)) for name in "abcd"}
    entries = [advertised(name, f"dist-{name}", modules[name]) for name in modules]
    entries += [advertised("twice", f"dist-{n}") for n in range(3)] + [advertised("class", "dist-x")]
    with site.on_path():
        seen = set()
        for seed in range(20):
            random.Random(seed).shuffle(entries)  # noqa: S311 - orders that a failure repeats
            records = sorted(judge(*entries), key=lambda record: record.name)
            seen.add(tuple((r.name, r.status, tuple(map(str, r.kernels))) for r in records))
            assert [r.name for r in records] == [r.name for r in judge(*entries)]
    assert 1 == len(seen)


def test_discovering_two_hundred_plugins_takes_about_twice_as_long_as_a_hundred(site):
    # Counted, not timed: every metadata file is read once and every hook is looked at once.
    few, many = (calls_to_discover(Site(site.path / str(n)), n) for n in (20, 40))
    assert many <= 2.2 * few


def calls_to_discover(site, plugins):
    for number in range(plugins):
        site.plugin(f"many{number}")
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(1) if event == "call" else None)
    try:
        site.discover()
    finally:
        sys.setprofile(None)
    return len(calls)
