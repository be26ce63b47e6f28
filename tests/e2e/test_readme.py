"""What the README shows works as it stands there."""

from __future__ import annotations

import re

import pytest


@pytest.fixture
def examples(projects):
    """Give the Python blocks of the README: the caller's, then the vendor's."""
    text = (projects["opgraft"] / "README.md").read_text(encoding="utf-8")
    caller, vendor = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return {"caller": caller, "vendor": vendor}


def test_the_examples_are_about_ten_lines_long(examples):
    for source in examples.values():
        assert len([line for line in source.splitlines() if line]) <= 11


def test_the_callers_example_runs(everything, examples):
    assert "cpu_reference" in everything.python(examples["caller"])


def test_the_vendors_example_is_found_as_a_backend(core_only, made_up, examples):
    made_up.plugin("acme", source=examples["vendor"])
    record = core_only.backends(PYTHONPATH=str(made_up.path))["acme"]
    assert ("inactive", ["acme"]) == (record["status"], record["platforms"])


def test_the_makefile_has_the_commands_that_the_readme_names(projects, run_checked):
    text = (projects["opgraft"] / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|\$ )make ([a-z-]+)", text))
    said = run_checked(["make", "help"], cwd=projects["opgraft"]).stdout
    assert named <= {line.split()[1] for line in said.splitlines()}
