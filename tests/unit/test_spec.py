"""The frozen records: what they normalise, what they refuse."""

from __future__ import annotations

import pickle
import re
from dataclasses import FrozenInstanceError

import pytest
import torch

from opgraft import (
    ANY,
    Available,
    Backend,
    BackendRecord,
    CapabilityRequirement,
    FormatSignature,
    KernelBackend,
    KernelSpec,
    RegistrationError,
    Unavailable,
)
from opgraft.spec import DTYPES, RESERVED_SELECTORS, check_op_id


def refused(message):
    return pytest.raises(RegistrationError, match=f"^{re.escape(message)}$")


def spec(**fields):
    made = {"op": "attention.clamp_position", "backend": "there", "kernel_backend": "jit", "target": "a:b"}
    return KernelSpec(**{**made, **fields})


@pytest.mark.parametrize("op_id", ["a.b", "attention.clamp_position", "g2.n2_x"])
def test_an_op_id_is_group_dot_name(op_id):
    assert op_id == check_op_id(op_id)


@pytest.mark.parametrize(
    "op_id", ["", "a", "a.", ".b", "a.b.c", "a_b.c", "A.b", "a.B", "a b.c", "1.b", "a.class", 7, None]
)
def test_anything_else_is_no_op_id(op_id):
    with refused(f"an op id is 'group.name' in lower case, without underscore in the group, got {op_id!r}"):
        check_op_id(op_id)


class TestKernelBackend:
    def test_a_known_name_gives_the_one_object(self):
        assert KernelBackend.TRITON is KernelBackend("triton")
        assert KernelBackend.TRITON is KernelBackend(KernelBackend.TRITON)
        assert "triton" == KernelBackend.TRITON == KernelBackend.TRITON.value
        assert str is type(KernelBackend.TRITON.value)

    def test_it_prints_as_its_name_and_shows_what_it_is(self):
        assert ("triton", "KernelBackend('triton')") == (f"{KernelBackend.TRITON}", repr(KernelBackend.TRITON))

    @pytest.mark.parametrize("name", ["tritn", "", "native", 3, None])
    def test_an_unknown_name_is_refused(self, name):
        with pytest.raises(RegistrationError) as caught:
            KernelBackend(name)

        nearest = "did you mean 'triton'? " if name == "tritn" else ""
        known = ", ".join(sorted(KernelBackend.names()))
        assert f"unknown kernel backend {name!r}; {nearest}Known: {known}" == str(caught.value)

    def test_registering_twice_gives_the_same_object(self):
        first = KernelBackend.register("helion")

        assert first is KernelBackend.register("helion")
        assert first is KernelBackend("helion")
        assert "helion" in KernelBackend.names()

    @pytest.mark.parametrize("name", ["Triton", "a/b", "1a", "", 3, None, *sorted(RESERVED_SELECTORS)])
    def test_a_name_that_is_no_word_or_reserved_is_refused(self, name):
        with refused(f"a kernel backend's name is a lower-case word, not reserved, got {name!r}"):
            KernelBackend.register(name)

    def test_it_pickles_as_the_one_object(self):
        assert KernelBackend.JIT is pickle.loads(pickle.dumps(KernelBackend.JIT))


