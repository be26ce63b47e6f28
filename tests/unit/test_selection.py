"""The ladder as a pure function: who wins, and why each other one does not."""

from __future__ import annotations

import itertools
import random

import pytest

from opgraft import ANY, BackendRecord, CapabilityRequirement, KernelSpec
from opgraft.policy import OrderRule, Policy
from opgraft.selection import CallFacts, Candidate, Selection, select
from opgraft.spec import DEFAULT_PRIORITY

NATIVE = KernelSpec(op="a.b", backend="op", kernel_backend="torch", target="m:f", differentiable=True)
ON_CPU = CallFacts(platform="cpu", dtypes=(("x", "int32"),))


def spec(backend="there", kernel_backend="jit", **fields):
    return KernelSpec(op="a.b", backend=backend, kernel_backend=kernel_backend, target="m:f", **fields)


def method(platform, **fields):
    return spec("op", "plugin", platform=platform, **fields)


def chosen(*kernels, facts=ON_CPU, policy=None, native=True, **options):
    return select(
        op="a.b",
        call="x: int32 (1,) on cpu",
        facts=facts,
        kernels=[*kernels, NATIVE] if native else kernels,
        priority=options.pop("priority", DEFAULT_PRIORITY),
        policy=policy or Policy(),
        **options,
    )


def won(*kernels, **options):
    selection = chosen(*kernels, **options)
    return selection.winner and str(selection.winner), selection.decided_by


def reasons(selection):
    return {str(one.kernel): one.reason for one in selection.candidates}


def ordered(*selectors, **settings):
    return Policy(order=(OrderRule("*", selectors),), **settings)


def test_native_wins_where_there_is_nothing_else():
    assert ("native", "native") == won()


class TestRank:
    def test_the_higher_priority_wins(self):
        assert ("there/jit high", "priority") == won(spec(name="low", priority=10), spec(name="high", priority=11))

    def test_then_the_ops_own_order_of_kernel_backends(self):
        assert ("there/aot", "priority") == won(spec(), spec(kernel_backend="aot"))
        assert ("there/jit", "priority") == won(spec(), spec(kernel_backend="aot"), priority=("jit", "aot"))

    def test_unlisted_kernel_backends_come_last(self):
        assert ("there/jit", "priority") == won(spec(), spec(kernel_backend="aot"), priority=("jit",))
        assert "there/triton" == won(spec(kernel_backend="triton"), spec(), priority=("triton", "torch"))[0]

    def test_then_the_backends_name_then_the_functions(self):
        tied = [spec("zeta"), spec("acme", name="g"), spec("acme", name="f"), spec("beta")]

        assert ["acme/jit f", "acme/jit g", "beta/jit", "zeta/jit", "native"] == [
            str(one) for one in chosen(*tied).runners
        ]

    def test_never_the_order_in_which_they_were_found(self):
        kernels = [
            spec("zeta"),
            spec("acme", name="g"),
            spec("acme", name="f"),
            spec("beta", "triton", priority=60),
            spec("op", "triton"),
            method("cuda"),
            method("cpu"),
        ]
        expected = chosen(*kernels)

        for seed in range(100):
            shuffled = random.Random(seed).sample(kernels, len(kernels))  # noqa: S311 - an order, no secret
            assert expected == chosen(*shuffled)


