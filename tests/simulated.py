"""Hardware that is not here, and registries that believe in it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from opgraft.hardware import Detector, DeviceFacts
from opgraft.kernel_registry import KernelRegistry
from opgraft.policy import PolicyStore
from opgraft.spec import KernelSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


class SimulatedDetector(Detector):
    """Says of CPU tensors, or of every device, what it was told; counts how often it is asked."""

    def __init__(self, platform: str = "cpu", arch: str = "", *, amx: bool = False) -> None:
        self.platform, self.arch, self.amx = platform, arch, amx
        self.archs: dict[torch.device, str] = {}
        self.asked: list[str] = []

    def platform_key(self, device: torch.device) -> str:
        self.asked.append("platform_key")
        return self.platform if device.type == "cpu" else device.type

    def facts(self, device: torch.device) -> DeviceFacts:
        self.asked.append("facts")
        return DeviceFacts(index=device.index, arch=self.archs.get(device, self.arch))

    def cpu_has_amx(self) -> bool:
        self.asked.append("cpu_has_amx")
        return self.amx

    def count(self, platform: str) -> tuple[int, str]:
        self.asked.append("count")
        return 1, ""


class BrokenDetector(Detector):
    """Fails whatever it is asked."""

    def platform_key(self, device: torch.device) -> str:
        raise AssertionError("asked for a platform key")

    def facts(self, device: torch.device) -> DeviceFacts:
        raise AssertionError("asked for facts")

    def cpu_has_amx(self) -> bool:
        raise AssertionError("asked for AMX")

    def count(self, platform: str) -> tuple[int, str]:
        raise AssertionError("asked for a count")


def registry_on(
    platform: str = "cpu", arch: str = "", *, amx: bool = False, operators: str = "", **environ: str
) -> KernelRegistry:
    """Build a registry without plugins, on which CPU tensors are on `platform`; `environ` is its environment."""
    return KernelRegistry(
        detector=SimulatedDetector(platform, arch, amx=amx),
        policy=PolicyStore(environ=environ, folder="/nonexistent"),
        operators=operators,
        path=[],
    )


@contextlib.contextmanager
def unchanged(registry: KernelRegistry) -> Iterator[KernelRegistry]:
    """Take back what is added to a registry that outlives the tests."""
    handles, specs = dict(registry._handles), {op_id: [*specs] for op_id, specs in registry._specs.items()}
    yield registry
    registry._handles, registry._specs = handles, specs
    registry.changed()


def offer(registry: KernelRegistry, op: str, target: Any, **fields: Any) -> KernelSpec:
    """Register a kernel as a backend's, by default backend ``there`` and kernel backend ``jit``."""
    made: dict[str, Any] = {"backend": "there", "kernel_backend": "jit", **fields}
    return registry.register(KernelSpec(op=op, target=target, **made))
