"""Plugins made up on the spot: a metadata folder and one module on PYTHONPATH, nothing installed."""

from __future__ import annotations

import pytest

OP = "attention.clamp_position"
CALL = """
import torch, opgraft
seq_lens = torch.tensor([0, 1, 5, -7], dtype=torch.int32)
print(opgraft.ops.attention.clamp_position(seq_lens).tolist())
"""


@pytest.fixture
def explain_cpu(everything, made_up):
    """Give what decides about a CPU call, with the made-up plugins in reach."""

    def explain(**variables):
        arguments = ("explain", OP, "--device", "cpu", "--dtype", "int32")
        explained = everything.json(*arguments, PYTHONPATH=str(made_up.path), **variables)
        return explained["winner"].split()[0], explained["decided_by"]

    return explain


@pytest.fixture
def call_cpu(everything, made_up):
    """Give what a call on a CPU tensor prints, with the made-up plugins in reach."""

    def call(**variables):
        return everything.python(CALL, PYTHONPATH=str(made_up.path), **variables)

    return call


def test_a_plugin_on_pythonpath_wins_by_priority(made_up, explain_cpu, call_cpu):
    made_up.plugin("quick", priority=60)
    assert ("quick/plugin", "priority") == explain_cpu()
    assert "quick ran\n[0, 0, 4, 0]\n" == call_cpu()


def test_a_plugin_with_a_lower_priority_than_another_loses(made_up, explain_cpu, call_cpu):
    made_up.plugin("quick", priority=60)
    made_up.plugin("quicker", priority=61)
    assert ("quicker/plugin", "priority") == explain_cpu()
    assert "quicker ran\n[0, 0, 4, 0]\n" == call_cpu()


def test_a_negative_priority_is_never_chosen_unasked(made_up, explain_cpu, call_cpu):
    made_up.plugin("shy", priority=-1)
    assert "cpu_reference" == explain_cpu()[0].split("/")[0]
    assert "[0, 0, 4, 0]\n" == call_cpu()


def test_the_order_of_the_policy_beats_priority(made_up, explain_cpu, call_cpu):
    made_up.plugin("quick", priority=60)
    winner, decided_by = explain_cpu(OPGRAFT_ORDER="attention.*=cpu_reference")
    assert ("cpu_reference", "order") == (winner.split("/")[0], decided_by)
    assert "[0, 0, 4, 0]\n" == call_cpu(OPGRAFT_ORDER="attention.*=cpu_reference")


def test_the_order_of_the_policy_calls_a_shy_plugin(made_up, explain_cpu, call_cpu):
    made_up.plugin("shy", priority=-1)
    assert ("shy/plugin", "order") == explain_cpu(OPGRAFT_ORDER="*=shy")
    assert "shy ran\n[0, 0, 4, 0]\n" == call_cpu(OPGRAFT_ORDER="*=shy")


def test_a_denied_plugin_is_excluded_and_never_imported(everything, made_up, explain_cpu, call_cpu):
    made_up.plugin("quick", priority=60)
    assert "cpu_reference" == explain_cpu(OPGRAFT_DENY="quick")[0].split("/")[0]
    assert "[0, 0, 4, 0]\n" == call_cpu(OPGRAFT_DENY="quick")
    variables = {"PYTHONPATH": str(made_up.path), "OPGRAFT_DENY": "quick"}
    assert "denied" == everything.backends(**variables)["quick"]["status"]
    source = "import sys, opgraft; opgraft.backends(); print('made_up_quick' in sys.modules)"
    assert "False\n" == everything.python(source, **variables)


def test_a_forced_native_runs_no_plugin(made_up, explain_cpu, call_cpu):
    made_up.plugin("quick", priority=60)
    assert ("native", "force") == explain_cpu(OPGRAFT_FORCE="native")
    assert "[0, 0, 4, 0]\n" == call_cpu(OPGRAFT_FORCE="native")


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import a_module_that_nobody_has", "a_module_that_nobody_has"),
        ("raise OSError('libquick.so: undefined symbol: quick')", "undefined symbol: quick"),
        ("raise SystemExit(3)", "SystemExit"),
        ("this is no python", "SyntaxError"),
    ],
    ids=["absent module", "undefined symbol", "exit", "syntax"],
)
def test_a_broken_plugin_is_quarantined_and_breaks_nobody(source, cause, everything, made_up, call_cpu):
    before = everything.backends()
    made_up.plugin("broken", source=source)
    after = everything.backends(PYTHONPATH=str(made_up.path))
    broken = after.pop("broken")
    assert "quarantined" == broken["status"]
    assert cause in broken["reason"]
    assert before == after
    assert "[0, 0, 4, 0]\n" == call_cpu()


def test_a_broken_plugin_does_not_keep_a_made_up_neighbour_from_winning(made_up, explain_cpu, call_cpu):
    made_up.plugin("broken", source="raise RuntimeError('no')")
    made_up.plugin("quick", priority=60)
    assert ("quick/plugin", "priority") == explain_cpu()
    assert "quick ran\n[0, 0, 4, 0]\n" == call_cpu()