class TestLadder:
    def test_its_steps_in_their_order(self):
        registered, own = method("acme", name="f"), method("acme")
        kernel, native = spec(capabilities=ANY, priority=1000), NATIVE
        facts = CallFacts(platform="acme")

        assert ("op/acme f", "oot") == won(kernel, own, registered, facts=facts)
        assert ("op/acme", "oot") == won(kernel, own, facts=facts)
        assert ("there/jit", "priority") == won(kernel, method("cuda"), facts=facts)
        assert ("native", "native") == won(method("cuda"), facts=facts)
        assert native is chosen(method("cuda"), facts=facts).winner

    def test_a_kernel_comes_before_a_platform_method_whatever_its_priority(self):
        facts = CallFacts(platform="cuda")

        assert ("there/jit", "priority") == won(method("cuda"), spec(priority=0), facts=facts)
        assert ("op/cuda", "platform_method") == won(method("cuda"), facts=facts)

    def test_hip_takes_its_own_method_then_the_cuda_one(self):
        facts = CallFacts(platform="hip")

        assert "op/hip" == won(method("cuda"), method("hip"), facts=facts)[0]
        assert "op/cuda" == won(method("cuda"), facts=facts)[0]

    def test_meta_tensors_take_native(self):
        selection = chosen(spec(), method("cuda"), facts=CallFacts(platform="meta"))

        assert "native" == selection.winner.selector
        assert {"there/jit": "meta tensors take native", "op/cuda": "meta tensors take native"} == {
            name: reason for name, reason in reasons(selection).items() if name != "native"
        }

    def test_nothing_at_all_wins_where_native_is_absent_and_nothing_else_fits(self):
        selection = chosen(spec(capabilities=CapabilityRequirement.NPU), native_supported=False)

        assert (None, "", ()) == (selection.winner, selection.decided_by, selection.runners)
        assert "this op declares that it has no native" == reasons(selection)["native"]


REFUSALS = [
    (spec(capabilities=CapabilityRequirement.CUDA), {}, "device is cpu, needs cuda"),
    (
        spec(capabilities={CapabilityRequirement.CUDA, CapabilityRequirement.HIP}),
        {},
        "device is cpu, needs cuda or hip",
    ),
    (spec(dtypes=("int64",)), {}, "dtype int32 of x not in (int64)"),
    (spec(dtypes={"x": ("int64", "int8")}), {}, "dtype int32 of x not in (int64, int8)"),
    (spec(dtypes={"y": ("int64",)}), {}, None),
    (spec(dtypes=("int64",)), {"dtypes": (("", "int32"),)}, "dtype int32 not in (int64)"),
    (
        spec(leaves_out=frozenset({"scale", "bias"})),
        {"passed": frozenset({"scale", "bias", "out"})},
        "does not take bias, scale, which this call passes",
    ),
    (spec(leaves_out=frozenset({"scale"})), {"passed": frozenset({"out"})}, None),
    (spec(), {"needs_grad": True}, "records no gradient, and an input requires one"),
    (spec(differentiable=True), {"needs_grad": True}, None),
    (spec(declared=False), {}, "not declared in capabilities; runs only when named"),
    (spec(priority=-1), {}, "priority -1 is negative; runs only when named"),
    (method("cuda"), {}, "device is cpu, this method is for cuda"),
    (method("cpu"), {}, "forward_cpu needs a CPU with AMX"),
    (method("cpu"), {"amx": True}, None),
]


@pytest.mark.parametrize(("kernel", "facts", "reason"), REFUSALS)
def test_why_a_kernel_does_not_run(kernel, facts, reason):
    fields = {"platform": "cpu", "dtypes": (("x", "int32"),), **facts}

    selection = chosen(kernel, facts=CallFacts(**fields))

    if reason is None:
        assert kernel is selection.winner
    else:
        assert (NATIVE, reason) == (selection.winner, reasons(selection)[str(kernel)])


