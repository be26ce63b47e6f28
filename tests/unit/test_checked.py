"""Checked mode: a kernel that breaks its op's contract is named, with its distribution."""

from __future__ import annotations

import re

import pytest
import torch
from simulated import offer, registry_on
from torch import Tensor

import opgraft
from opgraft import ArgumentTypeError, BaseFusedOp, FormatSignature, PluginError
from opgraft.checked import as_outputs

X = torch.arange(6, dtype=torch.int32).view(2, 3)


class Twice(BaseFusedOp):
    op = "checked.twice"
    format_signature = FormatSignature(
        supported_dtypes={"x": ("int32",)}, output_dtype="int64", shapes={"x": ("n", "m"), "out": ("n", "m")}
    )

    def forward_native(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        result = (x * 2).long()
        return result if out is None else out.copy_(result)


class Split(BaseFusedOp):
    op = "checked.split"
    writes = {"low": 0}
    format_signature = FormatSignature(supported_dtypes=("int32",), output_dtype=("like:x", "int64"))

    def forward_native(self, x: Tensor, *, low: Tensor | None = None):
        return (x % 2 if low is None else low.copy_(x % 2)), (x // 2).long()


class Loose(BaseFusedOp):
    """States no format at all."""

    op = "checked.loose"

    def forward_native(self, x: Tensor):
        return x + 1


class Doubled(BaseFusedOp):
    """Changes its input, and says so."""

    op = "checked.doubled"
    mutates = ("x",)

    def forward_native(self, x: Tensor):
        return x.mul_(2)


class Sized(BaseFusedOp):
    """Reads its size from a value, so that nothing but dtype and device is known beforehand."""

    op = "checked.sized"
    format_signature = FormatSignature(supported_dtypes=("int32",), output_dtype="int32")

    def forward_native(self, x: Tensor):
        return torch.zeros(int(x.flatten()[0]), dtype=torch.int32)


def checked(op_class, kernel, **environ):
    op = op_class().attach(registry_on(OPGRAFT_CHECK="1", **environ))
    offer(op.registry, op.op, kernel, name="k", distribution="opgraft-there", version="1.2")
    return op


def good(x, *, out=None):
    return (x * 2).long() if out is None else out.copy_(x * 2)


CASES = {
    "dtype": (Twice, lambda x, *, out=None: x * 2, {}, "output 0 must have dtype int64, got int32"),
    "shape": (Twice, lambda x, *, out=None: x.long()[:1] * 2, {}, "output 0 must have shape (2, 3), got (1, 3)"),
    "device": (Twice, lambda x, *, out=None: good(x).to("meta"), {}, "output 0 must have device cpu, got meta"),
    "strides": (
        Twice,
        lambda x, *, out=None: good(x).t().contiguous().t(),
        {},
        "output 0 must have strides (3, 1), got (1, 2)",
    ),
    "no tensor": (Twice, lambda x, *, out=None: 7, {}, "output 0 must be a tensor, got int"),
    "none": (Twice, lambda x, *, out=None: None, {}, "output 0 must be a tensor, got NoneType"),
    "another buffer": (
        Twice,
        lambda x, *, out=None: good(x, out=None),
        {"out": torch.zeros(2, 3, dtype=torch.int64)},
        "output 0 must be the very buffer that was passed",
    ),
    "a view of the buffer": (
        Twice,
        lambda x, *, out=None: good(x, out=out).view(2, 3),
        {"out": torch.zeros(2, 3, dtype=torch.int64)},
        "output 0 must be the very buffer that was passed",
    ),
    "too few": (Split, lambda x, *, low=None: x % 2, {}, "it returned 1 outputs, expected 2"),
    "too many": (Split, lambda x, *, low=None: (x, x, x), {}, "it returned 3 outputs, expected 2"),
    "second": (Split, lambda x, *, low=None: (x % 2, x // 2), {}, "output 1 must have dtype int64, got int32"),
    "like": (Split, lambda x, *, low=None: (x.long() % 2, x.long()), {}, "output 0 must have dtype int32, got int64"),
    "alias of the input": (Loose, lambda x: x, {}, "output 0 shares memory with x, which the op does not declare"),
    "more than native gives": (Loose, lambda x: (x + 1, x + 2), {}, "it returned 2 outputs, expected 1"),
    "dtype that native gives": (Loose, lambda x: (x + 1).long(), {}, "output 0 must have dtype int32, got int64"),
    "size that is read": (Sized, lambda x: x.new_zeros(1).long(), {}, "output 0 must have dtype int32, got int64"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_that_breaks_the_contract_is_named_with_its_distribution(name):
    op_class, kernel, options, fault = CASES[name]

    with pytest.raises(PluginError) as caught:
        checked(op_class, kernel)(X, **options)

    assert (
        f"{op_class.op}: kernel there/jit k (opgraft-there 1.2) broke its contract: {fault}; "
        "tell its owner, opgraft-there 1.2"
    ) == str(caught.value)


def test_without_checked_mode_nothing_is_asked():
    op = Twice().attach(registry_on())
    offer(op.registry, op.op, lambda x, *, out=None: "anything")

    assert "anything" == op(X)


@pytest.mark.parametrize("x", [X, X.t(), X[:, ::2], X[:0], X[:, :1].expand(2, 3), X.as_strided((2, 3), (0, 1))])
def test_what_native_gives_passes_however_the_input_lies(x):
    expected = Twice().attach(registry_on())(x)

    assert torch.equal(expected, checked(Twice, good)(x))
    assert torch.equal(expected, Twice().attach(registry_on(OPGRAFT_CHECK="1"))(x))


def test_a_buffer_passes_whatever_its_strides_are():
    out = torch.zeros(3, 2, dtype=torch.int64).t()

    assert out is checked(Twice, good)(X, out=out)
    assert [[0, 2, 4], [6, 8, 10]] == out.tolist()


def test_an_op_may_give_back_the_input_that_it_declares_to_change():
    x = X.clone()

    assert x is checked(Doubled, lambda x: x.mul_(2))(x)


def test_one_buffer_of_several_outputs_is_held_apart_from_the_others():
    def kernel(x, *, low=None):
        return low.copy_(x % 2), (x // 2).long()

    low = torch.zeros_like(X)

    assert low is checked(Split, kernel)(X, low=low)[0]


def test_a_size_that_is_read_from_a_value_is_left_alone():
    assert (1,) == checked(Sized, lambda x: x.new_zeros(1))(X).shape


def test_an_op_that_gives_nothing_or_no_tensor_passes_as_its_native_does():
    class Fill(BaseFusedOp):
        op = "checked.fill"
        mutates = ("x",)

        def forward_native(self, x: Tensor):
            x.fill_(7)

    class Many(BaseFusedOp):
        op = "checked.many"

        def forward_native(self, xs: list[Tensor], more=()):
            return len(xs), xs[0] + 1

    count, tensor = checked(Many, lambda xs, more=(): (2, xs[0] + 1))([X, X])

    assert (2, 1) == (count, tensor.min().item())
    assert checked(Fill, lambda x: None)(X) is None
    with pytest.raises(PluginError, match="output 1 must have shape"):
        checked(Many, lambda xs, more=(): (2, xs[0][:1] + 1))([X, X])
    with pytest.raises(PluginError, match="output 1 must be a tensor, got int"):
        checked(Many, lambda xs, more=(): (2, 3))([X, X])


def test_arguments_are_held_against_the_format_as_always():
    with pytest.raises(ArgumentTypeError, match=r"^checked.twice: x must be int32, got float32$"):
        checked(Twice, good)(X.float())


def test_the_check_reads_no_values_and_changes_nothing():
    results = []

    def kernel(x, *, out=None):
        results.append(torch.empty((2, 3), dtype=torch.int64, device="meta"))
        return results[0]

    op = checked(Twice, kernel)

    with pytest.raises(PluginError, match=re.escape("output 0 must have device cpu, got meta")):
        op(X)


def test_every_op_of_the_catalogue_passes_its_own_native():
    registry = registry_on(OPGRAFT_CHECK="1")
    generator = torch.Generator().manual_seed(3)
    for op_name in opgraft.ops.attention.__all__:
        op_class = type(opgraft.op(f"attention.{op_name}").op)
        op = op_class().attach(registry)
        dtypes = {}
        for name in op.arguments().required + op.arguments().optional:
            known = op.format_signature.dtypes(name) or op.format_signature.outputs
            dtypes[name] = getattr(torch, known[0])
        op(**op.sample(64, dtypes=dtypes, generator=generator))


@pytest.mark.parametrize(("result", "outputs"), [(X, (X,)), ((X, X), (X, X)), ([X], (X,)), (None, (None,)), ((), ())])
def test_one_result_or_several_are_a_tuple(result, outputs):
    assert len(outputs) == len(as_outputs(result))
    assert all(one is two for one, two in zip(outputs, as_outputs(result), strict=True))
