"""What hardware a tensor's device is, and what hardware a kernel asks for.

The only module that names vendors' hardware. The facts belong to a *device* (type and index),
never to the process, and are read when a tensor of that device is first seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from opgraft.errors import RegistrationError

if TYPE_CHECKING:
    import torch

IN_TREE: Final = ("cuda", "hip", "musa", "npu", "xpu", "cpu")
"""The platform keys for which an op may define a platform method; any other is out-of-tree."""

CHAINS: Final = {"hip": ("hip", "cuda")}
"""Platform methods tried for a platform key besides its own: the one implicit chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What is known of one device.

    Parameters
    ----------
    index
        Index among the devices of its type, or None where the type has no index.
    arch
        ``"9.0"`` (compute capability) or ``"gfx942"``; empty where unknown.
    name
        The device's own name, for people.

    """

    index: int | None = None
    arch: str = ""
    name: str = ""


Arch = str | tuple[int, ...] | None


def arch_key(arch: str) -> tuple[int, ...] | None:
    """Order archs of the dotted kind; a name such as ``gfx942`` has no order (None)."""
    return tuple(map(int, arch.split("."))) if re.fullmatch(r"\d+(\.\d+)*", arch) else None


def _dotted(value: str | tuple[int, ...] | None) -> str:
    return ".".join(map(str, value)) if isinstance(value, tuple) else value or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapabilityRequirement:
    """Where a kernel may run: a platform key and a window of archs, both ends included.

    Parameters
    ----------
    platform
        Platform key, or ``"*"`` for any device (written :data:`ANY`).
    min_arch, max_arch
        Ends of the window, dotted numbers such as ``"8.0"``; empty means open.
    archs
        Explicit set of archs such as ``{"gfx942"}``; a feature suffix of the device's arch
        (``:sramecc+``) is ignored.

    Raises
    ------
    RegistrationError
        If the platform key or an arch is not of the form above, or the window is empty.

    Notes
    -----
    An unknown arch does not satisfy a bounded window.

    """

    platform: str
    min_arch: str = ""
    max_arch: str = ""
    archs: frozenset[str] = frozenset()

    CUDA: ClassVar[CapabilityRequirement]
    HIP: ClassVar[CapabilityRequirement]
    MUSA: ClassVar[CapabilityRequirement]
    NPU: ClassVar[CapabilityRequirement]
    XPU: ClassVar[CapabilityRequirement]
    CPU: ClassVar[CapabilityRequirement]

    def __post_init__(self) -> None:
        """Refuse a requirement that no device could meet."""
        if self.platform != "*" and not re.fullmatch(r"[a-z][a-z0-9_]*", str(self.platform)):
            raise RegistrationError(f"a platform key is a lower-case word such as 'cuda', got {self.platform!r}")
        for end in ("min_arch", "max_arch"):
            arch = getattr(self, end)
            if arch and (not isinstance(arch, str) or arch_key(arch) is None):
                raise RegistrationError(f"{end} must be an arch such as '9.0' or (9, 0), got {arch!r}")
        low, high = arch_key(self.min_arch), arch_key(self.max_arch)
        if low and high and low > high:
            raise RegistrationError(f"{self.platform}: min_arch {self.min_arch} is above max_arch {self.max_arch}")
        for arch in self.archs:
            if not isinstance(arch, str) or not re.fullmatch(r"[A-Za-z0-9_.]+", arch):
                raise RegistrationError(f"{self.platform}: {arch!r} is not an arch such as 'gfx942' or '9.0'")

    @classmethod
    def cuda(cls, *, min_sm: Arch = None, max_sm: Arch = None) -> CapabilityRequirement:
        """Require a CUDA device, compute capability within ``[min_sm, max_sm]``."""
        return cls.device("cuda", min_arch=min_sm, max_arch=max_sm)

    @classmethod
    def hip(cls, *, archs: Iterable[str] = ()) -> CapabilityRequirement:
        """Require a ROCm device, of one of ``archs`` if any are given."""
        return cls.device("hip", archs=archs)

    @classmethod
    def device(
        cls, key: str, *, min_arch: Arch = None, max_arch: Arch = None, archs: Iterable[str] = ()
    ) -> CapabilityRequirement:
        """Require a device of any platform key, in-tree or not."""
        names = frozenset([archs] if isinstance(archs, str) else archs)
        return cls(platform=key, min_arch=_dotted(min_arch), max_arch=_dotted(max_arch), archs=names)

    def unmet(self, platform: str, arch: str) -> str | None:
        """Give the reason why a device does not satisfy this, or None if it does."""
        bounded = self.min_arch or self.max_arch or self.archs
        if self.platform == "*" or (platform == self.platform and not bounded):
            return None
        bare = arch.partition(":")[0]
        key, low, high = arch_key(bare), arch_key(self.min_arch), arch_key(self.max_arch)
        if platform != self.platform:
            return f"device is {platform}, needs {self}"
        if not bare:
            return f"arch of the {platform} device is unknown, needs {self}"
        outside = (low or high) and (key is None or (low and key < low) or (high and key > high))
        return f"arch is {bare}, needs {self}" if outside or (self.archs and bare not in self.archs) else None

    def __str__(self) -> str:
        """Write ``cuda 8.0..9.0`` or ``hip gfx942|gfx950``."""
        if self.platform == "*":
            return "any device"
        window = f" {self.min_arch}..{self.max_arch}" if self.min_arch or self.max_arch else ""
        names = f" {'|'.join(sorted(self.archs))}" if self.archs else ""
        return f"{self.platform}{window}{names}"


for _key in IN_TREE:
    setattr(CapabilityRequirement, _key.upper(), CapabilityRequirement(platform=_key))

ANY: Final = CapabilityRequirement(platform="*")
"""Any device; a member of a capability set, or in place of one."""

Capabilities = frozenset[CapabilityRequirement]


def capability_set(declared: CapabilityRequirement | Iterable[CapabilityRequirement], whose: str) -> Capabilities:
    """Normalise what an author may write (one requirement or a set) and refuse an empty set."""
    members = list(declared) if isinstance(declared, Iterable) else [declared]
    for member in members:
        if not isinstance(member, CapabilityRequirement):
            raise RegistrationError(f"{whose}: capabilities must be CapabilityRequirement or ANY, got {member!r}")
    if not members:
        raise RegistrationError(f"{whose}: the capability set is empty; write ANY for any device")
    return frozenset(members)


def unmet(capabilities: Capabilities, platform: str, arch: str) -> str | None:
    """Give the reason why a device meets none of the requirements, or None if it meets one."""
    reasons = [one.unmet(platform, arch) for one in capabilities]
    if None in reasons or len(reasons) == 1:
        return None if None in reasons else reasons[0]
    return f"device is {f'{platform} {arch}'.strip()}, needs {' or '.join(sorted(map(str, capabilities)))}"


class Detector:
    """Ask torch what a device is. Tests inject another one; nobody patches globals."""

    def platform_key(self, device: torch.device) -> str:
        """Name the hardware: the torch device type, except ``hip`` on a ROCm build of torch."""
        import torch

        return "hip" if device.type == "cuda" and torch.version.hip else device.type

    def device_type(self, platform: str) -> str:
        """Name the torch device type that a platform key's tensors have."""
        return "cuda" if platform == "hip" else platform

    def facts(self, device: torch.device) -> DeviceFacts:
        """Read arch and name of one device; initialises it if need be."""
        import torch

        index = device.index or 0
        read = getattr(getattr(torch, device.type, None), "get_device_properties", None)
        if device.type == "cpu" or read is None:
            return DeviceFacts(index=device.index, name=device.type)
        properties = read(index)
        arch = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
        if not arch.startswith("gfx"):
            version = getattr(properties, "major", None), getattr(properties, "minor", None)
            arch = "" if None in version else f"{version[0]}.{version[1]}"
        return DeviceFacts(index=index, arch=arch, name=str(getattr(properties, "name", "")))

    def cpu_has_amx(self) -> bool:
        """Say whether this CPU has AMX tiles, the condition of an op's ``forward_cpu``."""
        import torch

        probe = getattr(torch.cpu, "_is_amx_tile_supported", None)
        return bool(probe()) if probe is not None else False

    def count(self, platform: str) -> tuple[int, str]:
        """Count the devices of a platform key as torch sees them, without initialising any.

        Returns
        -------
        tuple of int and str
            The count, and the reason where it is zero.

        """
        import torch

        if platform == "cpu":
            return 1, ""
        for key, built, stack in (("hip", torch.version.hip, "ROCm"), ("cuda", torch.version.cuda, "CUDA")):
            if platform == key and not built:
                return 0, f"this torch was built without {stack}"
        counter = getattr(getattr(torch, self.device_type(platform), None), "device_count", None)
        if counter is None:
            return 0, f"this torch knows no device {platform!r}"
        count = int(counter())
        return count, "" if count else f"torch sees no {platform} device"
