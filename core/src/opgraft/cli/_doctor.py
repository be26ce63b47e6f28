"""``opgraft doctor``: what is wrong with the installation or the policy, and what to do."""

from __future__ import annotations

import itertools
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import importlib_metadata
import typer

import opgraft
from opgraft.cli._findings import of_policy, of_records, ties
from opgraft.cli._isolated import crash
from opgraft.cli._list import as_data, show_records
from opgraft.cli._metadata import metadata_findings, second_cores
from opgraft.cli._output import WRONG, say, say_json
from opgraft.discovery import Finding, Installation, scan
from opgraft.errors import OpgraftError, PolicyError
from opgraft.spec import BackendRecord

if TYPE_CHECKING:
    from opgraft.policy import Policy


def doctor(
    probe_isolated: Annotated[
        bool, typer.Option("--probe-isolated", help="Load and probe each plugin in a child process first.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for each such child.", min=0.1)] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Examine installation, policy and devices; end with exit code 1 if anything is wrong."""
    installation = scan()
    findings = metadata_findings(installation)
    policy, unreadable = _policy()
    findings += [Finding("policy", message) for message in unreadable]
    crashed = _crashes(installation, policy, timeout) if probe_isolated and policy else {}
    if crashed:
        opgraft.set_policy(deny=sorted(crashed))
    records: tuple[BackendRecord, ...] = ()
    if policy is not None:
        records, stopped = _records(crashed)
        findings += stopped
        if not stopped:
            findings += of_records(records)
            findings += of_policy(policy, records, installation)
            findings += ties(records)
    findings += second_cores()
    findings = list(dict.fromkeys(findings))
    environment = _environment(records)
    if as_json:
        say_json(_as_data(findings, records, installation, policy, environment))
    else:
        _show(findings, records, installation, policy, environment)
    if findings:
        raise typer.Exit(WRONG)


def _policy() -> tuple[Policy | None, list[str]]:
    try:
        return opgraft.get_policy(), list(opgraft.registry.policy.unknown)
    except PolicyError as error:
        return None, [str(error)]


def _crashes(installation: Installation, policy: Policy, seconds: float) -> dict[str, str]:
    """Say how each plugin ends a process, for those that do."""
    found = {}
    for name, entries in itertools.groupby(installation.entries, key=lambda entry: entry.name):
        allowed = [e for e in entries if policy.allows(name, e.distribution) is None]
        if len(allowed) == 1 and (ending := crash(allowed[0], seconds, os.environ)):
            found[name] = ending
    return found


def _records(crashed: dict[str, str]) -> tuple[tuple[BackendRecord, ...], list[Finding]]:
    from dataclasses import replace

    try:
        records = opgraft.backends()
    except OpgraftError as error:
        return (), [Finding("discovery", str(error))]
    return tuple(
        replace(r, status="quarantined", reason=crashed[r.name]) if r.name in crashed else r for r in records
    ), []


def _environment(records: tuple[BackendRecord, ...]) -> dict[str, Any]:
    """Describe interpreter, torch, triton, drivers and devices."""
    import torch

    detector = opgraft.registry.detector
    platforms = dict.fromkeys(["cpu", "cuda", "hip", *(key for record in records for key in record.platforms)])
    devices = {}
    for key in platforms:
        try:
            count, reason = detector.count(key)
        except Exception as error:  # noqa: BLE001 - a device module may be unable to count
            count, reason = 0, f"{type(error).__name__}: {error}"
        devices[key] = str(count) if count else f"0, {reason}"
    return {
        "opgraft": f"{opgraft.__version__} in {Path(str(opgraft.__file__)).parent}",
        "python": f"{platform.python_version()} at {sys.executable}",
        "system": platform.platform(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, ROCm {torch.version.hip}",
        "triton": _version("triton"),
        "pluggy": _version("pluggy"),
        "nvidia driver": _first_line("/proc/driver/nvidia/version"),
        "amdgpu driver": _first_line("/sys/module/amdgpu/version"),
        "devices": devices,
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith("OPGRAFT_")},
    }


def _version(distribution: str) -> str:
    try:
        return str(importlib_metadata.version(distribution))
    except importlib_metadata.PackageNotFoundError:
        return "not installed"


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return "none"


def _as_data(
    findings: list[Finding],
    records: tuple[BackendRecord, ...],
    installation: Installation,
    policy: Policy | None,
    environment: dict[str, Any],
) -> dict[str, Any]:
    settings = policy.export() if policy is not None else {}
    return {
        "findings": [{"subject": one.subject, "message": one.message} for one in findings],
        "backends": [as_data(r) | {"locations": _locations(r, installation)} for r in records],
        "policy": {name: {"value": value, "source": policy.source(name)} for name, value in settings.items() if policy},
        "environment": environment,
    }


def _locations(record: BackendRecord, installation: Installation) -> list[str]:
    return [place for entry in installation.entries if entry.name == record.name for place in entry.locations]


def _show(
    findings: list[Finding],
    records: tuple[BackendRecord, ...],
    installation: Installation,
    policy: Policy | None,
    environment: dict[str, Any],
) -> None:
    say("Environment", style="bold")
    for name, value in environment.items():
        for key, text in value.items() if isinstance(value, dict) else [("", value)]:
            say(f"{f'{name} {key}'.strip()}: {text}", indent=2)
    say()
    say("Policy", style="bold")
    for line in str(policy).splitlines() if policy is not None else ["cannot be read"]:
        say(line, indent=2)
    say()
    say("Backends", style="bold")
    show_records(records)
    say()
    say("Metadata", style="bold")
    for record in records:
        for place in _locations(record, installation):
            say(f"{record.name}: {place}", indent=2)
    say()
    say(f"Findings: {len(findings) or 'none'}", style="bold")
    for one in findings:
        say(f"{one.subject}: {one.message}", indent=2)
    for record in records:
        if record.error is not None and not isinstance(record.error, OpgraftError):
            _show_traceback(record)


def _show_traceback(record: BackendRecord) -> None:
    import traceback

    say()
    say(f"What {record.name} raised", style="bold")
    for line in "".join(traceback.format_exception(record.error)).splitlines():
        say(line, indent=2)
