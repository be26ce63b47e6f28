"""The older contract beyond its statements: a forward that is overridden, eligibility for each call."""

from __future__ import annotations

import warnings

import torch
from simulated import registry_on

import opgraft
from opgraft import ANY, KernelBackend
from opgraft.compat import MultiPlatformOp

X = torch.tensor([1.0])


def test_overriding_forward_is_a_warning_at_the_authors_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        class Legacy(MultiPlatformOp):
            def forward(self, x):
                return "own"

    told = [(str(one.message), one.filename) for one in caught if one.category is UserWarning]
    assert [("Legacy overrides forward; no kernel will be chosen for it", __file__)] == told
    assert "own" == Legacy()(X)


def test_eligibility_decides_for_each_call_and_never_bypasses_capabilities():
    asked = []

    def backend_eligible(self, backend, x):
        asked.append(backend)
        return len(x) > 1

    op = _legacy(
        capabilities={KernelBackend.TRITON: ANY, KernelBackend.JIT: opgraft.CapabilityRequirement.CUDA},
        forward_native=lambda self, x: "native",
        forward_triton=lambda self, x: "triton",
        forward_jit=lambda self, x: "jit",
        backend_eligible=backend_eligible,
    )().attach(registry_on())

    assert ("native", "triton") == (op(X), op(torch.ones(2)))
    assert ["triton", "triton"] == asked


def _legacy(**methods):
    """Declare a subclass without its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return type("Legacy", (MultiPlatformOp,), methods)
