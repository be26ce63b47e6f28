"""Each deliberately dishonest kernel is caught by the rule that is named for it, and honest ones by none."""

from __future__ import annotations

import os
import random

import pytest
import torch
from contract import made_up
from contract.dishonest_kernels import LIES, Lie
from contract.honest_kernels import HONEST


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
