"""Which kernel wins, and why each other one does not: a pure function of its arguments.

One list of candidates, one walk; the steps of the ladder are sort keys.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

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


_DECIDED: Final[Mapping[Step, DecidedBy]] = {
    Step.OOT_REGISTERED: "oot",
    Step.OOT_METHOD: "oot",
    Step.KERNEL: "priority",
    Step.PLATFORM_METHOD: "platform_method",
    Step.NATIVE: "native",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """What selection may know of a call; no tensor, no value.

    Parameters
    ----------
    platform, arch
        Platform key and arch of the tensors' device.
    device
        How to name the device to people.
    dtypes
        Dtype name of each tensor parameter; a name of ``""`` stands for all of them.
    passed
        Keyword-only parameters given a value other than the default.
    needs_grad
        Whether gradients are recorded and an input requires one.
    amx
        Whether the CPU has AMX tiles.

    """

    platform: str
    arch: str = ""
    device: str = ""
    dtypes: tuple[tuple[str, str], ...] = ()
    passed: frozenset[str] = frozenset()
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

    """

    kernel: KernelSpec | str
    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The choice for one call, with every candidate's verdict in the order of the walk.

    Parameters
    ----------
    op
        Op id or class name.
    call
        The call as people read it.
    winner
        The kernel that runs; None where none may.
    decided_by
        The step of the ladder that decided.
    candidates
        Every candidate.
    unforced
        The forced selector that this op could not honour; empty otherwise.

    """

    op: str
    call: str
    winner: KernelSpec | None
    decided_by: DecidedBy
    candidates: tuple[Candidate, ...]
    unforced: str = ""

    @property
    def runners(self) -> tuple[KernelSpec, ...]:
        """The accepted kernels in the order in which they may be tried."""
        accepted = (c.kernel for c in self.candidates if c.accepted)
        return tuple(kernel for kernel in accepted if isinstance(kernel, KernelSpec))

    def conditional(self) -> Selection:
        """Mark the accepted kernels that would be asked per call."""
        candidates = tuple(
            replace(c, reason=f"{c.reason}; conditional: asked per call")
            if c.accepted and isinstance(c.kernel, KernelSpec) and c.kernel.rejects is not None
            else c
            for c in self.candidates
        )
        return replace(self, candidates=candidates)

    def without(self, refusals: Mapping[KernelSpec, str]) -> Selection:
        """Take kernels out that refused this very call, each with its reason."""
        if not refusals:
            return self
        candidates = tuple(
            replace(c, accepted=False, reason=f"rejected: {refusals[c.kernel]}")
            if isinstance(c.kernel, KernelSpec) and c.kernel in refusals
            else c
            for c in self.candidates
        )
        left = replace(self, candidates=candidates)
        winner = left.runners[0] if left.runners else None
        decided = self.decided_by
        if winner is not self.winner and decided not in {"call", "force"}:
            decided = _DECIDED[_step(winner)] if winner else ""
        return replace(left, winner=winner, decided_by=decided)

    def table(self) -> str:
        """Write one line a candidate."""
        rows = [
            (
                c.kernel if isinstance(c.kernel, str) else c.kernel.selector,
                "" if isinstance(c.kernel, str) else c.kernel.name or "-",
                "" if isinstance(c.kernel, str) else c.kernel.owner,
                c.reason,
            )
            for c in self.candidates
        ]
        if not rows:
            return "  (no candidates)"
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            "  " + "  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]) for row in rows
        )

    def __str__(self) -> str:
        """Write the winner, what decided, and the table."""
        won = f"{self.winner}, decided by {self.decided_by}" if self.winner else "no kernel"
        return f"{self.op} with {self.call}: {won}\n{self.table()}"


def _step(kernel: KernelSpec) -> Step:
    if kernel.platform:
        if kernel.platform in IN_TREE:
            return Step.PLATFORM_METHOD
        return Step.OOT_REGISTERED if kernel.name else Step.OOT_METHOD
    return Step.NATIVE if kernel.selector == "native" else Step.KERNEL


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
    strict = selector if selector is not None else policy.force
    ranked = sorted(kernels, key=lambda kernel: _rank(kernel, priority, order))
    judged: list[tuple[KernelSpec, str | None]] = []
    ended = False
    for kernel in ranked:
        place = _place(kernel, order)
        named = strict is not None and kernel.matches(strict)
        reason = _unfit(kernel, facts, native_supported=native_supported)
        if reason is None and selector is None:
            reason = policy.denied(kernel)
        if reason is None and not named:
            reason = _unasked(kernel, listed=place < len(order), ended=ended)
        judged.append((kernel, reason))
        ended = ended or (kernel.selector == "native" and place < len(order))
    unforced = ""
    if strict is not None:
        named_ok = [k for k, reason in judged if reason is None and k.matches(strict)]
        if named_ok or selector is not None:
            judged = [(k, reason or _not_named(k, strict)) for k, reason in judged]
        else:
            unforced = strict
    eligible = [kernel for kernel, reason in judged if reason is None]
    winner = eligible[0] if eligible else None
    decided: DecidedBy = ""
    if winner is not None:
        if selector is not None:
            decided = "call"
        elif strict is not None and not unforced:
            decided = "force"
        elif _place(winner, order) < len(order) and _step(winner) >= Step.KERNEL:
            decided = "order"
        else:
            decided = _DECIDED[_step(winner)]
    offered = [
        Candidate(
            kernel=kernel,
            accepted=reason is None,
            reason=reason or (f"wins by {decided}" if kernel is winner else f"ranks after {winner}"),
        )
        for kernel, reason in judged
    ]
    absent = [
        Candidate(kernel=r.name, accepted=False, reason=f"{r.status}: {r.reason}")
        for r in records
        if r.status != "active"
    ]
    return Selection(
        op=op,
        call=call,
        winner=winner,
        decided_by=decided,
        candidates=(*offered, *absent),
        unforced=unforced,
    )


def _place(kernel: KernelSpec, order: Sequence[str]) -> int:
    return next((i for i, word in enumerate(order) if kernel.matches(word)), len(order))


def _rank(
    kernel: KernelSpec, priority: Sequence[KernelBackend], order: Sequence[str]
) -> tuple[object, ...]:
    step = _step(kernel)
    place = _place(kernel, order)
    if step in {Step.KERNEL, Step.NATIVE, Step.PLATFORM_METHOD} and place < len(order):
        step = Step.KERNEL
    by = kernel.kernel_backend
    built = priority.index(by) if by in priority else len(priority)
    chain = CHAINS.get("hip", ()).index(kernel.platform) if kernel.platform in {"hip", "cuda"} else 0
    return step, place, -kernel.priority, chain, built, kernel.backend, str(by), kernel.name


def _unfit(kernel: KernelSpec, facts: CallFacts, *, native_supported: bool) -> str | None:
    """Give the reason why the kernel cannot run this call, whoever asks for it."""
    step = _step(kernel)
    if step is Step.NATIVE:
        return None if native_supported else "this op declares that it has no native"
    if facts.platform == "meta":
        return "meta tensors take native"
    if kernel.platform:
        keys = CHAINS.get(facts.platform, (facts.platform,))
        if kernel.platform not in keys:
            return f"device is {facts.platform}, this method is for {kernel.platform}"
        if kernel.platform == "cpu" and not facts.amx:
            return "forward_cpu needs a CPU with AMX"
    else:
        reason = unmet(kernel.capabilities, facts.platform, facts.arch)
        if reason is not None:
            return reason
    for parameter, dtype in facts.dtypes:
        allowed = _allowed(kernel, parameter)
        if allowed is not None and dtype not in allowed:
            what = f"dtype {dtype}" if not parameter else f"dtype {dtype} of {parameter}"
            return f"{what} not in ({', '.join(allowed)})"
    left_out = kernel.leaves_out & facts.passed
    if left_out:
        return f"does not take {', '.join(sorted(left_out))}, which this call passes"
    if facts.needs_grad and not kernel.differentiable:
        return "records no gradient, and an input requires one"
    return None


def _allowed(kernel: KernelSpec, parameter: str) -> tuple[str, ...] | None:
    if not parameter and isinstance(kernel.dtypes, Mapping):
        return tuple(dict.fromkeys(name for names in kernel.dtypes.values() for name in names))
    return dtypes_of(kernel.dtypes, parameter)


def _unasked(kernel: KernelSpec, *, listed: bool, ended: bool) -> str | None:
    """Give the reason why the kernel is not chosen unless somebody names it."""
    step = _step(kernel)
    if step is not Step.KERNEL and step is not Step.PLATFORM_METHOD:
        return None
    if ended and not listed:
        return "the policy's order ends with native before it"
    if step is Step.KERNEL and not kernel.declared:
        return "not declared in capabilities; runs only when named"
    if step is Step.KERNEL and kernel.priority < 0 and not listed:
        return f"priority {kernel.priority} is negative; runs only when named"
    return None


def _not_named(kernel: KernelSpec, selector: str) -> str | None:
    return None if kernel.matches(selector) else f"not named by {selector!r}"
