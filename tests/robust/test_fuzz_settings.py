"""Random metadata, files and variables: a sentence that names the culprit, never a traceback."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opgraft.discovery import scan
from opgraft.errors import PolicyError
from opgraft.policy import Policy, PolicyStore

NAMES = ("ORDER", "FORCE", "DENY", "PLUGINS", "REQUIRE", "STRICT", "TRACE", "CHECK", "LOCK", "CONFIG")
WORDS = (
    "cuda",
    "triton",
    "cuda/triton",
    "native",
    "auto",
    "1",
    "yes",
    "maybe",
    "*",
    "attention.*=cuda",
    ";",
    "=",
    ",",
    " ",
    "",
)
printable = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=20)
values = st.one_of(printable, st.lists(st.sampled_from(WORDS), max_size=4).map("".join))
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), printable),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(printable, inner, max_size=3)),
    max_leaves=6,
)


def usable(store):
    """Use the policy as the library does."""
    policy = store.current()
    assert isinstance(policy, Policy)
    assert str(policy)
    policy.selectors_for("attention.clamp_position")
    policy.allows("acme", "opgraft-acme")
    assert policy.export() == PolicyStore({}, "/nowhere").current().export() | policy.export()


def complaint(action, *arguments):
    """Do something; give the sentence with which it was refused, or nothing."""
    try:
        action(*arguments)
    except PolicyError as error:
        return str(error)
    return ""


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), values, max_size=4))
def test_any_value_of_any_variable_is_read_or_named(environ):
    store = PolicyStore({f"OPGRAFT_{name}": value for name, value in environ.items()}, "/nowhere")
    said = complaint(usable, store)
    assert not said or any(f"OPGRAFT_{name}" in said for name in environ)


@settings(max_examples=100, deadline=None)
@given(st.text(string.ascii_uppercase + "_", min_size=1, max_size=10), values)
def test_any_other_variable_is_reported_and_stops_nothing(name, value):
    if name not in NAMES:
        store = PolicyStore({f"OPGRAFT_{name}": value}, "/nowhere")
        usable(store)
        (message,) = store.unknown
        assert f"OPGRAFT_{name}" in message


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.one_of(st.sampled_from([n.lower() for n in NAMES]), printable), plain, max_size=3))
def test_any_value_that_the_api_is_given_is_read_or_named(data):
    store = PolicyStore({}, "/nowhere")
    said = complaint(store.apply, data)
    assert not said or said.startswith("opgraft.apply_policy: ")
    usable(store)


toml = st.one_of(
    st.binary(max_size=60),
    st.lists(
        st.tuples(
            st.sampled_from([n.lower() for n in NAMES]),
            st.sampled_from(["1", "true", '"x"', "[]", '["a b"]', "{}", "1979-05-27", "nan", "[[", ""]),
        ),
        max_size=3,
    ).map(lambda pairs: "\n".join(f"{key} = {value}" for key, value in pairs).encode()),
)


@settings(max_examples=300, deadline=None)
@given(content=toml)
def test_any_file_is_read_or_named(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("policy", numbered=True)
    (folder / "opgraft.toml").write_bytes(content)
    said = complaint(usable, PolicyStore({}, folder))
    assert not said or str(folder / "opgraft.toml") in said


lines = st.lists(
    st.sampled_from(
        [
            "[opgraft.backends]",
            "[opgraft.backends",
            "[x]",
            "acme = a.b",
            "acme = a:b",
            "= a",
            "acme",
            "acme =",
            "a = b = c",
            "# x",
            "",
            "\t",
            "é = é",
        ]
    ),
    max_size=6,
).map("\n".join)


@settings(max_examples=200, deadline=None)
@given(
    entries=st.one_of(st.binary(max_size=60), lines.map(str.encode)),
    metadata=st.one_of(st.binary(max_size=60), st.just(b"Name: x\nVersion: 1\n")),
)
def test_any_metadata_is_read_or_a_finding(tmp_path_factory, entries, metadata):
    path = tmp_path_factory.mktemp("metadata", numbered=True)
    folder = path / "made_up-1.0.dist-info"
    folder.mkdir()
    (folder / "entry_points.txt").write_bytes(entries)
    (folder / "METADATA").write_bytes(metadata)
    found = scan([str(path)])
    assert all(isinstance(entry.name, str) and isinstance(entry.value, str) for entry in found.entries)
    assert all(str(folder) == finding.subject and finding.message for finding in found.findings)


@pytest.mark.parametrize("name", ["made_up-1.0.dist-info", "made_up.egg-info", "x-1-2-3.egg-info"])
def test_a_file_in_place_of_a_metadata_folder_is_passed_over(tmp_path, name):
    (tmp_path / name).write_text("[opgraft.backends]\nacme = a", encoding="utf-8")
    assert ((), ()) == (scan([str(tmp_path)]).entries, scan([str(tmp_path)]).findings)
