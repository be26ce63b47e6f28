"""The cost of reaching a kernel, followed over time with pytest-benchmark.

``make bench-suite`` runs it; ``PYTEST_ARGS="--benchmark-save=NAME"`` keeps the figures and
``--benchmark-compare`` holds the next run against them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import trivial

import opgraft

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="module")
def trivial_backend() -> Iterator[None]:
    """Let the trivial kernel win while this module's benchmarks run."""
    trivial.register()
    yield
    opgraft.set_policy(deny=["trivial"])


@pytest.fixture
def seq_lens() -> torch.Tensor:
    """Give the argument of every call."""
    return torch.arange(1, 65, dtype=torch.int32)


def test_direct_call_of_the_kernel(benchmark, seq_lens):
    assert benchmark(trivial.clamp_position, seq_lens) is seq_lens


def test_handle(benchmark, seq_lens):
    assert benchmark(opgraft.ops.attention.clamp_position, seq_lens) is seq_lens


def test_handle_with_out(benchmark, seq_lens):
    out = torch.empty_like(seq_lens, dtype=torch.int64)
    assert benchmark(opgraft.ops.attention.clamp_position, seq_lens, out=out) is out


def test_handle_with_backend(benchmark, seq_lens):
    called = benchmark(opgraft.ops.attention.clamp_position, seq_lens, backend="trivial")
    assert called is seq_lens


def test_module(benchmark, seq_lens):
    assert benchmark(opgraft.ops.attention.clamp_position.op, seq_lens) is seq_lens


def test_handle_inside_a_scoped_policy(benchmark, seq_lens):
    with opgraft.use(order={"quantization.*": ["native"]}):
        assert benchmark(opgraft.ops.attention.clamp_position, seq_lens) is seq_lens


def test_handle_with_tracing_on(benchmark, seq_lens):
    with opgraft.trace():
        assert benchmark(opgraft.ops.attention.clamp_position, seq_lens) is seq_lens


def test_entering_and_leaving_a_scoped_policy(benchmark):
    def scope() -> None:
        with opgraft.use(force="native"):
            pass

    benchmark(scope)


def test_explain(benchmark, seq_lens):
    selection = benchmark(opgraft.explain, "attention.clamp_position", seq_lens)
    assert "trivial" in str(selection.winner)


def test_refresh_and_the_first_call_after_it(benchmark, seq_lens):
    def again() -> torch.Tensor:
        opgraft.refresh()
        return opgraft.ops.attention.clamp_position(seq_lens)

    benchmark(again)
