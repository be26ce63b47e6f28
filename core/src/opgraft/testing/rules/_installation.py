"""Rules on a backend as it is installed; none needs its hardware."""

from __future__ import annotations

import re
import sys
from typing import Final

from importlib_metadata import packages_distributions
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from opgraft.testing.faults import NotApplicable, Violation
from opgraft.testing.rule import Installed, Scope, rule

_NO_METADATA: Final = "the backend was registered without metadata"
_TOO_GENERAL: Final = frozenset({"src", "test", "tests", "opgraft"})


@rule(scope=Scope.BACKEND)
def backend_loads(installed: Installed) -> None:
    """The plugin loads, its hooks answer, and nothing else claims its name."""
    record = installed.record
    if record.status not in {"active", "inactive"}:
        cause = f" ({record.error!r})" if record.error is not None else ""
        raise Violation(f"the backend is {record.status}: {record.reason}{cause}")


@rule(scope=Scope.BACKEND)
def probe_agrees_with_torch(installed: Installed) -> None:
    """A backend whose probe finds its hardware names a platform of which torch sees a device."""
    if installed.record.status != "active":
        raise NotApplicable("the backend is not active")
    counted = [installed.detector.count(platform) for platform in installed.record.platforms]
    if not any(count for count, _ in counted):
        raise Violation(f"the backend is active, and {'; '.join(reason for _, reason in counted)}")


@rule(scope=Scope.BACKEND)
def every_forward_is_accepted(installed: Installed) -> None:
    """Every forward names an op that exists and has that op's parameters."""
    if installed.record.refused:
        raise Violation("; ".join(installed.record.refused))


@rule(scope=Scope.BACKEND)
def hooks_are_known(installed: Installed) -> None:
    """The plugin has no misspelt hook and nothing else that `opgraft doctor` would tell."""
    if installed.record.findings:
        raise Violation("; ".join(installed.record.findings))


@rule(scope=Scope.BACKEND)
def offers_a_kernel(installed: Installed) -> None:
    """The backend offers at least one kernel."""
    if installed.record.status not in {"active", "inactive"}:
        raise NotApplicable("the backend is not loaded")
    if not installed.record.kernels:
        raise Violation("the backend offers no kernel; mark one with @opgraft.forward(...)")


@rule(scope=Scope.BACKEND)
def name_is_legal(installed: Installed) -> None:
    """The backend's name is a lower-case word, and the distribution's is not another's."""
    name = installed.record.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise Violation(f"the name {name!r} is no lower-case word such as 'acme'")
    if canonicalize_name(installed.record.distribution) in {"opgraft", "torch", "triton"}:
        raise Violation(f"the distribution is called {installed.record.distribution!r}")


@rule(scope=Scope.BACKEND)
def metadata_names_its_ranges(installed: Installed) -> None:
    """The distribution's own requirements name opgraft and torch, each with a version range."""
    if installed.distribution is None:
        raise NotApplicable(_NO_METADATA)
    ranges: dict[str, str] = {}
    for text in installed.distribution.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise Violation(f"the requirement {text!r} cannot be read: {error}") from None
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            known = str(canonicalize_name(requirement.name))
            ranges[known] = ranges.get(known, "") + str(requirement.specifier)
    for name in ("opgraft", "torch"):
        if name not in ranges:
            raise Violation(f"the metadata names no requirement on {name}")
        if not ranges[name]:
            raise Violation(f"the requirement on {name} has no version range, such as '>=2.10'")


@rule(scope=Scope.BACKEND)
def package_is_its_own(installed: Installed) -> None:
    """The plugin's top-level package is a name of its own that no other distribution installs."""
    if installed.distribution is None:
        raise NotApplicable(_NO_METADATA)
    top = installed.record.entry_point.partition(":")[0].partition(".")[0]
    if top in sys.stdlib_module_names:
        raise Violation(f"the top-level package {top!r} is a module of Python itself")
    if top in _TOO_GENERAL:
        raise Violation(f"the top-level package {top!r} is not the distribution's own")
    mine = canonicalize_name(installed.record.distribution)
    owners = {canonicalize_name(name) for name in packages_distributions().get(top, ())}
    if owners - {mine}:
        others = ", ".join(sorted(owners - {mine}))
        raise Violation(f"the top-level package {top!r} is also installed by {others}")
