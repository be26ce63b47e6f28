"""Every Triton kernel becomes device code for every arch that a backend claims, without such a device."""

from __future__ import annotations

import itertools

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from opgraft_triton_kernels.attention import _clamp_position as clamp_position
from opgraft_triton_kernels.attention import _compact_valid_indices as compact_valid_indices
from opgraft_triton_kernels.attention import _cp_interleave_split as cp_interleave_split
from opgraft_triton_kernels.attention import _extend_positions as extend_positions
from opgraft_triton_kernels.attention import _seqlens_expand as seqlens_expand
from opgraft_triton_kernels.attention import _topk_to_slots as topk_to_slots
from opgraft_triton_kernels.attention import _topk_to_slots_dcp as topk_to_slots_dcp
from opgraft_triton_kernels.attention import _topk_valid_length as topk_valid_length

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

HIP = {"gfx942": 64, "gfx950": 64, "gfx1201": 32}
"""The archs that opgraft-hip claims, and the width of their wavefronts."""

CUDA = (80, 86, 89, 90, 100, 103, 120, 121)
"""Archs in the window that opgraft-cuda claims, both of its ends included."""

CLAMP_POSITION = {"out_ptr": "*i64", "size": "i64", "BLOCK": 512}

# One entry a kernel and combination of dtypes: its name, the kernel, and for each parameter its
# type, or the value of a constant.
KERNELS = [
    (
        "clamp_position int32",
        clamp_position.clamp_position_contiguous_kernel,
        {"seq_lens_ptr": "*i32", **CLAMP_POSITION},
    ),
    (
        "clamp_position int64",
        clamp_position.clamp_position_contiguous_kernel,
        {"seq_lens_ptr": "*i64", **CLAMP_POSITION},
    ),
    (
        "clamp_position strided int32",
        clamp_position.clamp_position_strided_kernel,
        {"seq_lens_ptr": "*i32", "seq_lens_stride": "i64", "out_stride": "i64", **CLAMP_POSITION},
    ),
    (
        "clamp_position strided int64",
        clamp_position.clamp_position_strided_kernel,
        {"seq_lens_ptr": "*i64", "seq_lens_stride": "i64", "out_stride": "i64", **CLAMP_POSITION},
    ),
]


def variants(launcher, *choices):
    """Give each combination of dtypes and flags; widths are as declared, constants as the launcher has them."""
    kernel = launcher._kernel
    declared = {one.name: one.annotation_type for one in kernel.params if one.annotation_type in {"i32", "i64"}}
    declared |= {name: value for name, value in launcher._options.items() if name in kernel.arg_names}
    for chosen in itertools.product(*choices):
        parameters = dict(itertools.chain.from_iterable(one.items() for one in chosen))
        words = " ".join(str(value) for value in parameters.values())
        yield (f"{kernel.__name__.removesuffix('_kernel')} {words}", kernel, declared | parameters)


def either(*names):
    """Choose the dtype of these pointers, the same for all of them."""
    return [dict.fromkeys(names, dtype) for dtype in ("*i32", "*i64")]


def flags(name):
    return [{name: True}, {name: False}]


KERNELS += [
    *variants(seqlens_expand.kernel, [{"out_ptr": "*i32"}], either("queries_ptr"), either("lengths_ptr")),
    *variants(extend_positions.kernel, [{"out_ptr": "*i64"}], either("extends_ptr", "prefixes_ptr"), flags("FILL")),
    *variants(cp_interleave_split.kernel, [{"requests_ptr": "*i32"}], either("lengths_ptr", "shares_ptr")),
    *variants(topk_valid_length.kernel, [{"out_ptr": "*i32"}], either("topk_ptr"), flags("LAST"), [{"REPAIR": True}]),
    *variants(topk_to_slots_dcp.kernel, [{"out_ptr": "*i32", "counts_ptr": "*i32"}], either("slots_ptr")),
    *variants(
        topk_to_slots.kernel,
        [{"out_ptr": "*i32", "OWNED": True}],
        either("table_ptr"),
        either("topk_ptr", "bounds_ptr"),
        flags("PAGED"),
    ),
    *variants(compact_valid_indices.count, [{"counts_ptr": "*i32"}], either("indices_ptr")),
    *variants(
        compact_valid_indices.compact,
        [{"counts_ptr": "*i32", "places_ptr": "*i32"}],
        either("indices_ptr", "given_ptr"),
        either("out_ptr"),
        [{"GIVEN": True, "FILL": False}, {"GIVEN": False, "FILL": True}],
    ),
]


@pytest.fixture(autouse=True)
def cache(tmp_path):
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        yield


def compiled(kernel, parameters, target):
    """Compile as a launch would, with tensors aligned to 16 bytes."""
    names = kernel.arg_names
    assert set(names) == set(parameters)
    source = ASTSource(
        fn=kernel,
        signature={name: parameters[name] if isinstance(parameters[name], str) else "constexpr" for name in names},
        constexprs={(names.index(name),): value for name, value in parameters.items() if not isinstance(value, str)},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name, value in parameters.items()
            if isinstance(value, str) and value.startswith("*")
        },
    )
    return triton.compile(source, target=target, options={"num_warps": 8})


@pytest.mark.parametrize("arch", HIP)
@pytest.mark.parametrize(("name", "kernel", "parameters"), KERNELS, ids=[one[0] for one in KERNELS])
def test_it_becomes_code_for_an_amd_gpu(name, kernel, parameters, arch):
    code = compiled(kernel, parameters, GPUTarget("hip", arch, HIP[arch]))
    assert code.asm["hsaco"].startswith(b"\x7fELF")
    assert arch in code.asm["amdgcn"]


@pytest.mark.parametrize("arch", CUDA)
@pytest.mark.parametrize(("name", "kernel", "parameters"), KERNELS, ids=[one[0] for one in KERNELS])
def test_it_becomes_code_for_an_nvidia_gpu(name, kernel, parameters, arch):
    code = compiled(kernel, parameters, GPUTarget("cuda", arch, 32))
    assert code.asm["cubin"].startswith(b"\x7fELF")
    assert f".target sm_{arch}" in code.asm["ptx"]


@pytest.mark.parametrize(("name", "kernel", "parameters"), KERNELS, ids=[one[0] for one in KERNELS])
def test_no_size_or_stride_is_compiled_in(name, kernel, parameters):
    integers = [one for one in kernel.params if parameters[one.name] in {"i32", "i64"}]
    assert [] == [one.name for one in integers if not one.do_not_specialize]
