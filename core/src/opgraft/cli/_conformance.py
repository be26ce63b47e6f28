"""``opgraft conformance``: hold a backend's kernels against what their ops say of themselves."""

from __future__ import annotations

import faulthandler
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from opgraft.cli._output import FINE, USAGE, WRONG, fail, say

if TYPE_CHECKING:
    from opgraft.testing.conformance import Check
    from opgraft.testing.report import Report

_STYLES: Final = {"FAILED": "red", "UNEXPECTED": "red", "expected:": "yellow", "note:": "dim"}


def conformance(
    backend: Annotated[str, typer.Argument(metavar="BACKEND", help="Name of an installed backend, or loopback.")],
    require_device: Annotated[
        bool, typer.Option("--require-device", help="Fail where the backend's device is absent.")
    ] = False,
    thorough: Annotated[bool, typer.Option("--thorough", help="Larger sizes and more random calls.")] = False,
    op: Annotated[str, typer.Option(metavar="PATTERN", help="Ops to try, such as 'attention.*'.")] = "*",
    xfails: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Expected failures; default: conformance-xfails.txt here.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random calls; fixed by default.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as a page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Hold every kernel of a backend to its op's contract; 1 if a rule fails."""
    if importlib.util.find_spec("hypothesis") is None:
        fail("the conformance suite needs hypothesis and pytest: pip install 'opgraft[testing]'", USAGE)
    from opgraft.testing.conformance import Options, Suite
    from opgraft.testing.expected_failures import ExpectedFailuresError
    from opgraft.testing.page import page

    options = Options(require_device=require_device, thorough=thorough, pattern=op, xfails=xfails, seed=seed)
    try:
        suite = Suite(backend, options)
    except ExpectedFailuresError as error:
        fail(str(error), USAGE)
    faulthandler.enable()  # a kernel that takes the process down leaves a trace of where
    report = suite.report(_progress)
    if html is not None:
        html.write_text(page(report), encoding="utf-8")
    if as_json:
        sys.stdout.write(report.json() + "\n")
    else:
        _show(report)
    raise typer.Exit(FINE if report.passed else WRONG)


def _progress(check: Check) -> None:
    """Name the rule under way on a terminal, so that a crash or a hang has a name."""
    if sys.stderr.isatty():
        subject = f"{check.op} {check.kernel}".strip()
        sys.stderr.write(f"\r\x1b[K{subject} {check.rule}\r"[:200])
        sys.stderr.flush()


def _show(report: Report) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    for line in report.lines():
        text = line.lstrip()
        say(text, style=_STYLES.get(text.partition(" ")[0], ""), indent=len(line) - len(text))
