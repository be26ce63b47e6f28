"""The Triton kernels of the index ops become device code for every arch that a backend claims."""

from __future__ import annotations

import importlib
import inspect

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from opgraft_triton_kernels import attention
from opgraft_triton_kernels.launcher import Launcher

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

TARGETS = {
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1201": GPUTarget("hip", "gfx1201", 32),
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
}
# Whatever a kernel writes has one dtype, or that of an input; all else may be narrow or wide.
ALWAYS = {
    "counts_ptr": "*i32",
    "places_ptr": "*i32",
    "requests_ptr of cp_interleave_split": "*i32",
    "out_ptr of extend_positions": "*i64",
}
MODULES = {
    name: importlib.import_module(f"opgraft_triton_kernels.attention._{name}")
    for name in attention.__all__
    if name != "clamp_position"
}
LAUNCHERS = [
    pytest.param(name, value, id=f"{name} {key}")
    for name, module in MODULES.items()
    for key, value in vars(module).items()
    if isinstance(value, Launcher)
]
# The constants of a call: what the usual call has, and the opposite of each.
USUAL = {"UNIT": True}
every_launcher = pytest.mark.parametrize(("name", "launcher"), LAUNCHERS)


@pytest.fixture(autouse=True)
def cache(tmp_path):
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        yield


def compiled(name, launcher, target, *, usual, integer):
    kernel, options = launcher._kernel, dict(launcher._options)
    signature, constants = {}, {}
    for parameter in kernel.params:
        key = parameter.name
        if parameter.is_constexpr:
            signature[key] = "constexpr"
            constants[key] = options.pop(key, None)
            if constants[key] is None:
                constants[key] = USUAL.get(key, False) == usual
        elif key.endswith("_ptr"):
            signature[key] = ALWAYS.get(key, ALWAYS.get(f"{key} of {name}", f"*{integer}"))
        else:
            signature[key] = parameter.annotation_type
    # What is compiled in excludes one another: holes are filled only where places are counted.
    if constants.get("GIVEN"):
        constants["FILL"] = False
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=target, options=options)


@every_launcher
@pytest.mark.parametrize("arch", TARGETS)
def test_a_kernel_becomes_device_code(name, launcher, arch):
    code = compiled(name, launcher, TARGETS[arch], usual=True, integer="i32").asm
    assert (code.get("hsaco") or code["cubin"]).startswith(b"\x7fELF")


@every_launcher
@pytest.mark.parametrize("arch", ["gfx942", "sm_90"])
@pytest.mark.parametrize(("usual", "integer"), [(True, "i64"), (False, "i32"), (False, "i64")])
def test_so_does_every_other_form_of_it(name, launcher, arch, usual, integer):
    code = compiled(name, launcher, TARGETS[arch], usual=usual, integer=integer).asm
    assert (code.get("hsaco") or code["cubin"]).startswith(b"\x7fELF")


@every_launcher
def test_nothing_but_dtypes_and_constants_is_compiled_in(name, launcher):
    assert [] == [
        parameter.name
        for parameter in launcher._kernel.params
        if not (parameter.is_constexpr or parameter.do_not_specialize)
    ]


@every_launcher
def test_constants_are_few_and_none_is_a_size(name, launcher):
    free = [one for one in inspect.signature(launcher._kernel.fn).parameters if one.isupper()]
    assert set(free) - set(launcher._options) <= {
        "WIDE", "UNIT", "FILL", "GIVEN", "OWNED", "PAGED", "LAST", "REPAIR", "HAS_STARTS", "HAS_MAP", "TRANSLATED",
    }  # fmt: skip
