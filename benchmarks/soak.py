"""Call, refresh and change the policy from 16 threads, check every result, and watch the memory.

Ten minutes by default; exits non-zero at the first wrong result, at an exception that nobody asked
for, or if the memory has grown between the first and the last third.

    python benchmarks/soak.py --seconds 60
"""

from __future__ import annotations

import argparse
import itertools
import logging
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

THREADS = 16
GROWTH_MB = 16.0
"""More than the allocator's wobble over ten minutes of the same work (3 to 6 MB, 2-core x86-64)."""

PLUGIN = """\
from opgraft import Backend, Unavailable, forward, hookimpl

@hookimpl
def opgraft_backend():
    return Backend(name={name!r}, platforms=("cpu",))

{more}
@forward("attention.clamp_position", kernel_backend="plugin", priority={priority})
def clamp_position(seq_lens, *, out=None):
    import torch
    return torch.sub(torch.clamp(seq_lens, min=1).to(torch.int64), 1, out=out)
"""
MORE = {
    "soak_fast": "",
    "soak_slow": "",
    "soak_absent": "@hookimpl\ndef opgraft_probe(): return Unavailable('not here')\n",
    "soak_broken": "@hookimpl\ndef opgraft_probe(): raise OSError('no driver')\n",
}


def install(folder: Path) -> None:
    """Make up four plugins: two that work, one without hardware, one that is broken."""
    for priority, (name, more) in enumerate(MORE.items()):
        source = PLUGIN.format(name=name, more=more, priority=60 - priority)
        (folder / f"{name}_plugin.py").write_text(source, encoding="utf-8")
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[opgraft.backends]\n{name} = {name}_plugin\n", encoding="utf-8")
    sys.path.insert(0, str(folder))


def resident_mb() -> float:
    """Give the memory this process holds now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 2**20


class Soak:
    """The threads' work, what they did, and what went wrong."""

    def __init__(self) -> None:
        import torch

        import opgraft

        self.opgraft = opgraft
        self.torch = torch
        self.stop = threading.Event()
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.inputs = [torch.arange(-3, 40, dtype=dtype) for dtype in (torch.int32, torch.int64)]
        self.inputs += [one[::2] for one in self.inputs] + [one[:0] for one in self.inputs]
        self.expected = [(one.clamp(min=1) - 1).to(torch.int64) for one in self.inputs]

    def run(self, work, number: int) -> None:
        """Do a thread's work until the end or the first fault."""
        try:
            for turn in itertools.count():
                if self.stop.is_set():
                    return
                work(number, turn)
                self.done[work.__name__] += 1
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is what this looks for
            self.wrong.append(f"{work.__name__}: {type(error).__name__}: {error}")
            self.stop.set()

    def check(self, turn: int, **options: object) -> None:
        """Call the op and compare."""
        index = turn % len(self.inputs)
        result = self.opgraft.ops.attention.clamp_position(self.inputs[index], **options)
        if not self.torch.equal(self.expected[index], result):
            raise AssertionError(f"input {index}: {result} in place of {self.expected[index]}")

    def call(self, number: int, turn: int) -> None:
        """Call as an engine does."""
        del number
        self.check(turn)

    def call_by_name(self, number: int, turn: int) -> None:
        """Call one backend, and now and then with a buffer."""
        names = ("native", "soak_fast", "soak_slow")
        self.check(turn, backend=names[(number + turn) % len(names)])
        if turn % 16 == 0:
            index = turn % len(self.inputs)
            out = self.torch.empty_like(self.expected[index])
            self.check(turn, out=out)

    def call_in_a_scope(self, number: int, turn: int) -> None:
        """Call within a policy of this thread's own, and explain."""
        name = ("soak_slow", "native")[(number + turn) % 2]
        with self.opgraft.use(force=name), self.opgraft.use(order="*=soak_fast"):
            self.check(turn)
            if turn % 32 == 0:
                won = self.opgraft.explain("attention.clamp_position", self.inputs[0]).winner
                if won is None or won.selector.partition("/")[0] != name:
                    raise AssertionError(f"{won} in place of {name}")

    def change_the_policy(self, number: int, turn: int) -> None:
        """Change what the process wants."""
        del number
        changes = ({"order": "*=soak_slow"}, {"order": None}, {"deny": "jit"}, {"deny": None}, {"strict": False})
        self.opgraft.set_policy(**changes[turn % len(changes)])
        time.sleep(0.005)

    def refresh(self, number: int, turn: int) -> None:
        """Look again at what is installed."""
        del number, turn
        self.opgraft.refresh()
        time.sleep(0.05)


def main() -> int:
    """Run, report, and say whether all went well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    seconds = parser.parse_args().seconds
    logging.getLogger("opgraft").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        soak = Soak()
        kinds = [soak.refresh, soak.change_the_policy, *[soak.call, soak.call_by_name, soak.call_in_a_scope] * 5][
            :THREADS
        ]
        threads = [threading.Thread(target=soak.run, args=(work, number)) for number, work in enumerate(kinds)]
        for thread in threads:
            thread.start()
        memory = []
        began = time.monotonic()
        while time.monotonic() - began < seconds and not soak.stop.wait(min(1.0, seconds / 30)):
            memory.append(resident_mb())
        soak.stop.set()
        for thread in threads:
            thread.join(60)
            if thread.is_alive():
                soak.wrong.append("a thread is stuck")
    third = max(1, len(memory) // 3)
    growth = sum(memory[-third:]) / third - sum(memory[third : 2 * third] or memory) / len(
        memory[third : 2 * third] or memory
    )
    for what, count in sorted(soak.done.items()):
        print(f"{what:<20}{count:>12,}")
    print(f"memory {memory[0]:.0f} MB at first, {memory[-1]:.0f} MB at last, {growth:+.1f} MB over the last third")
    if growth > GROWTH_MB:
        soak.wrong.append(f"the memory grew by {growth:.1f} MB")
    for fault in soak.wrong:
        print(f"WRONG {fault}")
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
