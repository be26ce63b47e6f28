"""The lock: what changed since is refused before anything is imported, and named."""

from __future__ import annotations

import base64
import hashlib
import sys
from pathlib import Path

import pytest
import torch
from installation import plugin_source

import opgraft
from opgraft.cli._lock import written
from opgraft.discovery import scan
from opgraft.lockfile import Lock, installed
from opgraft.planning import plan
from opgraft.policy import read_toml

NATIVE = torch.tensor([0, 0, 4])
REMEDY = "`opgraft lock --check` shows all of it, `opgraft lock` accepts it"


def record(folder, *files):
    """Write the RECORD that pip would have written."""
    root = folder.parent
    lines = []
    for name in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256((root / name).read_bytes()).digest())
        lines.append(f"{name},sha256={digest.rstrip(b'=').decode()},1")
    lines += [f"{folder.name}/INSTALLER,sha256=pip,4", f"{folder.name}/RECORD,,", "../../bin/tool,sha256=x,1"]
    (folder / "RECORD").write_text("\n".join(lines), encoding="utf-8")


@pytest.fixture
def locked(process, site, tmp_path):
    """Give module, metadata folder and lock of a plugin that was installed when the lock was made."""
    module = site.module("made_up_locked", plugin_source("acme"))
    folder = site.distribution("opgraft-acme", {"acme": module})
    record(folder, f"{module}.py")
    made = process()
    path = tmp_path / "opgraft.lock"
    path.write_text(written(scan([str(site.path)]), plan(made.registry)), encoding="utf-8")
    sys.modules.pop(module, None)
    return module, folder, str(path)


def refused(process, path):
    with pytest.raises(opgraft.PluginError) as caught:
        process(LOCK=path).call()
    first, *lines = str(caught.value).splitlines()
    return first, [line.strip() for line in lines]


def test_a_process_that_is_as_locked_runs(process, locked):
    assert "acme" == process(LOCK=locked[2]).call()


def test_the_file_lists_distributions_backends_and_winners(locked):
    content = read_toml(Path(locked[2]))
    assert {"distribution", "backend", "plan"} == content.keys()
    assert {"opgraft", "opgraft-acme", "torch"} <= {one["name"] for one in content["distribution"]}
    assert [{"name": "acme", "distribution": "opgraft-acme", "entry_point": locked[0]}] == content["backend"]
    assert {"acme/plugin clamp_position"} == {one["winner"] for one in content["plan"] if one["platform"] == "cpu"}


def test_a_changed_file_is_refused_before_anything_is_imported(process, site, locked):
    module, _, path = locked
    site.module(module, plugin_source("acme", "x = 1"))
    assert (
        f"lock {path} does not hold; {REMEDY}",
        [f"opgraft-acme 1.0: its files are not those of the lock: {module}.py"],
    ) == refused(process, path)
    assert module not in sys.modules


def test_a_missing_file_is_a_changed_one(process, site, locked):
    module, _, path = locked
    (site.path / f"{module}.py").unlink()
    assert [f"opgraft-acme 1.0: its files are not those of the lock: {module}.py"] == refused(process, path)[1]


def test_a_file_that_record_admits_and_the_lock_does_not_is_refused(process, site, locked):
    module, folder, path = locked
    site.module(module, plugin_source("acme", "x = 1"))
    record(folder, f"{module}.py")
    assert ["opgraft-acme 1.0: its files are not those of the lock"] == refused(process, path)[1]


def test_what_the_installer_notes_and_compiles_is_no_change(process, site, locked):
    _, folder, path = locked
    text = (folder / "RECORD").read_text(encoding="utf-8").replace("sha256=pip", "sha256=uv")
    text += "\n__pycache__/made_up_locked.cpython-311.pyc,,\n"
    (folder / "RECORD").write_text(text, encoding="utf-8")
    assert "acme" == process(LOCK=path).call()


def test_another_version_is_refused(process, locked):
    _, folder, path = locked
    metadata = folder / "METADATA"
    metadata.write_text(metadata.read_text(encoding="utf-8").replace("1.0", "1.1"), encoding="utf-8")
    assert ["opgraft-acme: 1.0 in the lock, 1.1 here"] == refused(process, path)[1]


def test_an_uninstalled_distribution_is_refused(process, locked):
    _, folder, path = locked
    for file in folder.iterdir():
        file.unlink()
    assert ["opgraft-acme: 1.0 in the lock, nothing here"] == refused(process, path)[1]


