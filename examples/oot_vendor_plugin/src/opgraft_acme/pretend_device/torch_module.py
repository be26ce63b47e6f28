"""The functions of ``torch.acme``, by which torch and opgraft ask about the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from opgraft_acme.pretend_device.memory import memory

_Device = torch.device | str | int | None


class Properties(NamedTuple):
    """What is known of the card."""

    name: str
    major: int
    minor: int
    total_memory: int


def is_available() -> bool:
    """Say whether there is a card: the pretend one always is."""
    return True


def is_initialized() -> bool:
    """Say whether the card is ready: the pretend one needs no preparation."""
    return True


def device_count() -> int:
    """Count the cards; torch's support for devices written in Python knows only one."""
    return 1


def current_device() -> int:
    """Give the index of the card in use."""
    return 0


def set_device(device: _Device) -> None:
    """Use a card; refuse any but the one there is."""
    check_device(device)


def synchronize(device: _Device = None) -> None:
    """Wait for the card: it has always finished, since it runs in the caller's thread."""
    check_device(device)


def get_device_properties(device: _Device = None) -> Properties:
    """Describe a card."""
    check_device(device)
    return Properties(name="Acme A1 (pretend)", major=1, minor=0, total_memory=1 << 34)


def get_device_name(device: _Device = None) -> str:
    """Name a card."""
    return get_device_properties(device).name


def memory_allocated(device: _Device = None) -> int:
    """Count the bytes that tensors hold on the card."""
    check_device(device)
    return memory.allocated


def get_rng_state(device: _Device = None) -> torch.Tensor:
    """Give the host's state, since the host draws the card's random numbers."""
    check_device(device)
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: _Device = None) -> None:
    """Set the host's state, since the host draws the card's random numbers."""
    check_device(device)
    torch.set_rng_state(state)


def manual_seed_all(seed: int) -> None:
    """Do nothing: torch seeds the host, which draws the card's random numbers, by itself."""


def get_amp_supported_dtype() -> list[torch.dtype]:
    """List the dtypes of autocast, about which reentrant checkpointing asks, whatever its tensors are on."""
    return [torch.float16, torch.bfloat16]


def _is_in_bad_fork() -> bool:
    return False


def check_device(device: _Device) -> None:
    """Refuse a device that does not exist.

    Raises
    ------
    RuntimeError
        If the index is not that of the one card.

    """
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    if index not in {None, 0}:
        raise RuntimeError(f"acme: there is one device, acme:0; there is no acme:{index}")
