"""Statements 115 to 118: the class by its older name and with its older contract."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from simulated import registry_on

import opgraft
from opgraft import BaseFusedOp
from opgraft.compat import MultiPlatformOp

X = torch.tensor([1.0])


def legacy(**methods):
    """Declare a subclass without its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return type("Legacy", (MultiPlatformOp,), methods)


def test_115_the_alias_is_a_subclass_and_subclassing_it_warns_at_the_authors_line():
    with pytest.warns(DeprecationWarning, match="^Legacy: ") as caught:

        class Legacy(MultiPlatformOp):
            pass

    line = inspect.getsource(inspect.currentframe()).splitlines().index("        class Legacy(MultiPlatformOp):")
    first = inspect.currentframe().f_code.co_firstlineno
    assert issubclass(Legacy, BaseFusedOp)
    assert ["Legacy: MultiPlatformOp is deprecated, derive from opgraft.BaseFusedOp"] == [
        str(one.message) for one in caught
    ]
    assert (__file__, first + line) == (caught[0].filename, caught[0].lineno)


def test_115_importing_the_alias_warns_of_nothing_and_opgraft_has_it():
    assert MultiPlatformOp is opgraft.compat.MultiPlatformOp


def test_116_it_is_instantiable_without_a_native_whose_call_raises():
    op = legacy()().attach(registry_on())

    with pytest.raises(NotImplementedError) as caught:
        op(X)

    assert "Legacy has no forward_native" == str(caught.value)


@pytest.mark.parametrize("platform", ["npu", "xpu", "hpu", "cpu"])
def test_117_other_platforms_call_native(platform):
    op = legacy(forward_native=lambda self, x: "native", forward_cuda=lambda self, x: "cuda")()

    assert "native" == op.attach(registry_on(platform, amx=True))(X)


@pytest.mark.parametrize("platform", ["cuda", "hip", "musa"])
def test_117_hip_and_musa_call_the_cuda_method(platform):
    op = legacy(forward_native=lambda self, x: "native", forward_cuda=lambda self, x: "cuda")()

    assert "cuda" == op.attach(registry_on(platform))(X)


@pytest.mark.parametrize("platform", ["cuda", "hip", "musa"])
def test_117_a_legacy_op_with_a_native_alone_raises_on_cuda(platform):
    op = legacy(forward_native=lambda self, x: "native")().attach(registry_on(platform))

    with pytest.raises(NotImplementedError) as caught:
        op(X)

    assert "Legacy has no forward_cuda" == str(caught.value)


def test_118_ops_of_the_catalogue_do_not_have_the_alias_among_their_bases():
    ops = [getattr(opgraft.ops.attention, name).op for name in opgraft.ops.attention.__all__]

    assert ops
    assert not [op for op in ops if isinstance(op, MultiPlatformOp)]
