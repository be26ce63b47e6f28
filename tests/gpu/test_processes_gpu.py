"""Field reports G3 and G4 on real devices: listing leaves CUDA to a forked child; NCCL ranks agree."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

FORK = """
import os, sys, torch, opgraft
from typer.testing import CliRunner
from opgraft.cli import app

listed = CliRunner().invoke(app, ["list"])
explained = opgraft.explain_for("attention.clamp_position", device="cuda", arch="9.0", dtype="int32")
print(listed.exit_code, torch.cuda.is_initialized(), explained.winner.selector, flush=True)
child = os.fork()
if child == 0:
    seq_lens = torch.tensor([0, 1, 5], dtype=torch.int32, device="cuda")
    print(opgraft.ops.attention.clamp_position(seq_lens).tolist(), flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""

RANKS = """
import json, os, sys, torch, opgraft
import torch.multiprocessing as mp
from torch import distributed

def rank_main(rank, store, differ, queue):
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    if differ and rank:
        opgraft.set_policy(order="*=native")
    try:
        said = opgraft.check_agreement().fingerprint
    except opgraft.PolicyError as error:
        said = str(error)
    distributed.destroy_process_group()
    queue.put(said)

if __name__ == "__main__":
    context, answers = mp.get_context("spawn"), []
    for differ in (False, True):
        queue = context.SimpleQueue()
        processes = [context.Process(target=rank_main, args=(rank, f"{sys.argv[1]}{differ}", differ, queue)) for rank in (0, 1)]
        [process.start() for process in processes]
        answers.append([queue.get() for _ in processes])
        [process.join() for process in processes]
    print(json.dumps(answers))
"""


def test_g4_a_child_forked_after_listing_uses_the_device():
    done = subprocess.run([sys.executable, "-c", FORK], check=True, capture_output=True, text=True, timeout=240)
    first, child, code = done.stdout.splitlines()
    assert ["0", "False"] == first.split()[:2]
    assert first.split()[2].startswith("cuda/")
    assert ("[0, 0, 4]", "0") == (child, code)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_g3_ranks_on_two_devices_agree_or_hear_why_not(tmp_path):
    program = tmp_path / "ranks.py"
    program.write_text(RANKS, encoding="utf-8")
    command = [sys.executable, str(program), str(tmp_path / "store")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    alike, different = json.loads(done.stdout)
    assert 1 == len(set(alike))
    assert all("rank 0 against rank 1: attention.clamp_position cuda " in said for said in different)
