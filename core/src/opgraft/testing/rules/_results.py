"""Rules on what kind of thing a kernel returns."""

from __future__ import annotations

from collections.abc import Iterator

from opgraft.testing import judges
from opgraft.testing.calls import Call
from opgraft.testing.groups import broad
from opgraft.testing.rule import rule
from opgraft.testing.subject import Subject


@rule()
def result_has_natives_structure(subject: Subject) -> None:
    """A call returns what native returns: a tensor, a tuple of so many, or nothing."""
    subject.every(broad(subject), judges.structure)


@rule()
def result_has_the_declared_dtype(subject: Subject) -> None:
    """The result has the dtype that the op's format signature states, for every input dtype."""
    subject.every(broad(subject), judges.dtype)


@rule()
def result_has_the_right_shape(subject: Subject) -> None:
    """The result has native's shape, at every size and layout."""
    subject.every(broad(subject), judges.shape)


@rule()
def result_is_on_the_device_of_the_inputs(subject: Subject) -> None:
    """The result is on the device of the arguments, index included."""
    subject.every(broad(subject), judges.device)


@rule()
def result_is_contiguous(subject: Subject) -> None:
    """A fresh result is contiguous, whatever the strides of the inputs are."""
    subject.every(broad(subject), judges.contiguity)


@rule()
def result_is_a_plain_tensor(subject: Subject) -> None:
    """The result is a plain strided tensor that records no gradient."""
    subject.every(_without_buffers(broad(subject)), judges.plainness)


def _without_buffers(calls: Iterator[Call]) -> Iterator[Call]:
    return (call for call in calls if not call.buffers)