class TestOrder:
    def test_what_it_lists_comes_first_and_decides(self):
        kernels = spec("acme", priority=99), spec("beta", priority=1), spec("zeta")

        assert ("beta/jit", "order") == won(*kernels, policy=ordered("beta"))
        assert ["beta/jit", "zeta/jit", "acme/jit", "native"] == [
            str(one) for one in chosen(*kernels, policy=ordered("beta", "zeta")).runners
        ]

    def test_it_may_name_kernel_backends_and_whole_selectors(self):
        kernels = spec("acme", "aot"), spec("acme", "triton"), spec("beta", "triton", priority=60)

        assert "beta/triton" == won(*kernels, policy=ordered("triton"))[0]
        assert "acme/triton" == won(*kernels, policy=ordered("acme/triton"))[0]

    def test_it_asks_for_negative_priorities(self):
        assert ("there/jit", "order") == won(spec(priority=-10), policy=ordered("there"))

    def test_native_in_it_ends_the_walk(self):
        kernels = spec("acme"), spec("beta"), method("cpu")
        facts = CallFacts(platform="cpu", amx=True)

        selection = chosen(*kernels, policy=ordered("beta", "native"), facts=facts)

        assert ["beta/jit", "native"] == [str(one) for one in selection.runners]
        assert "the policy's order ends with native before it" == reasons(selection)["acme/jit"]
        assert "the policy's order ends with native before it" == reasons(selection)["op/cpu"]
        assert ("native", "order") == won(spec("acme"), policy=ordered("beta", "native"))

    def test_it_lists_platform_methods_too(self):
        facts = CallFacts(platform="cuda")

        assert ("op/cuda", "order") == won(spec(), method("cuda"), facts=facts, policy=ordered("op/cuda"))

    def test_it_overrides_no_capability_and_names_absent_ones_in_vain(self):
        cuda = spec("cuda", capabilities=CapabilityRequirement.CUDA)

        assert ("there/jit", "priority") == won(spec(), cuda, policy=ordered("cuda", "nobody"))

    def test_out_of_tree_comes_before_it(self):
        facts = CallFacts(platform="acme")

        assert ("op/acme", "oot") == won(spec(), method("acme"), facts=facts, policy=ordered("there"))

    def test_an_undeclared_kernel_is_not_chosen_by_it(self):
        undeclared = spec("op", "triton", declared=False)

        assert "native" == won(undeclared, policy=ordered("op"))[0]

    def test_the_first_rule_that_matches_counts(self):
        policy = Policy(order=(OrderRule("a.*", ("beta",)), OrderRule("*", ("acme",))))

        assert "beta/jit" == won(spec("acme"), spec("beta"), policy=policy)[0]


class TestDeny:
    def test_a_denied_kernel_does_not_run_unless_the_call_names_it(self):
        policy = Policy(deny=frozenset({"there"}), sources={"deny": "OPGRAFT_DENY"})

        selection = chosen(spec(), policy=policy)

        assert ("native", "'there' is denied by OPGRAFT_DENY") == (
            selection.winner.selector,
            reasons(selection)["there/jit"],
        )
        assert ("there/jit", "call") == won(spec(), policy=policy, selector="there")

    def test_native_may_be_denied(self):
        assert (None, "") == won(policy=Policy(deny=frozenset({"native"})))


class TestSelector:
    def test_it_is_strict(self):
        selection = chosen(spec("acme"), spec("beta"), selector="beta")

        assert ("beta/jit", "call") == (str(selection.winner), selection.decided_by)
        assert {
            "acme/jit": "not named by 'beta'",
            "beta/jit": "wins by call",
            "native": "not named by 'beta'",
        } == reasons(selection)

    def test_it_overrides_declaration_priority_and_order_not_capability(self):
        policy = ordered("native")
        cuda = spec(capabilities=CapabilityRequirement.CUDA)

        assert "there/jit" == won(spec(declared=False, priority=-5), selector="there", policy=policy)[0]
        assert (None, "") == won(cuda, selector="there")
        assert "device is cpu, needs cuda" == reasons(chosen(cuda, selector="there"))["there/jit"]

    def test_it_overrides_a_force(self):
        assert ("native", "call") == won(spec(), selector="native", policy=Policy(force="there"))


class TestForce:
    def test_it_comes_before_every_step(self):
        facts = CallFacts(platform="acme")

        assert ("native", "force") == won(spec(), method("acme"), facts=facts, policy=Policy(force="native"))
        assert ("there/jit", "force") == won(spec(priority=-1, declared=False), policy=Policy(force="there"))

    def test_what_it_cannot_have_leaves_the_ladder_as_it_is(self):
        selection = chosen(spec(), policy=Policy(force="triton"))

        assert ("there/jit", "priority", "triton") == (str(selection.winner), selection.decided_by, selection.unforced)

    def test_a_refusal_of_the_call_falls_through_and_is_told(self):
        forced = spec("forced")
        selection = chosen(spec("acme"), forced, policy=Policy(force="forced"))
        assert ("", "forced/jit") == (selection.unforced, str(selection.winner))

        left = selection.without({forced: "odd"})

        assert ("forced", "acme/jit", "priority") == (left.unforced, str(left.winner), left.decided_by)


