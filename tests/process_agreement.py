"""Start processes in every way there is and print, as JSON, what each of them chooses.

Run as a script by tests/robust/test_g_processes.py, with a made-up plugin on ``PYTHONPATH``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

SCRUBBED = """
import json, sys
exported, sys.path[:] = json.loads(sys.stdin.read())
import opgraft
opgraft.apply_policy(exported)
print(json.dumps([opgraft.plan().fingerprint, opgraft.plan().rows[0].winner]))
"""


def choose(exported=None):
    """Give this process's fingerprint, with the parent's policy if it is given."""
    import opgraft

    if exported is not None:
        opgraft.apply_policy(exported)
    return opgraft.plan().fingerprint


def use(pickled):
    """Call a pickled handle and a pickled op, and say which kernel each of them ran."""
    import torch

    import opgraft

    handle, op = pickle.loads(pickled)
    seq_lens = torch.tensor([0, 1, 5], dtype=torch.int32)
    with opgraft.trace() as traced:
        results = [handle(seq_lens).tolist(), op(seq_lens).tolist()]
    return results, [record.kernel for record in traced]


def answer(queue, function, *arguments):
    """Put a function's result into a queue."""
    queue.put(function(*arguments))


def in_process(context, function, *arguments):
    """Run a function in a process of a start method."""
    queue = context.SimpleQueue()
    process = context.Process(target=answer, args=(queue, function, *arguments))
    process.start()
    result = queue.get()
    process.join()
    return result


def main():
    """Print what every process chooses."""
    import torch.multiprocessing

    import opgraft

    chosen = {"fork before discovery": in_process(multiprocessing.get_context("fork"), choose)}
    chosen["parent"] = choose()
    chosen["fork after discovery"] = in_process(multiprocessing.get_context("fork"), choose)
    for method in ("spawn", "forkserver"):
        chosen[method] = in_process(multiprocessing.get_context(method), choose)
    chosen["torch.multiprocessing"] = in_process(torch.multiprocessing.get_context("spawn"), choose)

    opgraft.set_policy(order="attention.*=native", deny="acme")
    exported = opgraft.export_policy()
    told = {"parent": choose(), "fork": in_process(multiprocessing.get_context("fork"), choose)}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        told["ProcessPoolExecutor"] = pool.submit(choose, exported).result()
        told["not told"] = pool.submit(choose).result()
        opgraft.set_policy(order=None, deny=None)
        pickled = pickle.dumps((opgraft.ops.attention.clamp_position, opgraft.op("attention.clamp_position").op))
        pool.submit(choose, opgraft.export_policy()).result()
        used = {"parent": use(pickled), "child": pool.submit(use, pickled).result()}
    scrubbed = subprocess.run(
        [sys.executable, "-c", SCRUBBED],
        check=True,
        capture_output=True,
        text=True,
        input=json.dumps([exported, sys.path]),
        env={"PATH": os.defpath},
    )
    told["scrubbed interpreter"], winner = json.loads(scrubbed.stdout)
    json.dump({"chosen": chosen, "told": told, "used": used, "winner": winner}, sys.stdout)


if __name__ == "__main__":
    main()
