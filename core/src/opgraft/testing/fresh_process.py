"""Loads a plugin in a process of its own and says what that changed: run as a script.

Takes one argument, JSON with ``target`` (an entry point's value) and ``path`` (``sys.path``), and
prints one line of JSON. Nothing of opgraft but its public names is imported before the plugin is.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import operator
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

MARK = "opgraft-fresh-process:"

HEAVY = frozenset(
    {
        "torch",
        "triton",
        "numpy",
        "scipy",
        "pandas",
        "jax",
        "jaxlib",
        "tensorflow",
        "cupy",
        "numba",
        "llvmlite",
        "pyopencl",
        "pycuda",
        "cuda",
        "tvm",
        "tvm_ffi",
        "cutlass",
        "flashinfer",
        "sgl_kernel",
        "sglang",
        "vllm",
        "torch_npu",
        "intel_extension_for_pytorch",
        "habana_frameworks",
        "onnxruntime",
        "aiter",
    }
)
"""Libraries that compute; a plugin imports them when a kernel first runs."""

_KERNEL_LIBRARIES = HEAVY - {"torch", "numpy", "pyopencl", "pycuda", "cuda"}
"""What a probe need not import: the last three bind drivers, all there is to ask for hardware torch cannot see."""


def snapshot() -> dict[str, Any]:
    """Note the state of a process that a plugin has no business to change."""
    return {
        "os.environ": dict(os.environ),
        "sys.path": list(sys.path),
        "the working folder": os.getcwd(),  # noqa: PTH109 - compared as text
        "sys.meta_path": [id(finder) for finder in sys.meta_path],
        "sys.path_hooks": [id(hook) for hook in sys.path_hooks],
        "the recursion limit": sys.getrecursionlimit(),
        "the thread switch interval": sys.getswitchinterval(),
        "sys.excepthook": id(sys.excepthook),
        "the trace or profile function": (id(sys.gettrace()), id(sys.getprofile())),
        "warnings.filters": list(map(repr, warnings.filters)),
        "signal handlers": [repr(signal.getsignal(number)) for number in signal.Signals],
        "the root logger": (logging.root.level, list(map(repr, logging.root.handlers))),
        "the number of threads": threading.active_count(),
        "the multiprocessing start method": _start_method(),
        "opgraft": _opgraft(),
    }


def _start_method() -> str | None:
    module = sys.modules.get("multiprocessing")
    return module.get_start_method(allow_none=True) if module is not None else None


def _opgraft() -> dict[str, int]:
    """Note the objects behind opgraft's public names that are there already."""
    names = vars(sys.modules["opgraft"]) if "opgraft" in sys.modules else {}
    return {name: id(value) for name, value in names.items() if not name.startswith("__")}


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Name what differs between two snapshots; names that opgraft loaded late may be new."""
    found = []
    for name, value in before.items():
        now = after[name]
        if name == "opgraft":
            replaced = [key for key, number in value.items() if now.get(key) != number]
            found += [f"opgraft.{key}" for key in replaced]
        elif now != value:
            found.append(name)
    return found


def megabytes() -> float:
    """Give the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def initialized() -> list[str]:
    """Name the devices that torch has initialised."""
    torch = sys.modules.get("torch")
    found = []
    for name in ("cuda", "xpu", "mtia", "npu", "musa"):
        module = getattr(torch, name, None)
        asked = getattr(module, "is_initialized", None)
        if callable(asked) and asked():
            found.append(f"torch.{name}")
    return found


def watched(action: Callable[[], Any], libraries: frozenset[str]) -> tuple[dict[str, Any], Any]:
    """Run an action and say what it changed, imported, printed and cost."""
    before, modules, memory = snapshot(), set(sys.modules), megabytes()
    printed = io.StringIO()
    begun = time.perf_counter()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        result = action()
    seconds = time.perf_counter() - begun
    tops = {name.partition(".")[0] for name in set(sys.modules) - modules}
    return {
        "seconds": seconds,
        "megabytes": megabytes() - memory,
        "heavy": sorted(tops & libraries),
        "changed": changed(before, snapshot()),
        "printed": printed.getvalue()[:200],
        "initialized": initialized(),
    }, result


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Load the plugin, ask its name, then its probe."""
    sys.path[:] = request["path"]
    importlib.import_module("opgraft.hookspecs")
    opgraft = importlib.import_module("opgraft")
    for name in ("Backend", "KernelBackend", "CapabilityRequirement", "forward", "hookimpl"):
        getattr(opgraft, name)
    for name in ("Available", "Unavailable", "ANY"):
        getattr(opgraft, name, None)
    module, _, attribute = request["target"].partition(":")

    def load() -> Any:
        plugin: Any = importlib.import_module(module.strip())
        if attribute:
            plugin = operator.attrgetter(attribute.strip())(plugin)
        named = getattr(plugin, "opgraft_backend", None)
        if named is not None:
            named()
        return plugin

    seen, plugin = watched(load, HEAVY)
    answer: dict[str, Any] = {"load": {"module": module, **seen}, "probe": None}
    probe = getattr(plugin, "opgraft_probe", None)
    if probe is not None:
        with contextlib.suppress(ImportError):
            importlib.import_module("torch")
        answer["probe"] = watched(probe, _KERNEL_LIBRARIES)[0]
    return answer


if __name__ == "__main__":
    print(MARK, json.dumps(main(json.loads(sys.argv[1]))))  # noqa: T201 - the answer
