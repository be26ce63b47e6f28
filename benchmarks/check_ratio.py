"""Fail when a call here adds more than its share of what a call adds in SGLang or in vLLM.

Made to be run on a schedule: interleaved in one process, fastest of many rounds, exit code 1 when a limit is missed.
A busy machine gets more passes; what counts is the fastest round of all of them, for the peers as for opgraft. The
shares belong to the default interpreter of the machine it runs on.
"""

from __future__ import annotations

import argparse
import sys

from dispatch_peers import OPGRAFT, SGLANG, VLLM, added, environment, every_call, table
from interleave import fastest

LIMITS = {SGLANG: 0.20, VLLM: 0.25}


def missed(costs: dict[str, float]) -> list[str]:
    """Say, for each limit that is missed, by how much."""
    return [
        f"opgraft adds {costs[OPGRAFT]:.0f} ns, {costs[OPGRAFT] / costs[peer]:.3f} of the"
        f" {costs[peer]:.0f} ns that {peer} adds; the limit is {limit:.2f}"
        for peer, limit in LIMITS.items()
        if costs[OPGRAFT] > limit * costs[peer]
    ]


def main() -> int:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=4, help="how often to look again while a limit is missed")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--batch", type=int, default=1000)
    options = parser.parse_args()
    calls = every_call()
    nanoseconds = dict.fromkeys(calls, float("inf"))
    complaints: list[str] = []
    for _ in range(options.passes):
        latest = fastest(calls, rounds=options.rounds, batch=options.batch)
        nanoseconds = {name: min(ns, latest[name]) for name, ns in nanoseconds.items()}
        complaints = missed(added(nanoseconds))
        if not complaints:
            break
    print(", ".join(f"{name} {version}" for name, version in environment().items()))
    print(table(nanoseconds))
    print("\n".join(complaints) if complaints else "every limit is kept")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
