"""Random installations, policies and calls, held against a model of the ladder in ten lines."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from installation import NoHardware

import opgraft
from opgraft.discovery import Advertised, Installation
from opgraft.hookspecs import forward, hookimpl
from opgraft.kernel_registry import KernelRegistry
from opgraft.ops.attention._clamp_position import ClampPosition
from opgraft.policy import PolicyStore
from opgraft.spec import DEFAULT_PRIORITY, Available, Backend, Unavailable

OP = "attention.clamp_position"
BUILT = ("plugin", "triton", "jit", "aot")
NAMES = ("alpha", "beta", "gamma", "delta")
FAULTS = ("", "", "", "", "raises", "wrong probe", "absent", "wrong parameters", "no backend")
RANKED = ClampPosition.default_priority if hasattr(ClampPosition, "default_priority") else DEFAULT_PRIORITY


@dataclass(frozen=True)
class Made:
    """One made-up backend: one kernel, and what is wrong with it."""

    name: str
    priority: int
    built: str
    platform: str
    fault: str
    dtypes: tuple[str, ...] | None
    rejects: bool

    def plugin(self):
        """Make the object that carries the hooks."""

        class Plugin:
            if self.fault != "no backend":

                @hookimpl
                def opgraft_backend(_):  # noqa: N805 - self is the made-up backend here
                    if self.fault == "raises":
                        raise OSError(self.name)
                    return Backend(name=self.name, platforms=(self.platform,))

            @hookimpl
            def opgraft_probe(_):  # noqa: N805 - as above
                if self.fault == "wrong probe":
                    return "yes"
                return Unavailable("absent") if self.fault == "absent" else Available(1)

        def kernel(seq_lens, *, out=None):
            return self.name

        def other(lens):
            return self.name

        marked = forward(
            OP,
            kernel_backend=self.built,
            priority=self.priority,
            dtypes=self.dtypes,
            rejects=(lambda seq_lens, *, out=None: "never") if self.rejects else None,
        )(other if self.fault == "wrong parameters" else kernel)
        Plugin.kernel = staticmethod(marked)
        return Plugin()

    @property
    def works(self):
        """Whether it has a kernel and hardware."""
        return not self.fault

    def matches(self, word):
        """Whether a selector names it."""
        return word in {self.name, self.built, f"{self.name}/{self.built}"}


made = st.builds(
    Made,
    name=st.sampled_from(NAMES),
    priority=st.integers(-2, 2),
    built=st.sampled_from(BUILT),
    platform=st.sampled_from(["cpu", "cpu", "npu"]),
    fault=st.sampled_from(FAULTS),
    dtypes=st.sampled_from([None, None, ("int32",), ("int64",)]),
    rejects=st.sampled_from([False, False, False, True]),
)
backends = st.lists(made, max_size=4, unique_by=lambda one: one.name)
words = st.sampled_from([*NAMES, *BUILT, "native", *(f"{n}/{b}" for n, b in itertools.product(NAMES, BUILT))])
policies = st.fixed_dictionaries(
    {},
    optional={
        "order": st.lists(words, max_size=4),
        "deny": st.lists(st.sampled_from([*NAMES, *BUILT]), max_size=2),
        "force": words,
    },
)


def model(installed, policy, dtype):
    """Say who wins: the whole ladder for one op on a CPU tensor."""
    order, force = policy.get("order", []), policy.get("force")
    able = [b for b in installed if b.works and b.platform == "cpu" and not any(map(b.matches, policy.get("deny", [])))]
    able = [b for b in able if dtype in (b.dtypes or (dtype,)) and not b.rejects]
    place = lambda one: next((i for i, w in enumerate(order) if one.matches(w)), len(order))  # noqa: E731
    rank = lambda one: (place(one), -one.priority, RANKED.index(one.built), one.name)  # noqa: E731
    if force == "native" or (forced := [b for b in able if force and b.matches(force)]):
        return "native" if force == "native" else min(forced, key=rank).name
    end = order.index("native") if "native" in order else len(order)
    asked = [b for b in able if place(b) < end or (end == len(order) and b.priority >= 0)]
    return min(asked, key=rank).name if asked else "native"


def registry(installed, policy, entries=None):
    """Make a process with these backends; the entry points lead to made-up modules."""
    one = KernelRegistry(policy=PolicyStore({}, "/nowhere"), detector=NoHardware(), path=[])
    handle = ClampPosition.publish(one)
    for backend in entries or installed:
        one._extra.append(backend.plugin())
    one.policy.set(**policy)
    return one, handle.function


def outcome(function, seq_lens):
    """Give the winner's name, or the class of the error."""
    try:
        result = function(seq_lens)
    except opgraft.OpgraftError as error:
        return type(error)
    return result if isinstance(result, str) else "native"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(installed=backends, policy=policies, dtype=st.sampled_from(["int32", "int64"]), shuffle=st.randoms())
def test_the_winner_is_that_of_the_model_whatever_the_order_of_discovery(installed, policy, dtype, shuffle):
    seq_lens = torch.tensor([0, 1, 5], dtype=getattr(torch, dtype))
    one, function = registry(installed, policy)
    winner = outcome(function, seq_lens)
    if not isinstance(winner, type):
        assert model(installed, policy, dtype) == winner
        explained = one.handle(OP).op.dispatcher.explain((seq_lens, None)).winner
        assert winner == ("native" if explained.selector == "native" else explained.backend)
    else:
        # Only a forced word that no backend here offers is an error.
        offering = [b for b in installed if b.works and b.name not in policy.get("deny", [])]
        assert not any(b.matches(policy["force"]) for b in offering)
    shuffled = list(installed)
    shuffle.shuffle(shuffled)
    assert winner == outcome(registry(installed, policy, shuffled)[1], seq_lens)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(installed=backends, broken=made.filter(lambda one: one.fault in {"raises", "wrong probe", "no backend"}))
def test_a_broken_plugin_changes_nothing_for_the_others(installed, broken):
    others = [one for one in installed if one.name != broken.name]
    seq_lens = torch.tensor([0, 1, 5], dtype=torch.int32)
    without, with_it = (registry(found, {}) for found in (others, [*others, broken]))
    assert outcome(without[1], seq_lens) == outcome(with_it[1], seq_lens)
    names = {one.name for one in others}
    records = [
        {r.name: (r.status, r.reason) for r in one.backends() if r.name in names} for one, _ in (without, with_it)
    ]
    assert records[0] == records[1]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.builds(
            Advertised,
            name=st.one_of(st.sampled_from([*NAMES, "native", "class", "a-b", ""]), st.text(max_size=8)),
            value=st.one_of(st.sampled_from(["json", "json:dumps", "nobody.has"]), st.text(max_size=8)),
            distribution=st.one_of(st.sampled_from(["one", "two"]), st.text(max_size=5)),
            version=st.text(max_size=5),
            requirements=st.lists(
                st.one_of(st.sampled_from(["torch<2", "opgraft"]), st.text(max_size=12)), max_size=2
            ).map(tuple),
        ),
        max_size=5,
    )
)
def test_no_metadata_whatever_it_says_raises(entries):
    from opgraft.discovery import discover
    from opgraft.policy import Policy

    installation = Installation(entries=tuple(entries), versions={"torch": "2.13.0", "opgraft": "0.1.0"})
    found = discover(installation, Policy(), {}, NoHardware())
    assert {entry.name for entry in entries} == {record.name for record in found.records}
    assert all(record.reason for record in found.records)


@pytest.mark.parametrize("policy", [{}, {"order": ["native"]}, {"force": "native"}])
def test_the_model_knows_native(policy):
    assert "native" == model([], policy, "int32")
