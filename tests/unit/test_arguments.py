"""A call's arguments: bound, put back into a call, and held against the format."""

from __future__ import annotations

import inspect
import itertools
import re
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

from opgraft import ArgumentTypeError, ArgumentValueError, FormatSignature
from opgraft.arguments import Arguments, dtype_name, shares_places, tensors_of

INT = torch.int32
POSITIONAL, KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def ints(*shape):
    return torch.zeros(shape, dtype=INT)


def longs(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def arguments(native, form=None, writes=None, label="group.name"):
    return Arguments(inspect.signature(native), label, form, {"out": 0} if writes is None else writes)


def refused(kind, message):
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


def test_a_dtype_goes_by_its_name():
    assert ["int32", "bfloat16"] == [dtype_name(one) for one in (torch.int32, torch.bfloat16)]


def test_tensors_are_found_one_level_deep():
    x, y = ints(1), ints(2)

    assert [[x], [x, y], [y], [x], [], [], []] == [
        tensors_of(one) for one in (x, [x, 3, y], (y,), {"k": x}, 3, None, [[x]])
    ]


class TestBinding:
    @pytest.mark.parametrize(
        ("native", "args", "kwargs", "values", "call"),
        [
            (lambda x, y=2: None, (1,), {}, (1, 2), ([1, 2], {})),
            (lambda x, y=2: None, (), {"y": 5, "x": 1}, (1, 5), ([1, 5], {})),
            (lambda x, *, k=3, out=None: None, (1,), {}, (1, 3, None), ([1], {})),
            (lambda x, *, k=3, out=None: None, (1,), {"k": 4}, (1, 4, None), ([1], {"k": 4})),
            (lambda x, /, y, *xs, k, **more: None, (1, 2, 3), {"k": 4, "z": 5}, (1, 2, (3,), 4, {"z": 5}), None),
            (lambda: None, (), {}, (), ([], {})),
        ],
    )
    def test_values_are_in_the_order_of_the_parameters_and_become_a_call_again(
        self, native, args, kwargs, values, call
    ):
        made = arguments(native)

        assert values == made.bind(*args, **kwargs)
        assert (call or (list(args), kwargs)) == made.split(values)

    @pytest.mark.parametrize(
        ("args", "kwargs", "message"),
        [
            ((), {}, "name() missing 1 required positional argument: 'x'"),
            ((1, 2, 3), {}, "name() takes from 1 to 2 positional arguments but 3 were given"),
            ((1,), {"z": 2}, "name() got an unexpected keyword argument 'z'"),
        ],
    )
    def test_a_call_that_does_not_fit_is_pythons_own_error(self, args, kwargs, message):
        with refused(TypeError, message):
            arguments(lambda x, y=2: None).bind(*args, **kwargs)

    def test_defaults_are_the_very_objects(self):
        default = object()

        assert default is arguments(lambda x=default: None).bind()[0]

    def test_callers_see_one_more_keyword(self):
        with_backend = [
            str(arguments(native).with_backend())
            for native in (lambda x: None, lambda x, *, out=None: None, lambda *xs, **more: None, lambda: None)
        ]

        assert [
            "(x, *, backend=None)",
            "(x, *, out=None, backend=None)",
            "(*xs, backend=None, **more)",
        ] == with_backend[:3]
        assert "(*, backend=None)" == with_backend[3]


class TestTensorParameters:
    @pytest.mark.parametrize(
        "annotation",
        [
            "Tensor",
            "torch.Tensor",
            "Tensor | None",
            "None | torch.Tensor",
            "Optional[Tensor]",
            Tensor,
            Optional[Tensor],  # noqa: UP045 - it is what is tested
        ],
    )
    def test_a_parameter_is_a_tensor_by_its_annotation(self, annotation):
        def native(x, y=None): ...

        native.__annotations__ = {"x": annotation, "y": annotation}
        made = arguments(native)

        assert (("x",), ("y",), True) == (made.required, made.optional, made.keeps)

    @pytest.mark.parametrize(
        "annotation", ["list[Tensor]", "Sequence[Tensor]", "tuple[Tensor, ...]", "dict[str, Tensor]", list[Tensor], Any]
    )
    def test_what_only_holds_tensors_is_none_and_nothing_is_kept_past_it(self, annotation):
        def native(x: Tensor, y): ...

        native.__annotations__["y"] = annotation
        made = arguments(native)

        assert (("x",), (), False) == (made.required, made.optional, made.keeps)

    @pytest.mark.parametrize(
        ("annotation", "keeps"),
        [("int", True), ("float | None", True), ("str", True), (bool, True), (None, False), ("object", False)],
    )
    def test_a_choice_is_kept_past_numbers_and_words_alone(self, annotation, keeps):
        def native(x: Tensor, y): ...

        if annotation is not None:
            native.__annotations__["y"] = annotation

        assert keeps is arguments(native).keeps

    def test_variadics_are_no_tensor_parameters(self):
        def native(x: Tensor, *xs: Tensor, **more: Tensor): ...

        made = arguments(native)

        assert (("x",), False) == (made.required, made.keeps)
        made.check_format((ints(1), (ints(2), 3), {"k": ints(3)}))

    def test_an_op_without_tensors_keeps_nothing(self):
        assert not arguments(lambda n: None).keeps

    def test_without_annotation_the_format_tells(self):
        form = FormatSignature(supported_dtypes={"x": ("int32",)}, output_dtype=None, shapes={"y": ("n",)})

        assert ("x", "y") == arguments(lambda x, y, z: None, form).required


FORM = FormatSignature(
    supported_dtypes={"x": ("int32", "int64"), "scale": ("float32",)}, output_dtype="int64", shapes={"x": ("n",)}
)


def native(x: Tensor, scale: Tensor | None = None, *, k: int = 1, out: Tensor | None = None): ...


class TestFormat:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ((3, None, 1, None), "group.name: x must be a tensor, got int 3"),
            ((None, None, 1, None), "group.name: x must be a tensor, got NoneType None"),
            (([ints(1)], None, 1, None), "group.name: x must be a tensor, got list [tensor([0], dtype=torch.int32)]"),
            (("a" * 99, None, 1, None), f"group.name: x must be a tensor, got str '{'a' * 59}"),
            ((ints(1).float(), None, 1, None), "group.name: x must be int32 or int64, got float32"),
            ((ints(1), ints(1), 1, None), "group.name: scale must be float32, got int32"),
            ((ints(1), 2.0, 1, None), "group.name: scale must be a tensor, got float 2.0"),
            ((ints(1), None, 1, ints(1)), "group.name: out must be int64, got int32"),
            ((ints(1), None, 1, 5), "group.name: out must be a tensor, got int 5"),
        ],
    )
    def test_a_wrong_kind_or_dtype_is_a_type_error(self, values, message):
        with refused(ArgumentTypeError, message):
            arguments(native, FORM).check_format(values)

    def test_what_fits_passes(self):
        arguments(native, FORM).check_format((ints(1), torch.zeros(1), 7, longs(1)))
        arguments(native).check_format((torch.zeros(1), ints(1), 7, ints(1)))

    def test_a_dtype_is_held_against_the_format_whatever_the_annotation_is(self):
        form = FormatSignature(supported_dtypes=("int32",), output_dtype="like:xs")
        made = arguments(lambda xs, **more: None, form)

        made.check_format(((ints(1), ints(2)), {}))
        with refused(ArgumentTypeError, "group.name: xs must be int32, got int64"):
            made.check_format(((ints(1), longs(2)), {}))
        with refused(ArgumentTypeError, "group.name: more must be int32, got int64"):
            made.check_format(((), {"k": longs(2)}))

    @pytest.mark.parametrize(
        ("output", "out", "expected"),
        [("like:x", longs(1), "int32"), ("float16", ints(1), "float16"), (("int64", "int8"), ints(1), "int64")],
    )
    def test_a_buffers_dtype_is_that_of_its_output(self, output, out, expected):
        made = arguments(native, FormatSignature(supported_dtypes=("int32", "int64"), output_dtype=output))

        with refused(ArgumentTypeError, f"group.name: out must be {expected}, got {dtype_name(out.dtype)}"):
            made.check_format((ints(1), None, 1, out))

    def test_a_buffers_own_dtypes_rule_over_the_outputs(self):
        form = FormatSignature(supported_dtypes={"out": ("int32",)}, output_dtype="int64")
        made = arguments(native, form)

        made.check_format((ints(1), None, 1, ints(1)))
        with refused(ArgumentTypeError, "group.name: out must be int32, got int64"):
            made.check_format((ints(1), None, 1, longs(1)))

    def test_a_buffer_of_an_output_about_which_nothing_is_said_may_be_anything(self):
        made = arguments(native, FormatSignature(supported_dtypes=("int32",), output_dtype=None))

        made.check_format((ints(1), None, 1, torch.zeros(1)))

    def test_tensors_on_two_devices_are_a_value_error(self):
        with refused(ArgumentValueError, "group.name: out must be on cpu as x is, got meta"):
            arguments(native, FORM).check_format((ints(1), None, 1, longs(1).to("meta")))


