"""Which kernel wins, and why each other one does not: a pure function of its arguments.

One list of candidates, one walk; the steps of the ladder are sort keys.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, cast

from opgraft.hardware import CHAINS, IN_TREE, unmet
from opgraft.spec import BackendRecord, KernelBackend, KernelSpec, dtypes_of

if TYPE_CHECKING:
    from opgraft.policy import Policy

DecidedBy = Literal["call", "force", "oot", "order", "priority", "platform_method", "native", ""]


class Step(enum.IntEnum):
    """The ladder below an explicit or forced selector, in the order in which it is walked."""

    OOT_REGISTERED = 0
    OOT_METHOD = 1
    KERNEL = 2
    PLATFORM_METHOD = 3
    NATIVE = 4


_DECIDED: Final[Sequence[DecidedBy]] = ("oot", "oot", "priority", "platform_method", "native")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """What selection may know of a call; no tensor, no value.

    Parameters
    ----------
    platform, arch
        Platform key and arch of the tensors' device.
    dtypes
        Dtype name of each tensor parameter; a name of ``""`` stands for all of them.
    passed
        Keyword-only parameters given a value other than the default.
    buffers
        Caller-buffer parameters: dtypes that a kernel states for all parameters speak of the inputs.
    needs_grad
        Whether gradients are recorded and an input requires one.
    amx
        Whether the CPU has AMX tiles.

    """

    platform: str
    arch: str = ""
    dtypes: tuple[tuple[str, str], ...] = ()
    passed: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    needs_grad: bool = False
    amx: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One kernel's verdict.

    Parameters
    ----------
    kernel
        The kernel, or the name of a backend that has none to offer here.
    accepted
        Whether it could run this call.
    reason
        Why it could not, or why another one is preferred; for the winner, why it won.
    by
        What would decide for it.

    """

    kernel: KernelSpec | str
    accepted: bool
    reason: str
    by: DecidedBy = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The choice for one call, with every candidate's verdict in the order of the walk.

    Parameters
    ----------
    op, call
        Op id or class name, and the call as people read it.
    winner
        The kernel that runs; None where none may.
    decided_by
        The step of the ladder that decided.
    candidates
        Every candidate.
    forced
        The selector that is forced; empty where none is, or the call names its own.

    """

    op: str
    call: str
    winner: KernelSpec | None
    decided_by: DecidedBy
    candidates: tuple[Candidate, ...]
    forced: str = ""

    @property
    def unforced(self) -> str:
        """The forced selector that this call could not honour; empty otherwise."""
        return "" if self.decided_by == "force" else self.forced

    @property
    def runners(self) -> tuple[KernelSpec, ...]:
        """The accepted kernels in the order in which they may be tried."""
        return tuple(c.kernel for c in self.candidates if c.accepted and isinstance(c.kernel, KernelSpec))

    @property
    def left_out(self) -> frozenset[str]:
        """The parameters that a refused kernel does not take: passing one of them may have decided."""
        refused = (c.kernel.leaves_out for c in self.candidates if not c.accepted and isinstance(c.kernel, KernelSpec))
        return frozenset[str]().union(*refused)

    def without(self, refusals: Mapping[KernelSpec | str, str]) -> Selection:
        """Take out the kernels that refused this very call, each with its reason."""
        candidates = [
            replace(c, accepted=False, reason=f"rejected: {refusals[c.kernel]}") if c.kernel in refusals else c
            for c in self.candidates
        ]
        return _concluded(self.op, self.call, self.forced, candidates)

    def conditional(self) -> Selection:
        """Mark the accepted kernels that would be asked per call."""
        candidates = tuple(
            replace(c, reason=f"{c.reason}; conditional: asked per call")
            if c.accepted and isinstance(c.kernel, KernelSpec) and c.kernel.rejects is not None
            else c
            for c in self.candidates
        )
        return replace(self, candidates=candidates)

    def table(self) -> str:
        """Write one line a candidate."""
        cells = [
            (c.kernel, "(none)", "")
            if isinstance(c.kernel, str)
            else (c.kernel.selector, c.kernel.name, c.kernel.owner)
            for c in self.candidates
        ]
        widths = [max((len(row[i]) for row in cells), default=0) for i in range(3)]
        rows = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        return "\n".join(f"  {row}  {c.reason}" for row, c in zip(rows, self.candidates, strict=True))

    def __str__(self) -> str:
        """Write the winner, what decided, and the table."""
        won = f"{self.winner}, decided by {self.decided_by}" if self.winner else "no kernel"
        return f"{self.op} with {self.call}: {won}\n{self.table()}"


def select(
    *,
    op: str,
    call: str,
    facts: CallFacts,
    kernels: Iterable[KernelSpec],
    priority: Sequence[KernelBackend],
    policy: Policy,
    selector: str | None = None,
    records: Iterable[BackendRecord] = (),
    native_supported: bool = True,
) -> Selection:
    """Walk the ladder once.

    Parameters
    ----------
    op, call
        For messages.
    facts
        What is known of the call.
    kernels
        Everything offered: the op's own methods, out-of-tree forwards, plugins' kernels, native.
    priority
        The op's order of kernel backends.
    policy
        What the user wants.
    selector
        The call's own ``backend=`` or the instance's pin: strict.
    records
        Backends, of which those that are not active appear with their status as the reason.
    native_supported
        False where the op says that its native is absent on purpose.

    Returns
    -------
    Selection
        The winner, if any, and all verdicts.

    """
    order = policy.selectors_for(op)
    forced = policy.force or "" if selector is None else ""
    candidates: list[Candidate] = []
    ended = False
    for kernel in sorted(kernels, key=lambda kernel: _rank(kernel, priority, order, forced)):
        listed = _place(kernel, order) < len(order)
        reason = _unfit(kernel, facts, native_supported=native_supported)
        if reason is None and selector is None:
            reason = policy.denied(kernel)
        by: DecidedBy = "order" if listed and _step(kernel) >= Step.KERNEL else _DECIDED[_step(kernel)]
        if selector is not None:
            by = "call"
            reason = reason or (None if kernel.matches(selector) else f"not named by {selector!r}")
        elif kernel.matches(forced):
            by = "force"
        else:
            reason = reason or _unasked(kernel, listed=listed, ended=ended)
        candidates.append(Candidate(kernel=kernel, accepted=reason is None, reason=reason or "", by=by))
        ended = ended or (listed and kernel.selector == "native")
    candidates += [
        Candidate(kernel=record.name, accepted=False, reason=f"{record.status}: {record.reason}")
        for record in records
        if record.status != "active"
    ]
    return _concluded(op, call, forced, candidates)


def _concluded(op: str, call: str, forced: str, candidates: Sequence[Candidate]) -> Selection:
    """Name the first kernel that is accepted the winner."""
    won = next((c for c in candidates if c.accepted), None)
    told = (
        replace(c, reason=f"wins by {c.by}" if c is won else f"ranks after {won.kernel}") if won and c.accepted else c
        for c in candidates
    )
    winner = cast("KernelSpec", won.kernel) if won else None
    by = won.by if won else ""
    return Selection(op=op, call=call, winner=winner, decided_by=by, candidates=tuple(told), forced=forced)


def _step(kernel: KernelSpec) -> Step:
    if kernel.platform in IN_TREE:
        return Step.PLATFORM_METHOD
    if kernel.platform:
        return Step.OOT_REGISTERED if kernel.name else Step.OOT_METHOD
    return Step.NATIVE if kernel.selector == "native" else Step.KERNEL


def _place(kernel: KernelSpec, order: Sequence[str]) -> int:
    return next((i for i, word in enumerate(order) if kernel.matches(word)), len(order))


def _rank(
    kernel: KernelSpec, priority: Sequence[KernelBackend], order: Sequence[str], forced: str
) -> tuple[object, ...]:
    place, step, by = _place(kernel, order), _step(kernel), kernel.kernel_backend
    step = min(step, Step.KERNEL) if place < len(order) else step
    built = priority.index(by) if by in priority else len(priority)
    first = not kernel.matches(forced), step, place, -kernel.priority, kernel.platform == "cuda", built
    return *first, kernel.backend, str(by), kernel.name


def _unfit(kernel: KernelSpec, facts: CallFacts, *, native_supported: bool) -> str | None:
    """Give the reason why the kernel cannot run this call, whoever asks for it."""
    if kernel.selector == "native":
        return None if native_supported else "this op declares that it has no native"
    if facts.platform == "meta":
        return "meta tensors take native"
    if kernel.platform and kernel.platform not in CHAINS.get(facts.platform, (facts.platform,)):
        return f"device is {facts.platform}, this method is for {kernel.platform}"
    if kernel.platform == "cpu" and not facts.amx:
        return "forward_cpu needs a CPU with AMX"
    reason = None if kernel.platform else unmet(kernel.capabilities, facts.platform, facts.arch)
    if reason is not None:
        return reason
    for parameter, dtype in facts.dtypes:
        allowed = dtypes_of(kernel.dtypes, parameter)
        bound = parameter not in facts.buffers or isinstance(kernel.dtypes, Mapping)
        if bound and allowed is not None and dtype not in allowed:
            return f"dtype {dtype}{f' of {parameter}' if parameter else ''} not in ({', '.join(allowed)})"
    if kernel.leaves_out & facts.passed:
        return f"does not take {', '.join(sorted(kernel.leaves_out & facts.passed))}, which this call passes"
    if facts.needs_grad and not kernel.differentiable:
        return "records no gradient, and an input requires one"
    return None


def _unasked(kernel: KernelSpec, *, listed: bool, ended: bool) -> str | None:
    """Give the reason why the kernel is not chosen unless somebody names it."""
    step = _step(kernel)
    if ended and not listed and step in {Step.KERNEL, Step.PLATFORM_METHOD}:
        return "the policy's order ends with native before it"
    if step is Step.KERNEL and not kernel.declared:
        return "not declared in capabilities; runs only when named"
    if step is Step.KERNEL and kernel.priority < 0 and not listed:
        return f"priority {kernel.priority} is negative; runs only when named"
    return None
