"""The Triton kernel of ``attention.clamp_position`` on CPU tensors, in Triton's interpreter.

Triton decides at import whether it interprets, so the tests below run in a process of their own,
which the last one starts.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from opgraft_triton_kernels.attention import clamp_position

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run in the interpreter by the last test")

DTYPES = (torch.int32, torch.int64)
SIZES = (1, 2, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 2**17 + 3)
CANARY = -77


def meaning(seq_lens):
    return torch.maximum(seq_lens, torch.ones_like(seq_lens)).to(torch.int64) - 1


def lengths(size, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed + size)
    return torch.randint(-3, 2**31 - 1, (size,), dtype=dtype, generator=generator)


def same(expected, actual):
    assert actual.dtype == torch.int64
    assert actual.is_contiguous()
    assert torch.equal(expected, actual)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_formula_for_every_size(size, dtype):
    seq_lens = lengths(size, dtype)
    before = seq_lens.clone()
    same(meaning(seq_lens), clamp_position(seq_lens))
    assert torch.equal(before, seq_lens)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_lengths_do_not_wrap_round(dtype):
    limits = torch.iinfo(dtype)
    seq_lens = torch.tensor([limits.min, limits.min + 1, -1, 0, 1, 2, limits.max], dtype=dtype)
    same(torch.tensor([0, 0, 0, 0, 0, 1, limits.max - 1]), clamp_position(seq_lens))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 513, 1025])
def test_lengths_may_lie_anywhere(size, dtype):
    whole = lengths(4 * size + 8, dtype)
    for seq_lens in (
        whole[1 : 1 + size],
        whole[::3][:size],
        whole[5::2][:size],
        whole[:1].expand(size),
        whole[: 2 * size].view(size, 2)[:, 1],
        whole[: 2 * size].view(2, size).t()[:, 0],
    ):
        assert (size,) == seq_lens.shape
        same(meaning(seq_lens), clamp_position(seq_lens))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 64, 513])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_only_the_buffer_is_written_and_it_is_returned(size, dtype, stride):
    seq_lens = lengths(size, dtype)
    whole = torch.full((stride * size + 4,), CANARY)
    out = whole[2 : 2 + stride * size : stride]
    assert out is clamp_position(seq_lens, out=out)
    assert torch.equal(meaning(seq_lens), out)
    expected = torch.full_like(whole, CANARY)
    expected[2 : 2 + stride * size : stride] = meaning(seq_lens)
    assert torch.equal(expected, whole)


@interpreted
def test_both_sides_may_have_strides_of_their_own():
    seq_lens, whole = lengths(900, torch.int32)[::3], torch.full((600,), CANARY)
    clamp_position(seq_lens, out=whole[1::2])
    assert torch.equal(meaning(seq_lens), whole[1::2])
    assert [CANARY] == whole[::2].unique().tolist()


@interpreted
def test_the_interpreter_keeps_no_compiled_code():
    from opgraft_triton_kernels.attention import _clamp_position

    clamp_position(torch.tensor([3], dtype=torch.int32))
    assert {} == _clamp_position.contiguous.variants


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_launched_for_an_empty_batch(dtype):
    # Not interpreted: without a GPU any launch would be an error.
    empty = torch.empty(0, dtype=dtype)
    same(torch.empty(0, dtype=torch.int64), clamp_position(empty))
    same(torch.empty(0, dtype=torch.int64), clamp_position(empty[::2]))
    out = torch.empty(0, dtype=torch.int64)
    assert out is clamp_position(empty, out=out)


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_all_of_it_passes_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "1 skipped" in done.stdout
