"""What must be seen from outside: what a command imports, and what hostile plugins do to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from installation import Site


@pytest.fixture
def opgraft_in_child(tmp_path):
    """Give a function that runs the command line in a process of its own."""
    site = Site(tmp_path / "site")
    site.path.mkdir()

    def run(*arguments, **variables):
        return subprocess.run(
            [sys.executable, "-m", "opgraft", *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site.path), "COLUMNS": "20", **variables},
        )

    run.site = site
    return run


IMPORTED = """
import sys
sys.argv[1:] = {arguments!r}
from opgraft.cli import app
try:
    app()
finally:
    print("imported:", *sys.modules, file=sys.stderr)
"""


def imported_by(arguments, site):
    result = subprocess.run(
        [sys.executable, "-c", IMPORTED.format(arguments=arguments)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(site.path)},
    )
    return result.stdout, set(result.stderr.splitlines()[-1].split())


def test_the_installed_list_imports_neither_torch_nor_typer_nor_rich_nor_a_plugin(opgraft_in_child):
    module = opgraft_in_child.site.plugin("acme")
    output, modules = imported_by(["list", "--installed"], opgraft_in_child.site)
    assert f"{module}\n" in output
    assert set() == modules & {"torch", "triton", "typer", "rich", module}


def test_b4_the_list_imports_plugins_and_neither_triton_nor_a_kernel_module(opgraft_in_child):
    module = opgraft_in_child.site.plugin("extra")
    output, modules = imported_by(["list"], opgraft_in_child.site)
    assert "extra " in output
    assert {module} == modules & {"triton", "opgraft_triton_kernels.attention", "opgraft_acme.kernels", module}


def test_a_piped_table_is_neither_coloured_nor_wrapped_nor_cut(opgraft_in_child):
    reason = "a reason that is much longer than any terminal is wide " * 4
    opgraft_in_child.site.plugin("acme_two", f"raise OSError({reason.strip()!r})")
    result = opgraft_in_child("list", FORCE_COLOR="1")
    (line,) = (line for line in result.stdout.splitlines() if "much longer" in line)
    assert line.endswith(reason.strip())
    assert "\x1b" not in result.stdout
    assert "…" not in result.stdout


def test_what_cannot_be_printed_is_escaped(opgraft_in_child):
    opgraft_in_child.site.plugin("acme_two", "raise OSError('\\x1b[31mred\\udc80 \xe9')")
    result = opgraft_in_child("list", PYTHONIOENCODING="ascii", OPGRAFT_PLUGINS="acme_two")
    assert 0 == result.returncode
    assert "OSError: \\x1b[31mred\\udc80 \\xe9" in result.stdout


def test_a_reader_that_has_seen_enough_is_no_fault(opgraft_in_child):
    for number in range(3):
        opgraft_in_child.site.plugin(f"many{number}")
    command = f"{sys.executable} -u -m opgraft list --installed | true"
    done = subprocess.run(["sh", "-c", command], check=False, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr


def test_an_unreadable_variable_ends_every_command_with_two_and_is_a_finding_of_doctor(opgraft_in_child):
    message = "OPGRAFT_STRICT: strict must be one of 1, true, yes, on, 0, false, no, off, got 'maybe'"
    result = opgraft_in_child("list", OPGRAFT_STRICT="maybe")
    assert (2, "", f"opgraft: {message}\n") == (result.returncode, result.stdout, result.stderr)
    result = opgraft_in_child("doctor", "--json", OPGRAFT_STRICT="maybe")
    assert 1 == result.returncode
    assert {"subject": "policy", "message": message} in json.loads(result.stdout)["findings"]


def test_doctor_reports_a_crash_a_hang_and_a_fault_in_one_run(opgraft_in_child):
    site = opgraft_in_child.site
    site.plugin("crashes", "import ctypes\nctypes.string_at(0)")
    site.plugin("hangs", "import time\ntime.sleep(300)")
    site.plugin("raises", "import a_module_that_nobody_has")
    result = opgraft_in_child(
        "doctor", "--probe-isolated", "--timeout", "8", "--json", OPGRAFT_PLUGINS="crashes,hangs,raises"
    )
    data = json.loads(result.stdout)
    reasons = {one["name"]: (one["status"], one["reason"]) for one in data["backends"]}
    assert 1 == result.returncode
    assert "quarantined" == reasons["crashes"][0]
    assert reasons["crashes"][1].startswith("loading and probing it was ended by SIGSEGV")
    assert ("quarantined", "loading and probing it did not end within 8 s") == reasons["hangs"]
    assert reasons["raises"][1].endswith("raised ModuleNotFoundError: No module named 'a_module_that_nobody_has'")
    assert {"crashes", "hangs", "raises"} == {one["subject"] for one in data["findings"]}


def test_doctor_shows_the_traceback_of_what_a_plugin_raised(opgraft_in_child):
    module = opgraft_in_child.site.plugin("raises", "import a_module_that_nobody_has")
    result = opgraft_in_child("doctor", OPGRAFT_PLUGINS="raises")
    assert 1 == result.returncode
    assert "What raises raised" in result.stdout
    assert f'File "{opgraft_in_child.site.path / module}.py", line 1, in <module>' in result.stdout
