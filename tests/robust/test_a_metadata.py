"""Field reports A: what is wrong with metadata."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from installation import NoHardware, Site, plugin_source

import opgraft
from opgraft.discovery import scan


def test_a1_one_package_seen_twice_is_registered_once_and_loaded_once(process, site):
    module = site.module(
        "made_up_twice", "import builtins\nbuiltins.loads = getattr(builtins, 'loads', 0) + 1\n" + plugin_source("acme")
    )
    first = site.distribution("opgraft-acme", {"acme": module})
    second = site.distribution("opgraft_acme", {"acme": module}, kind="egg-info")
    (record,) = process().registry.backends()
    import builtins

    loads = builtins.loads
    del builtins.loads
    assert ("active", 1) == (record.status, loads)
    (entry,) = scan([str(site.path)]).entries
    assert {str(first), str(second)} == set(entry.locations)


def test_a1_the_copy_that_is_first_on_the_path_counts(tmp_path):
    one, two = Site(tmp_path / "one"), Site(tmp_path / "two")
    one.distribution("opgraft-acme", {"acme": "first"}, version="1.0")
    two.distribution("opgraft-acme", {"acme": "second"}, version="2.0")
    seen = [scan([str(a.path), str(b.path)]).entries[0].value for a, b in ((one, two), (two, one))]
    assert ["first", "second"] == seen


def test_a1_of_two_versions_in_one_folder_the_higher_counts(site):
    for version in ("1.9", "1.10", "1.2"):
        site.distribution("opgraft-acme", {"acme": f"v{version}"}, version=version)
    (entry,) = scan([str(site.path)]).entries
    assert ("1.10", 3) == (entry.version, len(entry.locations))


def test_a1_a_folder_reached_by_two_paths_is_one_copy(site, tmp_path):
    site.distribution("opgraft-acme", {"acme": "a"})
    link = tmp_path / "link"
    link.symlink_to(site.path)
    (entry,) = scan([str(site.path), str(link), str(site.path)]).entries
    assert 1 == len(entry.locations)


def test_a3_an_empty_left_over_folder_hides_no_backend(process, site):
    (site.path / "made_up_acme-0.9.dist-info").mkdir()
    (site.path / "made_up_acme-1.1.egg-info").mkdir()
    site.plugin("acme")
    assert "active" == process().backends["acme"].status


@pytest.mark.parametrize("name", ["my-npu", "class", "native", "a b", "Npu", "triton"])
def test_a4_a_bad_name_is_told_once_with_its_distribution_and_breaks_nobody(process, site, caplog, name):
    site.distribution("vendor-x", {name: "a_module_that_nobody_has"})
    site.plugin("acme")
    made = process()
    assert "acme" == made.call()
    made.call()
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told.startswith(f"backend {name!r} (vendor-x 1.0) quarantined: illegal name {name!r}")


def test_a5_an_editable_install_is_found_by_its_entry_point_alone(process, site, tmp_path):
    # A finder in place of a path entry: iter_modules() sees nothing, the metadata does.
    source = tmp_path / "elsewhere"
    Site(source).module("acme_editable", plugin_source("acme"))
    finder = (
        "import importlib.util, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'acme_editable':\n"
        f"            return importlib.util.spec_from_file_location(name, {str(source / 'acme_editable.py')!r})\n"
        "sys.meta_path.append(Finder())\n"
    )
    before = list(sys.meta_path)
    exec(finder, {})  # noqa: S102 - what a .pth file of an editable install does
    site.distribution("opgraft-acme", {"acme": "acme_editable"})
    try:
        assert "active" == process().backends["acme"].status
    finally:
        sys.meta_path[:] = before
        sys.modules.pop("acme_editable", None)


def test_a5_a_module_that_is_advertised_and_given_by_hand_counts_once(process, site):
    module = site.plugin("acme")
    made = process()
    __import__(module)
    record = made.registry.register_backend(sys.modules[module])
    assert ("made-up-acme", 1) == (record.distribution, len(made.registry.backends()))


def test_a7_a_backend_installed_later_is_seen_by_refresh_and_the_policy_stays(process, site):
    made = process()
    made.registry.policy.set(order="*=acme,native")
    assert torch.equal(torch.tensor([0, 0, 4]), made.call())
    generation = made.registry.generation
    site.plugin("acme", plugin_source("acme", priority=-1))
    assert {} == made.backends
    made.registry.refresh()
    assert "acme" == made.call()
    assert made.registry.generation > generation


def test_a7_a_backend_that_was_uninstalled_is_gone_after_refresh(process, site):
    site.plugin("acme")
    made = process()
    assert "acme" == made.call()
    for path in (site.path / "made_up_acme-1.0.dist-info").iterdir():
        path.unlink()
    (site.path / "made_up_acme-1.0.dist-info").rmdir()
    made.registry.refresh()
    assert torch.equal(torch.tensor([0, 0, 4]), made.call())


def test_a8_a_frozen_application_is_told_what_to_do_and_can_register_by_hand(process, monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    made = process()
    assert [("frozen application", "no package metadata is here: give each backend to opgraft.register_backend")] == [
        (one.subject, one.message) for one in made.registry.discovery().findings
    ]

    class Plugin:
        @opgraft.hookimpl
        def opgraft_backend(self):
            return opgraft.Backend(name="acme", platforms=("cpu",))

        @staticmethod
        @opgraft.forward("attention.clamp_position", kernel_backend="plugin")
        def clamp_position(seq_lens, *, out=None):
            return "acme"

    made.registry.register_backend(Plugin())
    assert "acme" == made.call()


def test_a11_a_plugin_with_many_kernels_is_loaded_and_its_fault_told_once(process, site, caplog):
    site.plugin("acme", "raise OSError('no driver')")
    made = process()
    for _ in range(3):
        made.call()
        made.registry.backends()
    assert 1 == sum("no driver" in record.getMessage() for record in caplog.records)


def test_a_unreadable_metadata_stops_no_call(process, site):
    (site.distribution("broken", {"broken": "x"}) / "entry_points.txt").write_bytes(b"\xff")
    site.plugin("acme")
    assert "acme" == process(NoHardware()).call()


def test_importing_the_core_looks_at_no_metadata(tmp_path):
    site = Site(tmp_path)
    (site.distribution("broken", {"broken": "x"}) / "entry_points.txt").write_bytes(b"\xff")
    source = "import opgraft, sys; print('importlib_metadata' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "False False\n" == done.stdout
