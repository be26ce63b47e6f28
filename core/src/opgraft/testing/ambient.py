"""The state of a process that a kernel must neither change nor depend on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from opgraft.kernel_registry import default_registry
from opgraft.testing import fresh_process

__all__ = ["CIRCUMSTANCES", "DEFAULT_DEVICE", "changed", "in_event_loop", "lasting", "snapshot"]


# -- what a call must leave alone ------------------------------------------------------------------


def lasting() -> dict[str, Any]:
    """Note what not even the first call of a kernel, with all it imports, may change."""
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "the grad mode": torch.is_grad_enabled(),
        "the inference mode": torch.is_inference_mode_enabled(),
        "torch's random state": hash(torch.get_rng_state().numpy().tobytes()),
        "Python's random state": hash(random.getstate()),
        "torch's thread count": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the matmul precision": torch.get_float32_matmul_precision(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "the handling of denormal numbers": _keeps_denormals(),
        "the current device": _current_device(),
        "the current stream": _current_stream(),
        "torch's functions": _torch_functions(),
        "the working folder": os.getcwd(),  # noqa: PTH109 - compared as text
    }


def snapshot() -> dict[str, Any]:
    """Note what no call may change; a pool of threads may grow."""
    found = {**lasting(), **fresh_process.snapshot()}
    del found["the number of threads"]
    registry = default_registry()
    return found | {"opgraft's policy": id(registry.policy.current()), "opgraft's registrations": registry.generation}


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Name what differs between two snapshots."""
    found = []
    for name, value in before.items():
        if name == "torch's functions":
            now = after[name]
            found += [f"torch.{key}" for key, one in value.items() if now.get(key, one) != one]
    others = {name: value for name, value in before.items() if name != "torch's functions"}
    return found + fresh_process.changed(others, after)


def _keeps_denormals() -> bool:
    return bool(torch.tensor([1e-310], dtype=torch.float64).mul(1.0).ne(0).item())


def _current_device() -> object:
    return torch.accelerator.current_device_index() if torch.accelerator.is_available() else None


def _current_stream() -> object:
    if not torch.accelerator.is_available():
        return None
    with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError, TypeError):
        return torch.accelerator.current_stream().stream_id
    return None


def _torch_functions() -> dict[str, int]:
    # torch wraps manual_seed itself when torch.compile is first used.
    names = {name: id(value) for name, value in vars(torch).items() if callable(value) and name != "manual_seed"}
    methods = {f"Tensor.{name}": id(value) for name, value in vars(torch.Tensor).items()}
    return {**names, **methods}


# -- what a call must not depend on ----------------------------------------------------------------

Circumstance = Callable[[], contextlib.AbstractContextManager[object]]


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(former)


@contextlib.contextmanager
def _filled_memory() -> Iterator[None]:
    """Make torch fill what it allocates, so that reading unwritten memory shows."""
    former = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    _set_deterministic(mode=True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an operator without a deterministic form warns of it
            yield
    finally:
        _set_deterministic(mode=former, warn_only=warned)


def _set_deterministic(*, mode: bool, warn_only: bool) -> None:
    # The public function imports torch._inductor, which takes seconds.
    torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)  # noqa: SLF001 - as just said


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(former)


@contextlib.contextmanager
def _another_folder() -> Iterator[None]:
    former = os.getcwd()  # noqa: PTH109 - to go back to
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(former)


@contextlib.contextmanager
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def _other_seed() -> Iterator[None]:
    state, mine = torch.get_rng_state(), random.getstate()
    torch.manual_seed(20_000_003)
    random.seed(20_000_003)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(mine)


DEFAULT_DEVICE: Final = "default device meta"

CIRCUMSTANCES: Final[dict[str, Circumstance]] = {
    "default dtype float64": _default_dtype,
    DEFAULT_DEVICE: lambda: torch.device("meta"),
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "memory filled with a pattern": _filled_memory,
    "one torch thread": _one_thread,
    "another working folder": _another_folder,
    "warnings as errors": _warnings_are_errors,
    "another random seed": _other_seed,
}
"""Circumstances in which a call must give the same, each as a context manager."""


def in_event_loop(action: Callable[[], Any]) -> Any:
    """Run an action inside a running event loop, as a server does."""

    async def run() -> Any:
        return action()

    return asyncio.run(run())