class TestWithout:
    def test_the_next_one_wins_by_what_decides_for_it(self):
        first, second, third = spec("acme"), spec("beta"), spec("zeta")
        selection = chosen(first, second, third, policy=ordered("acme", "beta"))

        left = selection.without({first: "odd"})

        assert ("beta/jit", "order") == (str(left.winner), left.decided_by)
        assert {
            "acme/jit": "rejected: odd",
            "beta/jit": "wins by order",
            "zeta/jit": "ranks after beta/jit",
            "native": "ranks after beta/jit",
        } == reasons(left)
        assert ("zeta/jit", "priority") == won_of(left.without({second: "even"}))

    def test_a_strict_call_has_no_next_one(self):
        kernel = spec()
        left = chosen(kernel, spec("beta"), selector="there").without({kernel: "odd"})

        assert (None, "") == (left.winner, left.decided_by)


def won_of(selection):
    return str(selection.winner), selection.decided_by


def test_conditional_marks_the_accepted_kernels_that_are_asked_for_each_call():
    selection = chosen(spec("acme", rejects=lambda x: None), spec("beta")).conditional()

    assert {
        "acme/jit": "wins by priority; conditional: asked per call",
        "beta/jit": "ranks after acme/jit",
        "native": "ranks after acme/jit",
    } == reasons(selection)


def test_backends_that_are_not_active_appear_with_their_status_as_the_reason():
    records = [
        BackendRecord(name="acme", status="active"),
        BackendRecord(name="cuda", status="inactive", reason="torch sees no cuda device"),
        BackendRecord(name="odd", status="quarantined", reason="it raised"),
    ]

    absent = [one for one in chosen(records=records).candidates if isinstance(one.kernel, str)]

    assert [
        Candidate(kernel="cuda", accepted=False, reason="inactive: torch sees no cuda device"),
        Candidate(kernel="odd", accepted=False, reason="quarantined: it raised"),
    ] == absent


def test_a_selection_reads_as_a_table():
    selection = chosen(
        spec("acme", "triton", name="fast", distribution="opgraft-acme", version="0.3.1"),
        method("cuda"),
        records=[BackendRecord(name="hip", status="inactive", reason="no card")],
    )

    assert (
        "a.b with x: int32 (1,) on cpu: acme/triton fast (opgraft-acme 0.3.1), decided by priority\n"
        "  acme/triton  fast    opgraft-acme 0.3.1  wins by priority\n"
        "  op/cuda              the op itself       device is cpu, this method is for cuda\n"
        "  native               the op itself       ranks after acme/triton fast (opgraft-acme 0.3.1)\n"
        "  hip          (none)                      inactive: no card"
    ) == str(selection)


def test_a_selection_without_a_winner_says_so():
    selection = chosen(native_supported=False)

    assert (
        "a.b with x: int32 (1,) on cpu: no kernel\n  native    the op itself  this op declares that it has no native"
    ) == str(selection)
    assert "" == Selection(op="a.b", call="", winner=None, decided_by="", candidates=()).table()


@pytest.mark.parametrize(("force", "selector"), [*itertools.product([None, "there", "native"], repeat=2)])
def test_every_candidate_has_a_reason_whatever_is_asked(force, selector):
    kernels = [kernel for kernel, _, _ in REFUSALS]

    selection = chosen(*kernels, policy=Policy(force=force), selector=selector)

    assert len(kernels) + 1 == len(selection.candidates)
    assert all(one.reason for one in selection.candidates)
    assert all(one.accepted == one.reason.startswith(("wins by", "ranks after")) for one in selection.candidates)
