"""Every kernel of the catalogue that runs on the CPU, over its op's own sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import opgraft

OP = "attention.clamp_position"
SIZES = (1, 64, 4096, 2**20)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", ["native", "cpu_reference"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_clamp_position(benchmark: Any, dtype: torch.dtype, backend: str, size: int) -> None:
    benchmark.group = f"{OP} {dtype} [{size}]"
    seq_lens = torch.arange(size, dtype=dtype)
    call = opgraft.op(OP)
    assert torch.equal(call(seq_lens, backend="native"), benchmark(call, seq_lens, backend=backend))
