"""One plugin loaded and probed in a process of its own, so that a crash or a hang is seen as its.

Run as a script, it takes a backend's name and its entry point, and prints one line of JSON.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opgraft.discovery import Advertised

MARK: Final = "opgraft-isolated:"


def crash(entry: Advertised, seconds: float, environ: Mapping[str, str]) -> str:
    """Load and probe a plugin in a child; say how it ended the process, or nothing if it did not."""
    command = [sys.executable, "-m", __name__, entry.name, entry.value, json.dumps(sys.path)]
    try:
        child = subprocess.run(  # noqa: S603 - this interpreter, on a module of our own
            command,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            env=dict(environ),
        )
    except subprocess.TimeoutExpired:
        return f"loading and probing it did not end within {seconds:g} s"
    if any(line.startswith(MARK) for line in child.stdout.splitlines()):
        return ""
    said = (child.stderr.strip().splitlines() or ["nothing"])[-1]
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        return f"loading and probing it was ended by {name}; it said: {said}"
    return f"loading and probing it ended the process with exit code {child.returncode}; it said: {said}"


def _main(name: str, value: str, path: str) -> None:
    import faulthandler

    faulthandler.enable()
    sys.path[:] = json.loads(path)
    from opgraft.hardware import Detector
    from opgraft.plugins import introduced
    from opgraft.spec import BackendRecord

    record = introduced(BackendRecord(name=name, status="active", entry_point=value), Detector())
    sys.stdout.write(f"\n{MARK}{json.dumps([record.status, record.reason])}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
