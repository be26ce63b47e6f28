"""``opgraft lock``: write down what is installed and chosen, or hold this machine against it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import opgraft
from opgraft.cli._output import WRONG, say
from opgraft.discovery import Installation, canonical, scan
from opgraft.lockfile import Lock, installed

if TYPE_CHECKING:
    from opgraft.planning import Plan


def lock(
    path: Annotated[Path, typer.Argument(metavar="[FILE]", help="The lock.")] = Path("opgraft.lock"),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; say every difference from the lock.")] = False,
) -> None:
    """Write the lock of what is installed here and which kernels win, or check one."""
    installation = scan()
    if not check:
        path.write_text(written(installation, opgraft.plan()), encoding="utf-8")
        say(f"{path} written; a process with OPGRAFT_LOCK={path} is held against it")
        return
    held = Lock(path)
    differences = held.changes(installation)
    differences += [
        f"{entry.distribution} {entry.version}: here and not in the lock, so backend {entry.name} is not imported"
        for entry in installation.entries
        if canonical(entry.distribution) not in held.distributions
    ]
    differences += [f"plan, lock against here: {one}" for one in held.plan.differences(opgraft.plan())]
    for one in differences:
        say(one)
    say(f"{len(differences)} differences from {path}" if differences else f"as {path} says")
    if differences:
        raise typer.Exit(WRONG)


def written(installation: Installation, plan: Plan) -> str:
    """Write a lock of what is here: every value is a string, which TOML and JSON write alike."""
    tables = [
        ("distribution", {"name": name, "version": one["version"], "record": one["record"]})
        for name, one in installed(installation).items()
    ]
    for entry in installation.entries:
        where = {"distribution": canonical(entry.distribution), "entry_point": entry.value}
        tables.append(("backend", {"name": entry.name, **where}))
    tables += [("plan", asdict(row)) for row in plan.rows]
    lines = ["# Written by `opgraft lock`; OPGRAFT_LOCK holds a process against it."]
    for kind, table in tables:
        lines += ["", f"[[{kind}]]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"
