"""Installations made up in a folder: metadata and modules as pip would leave them, or worse."""

from __future__ import annotations

import inspect
import itertools
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opgraft.discovery import discover, scan
from opgraft.hardware import Detector
from opgraft.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_NUMBERS = itertools.count()


def clamp_position(seq_lens, *, out=None):
    """Have the parameters of the op that most made-up plugins offer a kernel for."""


OP = "attention.clamp_position"
CATALOGUE = {OP: inspect.signature(clamp_position)}


class NoHardware(Detector):
    """Sees CPUs and whatever a test says, and never imports torch."""

    def __init__(self, **counts: int) -> None:
        self.counts = {"cpu": 1, **counts}

    def count(self, platform: str) -> tuple[int, str]:
        """Count what the test said."""
        count = self.counts.get(platform, 0)
        return count, "" if count else f"no {platform} device"


def plugin_source(name: str, body: str = "", *, priority: int = 50, platform: str = "cpu") -> str:
    """Write a plugin with one kernel that says its name."""
    return f"""\
from opgraft import Backend, forward, hookimpl

@hookimpl
def opgraft_backend():
    return Backend(name={name!r}, platforms=({platform!r},))

@forward("attention.clamp_position", kernel_backend="plugin", priority={priority})
def clamp_position(seq_lens, *, out=None):
    return {name!r}
{body}
"""


@dataclass(frozen=True)
class Site:
    """A folder for ``sys.path``."""

    path: Path

    def module(self, name: str, source: str) -> str:
        """Write a module, packages of it included, and give its name."""
        *packages, leaf = name.split(".")
        folder = self.path
        for package in packages:
            folder /= package
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").touch()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{leaf}.py").write_text(source, encoding="utf-8")
        return name

    def distribution(
        self,
        name: str,
        entries: Mapping[str, str],
        *,
        version: str = "1.0",
        requires: Sequence[str] = (),
        group: str = "opgraft.backends",
        kind: str = "dist-info",
    ) -> Path:
        """Write the metadata of a distribution and give its folder."""
        folder = self.path / f"{name.replace('-', '_')}-{version}.{kind}"
        folder.mkdir(parents=True)
        headers = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
        text = "\n".join(["Metadata-Version: 2.1", *headers, "", "What it is for.", ""])
        metadata = "METADATA" if kind == "dist-info" else "PKG-INFO"
        (folder / metadata).write_text(text, encoding="utf-8")
        lines = "".join(f"{key} = {value}\n" for key, value in entries.items())
        (folder / "entry_points.txt").write_text(f"[{group}]\n{lines}", encoding="utf-8")
        return folder

    def plugin(self, name: str, source: str | None = None, **metadata) -> str:
        """Install a plugin whose module nobody has imported before; give the module's name."""
        module = self.module(f"made_up_{name}_{next(_NUMBERS)}", source or plugin_source(name))
        self.distribution(f"made-up-{name}", {name: module}, **metadata)
        return module

    @contextmanager
    def on_path(self) -> Iterator[None]:
        """Put the folder first on ``sys.path``; forget afterwards what was imported from it."""
        before = set(sys.modules)
        sys.path.insert(0, str(self.path))
        try:
            yield
        finally:
            sys.path.remove(str(self.path))
            for module in set(sys.modules) - before:
                if str(self.path) in str(getattr(sys.modules[module], "__file__", "")):
                    del sys.modules[module]

    def discover(self, policy=None, catalogue=None, detector=None, extra=()):
        """Discover what is in this folder alone."""
        with self.on_path():
            return discover(
                scan([str(self.path)]),
                policy or Policy(),
                CATALOGUE if catalogue is None else catalogue,
                detector or NoHardware(),
                extra,
            )

    def records(self, *args, **kwargs):
        """Discover and give the records by name."""
        return {record.name: record for record in self.discover(*args, **kwargs).records}
