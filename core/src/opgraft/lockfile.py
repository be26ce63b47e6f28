"""What a process is meant to have installed and to choose, written down and held against it.

A lock lists distributions with version and the hash of their RECORD, and the rows of the plan.
With ``OPGRAFT_LOCK`` a process imports no plugin that the lock does not list, and none at all if
files of one changed; it refuses its first call if it would choose another kernel anywhere.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import re
from contextvars import Context
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import importlib_metadata

from opgraft.discovery import Installation, canonical
from opgraft.errors import PluginError, PolicyError
from opgraft.hookspecs import PROJECT
from opgraft.policy import Policy, read_toml

if TYPE_CHECKING:
    from opgraft.kernel_registry import KernelRegistry

_BY_INSTALLER: Final = frozenset({"INSTALLER", "REQUESTED", "direct_url.json"})
_REMEDY: Final = "`opgraft lock --check` shows all of it, `opgraft lock` accepts it"


class Lock:
    """The content of a lock file.

    Parameters
    ----------
    path
        Where it lies.

    Raises
    ------
    PolicyError
        If it cannot be read.

    """

    def __init__(self, path: str | Path) -> None:
        from opgraft.planning import Plan, PlanRow

        self.path = path
        self.distributions: dict[str, tuple[str, str]] = {}
        read = read_toml(Path(path), ", a lock,")
        try:
            self.plan = Plan(tuple(PlanRow(**row) for row in read["plan"]))
            for one in read["distribution"]:
                self.distributions[one["name"]] = one["version"], one["record"]
        except (LookupError, TypeError) as error:
            message = f"{path} is no lock: {type(error).__name__}: {error}; write one with `opgraft lock`"
            raise PolicyError(message) from error

    def changes(self, installation: Installation) -> list[str]:
        """Say what of the distributions it lists is missing, of another version or changed."""
        here, lines = installed(installation), []
        for name, (version, record) in self.distributions.items():
            found = here.get(name, {"version": "nothing"})
            if found["version"] != version:
                lines.append(f"{name}: {version} in the lock, {found['version']} here")
            elif found["record"] != record:
                lines.append(f"{name} {version}: its files are not those of the lock{found['changed']}")
        return lines

    def admitted(self, policy: Policy, installation: Installation) -> Policy:
        """Narrow a policy to the distributions listed here.

        Raises
        ------
        PluginError
            If one of them changed; nothing was imported then.

        """
        if lines := self.changes(installation):
            raise PluginError("\n  ".join([f"lock {self.path} does not hold; {_REMEDY}", *lines]))
        listed = [e for e in installation.entries if canonical(e.distribution) in self.distributions]
        allowed = frozenset(e.distribution for e in listed if policy.allows(e.name, e.distribution) is None)
        return replace(policy, plugins=allowed, sources={**policy.sources, "plugins": f"lock {self.path}"})

    def agree(self, registry: KernelRegistry) -> None:
        """Hold a process's plan, its scopes left out, against the lock's.

        Raises
        ------
        PluginError
            If they differ, with every row.

        """
        from opgraft.planning import plan

        if lines := self.plan.differences(Context().run(plan, registry)):
            where = f"lock {self.path} does not hold (lock against this process); {_REMEDY}"
            raise PluginError("\n  ".join([where, *lines]))


def installed(installation: Installation) -> dict[str, dict[str, str]]:
    """Describe the core, torch, the backends' distributions and what these need, by name."""
    packages = {canonical(e.distribution): re.split(r"[.:]", e.value)[0] for e in installation.entries}
    found: dict[str, dict[str, str]] = {}
    waiting = [PROJECT, "torch", *packages]
    for name in waiting:
        try:
            dist = importlib_metadata.distribution(name)
        except importlib_metadata.PackageNotFoundError:
            continue
        needs = [canonical(re.split(r"[^\w.-]", text)[0]) for text in dist.requires or ()]
        ours = name == PROJECT or name in packages or PROJECT in needs
        files = _files(dist, packages.get(name, name.replace("-", "_")))
        held = {label: _hash(path) if ours else said for label, (path, said) in files.items()}
        digest = hashlib.sha256("\n".join(f"{label} {held[label]}" for label in sorted(held)).encode())
        changed = ", ".join(label for label, (_, said) in files.items() if held[label] != said)
        found[name] = {"version": dist.version, "record": f"sha256:{digest.hexdigest()}"}
        found[name]["changed"] = f": {changed}" if changed else ""
        waiting += [n for n in needs if ours and name != PROJECT and n not in waiting]
    return dict(sorted(found.items()))


def _files(dist: Any, package: str) -> dict[str, tuple[Path, str]]:
    """Give path and hash of each file, by its name in RECORD; an editable one's from its sources."""
    rows = [row for row in csv.reader((dist.read_text("RECORD") or "").splitlines()) if len(row) > 1]
    editable = '"editable": true' in (dist.read_text("direct_url.json") or "")
    if not rows or editable:
        spec = importlib.util.find_spec(package)
        root = Path(spec.origin).parent if spec is not None and spec.origin else Path()
        paths = root.rglob("*") if spec and spec.submodule_search_locations else root.glob(f"{package}.py")
        kept = [path for path in paths if path.is_file() and "__pycache__" not in path.parts]
        return {path.relative_to(root).as_posix(): (path, _hash(path)) for path in kept}
    return {
        name: (Path(str(dist.locate_file(name))), said)
        for name, said, *_ in rows
        if said and not name.startswith("..") and Path(name).name not in _BY_INSTALLER
    }


def _hash(path: Path) -> str:
    if not path.is_file():
        return "missing"
    digest = hashlib.sha256(path.read_bytes()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