def test_a_package_that_slipped_in_is_not_imported_and_changes_nothing(process, site, locked):
    module = site.plugin("intruder", plugin_source("intruder", priority=1000))
    made = process(LOCK=locked[2])
    assert "acme" == made.call()
    assert ("denied", f"not in the allow-list of lock {locked[2]}, which lists opgraft-acme") == (
        made.backends["intruder"].status,
        made.backends["intruder"].reason,
    )
    assert module not in sys.modules


def test_a_package_that_claims_the_name_of_a_locked_one_does_not_come_between(process, site, locked):
    site.distribution("impostor", {"acme": "a_module_that_nobody_has"})
    made = process(LOCK=locked[2])
    assert ("acme", "opgraft-acme") == (made.call(), made.backends["acme"].distribution)


def test_a_policy_that_chooses_otherwise_is_refused_with_every_row(process, locked):
    first, lines = refused(lambda LOCK: process(LOCK=LOCK, ORDER="*=native"), locked[2])  # noqa: N803
    assert f"lock {locked[2]} does not hold (lock against this process); {REMEDY}" == first
    assert [
        f"attention.clamp_position cpu {dtype}: acme/plugin clamp_position (opgraft-acme 1.0) against native"
        for dtype in ("int32", "int64")
    ] == lines


def test_a_scope_is_no_difference(process, locked):
    made = process(LOCK=locked[2])
    with made.registry.policy.use(force="native"):
        assert torch.equal(NATIVE, made.call())
    assert "acme" == made.call()


def test_the_allow_list_counts_beside_the_lock(process, locked):
    made = process(LOCK=locked[2], PLUGINS="other")
    assert "denied" == made.backends["acme"].status


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "{path}, a lock, cannot be read: No such file or directory"),
        ("x = ", "{path}, a lock, cannot be read: Invalid value (at end of document)"),
        ("plan = []", "{path} is no lock: KeyError: 'distribution'; write one with `opgraft lock`"),
        (
            "distribution = []\nplan = [{}]",
            (
                "{path} is no lock: TypeError: PlanRow.__init__() missing 7 required keyword-only arguments: 'op', "
                "'platform', 'arch', 'dtype', 'winner', 'distribution', and 'version'; write one with `opgraft lock`"
            ),
        ),
    ],
)
def test_a_lock_that_cannot_be_read_is_refused(process, tmp_path, content, message):
    path = tmp_path / "opgraft.lock"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(opgraft.PolicyError) as caught:
        process(LOCK=str(path)).call()
    assert message.format(path=path) == str(caught.value)


def test_what_a_backend_needs_is_locked_and_its_files_are_held_if_it_needs_the_core(site):
    site.module("kernels_of_acme", "x = 1")
    needed = site.distribution("kernels-of-acme", {"x": "y"}, group="x", requires=["opgraft", "third"])
    record(needed, "kernels_of_acme.py")
    third = site.distribution("third", {"x": "y"}, group="x")
    site.module("third", "x = 1")
    record(third, "third.py")
    site.distribution("opgraft-acme", {"acme": site.module("acme_locked", "")}, requires=["opgraft", "kernels-of-acme"])
    here = scan([str(site.path)])
    before = installed(here)
    assert {"kernels-of-acme", "opgraft", "opgraft-acme", "third", "torch"} <= before.keys()
    site.module("kernels_of_acme", "x = 2")
    site.module("third", "x = 2")
    changed = {name for name, one in installed(here).items() if one != before[name]}
    assert {"kernels-of-acme"} == changed


def test_the_sources_of_an_editable_installation_are_held(site):
    folder = site.distribution("opgraft-acme", {"acme": site.module("acme_editable_too.plugin", "x = 1")})
    record(folder, "acme_editable_too/__init__.py")
    (folder / "direct_url.json").write_text('{"dir_info": {"editable": true}}', encoding="utf-8")
    here = scan([str(site.path)])
    before = installed(here)["opgraft-acme"]
    site.module("acme_editable_too.plugin", "x = 2")
    assert before != installed(here)["opgraft-acme"]


def test_a_lock_reads_what_it_wrote(locked, site):
    held = Lock(locked[2])
    assert [] == held.changes(scan([str(site.path)]))
