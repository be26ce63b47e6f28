"""Show what opgraft does, on real input, as a user would type it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

OP = "attention.clamp_position"
CALL = f"opgraft run {OP} seq_lens=0,1,5,-7 --dtype int32"
PYTHON = """\
import torch
import opgraft

seq_lens = torch.tensor([0, 1, 5, -7], dtype=torch.int32)
for tensor in (seq_lens, seq_lens.to("acme")):
    position = opgraft.ops.attention.clamp_position(tensor)
    winner = opgraft.explain("attention.clamp_position", tensor).winner
    print(f"{position.cpu().tolist()} on {position.device}, by {winner}")
"""
STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Which backends are installed, and which have their hardware here", ("opgraft list",)),
    (
        "Why one kernel wins: for a tensor on the CPU, and for one on Acme's device",
        (f"opgraft explain {OP} --device cpu", f"opgraft explain {OP} --device acme"),
    ),
    (
        "The op itself, max(seq_lens, 1) - 1 as int64, on the CPU and on Acme's device",
        (f"{CALL} --device cpu", f"{CALL} --device acme"),
    ),
    ("The same from Python: each tensor's own device decides", ("python",)),
    (
        "Forced to native, to bisect numerics",
        (f"OPGRAFT_FORCE=native opgraft explain {OP} --device acme", f"OPGRAFT_FORCE=native {CALL} --device acme"),
    ),
    (
        "With a backend denied",
        (
            f"OPGRAFT_DENY=cpu_reference opgraft explain {OP} --device cpu",
            f"OPGRAFT_DENY=cpu_reference {CALL} --device cpu",
        ),
    ),
)


def show(line: str) -> None:
    """Print a command as a user would type it, and run it."""
    if line == "python":
        print(textwrap.indent(PYTHON, "    "))
        command, variables = [sys.executable, "-c", PYTHON], {}
    else:
        print(f"$ {line}")
        words = shlex.split(line)
        settings = [word for word in words if word.startswith("OPGRAFT_")]
        variables = dict(setting.split("=", 1) for setting in settings)
        _, *arguments = words[len(settings) :]
        command = [str(Path(sys.executable).parent / "opgraft"), *arguments]
    sys.stdout.flush()
    subprocess.run(command, check=True, env={**os.environ, **variables})
    print(flush=True)


def main() -> int:
    """Show every step; stop at the first that does not work."""
    try:
        for number, (title, lines) in enumerate(STEPS, start=1):
            print(f"{number}. {title}\n", flush=True)
            for line in lines:
                show(line)
    except subprocess.CalledProcessError as error:
        print(f"the command above exited {error.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
