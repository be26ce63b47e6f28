"""Field report G3: ranks of a real torch.distributed group agree, or each of them hears why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from installation import Site, plugin_source

TESTS = Path(__file__).resolve().parents[1]
OP = "attention.clamp_position"


@pytest.fixture
def agree(tmp_path):
    """Give a function that starts ranks and gives what each of them heard."""
    for number, folder in enumerate(("first", "second"), start=1):
        site = Site(tmp_path / folder)
        module = site.module("made_up_ranked", plugin_source("ranked", priority=90))
        site.distribution("made-up-ranked", {"ranked": module}, version=f"{number}.0")

    def run(ranks, scenario):
        done = subprocess.run(
            [sys.executable, str(TESTS / "rank_agreement.py"), str(ranks), scenario, str(tmp_path)],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        assert 0 == done.returncode, done.stderr
        return [tuple(answer) for answer in json.loads(done.stdout)]

    return run


@pytest.mark.parametrize("ranks", [2, 4])
def test_g3_ranks_that_are_alike_agree_after_one_small_gather(agree, ranks):
    (answer,) = set(agree(ranks, "alike"))
    fingerprint, gathers = answer
    assert (64, 1) == (len(fingerprint), gathers)


MADE_UP = "ranked/plugin clamp_position (made-up-ranked 1.0)"
DIFFERENCES = {"policy": "native", "installation": None, "version": "ranked/plugin clamp_position (made-up-ranked 2.0)"}


@pytest.mark.parametrize("scenario", DIFFERENCES)
def test_g3_a_rank_that_differs_is_named_with_its_rows_on_every_rank(agree, scenario):
    (answer,) = set(agree(4 if scenario == "policy" else 2, scenario))
    said = answer[0].splitlines()
    last = 3 if scenario == "policy" else 1
    assert "PolicyError: the ranks of this group choose different kernels" == said[0]
    for dtype in ("int32", "int64"):
        (line,) = (line for line in said if f": {OP} cpu {dtype}: " in line)
        assert line.startswith(f"  rank 0 against rank {last}: {OP} cpu {dtype}: {MADE_UP} against ")
        assert DIFFERENCES[scenario] is None or line.endswith(f" against {DIFFERENCES[scenario]}")
    assert "Install the same distributions and give every rank the same policy." == said[-1]
