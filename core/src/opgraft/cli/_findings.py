"""What ``opgraft doctor`` finds in the backends' records and in the policy."""

from __future__ import annotations

import itertools
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

import opgraft
from opgraft.discovery import Finding, Installation, canonical
from opgraft.errors import nearest
from opgraft.hardware import IN_TREE
from opgraft.spec import OWN, BackendRecord, KernelBackend, KernelSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from opgraft.policy import Policy

_FAULTY: Final = frozenset({"quarantined", "conflict", "incompatible"})


def of_records(records: Iterable[BackendRecord]) -> Iterator[Finding]:
    """Find backends that are not what their distribution means them to be."""
    for record in records:
        if record.status in _FAULTY:
            owner = f" ({record.owner})" if record.owner else ""
            yield Finding(record.name, f"{record.status}{owner}: {record.reason}")
        for message in (*record.refused, *record.findings):
            yield Finding(record.name, message)


def of_policy(policy: Policy, records: Iterable[BackendRecord], installation: Installation) -> Iterator[Finding]:
    """Find words in the policy that name nothing here, and requirements that are not met."""
    statuses = {record.name: record for record in records}
    backends = {entry.name for entry in installation.entries} | {*statuses, OWN, "native"}
    owners = {canonical(entry.distribution) for entry in installation.entries}
    built = set(KernelBackend.names())
    for setting, word in _words(policy):
        first, slash, second = word.partition("/")
        selects = (
            first in backends and second in built | {*IN_TREE}
            if slash
            else word in backends or (word in built and setting != "plugins")
        )
        owns = setting in {"deny", "plugins"} and canonical(word) in owners
        if not selects and not owns:
            known = backends | (owners if setting == "plugins" else built)
            message = f"{policy.source(setting)} names {word!r}, which nothing here is called"
            yield Finding("policy", message + nearest(word, known))
    for name in policy.require:
        source = policy.source("require")
        if name not in statuses:
            message = f"{source} requires {name!r}, which is not installed{nearest(name, statuses)}"
            yield Finding("policy", message)
        elif statuses[name].status != "active":
            message = f"{source} requires {name!r}, which is {statuses[name].status}: "
            yield Finding("policy", message + statuses[name].reason)
    ops = opgraft.registry.ops()
    for rule in policy.order:
        if not any(fnmatchcase(op, rule.pattern) for op in ops):
            message = f"{policy.source('order')} has a rule for {rule.pattern!r}, which matches no op"
            yield Finding("policy", message + nearest(rule.pattern, ops))


def _words(policy: Policy) -> Iterator[tuple[str, str]]:
    yield from (("force", word) for word in filter(None, [policy.force]))
    ordered = dict.fromkeys(word for rule in policy.order for word in rule.selectors)
    yield from (("order", word) for word in ordered)
    yield from (("deny", word) for word in sorted(policy.deny))
    yield from (("plugins", word) for word in sorted(policy.plugins or ()))


def ties(records: Iterable[BackendRecord]) -> Iterator[Finding]:
    """Find kernels of two active backends between which only the backends' names decide."""
    active = [record for record in records if record.status == "active"]
    for one, two in itertools.combinations(active, 2):
        pairs = itertools.product(one.kernels, two.kernels)
        ops = sorted({first.op for first, second in pairs if _tied(first, second)})
        if ops:
            message = (
                f"ties with {two.name} ({two.owner}) for {', '.join(ops)}: same platform, priority and "
                "kernel backend, so the name decides; say in OPGRAFT_ORDER which one you want"
            )
            yield Finding(one.name, message)


def _tied(one: KernelSpec, two: KernelSpec) -> bool:
    if (one.op, one.priority, one.kernel_backend) != (two.op, two.priority, two.kernel_backend):
        return False
    platforms = ({capability.platform for capability in each.capabilities} for each in (one, two))
    return one.priority >= 0 and not set.isdisjoint(*platforms)
