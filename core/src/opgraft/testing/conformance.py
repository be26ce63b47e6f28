"""The conformance suite: holds every kernel of a backend against what its op says of itself.

``opgraft conformance BACKEND`` runs it, and so does ::

    pytest -p opgraft.testing.plugin --pyargs opgraft.testing.conformance --opgraft-backend BACKEND

which makes every rule on every kernel a test of its own. Both go through :class:`Suite`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from importlib_metadata import PackageNotFoundError, distribution

from opgraft.errors import UnknownOpError, UnknownSelectorError, nearest
from opgraft.kernel_registry import default_registry
from opgraft.testing import expected_failures
from opgraft.testing.faults import NotApplicable, Violation
from opgraft.testing.report import Report, Result
from opgraft.testing.rule import PRESENCE, PRESENCE_SUMMARY, Installed, Offered, Rule, Scope
from opgraft.testing.rules import RULES
from opgraft.testing.subject import Subject

if TYPE_CHECKING:
    from opgraft.kernel_registry import KernelRegistry
    from opgraft.spec import BackendRecord, KernelSpec
    from opgraft.testing.calls import Call
    from opgraft.testing.expected_failures import ExpectedFailure

__all__ = ["Check", "Options", "Suite", "test_rule"]

LOOPBACK: Final = "loopback"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user may ask of the suite.

    Parameters
    ----------
    require_device
        Fail where no device is present, rather than try what needs none.
    thorough
        Take the time for larger sizes and more random calls.
    pattern
        Ops to try.
    xfails
        List of expected failures; a file of the usual name in the working folder if left out.
    seed
        Of the random calls; None is the fixed one.

    """

    require_device: bool = False
    thorough: bool = False
    pattern: str = "*"
    xfails: Path | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One rule to be held against one subject.

    Parameters
    ----------
    rule, summary
        The rule's name and sentence.
    run
        Raises as the rule does, and returns what was left out.
    show
        Writes a call.
    op, kernel, device
        What it is tried on; empty for the backend itself.
    expected
        The line that lists its failure, if one does.

    """

    rule: str
    summary: str
    run: Callable[[], tuple[str, ...]]
    show: Callable[[Call | str | None], str] = lambda call: str(call or "")
    op: str = ""
    kernel: str = ""
    device: str = ""
    expected: ExpectedFailure | None = None

    @property
    def id(self) -> str:
        """What pytest calls it."""
        return "-".join(filter(None, (self.op, self.kernel, self.device, self.rule))).replace(" ", "_")

    def result(self) -> Result:
        """Run the rule and say what became of it."""
        blank = Result(
            op=self.op, kernel=self.kernel, device=self.device, rule=self.rule, summary=self.summary, outcome="passed"
        )
        begun = time.perf_counter()
        try:
            notes = self.run()
        except Violation as fault:
            return self._failed(blank, fault, time.perf_counter() - begun)
        except NotApplicable as reason:
            return dataclasses.replace(blank, outcome="skipped", message=str(reason))
        seconds = time.perf_counter() - begun
        if self.expected is not None:
            message = f"it is listed as an expected failure ({self.expected.reason}); take it out"
            return dataclasses.replace(blank, outcome="unexpected pass", message=message)
        return dataclasses.replace(blank, seconds=seconds, notes=notes)

    def _failed(self, blank: Result, fault: Violation, seconds: float) -> Result:
        blank = dataclasses.replace(blank, seconds=seconds)
        if self.expected is not None:
            message = f"{self.expected.reason} ({fault.what})"
            return dataclasses.replace(blank, outcome="expected failure", message=message)
        return dataclasses.replace(
            blank, outcome="failed", message=fault.what, example=self.show(fault.call), route=fault.route
        )


class Suite:
    """Every rule for every kernel of one backend.

    Parameters
    ----------
    backend
        Name of an installed backend, or ``"loopback"``: native through the path of a plugin.
    options
        What the user asks for.
    registry
        The process's own if left out.

    Raises
    ------
    UnknownSelectorError
        If no such backend is installed, with the nearest names.
    UnknownOpError
        If the pattern matches no op of the backend, with the nearest names.
    ExpectedFailuresError
        If the list of expected failures cannot be read.

    """

    def __init__(self, backend: str, options: Options | None = None, *, registry: KernelRegistry | None = None) -> None:
        self.options = options or Options()
        self.registry = registry or default_registry()
        self.record = self._find(backend)
        self.kernels = self._kernels()
        self.expected = self._expected_failures()

    def _find(self, backend: str) -> BackendRecord:
        found = [one for one in self.registry.backends() if one.name == backend]
        if not found and backend == LOOPBACK:
            from opgraft.testing import loopback

            self.registry.register_backend(loopback)
            found = [one for one in self.registry.backends() if one.name == backend]
        if not found:
            known = [one.name for one in self.registry.backends()]
            message = f"no backend {backend!r} is installed{nearest(backend, [*known, LOOPBACK])}"
            raise UnknownSelectorError(message)
        return found[0]

    def _kernels(self) -> tuple[KernelSpec, ...]:
        pattern = self.options.pattern
        kernels = sorted(self.record.kernels, key=lambda one: (one.op, one.selector, one.name))
        wanted = tuple(one for one in kernels if fnmatch.fnmatchcase(one.op, pattern))
        if kernels and not wanted:
            known = nearest(pattern, {one.op for one in kernels})
            raise UnknownOpError(f"backend {self.record.name!r} has no op {pattern!r}{known}")
        return wanted

    def _expected_failures(self) -> tuple[ExpectedFailure, ...]:
        path = self.options.xfails or Path(expected_failures.FILE_NAME)
        if not path.exists():
            if self.options.xfails is not None:
                message = f"there is no list of expected failures {str(path)!r}"
                raise expected_failures.ExpectedFailuresError(message)
            return ()
        names = [PRESENCE, *(rule.name for rule in RULES)]
        return expected_failures.read(path, names, self.registry.ops())

    # -- what is to be checked ---------------------------------------------------------------

    def checks(self) -> Iterator[Check]:
        """Give every check, cheap ones first; nothing of a kernel runs before its own checks do."""
        installed = Installed(record=self.record, distribution=self._distribution(), detector=self.registry.detector)
        for rule in RULES:
            if rule.scope is Scope.BACKEND:
                yield self._check(rule, functools.partial(_static, rule, installed))
        for kernel in self.kernels:
            yield from self._kernel_checks(kernel)

    def _distribution(self) -> Any:
        try:
            return distribution(self.record.distribution) if self.record.distribution else None
        except PackageNotFoundError:
            return None

    def _kernel_checks(self, kernel: KernelSpec) -> Iterator[Check]:
        handle = self.registry.handle(kernel.op)
        offered = Offered(record=self.record, kernel=kernel, op=handle.op)
        names = {"op": kernel.op, "kernel": _label(kernel)}
        for rule in RULES:
            if rule.scope is Scope.KERNEL:
                yield self._check(rule, functools.partial(_static, rule, offered), **names)
        devices, absent = self._devices(kernel)
        yield self._presence(devices, absent, **names)
        for device in devices:
            subject = Subject(
                op=handle.op,
                kernel=kernel,
                device=device,
                handle=handle.function,
                reachable=self._reachable(kernel),
                thorough=self.options.thorough,
                seed=self.options.seed,
            )
            for rule in RULES:
                if rule.scope is Scope.CALL:
                    run = functools.partial(_on_subject, rule, subject)
                    check = self._check(rule, run, **names, device=str(device))
                    yield dataclasses.replace(check, show=subject.show)

    def _check(
        self, rule: Rule, run: Callable[[], tuple[str, ...]], *, op: str = "", kernel: str = "", device: str = ""
    ) -> Check:
        return Check(
            rule=rule.name,
            summary=rule.summary,
            run=run,
            op=op,
            kernel=kernel,
            device=device,
            expected=self._listed(op, rule.name),
        )

    def _listed(self, op: str, rule: str) -> ExpectedFailure | None:
        return next((one for one in self.expected if one.matches(op, rule)), None)

    def _presence(self, devices: list[torch.device], absent: str, *, op: str, kernel: str) -> Check:
        def run() -> tuple[str, ...]:
            if devices:
                return (absent,) if absent else ()
            if self.options.require_device:
                raise Violation(absent)
            raise NotApplicable(absent)

        return Check(
            rule=PRESENCE, summary=PRESENCE_SUMMARY, run=run, op=op, kernel=kernel, expected=self._listed(op, PRESENCE)
        )

    def _reachable(self, kernel: KernelSpec) -> bool:
        """Look whether the kernel is the only one that its selector names."""
        rivals = [one for one in self.registry.get(kernel.op) if one.selector == kernel.selector]
        return len(rivals) == 1

    def _devices(self, kernel: KernelSpec) -> tuple[list[torch.device], str]:
        """List devices that the kernel claims, one a type, and say what is not there."""
        if self.record.status != "active":
            return [], f"the backend is {self.record.status}: {self.record.reason}"
        platforms: list[str] = []
        for one in sorted(kernel.capabilities, key=str):
            named = (*self.record.platforms, "cpu") if one.platform == "*" else (one.platform,)
            platforms += [name for name in named if name not in platforms]
        devices, absent = [], []
        for platform in platforms:
            count, reason = self.registry.detector.count(platform)
            if not count:
                absent.append(reason)
                continue
            kind = self.registry.detector.device_type(platform)
            device = torch.device(kind) if kind == "cpu" else torch.device(kind, 0)
            unmet = _unmet(kernel, *self.registry.place(device))
            if unmet:
                absent.append(unmet)
            else:
                devices.append(device)
        return devices, "; ".join(absent)

    # -- all at once ---------------------------------------------------------------------------

    def report(self, progress: Callable[[Check], None] = lambda _: None) -> Report:
        """Run every check.

        Parameters
        ----------
        progress
            Told of each check before it runs.

        """
        results = []
        for check in self.checks():
            progress(check)
            results.append(check.result())
        record = self.record
        return Report(
            backend=record.name,
            distribution=record.distribution,
            version=record.version,
            status=record.status,
            reason=record.reason,
            thorough=self.options.thorough,
            results=tuple(results),
        )


def _label(kernel: KernelSpec) -> str:
    return f"{kernel.selector} {kernel.name}".strip()


def _unmet(kernel: KernelSpec, platform: str, arch: str) -> str | None:
    reasons = [one.unmet(platform, arch) for one in kernel.capabilities]
    return None if None in reasons else "; ".join(sorted(map(str, reasons)))


def _static(rule: Rule, subject: object) -> tuple[str, ...]:
    rule.check(subject)
    return ()


def _on_subject(rule: Rule, subject: Subject) -> tuple[str, ...]:
    subject.begin(rule.seconds)
    try:
        rule.check(subject)
    finally:
        subject.end()
    return tuple(subject.notes)


def test_rule(opgraft_check: Check) -> None:
    """Hold one rule against one kernel; pytest collects it once a rule and kernel."""
    from opgraft.testing.plugin import settle

    settle(opgraft_check)
