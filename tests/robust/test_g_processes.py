"""Field reports G: parents, children, nodes and ranks choose the same, or fail naming the row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from installation import Site, plugin_source

from opgraft.planning import Plan, PlanRow

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Give what processes of every kind chose, with a made-up plugin installed."""
    site = Site(tmp_path_factory.mktemp("site"))
    source = plugin_source("acme_two", priority=90).replace(
        "return 'acme_two'", "return (seq_lens.clamp(min=1) - 1).long()"
    )
    site.plugin("acme_two", source)
    done = subprocess.run(
        [sys.executable, str(TESTS / "process_agreement.py")],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=site.path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(site.path)])},
    )
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "kind", ["fork before discovery", "fork after discovery", "spawn", "forkserver", "torch.multiprocessing"]
)
def test_g1_a_child_of_every_start_method_has_its_parents_fingerprint(processes, kind):
    assert processes["chosen"]["parent"] == processes["chosen"][kind]


def test_g1_a_pickled_handle_and_a_pickled_op_work_in_a_spawned_child(processes):
    expected = [[[0, 0, 4], [0, 0, 4]], ["acme_two/plugin", "acme_two/plugin"]]
    assert expected == processes["used"]["parent"] == processes["used"]["child"]


@pytest.mark.parametrize("kind", ["fork", "ProcessPoolExecutor", "scrubbed interpreter"])
def test_g2_a_child_that_is_given_the_policy_agrees_without_any_environment(processes, kind):
    assert processes["told"]["parent"] == processes["told"][kind]
    assert processes["told"]["parent"] != processes["chosen"]["parent"]
    assert processes["winner"].startswith("native")


def row(**changes):
    made = PlanRow(
        op="attention.clamp_position",
        platform="cuda",
        arch="9.0",
        dtype="int32",
        winner="cuda/triton clamp_position",
        distribution="opgraft-cuda",
        version="0.1.0",
    )
    return replace(made, **changes)


def test_g2_another_version_on_another_node_is_named_with_its_row():
    here, there = Plan((row(),)), Plan((row(version="0.2.0"),))
    assert here.fingerprint != there.fingerprint
    assert [
        (
            "attention.clamp_position cuda 9.0 int32: cuda/triton clamp_position (opgraft-cuda 0.1.0) against "
            "cuda/triton clamp_position (opgraft-cuda 0.2.0)"
        )
    ] == here.differences(there)


def test_g3_a_plan_depends_on_no_clock_no_index_and_no_path(process, site):
    from opgraft.planning import plan

    site.plugin("acme")
    one, two = (plan(process().registry) for _ in range(2))
    assert one == two
    assert {"op", "platform", "arch", "dtype", "winner", "distribution", "version"} == set(PlanRow.__dataclass_fields__)
    assert str(site.path) not in str(one)


def test_g4_importing_and_listing_initialise_no_accelerator():
    source = (
        "import opgraft, torch\n"
        "opgraft.backends(); opgraft.registry.ops(); opgraft.explain_for('attention.clamp_position', device='cuda', arch='9.0')\n"
        "print(torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork())\n"
    )
    done = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True, timeout=120)
    assert "False False\n" == done.stdout


def test_g5_calling_says_nothing_and_a_fault_is_told_once_a_process(process, site, caplog):
    site.plugin("acme", "raise OSError('no driver')")
    made = process()
    for _ in range(5):
        made.call()
        made.call(backend="native")
    assert 1 == len(caplog.records)


def test_g1_a_process_forked_while_another_thread_discovers_is_not_stuck(tmp_path):
    site = Site(tmp_path)
    site.plugin("slow", "import time; time.sleep(1.5)\n" + plugin_source("slow"))
    source = (
        "import os, threading, time, torch, opgraft, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "thread = threading.Thread(target=opgraft.backends); thread.start(); time.sleep(0.7)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    print({r.name: r.status for r in opgraft.backends()}['slow'], flush=True); os._exit(0)\n"
        "for _ in range(100):\n"
        "    done, code = os.waitpid(child, os.WNOHANG)\n"
        "    if done: break\n"
        "    time.sleep(0.2)\n"
        "else:\n"
        "    os.kill(child, 9); print('stuck')\n"
        "thread.join()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OPGRAFT_PLUGINS": "slow"},
    )
    assert "active\n" == done.stdout
