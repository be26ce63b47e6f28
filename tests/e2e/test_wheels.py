"""What the built wheels hold and say about themselves."""

from __future__ import annotations

import configparser
import re
import sys
import zipfile
from email.parser import HeaderParser
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if TYPE_CHECKING:
    from email.message import Message
    from pathlib import Path

IN_REPO_VERSION = "0.1.0"
PACKAGES = {
    "opgraft": "opgraft",
    "opgraft-cpu-reference": "opgraft_cpu_reference",
    "opgraft-triton-kernels": "opgraft_triton_kernels",
    "opgraft-cuda": "opgraft_cuda",
    "opgraft-hip": "opgraft_hip",
    "opgraft-acme": "opgraft_acme",
    "opgraft-opencl": "opgraft_opencl",
}
BACKENDS = {
    "opgraft": [],
    "opgraft-cpu-reference": ["cpu_reference"],
    "opgraft-triton-kernels": [],
    "opgraft-cuda": ["cuda"],
    "opgraft-hip": ["hip"],
    "opgraft-acme": ["acme"],
    "opgraft-opencl": ["opencl"],
}
NEEDS = {
    "opgraft": {"torch", "pluggy", "importlib-metadata", "packaging", "typer", "rich"},
    "opgraft-cpu-reference": {"opgraft", "torch"},
    "opgraft-triton-kernels": {"opgraft", "torch", "triton"},
    "opgraft-cuda": {"opgraft", "torch", "opgraft-triton-kernels"},
    "opgraft-hip": {"opgraft", "torch", "opgraft-triton-kernels"},
    "opgraft-acme": {"opgraft", "torch"},
    "opgraft-opencl": {"opgraft", "torch", "numpy", "pyopencl"},
}
each_distribution = pytest.mark.parametrize("name", sorted(PACKAGES))


def contents(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def read(wheel: Path, file_name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(f".dist-info/{file_name}")]
        return archive.read(path).decode()


def headers(wheel: Path) -> Message:
    return HeaderParser().parsestr(read(wheel, "METADATA"))


def entry_points(wheel: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(delimiters=("=",))
    if any(name.endswith(".dist-info/entry_points.txt") for name in contents(wheel)):
        parser.read_string(read(wheel, "entry_points.txt"))
    return parser


def requirements(wheel: Path) -> dict[str, Requirement]:
    """What an installation without extras asks for, on a Python that has tomllib."""
    every = map(Requirement, headers(wheel).get_all("Requires-Dist", []))
    environment = {"python_version": "3.12", "extra": ""}
    return {
        requirement.name: requirement
        for requirement in every
        if requirement.marker is None or requirement.marker.evaluate(environment)
    }


@pytest.mark.parametrize("name", sorted(PACKAGES.keys() - {"opgraft-acme", "opgraft-opencl"}))
def test_a_wheel_of_ours_brings_its_license(wheels, name):
    assert read(wheels[name], "licenses/LICENSE").lstrip().startswith("Apache License")


@each_distribution
def test_a_wheel_is_named_after_its_distribution(name, wheels):
    assert name == headers(wheels[name])["Name"]


@each_distribution
def test_a_wheel_holds_one_typed_package_and_no_tests(name, wheels):
    files = contents(wheels[name])
    top_level = {file.split("/")[0] for file in files if ".dist-info/" not in file}
    assert {PACKAGES[name]} == top_level
    assert f"{PACKAGES[name]}/py.typed" in files
    assert [] == [file for file in files if re.search(r"(^|/)(tests?/.*|conftest)\.py$", file)]


@each_distribution
def test_a_wheel_runs_on_every_supported_python(name, wheels):
    assert wheels[name].name.endswith("-py3-none-any.whl")
    assert ">=3.10" == headers(wheels[name])["Requires-Python"]


@each_distribution
def test_a_wheel_carries_its_licence_and_its_readme(name, wheels):
    metadata = headers(wheels[name])
    assert "Apache-2.0" == metadata["License-Expression"]
    assert "text/markdown" == metadata["Description-Content-Type"].split(";")[0]
    assert len(metadata.get_payload()) > 100
    assert metadata["Summary"]


@each_distribution
def test_a_wheel_asks_for_what_the_design_says(name, wheels):
    assert NEEDS[name] == set(requirements(wheels[name]))


@pytest.mark.parametrize("name", sorted(set(PACKAGES) - {"opgraft"}))
def test_a_plugin_names_the_range_of_the_core_and_of_torch_that_it_was_made_for(name, wheels):
    asked = requirements(wheels[name])
    assert asked["opgraft"].specifier.contains(IN_REPO_VERSION)
    assert not asked["opgraft"].specifier.contains("1.0.0")
    assert SpecifierSet() != asked["torch"].specifier


def test_the_example_vendor_needs_the_first_torch_with_devices_in_pure_python(wheels):
    torch = requirements(wheels["opgraft-acme"])["torch"].specifier
    assert (False, True) == (torch.contains("2.9.1"), torch.contains("2.10.0"))


@each_distribution
def test_in_repo_distributions_share_one_version_and_the_examples_have_their_own(name, wheels):
    shares = headers(wheels[name])["Version"] == IN_REPO_VERSION
    assert (name not in {"opgraft-acme", "opgraft-opencl"}) == shares


@each_distribution
def test_a_wheel_offers_the_backends_that_the_design_gives_it(name, wheels):
    parser = entry_points(wheels[name])
    group = parser["opgraft.backends"] if parser.has_section("opgraft.backends") else {}
    assert BACKENDS[name] == list(group)


@each_distribution
def test_only_the_core_has_a_console_script(name, wheels):
    parser = entry_points(wheels[name])
    scripts = dict(parser["console_scripts"]) if parser.has_section("console_scripts") else {}
    assert ({"opgraft": "opgraft.cli:app"} if name == "opgraft" else {}) == scripts


def test_the_source_distribution_of_the_core_builds_the_same_wheel(wheels, projects, tmp_path, run_checked):
    # Without --wheel, build makes the sdist first and the wheel from it.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)]
    run_checked([*command, str(projects["opgraft"])])
    (rebuilt,) = tmp_path.glob("*.whl")
    assert contents(wheels["opgraft"]) == contents(rebuilt)
