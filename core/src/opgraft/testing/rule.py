"""What a rule is: a named function that raises where a backend breaks it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from opgraft.hardware import Detector

if TYPE_CHECKING:
    from importlib_metadata import Distribution

    from opgraft.fused_op import BaseFusedOp
    from opgraft.spec import BackendRecord, KernelSpec

__all__ = ["DEFINED", "PRESENCE", "PRESENCE_SUMMARY", "Installed", "Offered", "Rule", "Scope", "rule"]


class Scope(Enum):
    """What a rule looks at."""

    BACKEND = "backend"
    """The installed backend, no hardware needed."""
    KERNEL = "kernel"
    """What a kernel declares, no hardware needed."""
    CALL = "call"
    """Calls of a kernel on a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A backend as it is installed.

    Parameters
    ----------
    record
        What became of it.
    distribution
        Its metadata, or None where it was registered without any.
    detector
        Counts the devices that torch sees.

    """

    record: BackendRecord
    distribution: Distribution | None
    detector: Detector = field(default_factory=Detector)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A kernel as it is declared.

    Parameters
    ----------
    record
        The backend's.
    kernel
        The kernel's record.
    op
        The op.

    """

    record: BackendRecord
    kernel: KernelSpec
    op: BaseFusedOp


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that every backend must hold to.

    Parameters
    ----------
    name
        Its name in reports and in ``conformance-xfails.txt``.
    summary
        One sentence, which the report shows.
    scope
        What it looks at.
    check
        Raises :class:`~opgraft.testing.faults.Violation` where it is broken, and
        :class:`~opgraft.testing.faults.NotApplicable` where there is nothing to look at.
    seconds
        How long it may take on a CPU.

    """

    name: str
    summary: str
    scope: Scope
    check: Callable[[Any], None]
    seconds: float


DEFINED: Final[list[Rule]] = []
"""Every rule that a module has defined; `opgraft.testing.rules` puts them in order."""


PRESENCE: Final = "device_is_present"
PRESENCE_SUMMARY: Final = "A device that the kernel declares is present, so that it can be run."
"""What is told where no rule on calls can be tried; a failure only where the device is required."""


def rule(
    *, scope: Scope = Scope.CALL, seconds: float = 0.6
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Make a function a rule: its name is the rule's, its first line what the report shows."""

    def add(function: Callable[[Any], None]) -> Callable[[Any], None]:
        summary = (inspect.getdoc(function) or "").partition("\n")[0]
        made = Rule(name=function.__name__, summary=summary, scope=scope, check=function, seconds=seconds)
        if any(known.name == made.name for known in DEFINED):
            raise ValueError(f"there are two rules {made.name!r}")
        DEFINED.append(made)
        return function

    return add
