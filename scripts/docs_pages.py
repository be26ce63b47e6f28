"""Fills the documentation with what the code says itself; mkdocs calls it for every page.

A page has a marker such as ``<!-- generated: hooks -->`` where the text goes, so that no list in the documentation is
kept by hand.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import opgraft
from opgraft import errors, hookspecs
from opgraft.cli._commands import COMMANDS
from opgraft.testing.rule import PRESENCE, PRESENCE_SUMMARY, Scope
from opgraft.testing.rules import RULES

MARKER = re.compile(r"<!-- generated: (\w+) -->")
DECISIONS = "decisions/"
WIDTH = 72


def on_config(config: Any) -> Any:
    """List every decision record in the navigation."""
    records = sorted(path.name for path in (Path(config["docs_dir"]) / DECISIONS).glob("*.md"))
    _fill_decisions(config["nav"], [f"{DECISIONS}{name}" for name in records])
    return config


def _fill_decisions(nav: list[Any], records: list[str]) -> None:
    for entry in nav:
        for title, content in entry.items() if isinstance(entry, dict) else ():
            if title == "Decisions":
                content[:] = records
            elif isinstance(content, list):
                _fill_decisions(content, records)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the generated parts in."""
    return MARKER.sub(lambda match: PARTS[match[1]](), markdown)


def _prose(documented: object) -> str:
    """Write a docstring as markdown: its numpydoc sections become headings of their own lines."""
    text, _, examples = (inspect.getdoc(documented) or "").partition("\nExamples\n--------\n")
    shown = f"\n\n**Example**\n\n```pycon\n{examples.strip()}\n```" if examples else ""
    return _sections(text).replace("\n>", "\n\\>") + shown


def _sections(text: str) -> str:
    text = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = re.sub(r"^(\w[\w ]+)\n-+$", r"\n**\1**\n", text, flags=re.MULTILINE)
    return _definitions(text)


def _definitions(text: str) -> str:
    """Write numpydoc's indented descriptions as list items."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("    ") and lines and lines[-1] and not lines[-1].startswith((" ", "*")):
            lines[-1] = f"* `{lines[-1]}`: {line.strip()}"
        elif line.startswith("    ") and lines and lines[-1].startswith("* "):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return "\n".join(lines)


def hooks() -> str:
    """Describe every hook from its specification, and the marker that offers a kernel."""
    parts: list[str] = []
    for name, function in vars(hookspecs.HookSpecs).items():
        if name.startswith("opgraft_"):
            returns = str(inspect.signature(function).return_annotation)
            parts += [f"## `{name}() -> {returns}`", "", _prose(function), ""]
    parts += ["## `@forward`", "", _signature("@forward", hookspecs.forward), "", _prose(hookspecs.forward), ""]
    parts += ["## What the hooks return", ""]
    for record in (opgraft.Backend, opgraft.Available, opgraft.Unavailable, opgraft.CapabilityRequirement):
        parts += [f"### `{record.__name__}`", "", _prose(record), ""]
    for method in ("cuda", "hip", "device"):
        function = getattr(opgraft.CapabilityRequirement, method)
        name = f"CapabilityRequirement.{method}"
        parts += [f"#### `{name}`", "", _signature(name, function), "", _prose(function), ""]
    return "\n".join(parts)


def _signature(name: str, function: Callable[..., Any]) -> str:
    """Write how a function is called, without types, a parameter a line where they are many."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    if len(name + text) > WIDTH:
        text = "(\n    " + text[1:-1].replace(", ", ",\n    ") + ",\n)"
    return f"```python\n{name}{text}\n```"


def rules() -> str:
    """List every rule of the conformance suite with its sentence."""
    titles = {
        Scope.BACKEND: "The backend as it is installed (no hardware needed)",
        Scope.KERNEL: "What a kernel declares (no hardware needed)",
        Scope.CALL: "What a kernel does",
    }
    parts = []
    for scope, title in titles.items():
        chosen = [(rule.name, rule.summary) for rule in RULES if rule.scope is scope]
        if scope is Scope.KERNEL:
            chosen.append((PRESENCE, PRESENCE_SUMMARY))
        rows = [f"| `{name}` | {summary.replace('``', '`')} |" for name, summary in chosen]
        parts += [f"### {title}", "", "| rule | what it holds a backend to |", "| --- | --- |", *rows, ""]
    return "\n".join(parts)


def error_classes() -> str:
    """List every error class with the builtin that it is too."""
    rows = ["| class | is also a | raised when |", "| --- | --- | --- |"]
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.OpgraftError) and kind is not errors.OpgraftError:
            builtin = next(base.__name__ for base in kind.__mro__ if base.__module__ == "builtins")
            rows.append(f"| `{name}` | `{builtin}` | {(inspect.getdoc(kind) or '').splitlines()[0]} |")
    return "\n".join(rows)


def commands() -> str:
    """Show what each command says of itself."""
    parts: list[str] = []
    for name in COMMANDS:
        shown = subprocess.run(
            [sys.executable, "-m", "opgraft", name, "--help"],
            capture_output=True,
            check=True,
            env={**os.environ, "COLUMNS": "100"},
            text=True,
        )
        parts += [f"## opgraft {name}", "", "```text", shown.stdout.strip(), "```", ""]
    return "\n".join(parts)


def ops() -> str:
    """Describe every op of the catalogue: signature, format, meaning."""
    return "\n".join(_ops())


def _ops() -> Iterator[str]:
    for op_id in sorted(
        f"{group}.{name}" for group in opgraft.ops.__all__ for name in getattr(opgraft.ops, group).__all__
    ):
        handle = opgraft.op(op_id)
        form = handle.op.format_signature
        yield from (f"## {op_id}", "", _signature(op_id, handle), "")
        if form is not None and form.description:
            yield from (f"*{form.description}*", "")
        yield from (_prose(type(handle.op)), "")


PARTS: dict[str, Callable[[], str]] = {
    "hooks": hooks,
    "rules": rules,
    "errors": error_classes,
    "commands": commands,
    "ops": ops,
}