class TestFormatSignature:
    def test_dtypes_may_be_one_two_or_a_mapping(self):
        one = FormatSignature(supported_dtypes="int32", output_dtype="int64")
        two = FormatSignature(supported_dtypes=["int32", "int64"], output_dtype=None)
        each = FormatSignature(supported_dtypes={"x": ["int32"], "y": "int8"}, output_dtype=("int64", "like:x"))

        assert [("int32",), ("int32", "int64"), ("int32",)] == [form.dtypes("x") for form in (one, two, each)]
        assert [("int64",), (), ("int64", "like:x")] == [form.outputs for form in (one, two, each)]
        assert [{"int32"}, {"int32", "int64"}, {"int32", "int8"}] == [form.every_dtype for form in (one, two, each)]
        assert ({}, {"x": ("int32",), "y": ("int8",)}) == (two.by_parameter, each.by_parameter)
        assert each.dtypes("z") is None

    def test_every_dtype_is_one_of_torchs(self):
        assert [] == [name for name in DTYPES if not isinstance(getattr(torch, name, None), torch.dtype)]

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"supported_dtypes": ("int33",)}, "supported_dtypes: unknown dtype 'int33'; did you mean 'int32' or"),
            ({"supported_dtypes": (torch.int32,)}, "supported_dtypes: unknown dtype torch.int32; did you mean"),
            (
                {"supported_dtypes": {"x": ("long",)}},
                "supported_dtypes, x: unknown dtype 'long'; Known: bfloat16, bool",
            ),
            ({"output_dtype": "int65"}, "output_dtype: unknown dtype 'int65'; did you mean"),
            ({"output_dtype": ("int64", "int65")}, "output_dtype: unknown dtype 'int65'; did you mean"),
            ({"output_dtype": torch.int64}, "output_dtype: unknown dtype torch.int64; did you mean"),
        ],
    )
    def test_an_unknown_dtype_is_refused_with_the_nearest(self, fields, message):
        with pytest.raises(RegistrationError, match=f"^{re.escape(message)}") as caught:
            FormatSignature(**{"supported_dtypes": ("int32",), "output_dtype": None, **fields})

        assert str(caught.value).endswith(f"Known: {', '.join(sorted(DTYPES))}")

    def test_no_dtype_at_all_is_refused(self):
        with refused("supported_dtypes: no dtype is listed"):
            FormatSignature(supported_dtypes=(), output_dtype=None)

    def test_a_lone_dim_may_be_written_without_a_tuple(self):
        form = FormatSignature(supported_dtypes="int32", output_dtype=None, shapes={"x": "batch + 1", "y": ["a", "b"]})

        assert {"x": ("batch + 1",), "y": ("a", "b")} == form.shapes

    @pytest.mark.parametrize("dim", ["Batch", "batch+1", "batch - 1", "3", "", "batch + x"])
    def test_a_dim_that_cannot_be_read_is_refused(self, dim):
        with refused(f"shapes, x: a dim is 'name' or 'name + 1', got {dim!r}"):
            FormatSignature(supported_dtypes="int32", output_dtype=None, shapes={"x": ("batch", dim)})


class TestKernelSpec:
    def test_what_an_author_writes_in_short_is_normalised(self):
        made = spec(capabilities=CapabilityRequirement.CUDA, dtypes={"x": "int32"})

        assert (KernelBackend.JIT, frozenset({CapabilityRequirement.CUDA}), {"x": ("int32",)}) == (
            made.kernel_backend,
            made.capabilities,
            made.dtypes,
        )
        assert frozenset({ANY}) == spec().capabilities

    def test_it_is_frozen_and_has_a_hash_whatever_it_holds(self):
        made = spec(dtypes={"x": ("int32",)})

        assert {made: 1}[spec(dtypes={"x": ("int32",)})]
        assert made != spec(dtypes={"x": ("int64",)})
        with pytest.raises(FrozenInstanceError):
            made.priority = 3

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"target": "a.b"}, "kernel there/jit of 'attention.clamp_position': a target is 'module:attr', got 'a.b'"),
            (
                {"priority": "high"},
                "kernel there/jit of 'attention.clamp_position': priority must be an int, got 'high'",
            ),
            ({"priority": True}, "kernel there/jit of 'attention.clamp_position': priority must be an int, got True"),
            (
                {"capabilities": ()},
                "kernel there/jit of 'attention.clamp_position': the capability set is empty; write ANY for any device",
            ),
            (
                {"capabilities": ("cuda",)},
                "kernel there/jit of 'attention.clamp_position': capabilities must be CapabilityRequirement or ANY, got 'cuda'",
            ),
            ({"dtypes": ()}, "kernel there/jit of 'attention.clamp_position': no dtype is listed"),
        ],
    )
    def test_what_cannot_be_meant_is_refused(self, fields, message):
        with refused(message):
            spec(**fields)

    @pytest.mark.parametrize(
        ("fields", "selector", "label", "text"),
        [
            ({}, "there/jit", "there/jit", "there/jit"),
            (
                {"name": "k", "distribution": "opgraft-there", "version": "1.0"},
                "there/jit",
                "there/jit",
                "there/jit k (opgraft-there 1.0)",
            ),
            ({"backend": "op"}, "op/jit", "op/jit", "op/jit"),
            ({"backend": "op", "kernel_backend": "torch"}, "native", "native", "native"),
            ({"kernel_backend": "torch"}, "there/torch", "there/torch", "there/torch"),
            ({"backend": "op", "platform": "cuda"}, "op/cuda", "cuda", "op/cuda"),
            ({"backend": "op", "platform": "acme", "name": "f"}, "op/acme", "f", "op/acme f"),
        ],
    )
    def test_selector_label_and_text(self, fields, selector, label, text):
        made = spec(**fields)

        assert (selector, label, text) == (made.selector, made.label, str(made))

    @pytest.mark.parametrize(
        ("fields", "matching"),
        [
            ({}, {"there", "jit", "there/jit"}),
            ({"backend": "op"}, {"op", "jit", "op/jit"}),
            ({"backend": "op", "kernel_backend": "torch"}, {"native", "torch"}),
            ({"backend": "op", "kernel_backend": "plugin", "platform": "cuda"}, {"op", "op/cuda"}),
        ],
    )
    def test_the_words_that_name_it(self, fields, matching):
        words = {"there", "jit", "there/jit", "op", "op/jit", "native", "torch", "op/cuda", "cuda", "plugin", "", "/"}

        assert matching == {word for word in words if spec(**fields).matches(word)}

    @pytest.mark.parametrize(
        ("fields", "owner"),
        [
            ({"distribution": "opgraft-there", "version": "1.0"}, "opgraft-there 1.0"),
            ({}, "backend there"),
            ({"backend": "op"}, "the op itself"),
        ],
    )
    def test_whose_it_is(self, fields, owner):
        assert owner == spec(**fields).owner

    def test_its_identity_is_op_backend_kernel_backend_and_name(self):
        assert spec().identity == spec(target="c:d", priority=3).identity
        assert 5 == len(
            {
                spec(**fields).identity
                for fields in ({}, {"op": "a.b"}, {"backend": "x"}, {"kernel_backend": "aot"}, {"name": "n"})
            }
        )

    def test_a_target_is_loaded_when_asked(self):
        assert pickle.dumps is spec(target="pickle:dumps").load()
        assert re.Pattern.match is spec(target="re:Pattern.match").load()
        assert spec is spec(target=spec).load()
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            spec(target="no_such_module:f").load()
        with pytest.raises(AttributeError, match="no_such_name"):
            spec(target="re:no_such_name").load()


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "1", None])
def test_available_takes_a_count(count):
    assert 3 == Available(3).count
    with refused(f"Available takes a count of at least 1, got {count!r}"):
        Available(count)


