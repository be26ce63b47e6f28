"""What the host decides before a launch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from opgraft import ArgumentTypeError, ArgumentValueError, BufferOverflowError
from opgraft.host import canonicalize_stride, check_buffer_fits, kv_index_grid, token_blocks


@pytest.mark.parametrize(("used", "capacity"), [(0, 0), (0, 5), (5, 5)])
def test_what_fits_passes(used, capacity):
    assert check_buffer_fits(used, capacity, "page table") is None


def test_what_does_not_fit_is_an_error_with_all_numbers_and_the_context_in_order():
    with pytest.raises(BufferOverflowError) as caught:
        check_buffer_fits(6, 5, "page table", page_size=64, batch=3)
    assert "page table: 6 used, capacity 5 (page_size=64, batch=3)" == str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_without_context_the_message_has_no_brackets():
    with pytest.raises(BufferOverflowError) as caught:
        check_buffer_fits(1, 0, "KV indices")
    assert "KV indices: 1 used, capacity 0" == str(caught.value)


CALLS = {
    ("check_buffer_fits", "used", 0): lambda value: check_buffer_fits(value, 5, "it"),
    ("check_buffer_fits", "capacity", 0): lambda value: check_buffer_fits(5, value, "it"),
    ("kv_index_grid", "width", 0): lambda value: kv_index_grid(value, 1),
    ("kv_index_grid", "page_size", 1): lambda value: kv_index_grid(1, value),
    ("token_blocks", "table_width", 0): lambda value: token_blocks(value, 1),
    ("token_blocks", "base_programs", 0): lambda value: token_blocks(1, value),
}


@pytest.mark.parametrize(("function", "name", "least"), CALLS)
@pytest.mark.parametrize(
    ("value", "kind"), [(torch.tensor(1), "Tensor"), (True, "bool"), (1.0, "float"), (None, "NoneType")]
)
def test_a_number_that_is_not_on_the_host_is_refused(function, name, least, value, kind):
    with pytest.raises(ArgumentTypeError) as caught:
        CALLS[function, name, least](value)
    assert f"{function}: {name} must be an int, got {kind}" == str(caught.value)


@pytest.mark.parametrize(("function", "name", "least"), CALLS)
def test_a_number_out_of_range_is_refused(function, name, least):
    with pytest.raises(ArgumentValueError) as caught:
        CALLS[function, name, least](least - 1)
    assert f"{function}: {name} must be at least {least}, got {least - 1}" == str(caught.value)


def test_the_guard_survives_python_without_assertions_and_needs_no_torch():
    program = (
        "import sys\n"
        "from opgraft.host import *\n"
        "kv_index_grid(9, 3), token_blocks(9, 3)\n"
        "print('torch' in sys.modules)\n"
        "check_buffer_fits(2, 1, 'buffer', rows=7)\n"
    )
    ran = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, check=False)
    assert "False\n" == ran.stdout
    assert ran.stderr.endswith("BufferOverflowError: buffer: 2 used, capacity 1 (rows=7)\n")


@pytest.mark.parametrize(
    ("width", "page_size", "blocks"),
    [(0, 64, 0), (1, 64, 1), (64, 64, 1), (65, 64, 2), (2048, 64, 32), (4096, 1, 1), (4097, 1, 2)],
)
def test_a_block_of_a_page_table_covers_4096_tokens(width, page_size, blocks):
    assert blocks == kv_index_grid(width, page_size)


def test_any_page_size_makes_a_grid():
    assert 3 == kv_index_grid(100, 100)
    assert 7 == kv_index_grid(7, 5000)
    for page_size in (1, 3, 100, 4095, 4096, 4097, 10**9):
        covered = kv_index_grid(1234, page_size) * max(1, 4096 // page_size)
        assert 1234 <= covered < 1234 + max(1, 4096 // page_size)


@pytest.mark.parametrize(
    ("width", "programs", "blocks"),
    [
        (0, 1, 1),
        (8192, 1, 1),
        (8193, 1, 2),
        (131072, 8, 16),
        (131072, 64, 8),
        (131072, 512, 1),
        (131072, 4096, 1),
        (2**30, 0, 512),
    ],
)
def test_token_blocks_aim_for_512_programs_and_8192_columns_each(width, programs, blocks):
    assert blocks == token_blocks(width, programs)


def strided(shape, strides):
    return torch.empty_strided(shape, strides)


@pytest.mark.parametrize(
    ("shape", "given", "expected"),
    [
        ((4, 1, 64, 128), (8192, 128, 128, 1), (8192, 8192, 128, 1)),
        ((1, 1, 64, 128), (128, 128, 128, 1), (8192, 8192, 128, 1)),
        ((1, 3), (1, 1), (3, 1)),
        ((1, 1, 5), (5, 1, 1), (5, 5, 1)),
        ((1, 1, 1, 5), (1, 1, 1, 1), (5, 5, 5, 1)),
        ((2, 1, 0), (1, 1, 1), (1, 0, 1)),
    ],
)
def test_axes_of_size_one_get_the_stride_they_would_have(shape, given, expected):
    tensor = strided(shape, given)
    result = canonicalize_stride(tensor)
    assert expected == result.stride()
    assert tensor.shape == result.shape
    assert tensor.data_ptr() == result.data_ptr()


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((), ()),
        ((5,), (3,)),
        ((4, 5), (5, 1)),
        ((4, 1, 5), (5, 7, 1)),
        ((2, 2), (1, 1)),
        ((1, 1), (1, 1)),
        ((3, 1, 1), (1, 1, 1)),
    ],
)
def test_a_tensor_with_nothing_to_change_is_given_back_itself(shape, strides):
    tensor = strided(shape, strides)
    assert canonicalize_stride(tensor) is tensor


def test_the_offset_into_the_storage_stays():
    whole = torch.arange(30)
    view = whole[10:].as_strided((2, 1, 5), (5, 1, 1), 10)
    result = canonicalize_stride(view)
    assert (5, 5, 1) == result.stride()
    assert view.tolist() == result.tolist()
    result[0, 0, 0] = -7
    assert -7 == int(whole[10])


def test_only_a_tensor_has_strides_to_change():
    with pytest.raises(ArgumentTypeError) as caught:
        canonicalize_stride([1, 2])
    assert "canonicalize_stride: tensor must be a tensor, got list" == str(caught.value)
