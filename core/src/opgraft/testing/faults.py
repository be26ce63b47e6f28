"""What a rule can say besides nothing: that it is violated, or that it does not apply here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opgraft.testing.calls import Call

__all__ = ["Declined", "NotApplicable", "Violation"]


class Violation(Exception):  # noqa: N818 - the finding of a rule, not an error of the suite
    """A kernel or a backend breaks a rule.

    Parameters
    ----------
    what
        What is wrong, with the values expected and got.
    call
        The smallest call that shows it, or words for it where it is no plain call; None where no
        call is to blame.
    route
        How the kernel was called: ``"direct"`` or ``"handle"``; empty as above.

    """

    def __init__(self, what: str, call: Call | str | None = None, route: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.call = call
        self.route = route


class NotApplicable(Exception):  # noqa: N818 - as above
    """A rule has nothing to look at here; the argument is the reason."""


class Declined(Exception):  # noqa: N818 - as above
    """The kernel passed a call on, by ``rejects`` or by ``NotSupported``; the argument is why."""
