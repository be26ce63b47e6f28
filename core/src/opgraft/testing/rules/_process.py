"""Rules on what loading a plugin does to a process; each looks at a fresh one."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from opgraft.testing import fresh_process
from opgraft.testing.faults import NotApplicable, Violation
from opgraft.testing.rule import Installed, Scope, rule

_TIMEOUT: Final = 120.0
_SECONDS: Final = 1.5
_MEGABYTES: Final = 64.0


@rule(scope=Scope.BACKEND, seconds=10.0)
def plugin_loads_light(installed: Installed) -> None:
    """Loading the plugin imports no torch, no triton, no kernel library, and takes no time."""
    seen = _look(installed)["load"]
    if seen["heavy"]:
        raise Violation(f"loading {seen['module']} imports {', '.join(seen['heavy'])}")
    if seen["seconds"] > _SECONDS:
        raise Violation(f"loading {seen['module']} takes {seen['seconds']:.1f} s")
    if seen["megabytes"] > _MEGABYTES:
        raise Violation(f"loading {seen['module']} takes {seen['megabytes']:.0f} MB of memory")


@rule(scope=Scope.BACKEND, seconds=10.0)
def loading_leaves_the_process_alone(installed: Installed) -> None:
    """Loading the plugin changes no environment, path, handler or module, and prints nothing."""
    _unchanged(_look(installed)["load"])


@rule(scope=Scope.BACKEND, seconds=10.0)
def probe_is_quiet(installed: Installed) -> None:
    """The probe answers without initialising a device, importing a kernel or printing."""
    seen = _look(installed)["probe"]
    if seen is None:
        raise NotApplicable("the plugin has no opgraft_probe; torch is asked")
    if seen["heavy"]:
        raise Violation(f"opgraft_probe imports {', '.join(seen['heavy'])}")
    if seen["initialized"]:
        raise Violation(f"opgraft_probe initialises {', '.join(seen['initialized'])}")
    _unchanged(seen)


def _unchanged(seen: dict[str, Any]) -> None:
    if seen["changed"]:
        raise Violation(f"changes {', '.join(seen['changed'])}")
    if seen["printed"]:
        raise Violation(f"prints {seen['printed']!r}")


def _look(installed: Installed) -> dict[str, Any]:
    target = installed.record.entry_point
    if installed.distribution is None and not _exists(target):
        raise NotApplicable("the backend was registered as an object, not by the name of a module")
    found = _in_a_fresh_process(target)
    if "error" in found:
        raise Violation(f"loading {target} in a fresh process fails: {found['error']}")
    return found


def _exists(target: str) -> bool:
    try:
        return importlib.util.find_spec(target.partition(":")[0]) is not None
    except (ImportError, ValueError):
        return False


@functools.lru_cache(maxsize=32)
def _in_a_fresh_process(target: str) -> dict[str, Any]:
    script = Path(fresh_process.__file__)
    request = json.dumps({"target": target, "path": sys.path})
    try:
        done = subprocess.run(  # noqa: S603 - our own script, the same interpreter
            [sys.executable, "-I", str(script), request], capture_output=True, check=False, text=True, timeout=_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {_TIMEOUT:.0f} s"}
    line = done.stdout.rpartition(fresh_process.MARK)[2].strip()
    if done.returncode or not line:
        tail = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"error": tail}
    answer: dict[str, Any] = json.loads(line)
    return answer
