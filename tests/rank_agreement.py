"""Start the ranks of a gloo group, each as a scenario says, and print what each of them hears.

Run as a script by tests/robust/test_g_ranks.py: arguments are the number of ranks, the scenario
and a folder with made-up plugins.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path


def prepare(scenario, rank, folder):
    """Make the last rank differ in the way that the scenario says."""
    import opgraft

    sys.path.insert(0, str(Path(folder) / ("second" if scenario == "version" and rank else "first")))
    if rank and scenario == "policy":
        opgraft.set_policy(order="attention.clamp_position=native")
    if rank and scenario == "installation":
        sys.path.pop(0)
    opgraft.refresh()


def rank_main(scenario, rank, ranks, folder, store):
    """Agree, or say why not."""
    from torch import distributed

    import opgraft

    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    last = ranks - 1
    prepare(scenario, rank == last, folder)
    gathers = []
    gather = distributed.all_gather_object
    distributed.all_gather_object = lambda *args, **kwargs: (gathers.append(1), gather(*args, **kwargs))[1]
    try:
        said = opgraft.check_agreement().fingerprint
    except opgraft.OpgraftError as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        distributed.destroy_process_group()
    return [said, len(gathers)]


def main():
    """Fork the ranks and collect their answers in order."""
    import torch  # noqa: F401 - once, for all ranks

    import opgraft  # noqa: F401 - as torch

    warnings.simplefilter("ignore")
    ranks, scenario, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    with tempfile.TemporaryDirectory() as answers:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                answer = rank_main(scenario, rank, ranks, folder, Path(answers) / "store")
                (Path(answers) / str(rank)).write_text(json.dumps(answer), encoding="utf-8")
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        said = [json.loads((Path(answers) / str(rank)).read_text("utf-8")) for rank in range(ranks)]
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
