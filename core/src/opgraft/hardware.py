"""What hardware a tensor's device is, and what hardware a kernel asks for.

The only module that names vendors' hardware. The facts belong to a *device* (type and index),
never to the process, and are read when a tensor of that device is first seen.
"""

from __future__ import annotations

import functools
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

_PLATFORM_KEY = re.compile(r"[a-z][a-z0-9_]*")


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


def arch_key(arch: str) -> tuple[tuple[int, ...], str] | None:
    """Order archs of the dotted kind; a name such as ``gfx942`` has no order (None)."""
    if re.fullmatch(r"\d+(\.\d+)*", arch):
        return tuple(int(part) for part in arch.split(".")), ""
    return None


def _dotted(value: str | tuple[int, ...] | None, what: str) -> str:
    if value is None:
        return ""
    text = ".".join(str(part) for part in value) if isinstance(value, tuple) else value
    if not isinstance(text, str) or arch_key(text) is None:
        message = f"{what} must be an arch such as '9.0' or (9, 0), got {value!r}"
        raise RegistrationError(message)
    return text


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
        if self.platform != "*" and not _PLATFORM_KEY.fullmatch(self.platform):
            message = f"a platform key is a lower-case word such as 'cuda', got {self.platform!r}"
            raise RegistrationError(message)
        low = _dotted(self.min_arch or None, "min_arch")
        high = _dotted(self.max_arch or None, "max_arch")
        if low and high and (arch_key(low) or ()) > (arch_key(high) or ()):
            message = f"{self.platform}: min_arch {low} is above max_arch {high}"
            raise RegistrationError(message)
        for arch in self.archs:
            if not isinstance(arch, str) or not re.fullmatch(r"[A-Za-z0-9_.]+", arch):
                message = f"{self.platform}: {arch!r} is not an arch such as 'gfx942' or '9.0'"
                raise RegistrationError(message)

    @classmethod
    def cuda(
        cls,
        *,
        min_sm: tuple[int, ...] | str | None = None,
        max_sm: tuple[int, ...] | str | None = None,
    ) -> CapabilityRequirement:
        """Require a CUDA device, compute capability within ``[min_sm, max_sm]``."""
        return cls.device("cuda", min_arch=min_sm, max_arch=max_sm)

    @classmethod
    def hip(cls, *, archs: Iterable[str] = ()) -> CapabilityRequirement:
        """Require a ROCm device, of one of ``archs`` if any are given."""
        return cls.device("hip", archs=archs)

    @classmethod
    def device(
        cls,
        key: str,
        *,
        min_arch: tuple[int, ...] | str | None = None,
        max_arch: tuple[int, ...] | str | None = None,
        archs: Iterable[str] = (),
    ) -> CapabilityRequirement:
        """Require a device of any platform key, in-tree or not."""
        if isinstance(archs, str):
            archs = (archs,)
        return cls(
            platform=key,
            min_arch=_dotted(min_arch, "min_arch"),
            max_arch=_dotted(max_arch, "max_arch"),
            archs=frozenset(archs),
        )

    def unmet(self, platform: str, arch: str) -> str | None:
        """Give the reason why a device does not satisfy this, or None if it does."""
        if self.platform == "*":
            return None
        if platform != self.platform:
            return f"device is {platform}, needs {self}"
        bounded = self.min_arch or self.max_arch or self.archs
        if not bounded:
            return None
        bare = arch.partition(":")[0]
        if not bare:
            return f"arch of the {platform} device is unknown, needs {self}"
        if self.archs and bare not in self.archs:
            return f"arch is {bare}, needs {self}"
        if self.min_arch or self.max_arch:
            key = arch_key(bare)
            low, high = arch_key(self.min_arch), arch_key(self.max_arch)
            if key is None or (low and key < low) or (high and key > high):
                return f"arch is {bare}, needs {self}"
        return None

    def __str__(self) -> str:
        """Write ``cuda 8.0..9.0`` or ``hip gfx942|gfx950``."""
        if self.platform == "*":
            return "any device"
        window = f" {self.min_arch}..{self.max_arch}" if self.min_arch or self.max_arch else ""
        names = f" {'|'.join(sorted(self.archs))}" if self.archs else ""
        return f"{self.platform}{window}{names}"