SHAPES = {"x": ("n", "m"), "y": ("m + 1",), "out": ("n",)}


def shaped(x: Tensor, y: Tensor, z: Tensor | None = None, *, out: Tensor | None = None): ...


class TestShapes:
    made = arguments(shaped, FormatSignature(supported_dtypes=("int32",), output_dtype="int32", shapes=SHAPES))

    @pytest.mark.parametrize("values", [(ints(2, 3), ints(4), None, None), (ints(0, 0), ints(1), ints(9), ints(0))])
    def test_what_fits_passes(self, values):
        assert self.made.fits(*values)
        self.made.check_shapes(values)

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ((ints(2), ints(4), None, None), "group.name: x must be of shape [n, m], got (2,)"),
            ((ints(2, 3), ints(4, 1), None, None), "group.name: y must be of shape [m + 1], got (4, 1)"),
            ((ints(2, 3), ints(3), None, None), "group.name: y must be of shape [m + 1] with m = 3 as x has, got (3,)"),
            (
                (ints(2, 3), ints(4), None, ints(3)),
                "group.name: out must be of shape [n] with n = 2 as x has, got (3,)",
            ),
        ],
    )
    def test_another_number_of_dims_or_size_is_a_value_error(self, values, message):
        assert not self.made.fits(*values)
        with refused(ArgumentValueError, message):
            self.made.check_shapes(values)

    def test_a_size_is_never_negative(self):
        form = FormatSignature(supported_dtypes=("int32",), output_dtype=None, shapes={"x": ("n + 1",)})
        made = arguments(native, form)

        with refused(ArgumentValueError, "group.name: x must be of shape [n + 1], got (0,)"):
            made.check_shapes((ints(0), None, 1, None))

    @pytest.mark.parametrize(
        ("shapes", "tensors", "relates"),
        [
            ({"x": ("n", "m")}, ("x",), False),
            ({"x": ("n", "n")}, ("x",), True),
            ({"x": ("n + 1",)}, ("x",), True),
            ({}, ("x", "scale"), True),
        ],
    )
    def test_sizes_that_a_guard_on_dims_does_not_see_have_to_be_asked(self, shapes, tensors, relates):
        form = FormatSignature(supported_dtypes=("int32",), output_dtype=None, shapes=shapes)

        assert relates is arguments(native, form).relates(tensors)


