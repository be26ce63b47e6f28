"""The memory of the pretend card: bytes with addresses that mean nothing to the host."""

from __future__ import annotations

import threading
from typing import Final

_FIRST_ADDRESS: Final = 0xACE_0000_0000_0000
_ALIGNMENT: Final = 256
_FRESH: Final = b"\xac"


class Memory:
    """Blocks of bytes, reachable by the address of their first byte and by nothing else.

    The addresses lie outside of what a process can map, so code that takes one for a host
    pointer faults at once instead of computing nonsense. No address is given out twice, and a
    fresh block is filled with a pattern: reading freed or unwritten memory shows.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, bytearray] = {}
        self._next = _FIRST_ADDRESS
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> int:
        """Reserve a block and give its address; the address of an empty block is 0."""
        if nbytes == 0:
            return 0
        with self._lock:
            address = self._next
            self._next += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._blocks[address] = bytearray(_FRESH) * nbytes
        return address

    def free(self, address: int) -> None:
        """Release a block. Takes no lock: the garbage collector may call it at any moment."""
        self._blocks.pop(address, None)

    def window(self, address: int, first: int, nbytes: int) -> memoryview:
        """Give ``nbytes`` bytes of the block at ``address``, from byte ``first`` on.

        Raises
        ------
        ValueError
            If there is no such block, or the window leaves it.

        """
        if nbytes == 0:
            return memoryview(bytearray())
        block = self._blocks.get(address)
        if block is None:
            raise ValueError(f"acme: no memory is allocated at {address:#x}")
        if first < 0 or first + nbytes > len(block):
            raise ValueError(f"acme: bytes [{first}..{first + nbytes}) leave the {len(block)} bytes at {address:#x}")
        return memoryview(block)[first : first + nbytes]

    @property
    def allocated(self) -> int:
        """Count the bytes that are allocated now."""
        return sum(map(len, self._blocks.values()))


memory: Final = Memory()
"""The memory of the one card."""
