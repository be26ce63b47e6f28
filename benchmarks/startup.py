"""Measure what a user waits for: the import, the list of what is installed, the first call.

Every figure is the fastest of several fresh processes. Installations are made up in a temporary
folder: metadata folders with our entry point, and others without, on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PLUGINS = 100
STRANGERS = 1000
IMPORT = "import opgraft"
FIRST_CALL = """
import time
import torch
seq_lens = torch.tensor([0, 1, 5], dtype=torch.int32)
start = time.perf_counter()
import opgraft
opgraft.ops.attention.clamp_position(seq_lens)
print(time.perf_counter() - start)
"""
DISCOVERY = """
import time
import opgraft
opgraft.backends()
start = time.perf_counter()
opgraft.refresh()
opgraft.backends()
print(time.perf_counter() - start)
"""
MODULE = """
from opgraft import Backend, KernelBackend, forward, hookimpl

@hookimpl
def opgraft_backend():
    return Backend(name={name!r}, platforms=("cpu",))

@forward("attention.clamp_position", kernel_backend=KernelBackend.PLUGIN, priority=-1)
def clamp_position(seq_lens, *, out=None):
    raise AssertionError("a negative priority was chosen unasked")
"""


@dataclass(frozen=True)
class Figure:
    """What was measured, and what it may be."""

    name: str
    value: float
    limit: float
    unit: str

    def __str__(self) -> str:
        """Return one line of the report."""
        verdict = "ok" if self.kept else "MISSED"
        return f"{self.name:60} {self.value:8.3f} {self.unit:2} (limit {self.limit:g})  {verdict}"

    @property
    def kept(self) -> bool:
        """Whether the limit is kept."""
        return self.value <= self.limit


def install_plugins(folder: Path, count: int) -> None:
    """Make up distributions that offer a backend each."""
    for index in range(count):
        name = f"made_up_{index}"
        (folder / f"{name}.py").write_text(MODULE.format(name=name), encoding="utf-8")
        entry = f"[opgraft.backends]\n{name} = {name}\n"
        write_metadata(folder, name, entry, "Requires-Dist: opgraft>=0.1\n")


def install_strangers(folder: Path, count: int) -> None:
    """Make up distributions of other people: with metadata as long as is usual, not for us."""
    prose = "\n".join(["A line of a long description, as most distributions carry one."] * 100)
    for index in range(count):
        name = f"stranger_{index}"
        entry = f"[console_scripts]\n{name} = {name}:main\n"
        write_metadata(folder, name, entry, f"Requires-Dist: requests>=2\n\n{prose}\n")


def write_metadata(folder: Path, name: str, entry_points: str, rest: str) -> None:
    """Write one metadata folder."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n"
    (info / "METADATA").write_text(head + rest, encoding="utf-8")
    (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    (info / "RECORD").write_text("", encoding="utf-8")


def variables(folder: Path | None) -> dict[str, str]:
    """Return the environment of a fresh process that sees the made-up installation."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPGRAFT_")}
    kept.pop("PYTHONPATH", None)
    return kept if folder is None else {**kept, "PYTHONPATH": str(folder)}


def wall(command: list[str], folder: Path | None, runs: int) -> float:
    """Return the seconds a command takes, in the fastest of several runs."""
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=variables(folder))
        best = min(best, time.perf_counter() - start)
    return best


def printed(source: str, folder: Path | None, runs: int) -> float:
    """Return the number that a program prints, in the smallest of several runs."""
    results = [
        subprocess.run(
            [sys.executable, "-c", source], check=True, capture_output=True, text=True, env=variables(folder)
        )
        for _ in range(runs)
    ]
    return min(float(result.stdout.split()[-1]) for result in results)


def measure(runs: int) -> list[Figure]:
    """Measure everything."""
    list_installed = [sys.executable, "-m", "opgraft", "list", "--installed"]
    with tempfile.TemporaryDirectory() as made_up:
        large, hundred, two_hundred = (Path(made_up, name) for name in ("large", "100", "200"))
        for folder in (large, hundred, two_hundred):
            folder.mkdir()
        install_plugins(large, PLUGINS)
        install_strangers(large, STRANGERS)
        install_plugins(hundred, PLUGINS)
        install_plugins(two_hundred, 2 * PLUGINS)

        nothing = wall([sys.executable, "-c", "pass"], None, 3 * runs)
        imported = wall([sys.executable, "-c", IMPORT], None, 3 * runs)
        growth = printed(DISCOVERY, two_hundred, runs) / printed(DISCOVERY, hundred, runs)
        large_name = f"{PLUGINS} plugins and {STRANGERS} other distributions"
        return [
            Figure("import opgraft, beyond the interpreter", 1e3 * (imported - nothing), 30, "ms"),
            Figure("opgraft list --installed", wall(list_installed, None, runs), 0.4, "s"),
            Figure(f"  with {large_name}", wall(list_installed, large, runs), 0.7, "s"),
            Figure("first call, beyond importing torch", printed(FIRST_CALL, None, runs), 0.5, "s"),
            Figure(f"  with {large_name}", printed(FIRST_CALL, large, runs), 0.5, "s"),
            Figure("discovery of 200 plugins, times that of 100", growth, 2.2, "x"),
        ]


def main() -> int:
    """Measure and print; with ``--check``, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="fresh processes per figure")
    parser.add_argument("--check", action="store_true", help="exit 1 when a limit is missed")
    options = parser.parse_args()
    figures = measure(options.runs)
    print("\n".join(map(str, figures)))
    return 1 if options.check and not all(figure.kept for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