class TestOverlap:
    made = arguments(native, None, {"out": 0})

    def test_a_buffer_that_shares_memory_with_an_input_is_a_value_error(self):
        x = ints(8)

        with refused(ArgumentValueError, "group.name: out must be memory of its own, not x's, got overlapping tensors"):
            self.made.check_shapes((x, None, 1, x[2:4]))
        with refused(ArgumentValueError, "group.name: out must be memory of its own, not x's, got overlapping tensors"):
            self.made.check_shapes((x[:6:2], None, 1, x[4:]))

    def test_two_parts_of_one_storage_that_do_not_meet_pass(self):
        x = ints(8)

        self.made.check_shapes((x[:4], None, 1, x[4:]))
        self.made.check_shapes((x[:4:2], None, 1, x[3:]))
        self.made.check_shapes((x[:0], None, 1, x))

    def test_another_dtype_of_the_same_memory_overlaps_by_bytes(self):
        x = ints(8)

        self.made.check_shapes((x[:4], None, 1, x[4:].view(torch.int8)))
        with refused(ArgumentValueError, "group.name: out must be memory of its own, not x's, got overlapping tensors"):
            self.made.check_shapes((x[:5], None, 1, x[4:].view(torch.int8)))

    def test_two_buffers_may_not_overlap_either(self):
        def two(x: Tensor, *, out: Tensor | None = None, lens: Tensor | None = None): ...

        made = arguments(two, None, {"out": 0, "lens": 1})
        buffer = ints(4)

        with refused(
            ArgumentValueError, "group.name: out must be memory of its own, not lens's, got overlapping tensors"
        ):
            made.check_shapes((ints(1), buffer, buffer))


