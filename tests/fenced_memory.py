"""Tensors between pages that nobody may touch, and tables spread over more than 2**31 entries.

A read or write one entry beyond such a tensor ends the process, so tests use it in a process of
their own: ``python tests/fenced_memory.py native`` runs every index op on fenced arguments.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import torch

_NORESERVE = 0x4000
_PROT_NONE = 0


def fenced(tensor: torch.Tensor, *, at_end: bool) -> torch.Tensor:
    """Copy a contiguous tensor so that its last, or its first, entry lies at a fence."""
    page = mmap.PAGESIZE
    size = tensor.numel() * tensor.element_size()
    room = -(-size // page) * page
    memory = mmap.mmap(-1, room + 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for fence in (start, start + page + room):
        if libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    if not size:
        return tensor.clone()
    offset = page + (room - size if at_end else 0)
    view = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return view.view(tensor.shape).copy_(tensor)


def spread_out(table: torch.Tensor, reach: int = 2**31 + 1000) -> torch.Tensor:
    """Copy a table of at least two rows so that it reaches over so many entries, or a few less.

    The memory in between is reserved but never touched.
    """
    rows, columns = table.shape
    stride = (reach - columns) // (rows - 1)
    size = ((rows - 1) * stride + columns) * table.element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=table.dtype)
    return memory.as_strided((rows, columns), (stride, 1)).copy_(table)


def run_everything(implementation: str) -> int:
    """Run every op on fenced arguments, and count the calls."""
    import index_cases
    from index_check import check

    calls = 0
    for name in index_cases.NAMES:
        call: Any = index_cases.OPS[name].forward_native
        if implementation != "native":
            from importlib import import_module

            call = getattr(import_module(implementation), name)
        dtypes = next(index_cases.dtype_mixes(name))
        for _, arguments in index_cases.edge_cases(name, dtypes):
            for at_end in (True, False):
                behind = {
                    key: fenced(value, at_end=at_end) if isinstance(value, torch.Tensor) else value
                    for key, value in arguments.items()
                }
                call(**behind)
                plain = {key: value for key, value in behind.items() if key not in ("out", "out_lens")}
                if "repair" not in plain and not {"out", "out_lens"} & set(arguments):
                    check(call, name, plain)
                calls += 1
    return calls


if __name__ == "__main__":
    sys.stdout.write(f"{run_everything(sys.argv[1])}\n")
