"""The tutorial *Write a backend*, followed literally in a fresh environment; and the code of other pages, run."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )


def steps(block: str) -> list[tuple[str, list[str]]]:
    """Take a console block apart: each command, and the lines that it is said to print."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def as_said(said: list[str], printed: str) -> bool:
    """Compare line by line; ``...`` stands for any lines where it is one, and for any words within one."""
    pattern = "".join(
        r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(re.escape("..."), ".*") + r"\n" for line in said
    )
    return re.fullmatch(pattern, printed) is not None


@pytest.mark.parametrize(
    ("said", "printed", "same"),
    [
        (["a", "...", "d"], "a\nb\nc\nd\n", True),
        (["a", "...", "d"], "a\nd\n", True),
        (["a", "d"], "a\nb\nd\n", False),
        (["so ... many"], "so very many\n", True),
        ([], "", True),
        ([], "something\n", False),
    ],
)
def test_what_is_printed_is_compared_line_by_line(said, printed, same):
    assert same == as_said(said, printed)


def test_the_tutorial_works_as_it_stands(environment, wheels):
    ran = []
    for block in blocks("write-a-backend.md", "console"):
        for command, said in steps(block):
            ran.append(command.split()[:2])
            if command.startswith("pip install"):
                # No index is asked in a test: what is named comes from the wheel or the folder of that name.
                (name,) = [word for word in shlex.split(command)[2:] if not word.startswith("-")]
                place = wheels["opgraft"] if name.startswith("opgraft[") else environment.folder / name
                options = ["--no-build-isolation", *(["--editable"] if "-e" in command else [])]
                environment.install(place, options=options)
                continue
            code = 1 if any("does not conform" in line for line in said) else 0
            printed = environment.run("bash", "-c", command, code=code).stdout
            assert as_said(said, printed), f"$ {command}\n{printed}"
    assert [["pip", "install"], ["opgraft", "new"], ["opgraft", "conformance"]] == [
        one for one in (["pip", "install"], ["opgraft", "new"], ["opgraft", "conformance"]) if one in ran
    ]


@pytest.mark.parametrize("page", ["getting-started.md", "policy.md"])
def test_the_python_of_a_page_runs_from_top_to_bottom(everything, page):
    everything.python("\n".join(blocks(page, "python")))


def test_the_file_of_the_policy_page_is_a_policy(everything):
    (text,) = blocks("policy.md", "toml")
    (everything.folder / "opgraft.toml").write_text(text, encoding="utf-8")
    try:
        shown = everything.python("import opgraft; print(opgraft.get_policy())")
    finally:
        (everything.folder / "opgraft.toml").unlink()
    assert "acme" in shown
    assert "opgraft.toml" in shown


def test_the_messages_of_the_errors_page_are_those_that_are_raised(everything):
    (text,) = blocks("errors.md", "pycon")
    program = f"import doctest; test = doctest.DocTestParser().get_doctest({text!r}, {{}}, 'errors', None, 0)\n"
    program += "runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS); runner.run(test)\n"
    program += "assert not runner.failures and runner.tries == 3, runner.summarize()"
    everything.python(program)


def test_the_site_builds_without_a_warning(run_checked, tmp_path):
    pytest.importorskip("mkdocs", reason="`make docs` installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    run_checked(command, cwd=DOCS.parent)
    text = (tmp_path / "site" / "hooks.html").read_text(encoding="utf-8")
    assert "generated:" not in text
    assert "opgraft_probe" in text