@pytest.mark.parametrize(
    "name", ["kernel", "guard", "error", "alias", "fits", "slow", "never", "kept0", "self", "names"]
)
def test_a_parameter_may_have_any_name(name):
    kinds = {
        name: (POSITIONAL, inspect.Parameter.empty),
        "other": (POSITIONAL, inspect.Parameter.empty),
        "out": (KEYWORD, None),
    }
    parameters = [inspect.Parameter(n, kind, default=d, annotation=Tensor) for n, (kind, d) in kinds.items()]
    form = FormatSignature(supported_dtypes=("int32",), output_dtype="int32", shapes={name: ("n",), "other": ("n",)})
    made = Arguments(inspect.Signature(parameters), "group.name", form, {"out": 0})

    assert (1, 2, 3) == made.bind(1, 2, out=3)
    assert made.fits(ints(1), ints(1), ints(1))
    assert not made.fits(ints(1), ints(2), None)


@pytest.mark.parametrize("strides", [*itertools.product(range(6), repeat=2)], ids=str)
def test_a_plane_shares_places_where_two_of_its_elements_do(strides):
    for shape in itertools.product(range(5), repeat=2):
        plane = torch.zeros(40).as_strided(shape, strides)
        places = [i * strides[0] + j * strides[1] for i in range(shape[0]) for j in range(shape[1])]
        assert (len(set(places)) < len(places)) == shares_places(plane)


def test_rows_that_overlap_are_refused_and_rows_apart_are_not():
    from opgraft.ops import attention

    table, rows = torch.arange(20, dtype=torch.int32).view(2, 10), torch.tensor([0, 1, 0])
    lengths, memory = torch.tensor([8, 8, 8]), torch.full((12,), -9, dtype=torch.int32)
    expected = attention.block_table(table, rows, lengths, page_size=2, max_pages=4)
    for strides in ((2, 1), (0, 1), (3, 1)):
        with pytest.raises(
            ArgumentValueError, match=re.escape(f"no two elements share a place, got strides {strides}")
        ):
            attention.block_table(table, rows, lengths, page_size=2, out=memory.as_strided((3, 4), strides))
    assert [-9] * 12 == memory.tolist()
    assert torch.equal(expected, attention.block_table(table, rows, lengths, page_size=2, out=memory.view(3, 4)))
    nothing = torch.empty(1, 0, dtype=torch.int32).expand(3, 0)
    assert nothing is attention.block_table(table, rows, lengths, page_size=2, out=nothing)
    holes = torch.full((20,), -1)
    with pytest.raises(ArgumentValueError, match="entries of their own where repair is on"):
        attention.topk_valid_length(holes.as_strided((3, 5), (1, 1)), repair=True)
    assert [1, 1, 1] == attention.topk_valid_length(holes.as_strided((3, 0), (0, 1)), repair=True).tolist()


def test_a_caller_buffer_that_overlaps_itself_is_refused_before_any_kernel_runs():
    from opgraft.ops import attention

    seq_lens = torch.tensor([1, 2, 3])
    with pytest.raises(ArgumentValueError) as error:
        attention.clamp_position(seq_lens, out=torch.zeros(1, dtype=torch.int64).expand(3))
    expected = "out must be memory in which no two elements share a place, got strides (0,)"
    assert f"attention.clamp_position: {expected}" == str(error.value)
    one = torch.zeros(1, dtype=torch.int64).expand(1)
    assert one is attention.clamp_position(seq_lens[:1], out=one)
