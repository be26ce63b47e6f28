"""Every error class, and the words that say which known name is near."""

from __future__ import annotations

import pytest

import opgraft
from opgraft import errors
from opgraft.errors import add_note, nearest

CLASSES = {
    "UnknownOpError": LookupError,
    "UnknownSelectorError": LookupError,
    "NoKernelError": NotImplementedError,
    "PluginError": RuntimeError,
    "PolicyError": ValueError,
    "ArgumentTypeError": TypeError,
    "ArgumentValueError": ValueError,
    "BufferOverflowError": ValueError,
    "RegistrationError": ValueError,
    "NotSupported": NotImplementedError,
}


@pytest.mark.parametrize("name", CLASSES)
def test_every_error_may_be_caught_as_ours_and_as_the_fitting_builtin(name):
    error = getattr(opgraft, name)

    assert (opgraft.OpgraftError, CLASSES[name]) == error.__bases__
    assert "why" == str(error("why"))


def test_these_are_all_error_classes():
    known = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, Exception)}

    assert {*CLASSES, "OpgraftError"} == known


@pytest.mark.parametrize(
    ("name", "known", "message"),
    [
        ("tritn", ["triton", "jit"], "; did you mean 'triton'? Known: jit, triton"),
        ("ab", ["abc", "abd", "xyz"], "; did you mean 'abd' or 'abc'? Known: abc, abd, xyz"),
        ("zzz", ["triton", "triton"], "; Known: triton"),
        ("zzz", [], "; Known: none"),
    ],
)
def test_the_nearest_known_names(name, known, message):
    assert message == nearest(name, known)


def test_a_note_is_added_once():
    error = ValueError("x")

    add_note(error, "one")
    add_note(error, "two")
    add_note(error, "one")

    assert ["one", "two"] == error.__notes__
