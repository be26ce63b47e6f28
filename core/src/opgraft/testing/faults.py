"""What a rule can say besides nothing: that it is violated, or that it does not apply here."""

from __future__ import annotations

__all__ = ["Declined", "NotApplicable", "Violation"]


class Violation(Exception):  # noqa: N818 - the finding of a rule, not an error of the suite
    """A kernel or a backend breaks a rule.

    Parameters
    ----------
    what
        What is wrong, with the values expected and got.
    example
        The smallest call that shows it, as text; empty where no call is to blame.
    route
        How the kernel was called: ``"direct"`` or ``"handle"``; empty as above.

    """

    def __init__(self, what: str, example: str = "", route: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.example = example
        self.route = route


class NotApplicable(Exception):  # noqa: N818 - as above
    """A rule has nothing to look at here; the argument is the reason."""


class Declined(Exception):  # noqa: N818 - as above
    """The kernel passed a call on, by ``rejects`` or by ``NotSupported``; the argument is why."""
