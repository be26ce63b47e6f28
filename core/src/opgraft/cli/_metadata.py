"""What ``opgraft doctor`` finds in metadata: left-overs, misspelt groups, and things owned twice."""

from __future__ import annotations

import difflib
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import importlib_metadata

from opgraft.discovery import GROUP, Finding, Installation, canonical
from opgraft.hookspecs import PROJECT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ALIKE = 0.8  # "opgraft.backend" is 0.97 like the group, "torch.backends" 0.69


def metadata_findings(installation: Installation) -> list[Finding]:
    """Find what is wrong with the metadata on ``sys.path``."""
    found = [*installation.findings, *_copies(installation)]
    distributions = [(dist, Path(str(getattr(dist, "_path", "")))) for dist in importlib_metadata.distributions()]
    for dist, folder in distributions:
        found += _left_over(folder)
        found += _misspelt(dist, folder)
    found += _owned_twice(installation, distributions)
    return list(dict.fromkeys(found))


def _copies(installation: Installation) -> Iterator[Finding]:
    for entry in installation.entries:
        if len(entry.locations) > 1:
            places = ", ".join(entry.locations)
            message = f"{len(entry.locations)} copies of its metadata: {places}; {entry.location} counts"
            yield Finding(entry.distribution, message)


def _left_over(folder: Path) -> Iterator[Finding]:
    if folder.is_dir() and not any((folder / name).exists() for name in ("METADATA", "PKG-INFO", "entry_points.txt")):
        message = "metadata without content, left over from an uninstall; delete the folder, or install again"
        yield Finding(str(folder), message)


def _misspelt(dist: Any, folder: Path) -> Iterator[Finding]:
    try:
        text = dist.read_text("entry_points.txt") or ""
    except ValueError:
        return  # scan() reports what cannot be decoded
    for group in re.findall(r"^\s*\[([^\]\n]*)\]", text, re.MULTILINE):
        letters, meant = (re.sub(r"[^a-z]", "", name.lower()) for name in (group, GROUP))
        alike = difflib.SequenceMatcher(None, letters, meant).ratio() >= _ALIKE
        if group != GROUP and (alike or letters.startswith(PROJECT)):
            message = f"unknown entry-point group {group!r}; did you mean {GROUP!r}?"
            yield Finding(folder.name, message)


def _owned_twice(installation: Installation, distributions: Iterable[tuple[Any, Path]]) -> Iterator[Finding]:
    """Find files and top-level packages that a backend's distribution shares with another one."""
    ours = {canonical(entry.distribution) for entry in installation.entries} | {PROJECT}
    files: dict[str, set[str]] = defaultdict(set)
    packages: dict[str, set[str]] = defaultdict(set)
    regular: set[str] = set()
    for dist, folder in distributions:
        name = canonical(folder.name.partition("-")[0])
        for path in _files(dist):
            files[str((folder.parent / path).absolute())].add(name)
            top, slash, rest = path.partition("/")
            if slash and top.isidentifier():
                packages[top].add(name)
                regular |= {top} if rest == "__init__.py" else set()
    shared = {where: names for where, names in files.items() if len(names) > 1 and names & ours}
    for where, names in sorted(shared.items()):
        yield Finding(where, f"installed by {' and by '.join(sorted(names))}; the last one counts")
    for top in sorted(regular):
        names = packages[top]
        if len(names) > 1 and names & ours:
            yield Finding(top, f"package of {' and of '.join(sorted(names))}; one may hide the other")


def second_cores() -> Iterator[Finding]:
    """Find copies of the core that were imported under another name: what registers there is lost."""
    for name, module in sorted(sys.modules.items()):
        if name.rpartition(".")[2] == PROJECT and name != PROJECT and hasattr(module, "hookimpl"):
            message = (
                f"a second copy of the core, at {getattr(module, '__file__', 'no file')}; nothing here sees its plugins"
            )
            yield Finding(name, message)


def _files(dist: Any) -> list[str]:
    try:
        record = dist.read_text("RECORD") or ""
    except ValueError:
        return []
    paths = [line.split(",")[0] for line in record.splitlines()]
    return [path for path in paths if path and ".dist-info/" not in path and "__pycache__" not in path]
