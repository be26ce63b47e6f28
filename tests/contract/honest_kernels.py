"""Kernels that are right, each in another way; the suite has to pass every one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from opgraft import NotSupported

HONEST: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}


def honest(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a kernel to the list, with further arguments of ``@forward``."""

    def add(kernel: Callable[..., Any]) -> Callable[..., Any]:
        HONEST[kernel.__name__] = kernel, options
        return kernel

    return add


@honest()
def in_place_in_the_result(seq_lens, *, out=None):
    if out is None:
        out = torch.empty(seq_lens.shape, dtype=torch.int64, device=seq_lens.device)
    return out.copy_(seq_lens).clamp_(min=1).sub_(1)


@honest()
def with_temporaries(seq_lens, *, out=None):
    positions = torch.clamp(seq_lens.to(torch.int64), min=1) - 1
    if out is None:
        return positions
    out.copy_(positions)
    return out


@honest()
def on_the_default_device_since_it_is_for_the_cpu_alone(seq_lens, *, out=None):
    if out is None:
        out = torch.empty(seq_lens.shape, dtype=torch.int64)
    out.copy_(torch.where(seq_lens > 0, seq_lens.long() - 1, 0))
    return out


@honest()
def with_numpy(seq_lens, *, out=None):
    positions = torch.from_numpy(np.maximum(seq_lens.numpy(), 1).astype(np.int64) - 1)
    return positions if out is None else out.copy_(positions)


@honest()
def with_torchs_own_buffer(seq_lens, *, out=None):
    return torch.sub(torch.clamp(seq_lens, min=1).to(torch.int64), 1, out=out)


@honest()
def block_by_block(seq_lens, *, out=None):
    if out is None:
        out = torch.empty_like(seq_lens, dtype=torch.int64, memory_format=torch.contiguous_format)
    for begin in range(0, len(seq_lens), 1024):
        block = slice(begin, begin + 1024)
        torch.sub(seq_lens[block].clamp(min=1), 1, out=out[block]) if seq_lens.dtype is torch.int64 else out[
            block
        ].copy_(seq_lens[block].clamp(min=1) - 1)
    return out


@honest(dtypes=("int32",))
def for_one_dtype(seq_lens, *, out=None):
    assert seq_lens.dtype is torch.int32
    return in_place_in_the_result(seq_lens, out=out)


@honest(dtypes={"seq_lens": ("int64",)})
def for_one_dtype_of_a_parameter(seq_lens, *, out=None):
    assert seq_lens.dtype is torch.int64
    return in_place_in_the_result(seq_lens, out=out)


@honest()
def without_the_buffer(seq_lens):
    return in_place_in_the_result(seq_lens)


def _contiguous_only(seq_lens, *, out=None):
    return None if seq_lens.is_contiguous() else "needs contiguous seq_lens"


@honest(rejects=_contiguous_only)
def for_contiguous_input(seq_lens, *, out=None):
    assert seq_lens.is_contiguous()
    return in_place_in_the_result(seq_lens, out=out)


def _whole_vectors_only(seq_lens, *, out=None):
    return f"needs a multiple of 16, got {len(seq_lens)}" if len(seq_lens) % 16 else None


@honest(rejects=_whole_vectors_only)
def for_whole_vectors(seq_lens, *, out=None):
    assert len(seq_lens) % 16 == 0
    return in_place_in_the_result(seq_lens, out=out)


def _aligned_only(seq_lens, *, out=None):
    return "needs 16-byte alignment" if seq_lens.data_ptr() % 16 else None


@honest(rejects=_aligned_only)
def for_aligned_input(seq_lens, *, out=None):
    assert seq_lens.data_ptr() % 16 == 0
    return in_place_in_the_result(seq_lens, out=out)


def _without_buffer_only(seq_lens, *, out=None):
    return None if out is None else "writes into no buffer"


@honest(rejects=_without_buffer_only)
def for_fresh_results(seq_lens, *, out=None):
    assert out is None
    return in_place_in_the_result(seq_lens)


@honest()
def passing_strided_buffers_on(seq_lens, *, out=None):
    if out is not None and not out.is_contiguous():
        raise NotSupported("contiguous buffers only")
    return in_place_in_the_result(seq_lens, out=out)
