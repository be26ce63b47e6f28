"""Each deliberately dishonest kernel is caught by the rule that is named for it, and honest ones by none."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch
from contract import made_up
from contract.dishonest_kernels import LIES, Lie, right
from contract.honest_kernels import HONEST

import opgraft
from opgraft.testing import layouts
from opgraft.testing.conformance import Options, Suite
from opgraft.testing.faults import Violation
from opgraft.testing.rule import Installed
from opgraft.testing.rules import RULES


@pytest.fixture(autouse=True)
def _state_of_the_process():
    """Put back what a dishonest kernel has changed."""
    dtype, threads, rng, environment = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_rng_state(),
        dict(os.environ),
    )
    zeros_like, drawn = torch.zeros_like, random.getstate()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.set_rng_state(rng)
    torch.set_grad_enabled(True)
    torch.zeros_like = zeros_like
    random.setstate(drawn)
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name)
def test_a_dishonest_kernel_fails_the_rule_named_for_it(lie: Lie):
    suite = made_up.suite(lie.make(), op=lie.op, platforms=lie.platforms, **lie.options)
    checks = [check for check in suite.checks() if check.rule == lie.rule]

    outcomes = [check.result().outcome for check in checks]

    assert ["failed"] == outcomes


def test_there_are_enough_dishonest_kernels_and_each_has_a_name_of_its_own():
    assert len(LIES) >= 25
    assert len(LIES) == len({lie.name for lie in LIES})


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_kernel_fails_no_rule(name):
    kernel, options = HONEST[name]

    report = made_up.suite(kernel, **options).report()

    assert [] == [result.text() for result in report.results if result.is_bad]
    assert report.passed


# -- rules that need another op, more time, or no kernel ---------------------------------------------------------------


class Scale(opgraft.BaseFusedOp):
    """Multiply by two: an op with gradients."""

    op = "contract.scale"
    format_signature = opgraft.FormatSignature(
        supported_dtypes=("float32", "float64"), output_dtype="like:rows", shapes={"rows": ("count",)}
    )
    tolerance = opgraft.Tolerance(rtol=1e-6, atol=0.0, reason="one rounding")
    writes: ClassVar[Mapping[str, int]] = {}

    def forward_native(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * 2


def outcome_of(rule: str, kernel, *, options: Options | None = None, **declared) -> str:
    made = made_up.registry(made_up.CLAMP)
    Scale.publish(made)
    made.register_backend(made_up.plugin(kernel, **declared))
    suite = Suite("made_up", options, registry=made)
    (result,) = [check.result() for check in suite.checks() if check.rule == rule]
    return result.outcome


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        return rows * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def test_a_kernel_with_a_wrong_gradient_fails_the_rule_on_gradients():
    def scale(rows):
        return Wrong.apply(rows)

    assert "failed" == outcome_of("gradients_are_natives", scale, op=Scale.op, differentiable=True)


def test_a_kernel_that_loses_the_gradient_fails_the_rule_on_gradients():
    def scale(rows):
        return rows.detach() * 2

    assert "failed" == outcome_of("gradients_are_natives", scale, op=Scale.op, differentiable=True)


def test_a_kernel_with_the_right_gradient_passes_the_rule_on_gradients():
    def scale(rows):
        return rows + rows

    assert "passed" == outcome_of("gradients_are_natives", scale, op=Scale.op, differentiable=True)


def test_an_honest_kernel_of_an_op_without_samples_fails_no_rule():
    def scale(rows):
        return rows + rows

    made = made_up.registry()
    Scale.publish(made)
    made.register_backend(made_up.plugin(scale, op=Scale.op, differentiable=True))

    assert [] == [one.text() for one in Suite("made_up", registry=made).report().results if one.is_bad]


def test_a_kernel_that_counts_offsets_in_too_few_bits_fails_when_there_is_time(monkeypatch):
    # As with 32 bits, for which the memory of two tensors is more than a test should reserve.
    monkeypatch.setattr(layouts, "FAR", 2**16 + 4096)

    def kernel(seq_lens, *, out=None):
        far = len(seq_lens) > 1 and seq_lens.stride(0) * (len(seq_lens) - 1) >= 2**16
        return right(seq_lens[:1].expand(len(seq_lens)) if far else seq_lens, out)

    thorough = Options(thorough=True)
    assert "skipped" == outcome_of("input_beyond_32_bits", kernel)
    assert "failed" == outcome_of("input_beyond_32_bits", kernel, options=thorough)
    assert "passed" == outcome_of(
        "input_beyond_32_bits", lambda seq_lens, *, out=None: right(seq_lens, out), options=thorough
    )


def test_rejects_with_other_parameters_is_told():
    def refuses(lengths, *, out=None):
        return None

    def kernel(seq_lens, *, out=None):
        return right(seq_lens, out)

    suite = made_up.suite(kernel, rejects=refuses)
    bad = {one.rule: one.message for one in (check.result() for check in suite.checks()) if one.is_bad}

    assert {"every_forward_is_accepted", "offers_a_kernel"} == bad.keys()
    assert "its rejects takes (lengths, *, out=None)" in bad["every_forward_is_accepted"]


def test_an_arch_window_is_honoured_and_told_where_it_is_not():
    def kernel(seq_lens, *, out=None):
        return right(seq_lens, out)

    window = opgraft.CapabilityRequirement.device("cpu", min_arch="1", max_arch="2")
    rule = next(one for one in RULES if one.name == "declared_archs_are_honoured")
    assert "passed" == outcome_of(rule.name, kernel, capabilities=[window])


def test_a_distribution_that_is_called_like_another_is_told():
    rule = next(one for one in RULES if one.name == "name_is_legal")
    record = opgraft.BackendRecord(name="acme", status="active", distribution="Torch")

    with pytest.raises(Violation, match=r"^the distribution is called 'Torch'$"):
        rule.check(Installed(record=record, distribution=None))