@pytest.mark.parametrize("reason", ["", "  ", None, 3])
def test_unavailable_takes_a_reason(reason):
    assert "no card" == Unavailable("no card").reason
    with refused(f"Unavailable takes a reason, got {reason!r}"):
        Unavailable(reason)


def test_a_backend_may_name_one_platform_without_a_tuple():
    assert [("acme",), ("acme", "cuda")] == [Backend("a", "acme").platforms, Backend("a", ["acme", "cuda"]).platforms]


@pytest.mark.parametrize(
    ("name", "platforms", "message"),
    [
        ("Acme", ("acme",), "backend 'Acme': a backend's name is a lower-case word, got 'Acme'"),
        (None, ("acme",), "backend None: a backend's name is a lower-case word, got None"),
        ("acme", (), "backend 'acme' names no platform key"),
        ("acme", ("Acme",), "backend 'acme': a platform key is a lower-case word, got 'Acme'"),
        ("acme", ("acme", 7), "backend 'acme': a platform key is a lower-case word, got 7"),
    ],
)
def test_a_backend_that_cannot_be_meant_is_refused(name, platforms, message):
    with refused(message):
        Backend(name, platforms)


def test_a_record_says_whose_it_is_and_what_is_wrong():
    fields = {"distribution": "opgraft-acme", "version": "0.3.1", "entry_point": "opgraft_acme.plugin"}
    fine = BackendRecord(name="acme", status="active", **fields)
    broken = BackendRecord(name="acme", status="quarantined", reason="it raised", refused=("a", "b"), **fields)
    bare = BackendRecord(name="acme", status="inactive", reason="no card", entry_point="Acme")

    assert ["opgraft-acme 0.3.1", "opgraft-acme 0.3.1", ""] == [one.owner for one in (fine, broken, bare)]
    assert [(), ("a", "b", "quarantined: it raised"), ()] == [one.faults for one in (fine, broken, bare)]
    assert [
        "backend 'acme' (opgraft-acme 0.3.1) is quarantined: it raised",
        "backend 'acme' (Acme) is inactive: no card",
    ] == [broken.described, bare.described]
