"""Every Triton kernel becomes device code for every arch that a backend claims, without such a device."""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from opgraft_triton_kernels.attention import _clamp_position as clamp_position

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
