"""From entry points to backend records: found in metadata, judged, and only then loaded.

The only module that knows entry points. :func:`scan` reads metadata alone; :func:`discover` judges
it and loads what may be loaded. Both depend on their arguments only, never on the order in which
things were found.
"""

from __future__ import annotations

import email
import importlib
import keyword
import operator
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import importlib_metadata

from opgraft.hookspecs import PROJECT
from opgraft.plugins import Forwards, cause, introduced
from opgraft.spec import RESERVED_SELECTORS, BackendRecord, KernelBackend, Status

if TYPE_CHECKING:
    import inspect
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from opgraft.hardware import Detector
    from opgraft.policy import Policy

GROUP: Final = "opgraft.backends"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong with what is installed, and whose it is."""

    subject: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advertised:
    """One entry point as the metadata states it; ``locations`` are all copies of that metadata."""

    name: str
    value: str
    distribution: str = ""
    version: str = ""
    location: str = ""
    locations: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What the metadata alone says; ``versions`` are those of opgraft and torch."""

    entries: tuple[Advertised, ...] = ()
    findings: tuple[Finding, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """What became of every backend: records, op classes that plugins add, findings."""

    records: tuple[BackendRecord, ...]
    ops: tuple[type[Any], ...]
    findings: tuple[Finding, ...]


def scan(path: Sequence[str] | None = None) -> Installation:
    """Read the metadata of everything on ``sys.path``, or on ``path``; import nothing."""
    importlib.invalidate_caches()
    findings: list[Finding] = []
    copies: defaultdict[str, dict[Path, list[Advertised]]] = defaultdict(dict)
    for dist in _distributions(path, findings):
        folder = Path(str(getattr(dist, "_path", None) or dist.locate_file("")))
        try:
            entries = list(_advertised(dist, folder))
        except Exception as error:  # noqa: BLE001 - the broken metadata of one is a finding
            findings.append(Finding(str(folder), f"its metadata cannot be read: {cause(error)}"))
            continue
        if entries:
            copies[canonical(entries[0].distribution)].setdefault(folder.resolve(), entries)
    if getattr(sys, "frozen", False) and not copies:
        hint = "no package metadata is here: give each backend to opgraft.register_backend"
        findings.append(Finding("frozen application", hint))
    chosen: list[Advertised] = []
    for found in copies.values():
        places = tuple(entries[0].location for entries in found.values())
        chosen += [replace(entry, locations=places) for entry in _foremost([*found.values()])]
    chosen.sort(key=operator.attrgetter("name", "distribution", "value"))
    versions = {name: _version(name) for name in (PROJECT, "torch")}
    return Installation(entries=tuple(chosen), findings=tuple(findings), versions=versions)


def _distributions(path: Sequence[str] | None, findings: list[Finding]) -> Iterator[Any]:
    try:
        yield from importlib_metadata.distributions(**({} if path is None else {"path": [*path]}))
    except Exception as error:  # noqa: BLE001 - somebody's finder on sys.meta_path
        findings.append(Finding("sys.meta_path", f"looking for metadata raised {cause(error)}"))


def _advertised(dist: Any, folder: Path) -> Iterator[Advertised]:
    if GROUP not in (dist.read_text("entry_points.txt") or ""):
        return
    text = dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
    headers = email.message_from_string(text.partition("\n\n")[0])
    stem, _, version = folder.stem.partition("-")
    for entry in dict.fromkeys(e for e in dist.entry_points if e.group == GROUP):
        yield Advertised(
            name=entry.name,
            value=entry.value,
            distribution=headers.get("Name") or stem,
            version=headers.get("Version") or version,
            location=str(folder),
            requirements=tuple(headers.get_all("Requires-Dist", ())),
        )


def _foremost(copies: list[list[Advertised]]) -> list[Advertised]:
    """Take the first on the path; of several in one folder the highest version."""
    first = Path(copies[0][0].location).parent
    beside = [entries for entries in copies if Path(entries[0].location).parent == first]
    return max(beside, key=lambda e: [int(n) for n in re.findall(r"\d+", e[0].version)])


def canonical(distribution: str) -> str:
    """Write a distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _version(distribution: str) -> str:
    try:
        return str(importlib_metadata.version(distribution))
    except Exception:  # noqa: BLE001 - a source tree without metadata, or broken metadata
        return str(getattr(sys.modules.get(distribution), "__version__", ""))


def unmet(requirements: Iterable[str], versions: Mapping[str, str]) -> str:
    """Say which requirements on opgraft and torch the installed versions do not meet.

    Pre-, dev- and local builds are judged by their release number. An unknown version meets all.
    """
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import InvalidVersion, Version

    reasons = []
    for text in requirements:
        found = versions.get(canonical(re.split(r"[^\w.-]", text.strip())[0]))
        try:
            needed, version = Requirement(text), Version(found or "unknown")
        except InvalidVersion:
            continue
        except InvalidRequirement:
            reasons += [f"its requirement {text!r} cannot be read"] if found else []
            continue
        release = version.base_version + ("" if version.post is None else f".post{version.post}")
        applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
        for clause in needed.specifier if applies else ():
            exact = clause.operator in {"==", "===", "<="} and clause.contains(version)
            if not exact and not clause.contains(release):
                reasons.append(f"needs {needed.name}{needed.specifier}, found {found}")
                break
    return "; ".join(reasons)


def discover(
    installation: Installation,
    policy: Policy,
    catalogue: Mapping[str, inspect.Signature],
    detector: Detector,
    extra: Sequence[object] = (),
) -> Discovery:
    """Judge what is advertised, load what may be loaded, and collect what it offers.

    Parameters
    ----------
    installation
        What :func:`scan` found.
    policy
        Which backends may be loaded.
    catalogue
        The parameters of each op known so far.
    detector
        Counts devices for the backends that bring no probe of their own.
    extra
        Modules or objects that carry the hooks and have no metadata.

    """
    claims: defaultdict[str, list[Advertised]] = defaultdict(list)
    for entry in installation.entries:
        claims[entry.name].append(entry)
    records = [_judged(rivals, policy, installation.versions) for rivals in claims.values()]
    records = [introduced(record, detector) if record.status == "active" else record for record in records]
    for plugin in extra:
        if all(record.plugin is not plugin for record in records):
            records.append(_by_hand(plugin, policy, detector, records))
    records.sort(key=operator.attrgetter("name", "entry_point"))
    offered = dict.fromkeys(op_class for record in records if record.loaded for op_class in record.ops)
    times = Counter(op_class.op for op_class in offered)
    ops = {c.op: c for c in offered if c.op not in catalogue and times[c.op] == 1}
    forwards = Forwards({**catalogue, **{op: op_class.signature() for op, op_class in ops.items()}})
    records = [forwards.taken(record, ops) for record in records]
    kernels = forwards.kernels()
    complete = tuple(replace(r, kernels=kernels[r.name]) if r.loaded else r for r in records)
    return Discovery(records=complete, ops=tuple(ops.values()), findings=installation.findings)


def _judged(rivals: Sequence[Advertised], policy: Policy, versions: Mapping[str, str]) -> BackendRecord:
    """Decide from metadata and policy alone; ``active`` means that it may be loaded."""
    name = rivals[0].name
    refusals = [policy.allows(name, entry.distribution) for entry in rivals]
    allowed = [entry for entry, why in zip(rivals, refusals, strict=True) if why is None]
    status: Status = "active"
    if reason := illegal(name):
        status = "quarantined"
    elif not allowed:
        status, reason = "denied", "; ".join(dict.fromkeys(filter(None, refusals)))
    elif len(allowed) > 1:
        who = ", ".join(f"{e.distribution} {e.version} ({e.value})" for e in allowed)
        way = "name one distribution in OPGRAFT_PLUGINS, or the others in OPGRAFT_DENY"
        status, reason = "conflict", f"claimed by {who}; none is used: {way}"
    elif reason := unmet(allowed[0].requirements, versions):
        status = "incompatible"
    keys = {"distribution": "distribution", "version": "version", "entry_point": "value", "location": "location"}
    meant = allowed or rivals
    told: dict[str, Any] = {k: ", ".join(dict.fromkeys(getattr(e, v) for e in meant)) for k, v in keys.items()}
    return BackendRecord(name=name, status=status, reason=reason, **told)


def illegal(name: str) -> str:
    """Say why a backend may not have this name; nothing where it may."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        return f"illegal name {name!r}: a backend is named by a lower-case word, no Python keyword"
    if name in RESERVED_SELECTORS or name in KernelBackend.names():
        return f"illegal name {name!r}: this word is reserved"
    return ""


def _by_hand(plugin: object, policy: Policy, detector: Detector, others: Sequence[BackendRecord]) -> BackendRecord:
    """Introduce a plugin that has no metadata; its name must be legal, allowed and free."""
    title = str(getattr(plugin, "__name__", type(plugin).__qualname__))
    record = introduced(BackendRecord(name="", status="active", entry_point=title, plugin=plugin), detector)
    same = [r for r in others if r.name == record.name and r.status != "denied"]
    taken = f"the name is taken by {same[0].owner or same[0].entry_point}" if same else ""
    judgements: tuple[tuple[Status, str | None], ...] = (
        ("quarantined", illegal(record.name)),
        ("denied", policy.allows(record.name, "")),
        ("conflict", taken),
    )
    for status, reason in judgements:
        if reason and record.loaded:
            record = replace(record, status=status, reason=reason)
    return record
