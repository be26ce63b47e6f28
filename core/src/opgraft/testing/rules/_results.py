"""Rules on what kind of thing a kernel returns."""

from __future__ import annotations

import contextlib

from opgraft.testing import judges
from opgraft.testing.faults import NotApplicable
from opgraft.testing.rule import rule
from opgraft.testing.subject import Subject
from opgraft.testing.survey import BROAD, EDGES, surveyed


@rule(seconds=2.0)
def result_has_natives_structure(subject: Subject) -> None:
    """A call returns what native returns: a tensor, a tuple of so many, or nothing."""
    surveyed(subject, BROAD, judges.structure)


@rule(seconds=2.0)
def result_has_the_declared_dtype(subject: Subject) -> None:
    """The result has the dtype that the op's format signature states, for every input dtype."""
    surveyed(subject, BROAD, judges.dtype)
    with contextlib.suppress(NotApplicable):
        surveyed(subject, EDGES, judges.dtype)


@rule(seconds=2.0)
def result_has_the_right_shape(subject: Subject) -> None:
    """The result has native's shape, at every size and layout."""
    surveyed(subject, BROAD, judges.shape)


@rule(seconds=2.0)
def result_is_on_the_device_of_the_inputs(subject: Subject) -> None:
    """The result is on the device of the arguments, index included."""
    surveyed(subject, BROAD, judges.device)


@rule(seconds=2.0)
def result_is_contiguous(subject: Subject) -> None:
    """A fresh result is contiguous, whatever the strides of the inputs are."""
    surveyed(subject, BROAD, judges.contiguity)


@rule(seconds=2.0)
def result_is_a_plain_tensor(subject: Subject) -> None:
    """The result is a plain strided tensor that records no gradient."""
    surveyed(subject, BROAD, judges.plainness)
