"""Every error class of opgraft, and the one way to name the nearest known word.

Each class derives from :class:`OpgraftError` and from the builtin that fits, so that callers may
catch either. A message says what failed, with which values, whose it is and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OpgraftError(Exception):
    """Base of everything opgraft raises on its own account."""


class UnknownOpError(OpgraftError, LookupError):
    """No op of this name is in the catalogue."""


class UnknownSelectorError(OpgraftError, LookupError):
    """A selector names no backend and no kernel backend that anybody here knows."""


class NoKernelError(OpgraftError, NotImplementedError):
    """No kernel may run this call; the message lists every candidate with its reason."""


class PluginError(OpgraftError, RuntimeError):
    """A plugin broke its contract, or one that was required is not active."""


class PolicyError(OpgraftError, ValueError):
    """A policy setting cannot be read."""


class ArgumentTypeError(OpgraftError, TypeError):
    """An argument of a call has the wrong kind or dtype."""


class ArgumentValueError(OpgraftError, ValueError):
    """An argument of a call has a wrong shape, stride, range or device."""


class BufferOverflowError(OpgraftError, ValueError):
    """A preallocated buffer is too small for what is about to be written."""


class RegistrationError(OpgraftError, ValueError):
    """A declaration (op, kernel, capability, signature) is wrong or conflicts with another."""


class NotSupported(OpgraftError, NotImplementedError):  # noqa: N818 - a kernel's answer, not a fault
    """Raised by a kernel, before it wrote anything, to pass the call on to the next one."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known names are near.

    Parameters
    ----------
    name
        What was asked for.
    known
        The names that exist.

    Returns
    -------
    str
        ``"; did you mean 'a' or 'b'? Known: ..."``, without the question where nothing is near.

    """
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    question = f"; did you mean {' or '.join(repr(word) for word in close)}?" if close else ";"
    return f"{question} Known: {', '.join(names) if names else 'none'}"


def add_note(error: BaseException, note: str) -> None:
    """Attach a note to an exception, on Python 3.10 too, where ``add_note`` does not exist."""
    notes = getattr(error, "__notes__", None)
    if notes is None:
        notes = error.__notes__ = []  # type: ignore[attr-defined]
    if note not in notes:
        notes.append(note)