CapabilityRequirement.CUDA = CapabilityRequirement(platform="cuda")
CapabilityRequirement.HIP = CapabilityRequirement(platform="hip")
CapabilityRequirement.MUSA = CapabilityRequirement(platform="musa")
CapabilityRequirement.NPU = CapabilityRequirement(platform="npu")
CapabilityRequirement.XPU = CapabilityRequirement(platform="xpu")
CapabilityRequirement.CPU = CapabilityRequirement(platform="cpu")

ANY: Final = CapabilityRequirement(platform="*")
"""Any device; a member of a capability set, or in place of one."""

Capabilities = frozenset[CapabilityRequirement]


def capability_set(
    declared: CapabilityRequirement | Iterable[CapabilityRequirement], whose: str
) -> Capabilities:
    """Normalise what an author may write (one requirement or a set) and refuse an empty set."""
    single = isinstance(declared, CapabilityRequirement)
    capabilities = frozenset([declared] if single else declared)  # type: ignore[list-item,arg-type]
    for member in capabilities:
        if not isinstance(member, CapabilityRequirement):
            message = f"{whose}: capabilities must be CapabilityRequirement or ANY, got {member!r}"
            raise RegistrationError(message)
    if not capabilities:
        message = f"{whose}: the capability set is empty; write ANY for any device"
        raise RegistrationError(message)
    return capabilities


def unmet(capabilities: Capabilities, platform: str, arch: str) -> str | None:
    """Give the reason why a device meets none of the requirements, or None if it meets one."""
    reasons = [one.unmet(platform, arch) for one in capabilities]
    if None in reasons:
        return None
    if len(reasons) == 1:
        return reasons[0]
    device = f"{platform} {arch}".strip()
    return f"device is {device}, needs {' or '.join(sorted(map(str, capabilities)))}"


class Detector:
    """Ask torch what a device is. Tests inject another one; nobody patches globals."""

    def platform_key(self, device: torch.device) -> str:
        """Name the hardware: the torch device type, except ``hip`` on a ROCm build of torch."""
        return self.platform_of(device.type)

    def platform_of(self, device_type: str) -> str:
        """Do the same for a device type."""
        if device_type != "cuda":
            return device_type
        import torch

        return "hip" if torch.version.hip else "cuda"

    def device_type(self, platform: str) -> str:
        """Name the torch device type that a platform key's tensors have."""
        return "cuda" if platform == "hip" else platform

    def facts(self, device: torch.device) -> DeviceFacts:
        """Read arch and name of one device; initialises it if need be."""
        import torch

        if device.type == "cpu":
            return DeviceFacts(name="CPU")
        index = device.index if device.index is not None else 0
        module = getattr(torch, device.type, None)
        properties = getattr(module, "get_device_properties", None)
        if properties is None:
            return DeviceFacts(index=index)
        read = properties(index)
        arch = str(getattr(read, "gcnArchName", "") or "").partition(":")[0]
        if not arch.startswith("gfx"):
            major, minor = getattr(read, "major", None), getattr(read, "minor", None)
            arch = f"{major}.{minor}" if major is not None and minor is not None else ""
        return DeviceFacts(index=index, arch=arch, name=str(getattr(read, "name", "")))

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
        if platform == "hip" and not torch.version.hip:
            return 0, "this torch was built without ROCm"
        if platform == "cuda" and not torch.version.cuda:
            return 0, "this torch was built without CUDA"
        module = getattr(torch, self.device_type(platform), None)
        counter = getattr(module, "device_count", None)
        if counter is None:
            return 0, f"this torch knows no device {platform!r}"
        count = int(counter())
        return count, "" if count else f"torch sees no {platform} device"


@functools.lru_cache(maxsize=1)
def default_detector() -> Detector:
    """Give the process's detector; it holds no facts."""
    return Detector()
