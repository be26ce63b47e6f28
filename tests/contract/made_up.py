"""Backends made up for a test, each in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import opgraft
from opgraft import Backend, forward, hookimpl
from opgraft.kernel_registry import KernelRegistry
from opgraft.policy import PolicyStore
from opgraft.testing.conformance import Options, Suite

CLAMP = "attention.clamp_position"


def plugin(
    kernel: Callable[..., Any], *, op: str = CLAMP, platforms: tuple[str, ...] = ("cpu",), **options: Any
) -> object:
    """Make a plugin that offers one kernel."""

    @hookimpl
    def opgraft_backend() -> Backend:
        return Backend(name="made_up", platforms=platforms)

    offered = forward(op, kernel_backend="plugin", priority=-1, **options)(kernel)
    return SimpleNamespace(opgraft_backend=opgraft_backend, kernel=offered)


def registry(*ops: str) -> KernelRegistry:
    """Make a registry that knows these ops and no plugin that is installed."""
    policy = PolicyStore()
    policy.set(deny="acme,cpu_reference,cuda,hip,opencl")
    made = KernelRegistry(policy=policy)
    for op in ops:
        type(opgraft.op(op).op).publish(made)
    return made


def suite(kernel: Callable[..., Any], *, op: str = CLAMP, **options: Any) -> Suite:
    """Make the suite of a backend that offers one kernel."""
    made = registry(op)
    made.register_backend(plugin(kernel, op=op, **options))
    return Suite("made_up", Options(), registry=made)
