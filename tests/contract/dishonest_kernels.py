"""Kernels that lie, each in one way, and the rule that has to catch each.

None is a caricature: each passes a test that somebody might have written for it. They are plain functions; the test
wraps each in a backend of its own.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import random
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import opgraft
from opgraft import CapabilityRequirement, NotSupported

CLAMP = "attention.clamp_position"


@dataclass(frozen=True)
class Lie:
    """One dishonest kernel.

    Parameters
    ----------
    name
        What it does wrong.
    rule
        The rule that has to fail.
    make
        Gives a fresh kernel function, so that state of one test is not that of another.
    op
        Its op.
    platforms
        Of its backend.
    options
        Further arguments of ``@forward``.

    """

    name: str
    rule: str
    make: Callable[[], Callable[..., Any]]
    op: str = CLAMP
    platforms: tuple[str, ...] = ("cpu",)
    options: dict[str, Any] = field(default_factory=dict)


LIES: list[Lie] = []


def lie(
    rule: str, *, op: str = CLAMP, platforms: tuple[str, ...] = ("cpu",), **options: Any
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a kernel to the list."""

    def add(make: Callable[[], Any]) -> Callable[[], Any]:
        LIES.append(Lie(make.__name__, rule, make, op, platforms, options))
        return make

    return add


def right(seq_lens, out=None):
    """Compute it rightly: what the lies below depart from."""
    if out is None:
        out = torch.empty(seq_lens.shape, dtype=torch.int64, device=seq_lens.device)
    out.copy_(seq_lens)
    return out.clamp_(min=1).sub_(1)


def delivered(values, out):
    """Return values, or write them into the caller's buffer."""
    return values if out is None else out.copy_(values)


# -- values --------------------------------------------------------------------------------------------------------


@lie("result_has_the_declared_dtype")
def keeps_the_dtype_of_the_input():
    def kernel(seq_lens, *, out=None):
        values = right(seq_lens)
        return values.to(seq_lens.dtype) if out is None else out.copy_(values)

    return kernel


@lie("extreme_values")
def is_off_by_one_at_zero():
    def kernel(seq_lens, *, out=None):
        return delivered(seq_lens.to(torch.int64).clamp(min=0) - 1, out)

    return kernel


@lie("extreme_values")
def wraps_at_the_smallest_integer():
    def kernel(seq_lens, *, out=None):
        return delivered((seq_lens - 1).clamp(min=0).to(torch.int64), out)

    return kernel


@lie("extreme_values")
def narrows_to_32_bits():
    def kernel(seq_lens, *, out=None):
        return delivered(right(seq_lens.to(torch.int32)), out)

    return kernel


@lie("every_small_number")
def goes_through_half_precision():
    def kernel(seq_lens, *, out=None):
        return delivered(right(seq_lens.to(torch.bfloat16).to(torch.int64)), out)

    return kernel


@lie("extreme_values")
def goes_through_double_precision():
    def kernel(seq_lens, *, out=None):
        return delivered(right(seq_lens.to(torch.float64).to(torch.int64)), out)

    return kernel


@lie("extreme_values")
def is_wrong_at_one_value_only():
    def kernel(seq_lens, *, out=None):
        values = right(seq_lens)
        values[seq_lens == 2**31 - 1] = 0
        return delivered(values, out)

    return kernel


@lie("every_small_number")
def is_wrong_at_one_common_value_only():
    def kernel(seq_lens, *, out=None):
        values = right(seq_lens)
        values[seq_lens == 7777] = 7777
        return delivered(values, out)

    return kernel


@lie("edge_cases")
def takes_negative_lengths_for_absolute_ones():
    def kernel(seq_lens, *, out=None):
        return delivered(right(seq_lens.to(torch.int64).abs()), out)

    return kernel


@lie("every_size")
def is_wrong_beyond_the_first_block():
    def kernel(seq_lens, *, out=None):
        values = right(seq_lens)
        values[1024:] = 0
        return delivered(values, out)

    return kernel


@lie("every_size")
def forgets_the_tail_of_the_last_vector():
    def kernel(seq_lens, *, out=None):
        values = right(seq_lens)
        whole = len(seq_lens) // 4 * 4
        values[whole:] = seq_lens[whole:]
        return delivered(values, out)

    return kernel


@lie("every_size")
def counts_elements_in_16_bits():
    def kernel(seq_lens, *, out=None):
        values = right(seq_lens)
        values[2**16 :] = 0
        return delivered(values, out)

    return kernel


@lie("large_input")
def is_wrong_for_more_than_a_million_elements():
    def kernel(seq_lens, *, out=None):
        values = right(seq_lens)
        values[2**20 :] = 0
        return delivered(values, out)

    return kernel


@lie("every_size")
def is_wrong_when_there_is_one_element():
    def kernel(seq_lens, *, out=None):
        values = right(seq_lens)
        return delivered(values + 1 if len(seq_lens) == 1 else values, out)

    return kernel


@lie("every_declared_dtype")
def is_wrong_for_the_second_dtype():
    def kernel(seq_lens, *, out=None):
        values = right(seq_lens)
        return delivered(values + 1 if seq_lens.dtype is torch.int64 else values, out)

    return kernel


@lie("every_declared_dtype")
def refuses_a_declared_dtype_by_raising():
    def kernel(seq_lens, *, out=None):
        if seq_lens.dtype is torch.int64:
            raise TypeError("int32 only")
        return right(seq_lens, out)

    return kernel


@lie("every_size")
def swallows_its_errors():
    def kernel(seq_lens, *, out=None):
        try:
            return right(seq_lens.view(-1, 1, 512 if len(seq_lens) > 512 else 1).view(-1), out)
        except RuntimeError:
            return delivered(torch.zeros(len(seq_lens), dtype=torch.int64), out)

    return kernel


@lie("empty_input")
def fails_on_empty_input():
    def kernel(seq_lens, *, out=None):
        if len(seq_lens) == 0:
            raise RuntimeError("invalid configuration argument")
        return right(seq_lens, out)

    return kernel


@lie("empty_input")
def gives_empty_input_another_dtype():
    def kernel(seq_lens, *, out=None):
        if len(seq_lens) == 0 and out is None:
            return torch.empty(0)
        return right(seq_lens, out)

    return kernel


@lie("empty_input")
def gives_empty_input_one_element():
    def kernel(seq_lens, *, out=None):
        if len(seq_lens) == 0 and out is None:
            return torch.zeros(1, dtype=torch.int64)
        return right(seq_lens, out)

    return kernel


@lie("random_calls")
def is_wrong_where_two_neighbours_are_equal():
    def kernel(seq_lens, *, out=None):
        values = right(seq_lens)
        values[1:][seq_lens[1:] == seq_lens[:-1]] += 1
        return delivered(values, out)

    return kernel


@lie("arguments_by_keyword")
def takes_its_first_argument_by_position_only():
    def kernel(seq_lens, *, out=None):
        return right(seq_lens, out)

    @functools.wraps(kernel)
    def counted(*args, **kwargs):
        return kernel(args[0], **kwargs)

    return counted


@lie("arguments_by_keyword")
def cannot_be_given_none_for_the_buffer():
    def kernel(seq_lens, *, out=None):
        return right(seq_lens, out)

    @functools.wraps(kernel)
    def checked(seq_lens, **options):
        if "out" in options and options["out"].dtype is not torch.int64:
            raise TypeError("out must be int64")
        return kernel(seq_lens, **options)

    return checked


# -- strides -------------------------------------------------------------------------------------------------------


def _flat(tensor):
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.as_strided(tensor, (length,), (1,), 0)


@lie("strided_input")
def ignores_strides():
    def kernel(seq_lens, *, out=None):
        offset = seq_lens.storage_offset()
        return right(_flat(seq_lens)[offset : offset + len(seq_lens)].clone(), out)

    return kernel


@lie("strided_input")
def ignores_the_storage_offset():
    def kernel(seq_lens, *, out=None):
        step = seq_lens.stride(0) if len(seq_lens) > 1 else 1
        return right(torch.as_strided(seq_lens, seq_lens.shape, (step,), 0), out)

    return kernel


@lie("strided_input")
def takes_every_stride_for_two():
    def kernel(seq_lens, *, out=None):
        if seq_lens.is_contiguous():
            return right(seq_lens, out)
        offset, size = seq_lens.storage_offset(), len(seq_lens)
        room = (len(_flat(seq_lens)) - offset + 1) // 2
        return right(torch.as_strided(seq_lens, (min(size, room),), (2,), offset).clone(), out)

    return kernel


@lie("expanded_input")
def is_wrong_for_expanded_input():
    def kernel(seq_lens, *, out=None):
        values = right(seq_lens)
        if len(seq_lens) > 1 and seq_lens.stride(0) == 0:
            values[1:] = 0
        return delivered(values, out)

    return kernel


@lie("strided_input")
def fails_on_misaligned_input():
    def kernel(seq_lens, *, out=None):
        if seq_lens.data_ptr() % 16:
            raise RuntimeError("misaligned address")
        return right(seq_lens, out)

    return kernel


# -- what is returned ------------------------------------------------------------------------------------------------


@lie("result_has_the_right_shape")
def returns_a_column():
    def kernel(seq_lens, *, out=None):
        return right(seq_lens)[:, None] if out is None else right(seq_lens, out)

    return kernel


@lie("result_is_contiguous")
def returns_a_strided_result():
    def kernel(seq_lens, *, out=None):
        wide = torch.empty((len(seq_lens), 2), dtype=torch.int64)
        return right(seq_lens, wide[:, 0]) if out is None else right(seq_lens, out)

    return kernel


@lie("result_is_contiguous")
def keeps_the_strides_of_the_input():
    def kernel(seq_lens, *, out=None):
        if out is None:
            out = torch.empty_strided(seq_lens.shape, [step or 1 for step in seq_lens.stride()], dtype=torch.int64)
        return right(seq_lens, out)

    return kernel


@lie("result_has_natives_structure")
def returns_a_tuple():
    def kernel(seq_lens, *, out=None):
        return (right(seq_lens, out),)

    return kernel


@lie("result_is_a_plain_tensor")
def returns_a_parameter():
    def kernel(seq_lens, *, out=None):
        if out is not None:
            return right(seq_lens, out)
        return torch.nn.Parameter(right(seq_lens), requires_grad=False)

    return kernel


@lie("result_is_a_plain_tensor")
def computes_in_inference_mode():
    def kernel(seq_lens, *, out=None):
        if out is not None:
            return right(seq_lens, out)
        with torch.inference_mode():
            return right(seq_lens)

    return kernel


@lie("result_is_on_the_device_of_the_inputs")
def returns_a_tensor_without_data():
    def kernel(seq_lens, *, out=None):
        return torch.empty(seq_lens.shape, dtype=torch.int64, device="meta") if out is None else right(seq_lens, out)

    return kernel


@lie("result_is_on_the_device_of_the_inputs", platforms=("acme",))
def allocates_on_the_default_device():
    def kernel(seq_lens, *, out=None):
        return right(seq_lens, torch.empty(seq_lens.shape, dtype=torch.int64) if out is None else out)

    return kernel


# -- memory ----------------------------------------------------------------------------------------------------------


@lie("inputs_are_unchanged")
def computes_in_the_input():
    def kernel(seq_lens, *, out=None):
        if seq_lens.dtype is torch.int64 and out is None and len(seq_lens) > 1 and seq_lens.stride(0) > 0:
            return seq_lens.clamp_(min=1).sub_(1).clone()
        return right(seq_lens, out)

    return kernel


@lie("inputs_are_unchanged")
def changes_the_input_and_changes_it_back():
    def kernel(seq_lens, *, out=None):
        if len(seq_lens) > 1 and seq_lens.stride(0) == 0:
            return right(seq_lens, out)
        kept = seq_lens.clone()
        values = right(seq_lens.clamp_(min=1))
        seq_lens.copy_(kept)
        return delivered(values, out)

    return kernel


@lie("inputs_are_unchanged")
def writes_beside_the_input():
    def kernel(seq_lens, *, out=None):
        flat, end = _flat(seq_lens), seq_lens.storage_offset() + len(seq_lens)
        if len(seq_lens) and seq_lens.is_contiguous() and end < len(flat):
            flat.detach()[end].fill_(0)
        return right(seq_lens, out)

    return kernel


@lie("inputs_are_unchanged")
def reshapes_the_input():
    def kernel(seq_lens, *, out=None):
        values = right(seq_lens, out)
        seq_lens.unsqueeze_(0)
        return values

    return kernel


@lie("result_shares_no_memory_with_an_input")
def returns_the_input_when_there_is_nothing_to_do():
    def kernel(seq_lens, *, out=None):
        nothing = seq_lens.dtype is torch.int64 and len(seq_lens) == 0
        return seq_lens if nothing and out is None else right(seq_lens, out)

    return kernel


@lie("result_shares_no_memory_with_an_input")
def returns_a_view_of_the_input_when_nothing_changes():
    def kernel(seq_lens, *, out=None):
        values = right(seq_lens)
        same = seq_lens.dtype is torch.int64 and seq_lens.is_contiguous() and torch.equal(values, seq_lens)
        return seq_lens.view(-1) if same and out is None and len(seq_lens) else delivered(values, out)

    return kernel


@lie("results_are_fresh")
def returns_its_scratch_buffer():
    kept: dict[int, Any] = {}

    def kernel(seq_lens, *, out=None):
        if out is None:
            out = kept.setdefault(len(seq_lens), torch.empty(len(seq_lens), dtype=torch.int64))
        return right(seq_lens, out)

    return kernel


@lie("results_are_fresh")
def takes_turns_between_two_buffers():
    ring: dict[int, Any] = {}

    def kernel(seq_lens, *, out=None):
        size = len(seq_lens)
        if out is None:
            buffers = ring.setdefault(size, itertools.cycle([torch.empty(size, dtype=torch.int64) for _ in range(2)]))
            out = next(buffers)
        return right(seq_lens, out)

    return kernel


@lie("results_are_fresh")
def hands_out_slices_of_one_pool():
    pool = torch.empty(2**22, dtype=torch.int64)
    used = itertools.count(0, 8)

    def kernel(seq_lens, *, out=None):
        if out is None and len(seq_lens) <= 2**12:
            start = next(used) % 2**20
            out = pool[start : start + len(seq_lens)]
        return right(seq_lens, out)

    return kernel


@lie("results_stay_as_they_are")
def finishes_after_it_has_returned():
    def kernel(seq_lens, *, out=None):
        values = right(seq_lens)
        result = delivered(values, out)
        if len(seq_lens) == 33 and out is None:
            threading.Timer(0.001, lambda: result.add_(1)).start()
        return result

    return kernel


@lie("results_stay_as_they_are")
def writes_into_the_buffer_of_the_call_before():
    kept: list[Any] = []

    def kernel(seq_lens, *, out=None):
        if kept:
            kept.pop().fill_(-1)
        result = right(seq_lens, out)
        if out is not None:
            kept.append(out)
        return result

    return kernel


@lie("tensors_are_let_go")
def keeps_every_input():
    kept: list[Any] = []

    def kernel(seq_lens, *, out=None):
        kept.append(seq_lens)
        del kept[:-64]
        return right(seq_lens, out)

    return kernel


@lie("tensors_are_let_go")
def keeps_the_memory_of_the_last_input():
    kept: list[Any] = []

    def kernel(seq_lens, *, out=None):
        kept[:] = [seq_lens.detach().view(-1) if seq_lens.is_contiguous() else None]
        return right(seq_lens, out)

    return kernel


# -- buffers ---------------------------------------------------------------------------------------------------------


@lie("buffer_is_returned")
def ignores_the_buffer():
    def kernel(seq_lens, *, out=None):
        return right(seq_lens)

    return kernel


@lie("buffer_is_returned")
def fills_the_buffer_and_returns_another_object():
    def kernel(seq_lens, *, out=None):
        return right(seq_lens) if out is None else right(seq_lens, out)[:]

    return kernel


@lie("buffer_is_returned")
def resizes_the_buffer():
    def kernel(seq_lens, *, out=None):
        if out is None:
            return right(seq_lens)
        return out.set_(right(seq_lens)) if out.is_contiguous() else right(seq_lens, out)

    return kernel


@lie("buffer_is_filled")
def returns_the_buffer_unfilled():
    def kernel(seq_lens, *, out=None):
        return right(seq_lens) if out is None else out

    return kernel


@lie("buffer_is_filled")
def leaves_zeros_to_whoever_cleared_the_buffer():
    def kernel(seq_lens, *, out=None):
        if out is None:
            out = torch.zeros(seq_lens.shape, dtype=torch.int64)
        live = seq_lens > 1
        out[live] = right(seq_lens)[live]
        return out

    return kernel


@lie("buffer_is_filled")
def takes_the_truth_value_of_the_buffer():
    def kernel(seq_lens, *, out=None):
        return right(seq_lens, out or None)

    return kernel


@lie("buffer_of_any_stride")
def fails_on_a_strided_buffer():
    def kernel(seq_lens, *, out=None):
        if out is not None:
            out.view(-1)
            assert out.is_contiguous()
        return right(seq_lens, out)

    return kernel


@lie("buffer_of_any_stride")
def fills_a_contiguous_copy_of_the_buffer():
    def kernel(seq_lens, *, out=None):
        if out is not None:
            right(seq_lens, out.contiguous())
            return out
        return right(seq_lens)

    return kernel


@lie("memory_around_a_buffer_is_kept")
def writes_whole_vectors_into_the_buffer():
    def kernel(seq_lens, *, out=None):
        if out is None:
            return right(seq_lens)
        right(seq_lens, out)
        if out.is_contiguous():
            flat, end = _flat(out), out.storage_offset() + len(out)
            flat[end : end + (-len(out)) % 4] = 0
        return out

    return kernel


@lie("memory_around_a_buffer_is_kept")
def ignores_the_strides_of_the_buffer():
    def kernel(seq_lens, *, out=None):
        if out is None or len(out) == 0:
            return right(seq_lens, out)
        offset = out.storage_offset()
        _flat(out)[offset : offset + len(out)] = right(seq_lens)
        return out

    return kernel


@lie("buffer_and_strided_input")
def takes_the_strides_of_the_input_for_those_of_the_buffer():
    def kernel(seq_lens, *, out=None):
        right(seq_lens, out)
        if out is None:
            return right(seq_lens)
        if len(out) > 1 and 1 not in {seq_lens.stride(0), out.stride(0)} and out.stride() != seq_lens.stride():
            out[1:] = out[:-1].clone()
        return out

    return kernel


@lie("overlapping_buffer_is_refused")
def takes_one_memory_for_one_tensor():
    def kernel(seq_lens, *, out=None):
        if out is not None and len(out) and out.untyped_storage().data_ptr() == seq_lens.untyped_storage().data_ptr():
            return out.copy_(seq_lens)
        return right(seq_lens, out)

    return kernel


# -- refusals --------------------------------------------------------------------------------------------------------


def _refuses_int64(seq_lens, *, out=None):
    return "int32 is faster" if str(seq_lens.dtype) == "torch.int64" else None


@lie("rejects_keeps_what_is_declared", rejects=_refuses_int64)
def rejects_a_declared_dtype():
    return _honest


def _refuses_everything(seq_lens, *, out=None):
    return "not today"


@lie("rejects_keeps_what_is_declared", rejects=_refuses_everything)
def rejects_every_call():
    return _honest


def _refuses_large(seq_lens, *, out=None):
    return "too large" if seq_lens.numel() > 100 else None


@lie("rejects_keeps_what_is_declared", rejects=_refuses_large)
def rejects_what_it_can_run():
    return _honest


def _reads_a_value(seq_lens, *, out=None):
    return "negative length" if seq_lens.numel() and seq_lens.min().item() < -(2**62) else None


@lie("rejects_reads_no_value", rejects=_reads_a_value)
def rejects_by_value():
    return _honest


def _reads_through_numpy(seq_lens, *, out=None):
    return "starts at zero" if len(seq_lens) and seq_lens.numpy()[0] == -(2**31) else None


@lie("rejects_reads_no_value", rejects=_reads_through_numpy)
def rejects_by_value_through_numpy():
    return _honest


def _reads_a_list(seq_lens, *, out=None):
    return "long" if sum(seq_lens.tolist()[:1]) > 2**62 else None


@lie("rejects_reads_no_value", rejects=_reads_a_list)
def rejects_by_value_through_a_list():
    return _honest


def _raises(seq_lens, *, out=None):
    return None if seq_lens.shape[0] % 7 else "odd"[seq_lens.shape[0]]


@lie("rejects_gives_a_reason_or_none", rejects=_raises)
def rejects_raises():
    return _honest


def _says_true(seq_lens, *, out=None):
    return True if seq_lens.stride(0) > 1 else None


@lie("rejects_gives_a_reason_or_none", rejects=_says_true)
def rejects_says_true():
    return _honest


def _says_nothing(seq_lens, *, out=None):
    return "" if seq_lens.stride(0) > 1 else None


@lie("rejects_gives_a_reason_or_none", rejects=_says_nothing)
def rejects_gives_an_empty_reason():
    return _honest


_moods = itertools.count()


def _changes_its_mind(seq_lens, *, out=None):
    return "busy" if seq_lens.stride(0) > 1 and next(_moods) % 2 else None


@lie("rejects_gives_a_reason_or_none", rejects=_changes_its_mind)
def rejects_changes_its_mind():
    return _honest


def _writes(seq_lens, *, out=None):
    if out is not None:
        out.zero_()


@lie("rejects_gives_a_reason_or_none", rejects=_writes)
def rejects_writes_into_the_buffer():
    return _honest


@lie("calls_that_are_not_rejected_run")
def passes_on_a_declared_dtype():
    def kernel(seq_lens, *, out=None):
        if seq_lens.dtype is torch.int64:
            raise NotSupported("int32 only")
        return right(seq_lens, out)

    return kernel


@lie("calls_that_are_not_rejected_run")
def passes_on_values():
    def kernel(seq_lens, *, out=None):
        if len(seq_lens) and int(seq_lens.min()) < 0:
            raise NotSupported("negative lengths")
        return right(seq_lens, out)

    return kernel


@lie("not_supported_comes_before_writing")
def writes_before_it_passes_on():
    def kernel(seq_lens, *, out=None):
        right(seq_lens, out)
        if out is not None and not out.is_contiguous():
            raise NotSupported("contiguous buffers only")
        return right(seq_lens, out)

    return kernel


# -- declarations ----------------------------------------------------------------------------------------------------


@lie("dtypes_are_the_ops", dtypes=("int32", "float32"))
def declares_a_dtype_that_the_op_does_not_have():
    return _honest


@lie("dtypes_are_the_ops", dtypes={"seq_lens": ("int32", "int16")})
def declares_a_dtype_that_the_parameter_does_not_have():
    return _honest


@lie("capabilities_are_the_backends", capabilities=[CapabilityRequirement.CPU, CapabilityRequirement.CUDA])
def declares_hardware_of_others():
    return _honest


@lie(
    "arch_windows_are_closed",
    capabilities=[CapabilityRequirement.CPU, CapabilityRequirement.device("cpu", min_arch="1")],
)
def declares_every_arch_to_come():
    return _honest


# -- state -----------------------------------------------------------------------------------------------------------


@lie("many_calls_stay_right")
def is_wrong_every_hundredth_time():
    calls = itertools.count(1)

    def kernel(seq_lens, *, out=None):
        values = right(seq_lens)
        return delivered(values + (next(calls) % 100 == 0), out)

    return kernel


@lie("many_calls_stay_right")
def is_wrong_now_and_then():
    dice = random.Random(7)  # noqa: S311 - a fault, no secret

    def kernel(seq_lens, *, out=None):
        values = right(seq_lens)
        return delivered(values + (dice.random() < 0.02), out)

    return kernel


@lie("same_input_same_result")
def gives_other_bits_each_time():
    dice = random.Random(7)  # noqa: S311 - a fault, no secret

    def kernel(seq_lens, *, out=None):
        values = right(seq_lens)
        if len(values) > 1000:
            values[dice.randrange(1000)] += 1
        return delivered(values, out)

    return kernel


@lie("changed_input_changes_the_result")
def remembers_by_address():
    known: dict[Any, Any] = {}

    def kernel(seq_lens, *, out=None):
        key = seq_lens.data_ptr(), tuple(seq_lens.shape), seq_lens.dtype, seq_lens.stride()
        if key not in known:
            known.clear()
            known[key] = right(seq_lens)
        return delivered(known[key].clone(), out)

    return kernel


@lie("every_size")
def keeps_the_size_of_the_first_call():
    first: list[int] = []

    def kernel(seq_lens, *, out=None):
        first.append(len(seq_lens)) if not first and len(seq_lens) > 8 else None
        values = right(seq_lens)
        if first:
            values[first[0] :] = 0
        return delivered(values, out)

    return kernel


@lie("threads_do_not_disturb_each_other")
def computes_in_a_global_variable():
    class Scratch:
        values = None

    def kernel(seq_lens, *, out=None):
        Scratch.values = seq_lens.to(torch.int64)
        Scratch.values = Scratch.values.clamp(min=1)
        Scratch.values = Scratch.values - 1
        return delivered(Scratch.values, out)

    return kernel


@lie("threads_do_not_disturb_each_other")
def works_in_its_first_thread_only():
    home: list[int] = []

    def kernel(seq_lens, *, out=None):
        home.append(threading.get_ident())
        del home[1:]
        if threading.get_ident() != home[0]:
            raise RuntimeError("no context is bound to this thread")
        return right(seq_lens, out)

    return kernel


@lie("process_state_is_kept")
def sets_the_default_dtype():
    def kernel(seq_lens, *, out=None):
        torch.set_default_dtype(torch.float64)
        return right(seq_lens, out)

    return kernel


@lie("process_state_is_kept")
def seeds_the_random_generator():
    def kernel(seq_lens, *, out=None):
        torch.manual_seed(0)
        return right(seq_lens, out)

    return kernel


@lie("process_state_is_kept")
def draws_random_numbers():
    def kernel(seq_lens, *, out=None):
        torch.rand(1)
        return right(seq_lens, out)

    return kernel


@lie("process_state_is_kept")
def turns_gradients_off():
    def kernel(seq_lens, *, out=None):
        torch.set_grad_enabled(False)
        return right(seq_lens, out)

    return kernel


@lie("process_state_is_kept")
def sets_the_number_of_threads():
    def kernel(seq_lens, *, out=None):
        torch.set_num_threads(3 if torch.get_num_threads() != 3 else 2)
        return right(seq_lens, out)

    return kernel


@lie("process_state_is_kept")
def sets_the_environment():
    def kernel(seq_lens, *, out=None):
        import os

        os.environ["ACME_CALLS"] = str(time.perf_counter_ns())
        return right(seq_lens, out)

    return kernel


@lie("process_state_is_kept")
def sets_the_policy():
    def kernel(seq_lens, *, out=None):
        opgraft.set_policy(deny=None)
        return right(seq_lens, out)

    return kernel


@lie("process_state_is_kept")
def patches_torch():
    def kernel(seq_lens, *, out=None):
        torch.zeros_like = copy.copy(lambda like, **options: torch.full_like(like, 0, **options))
        return right(seq_lens, out)

    return kernel


@lie("circumstances_do_not_matter")
def computes_in_the_default_dtype():
    def kernel(seq_lens, *, out=None):
        floor = torch.tensor(1.5)
        offset = 1 if floor.dtype is torch.float32 else 2
        return delivered(right(seq_lens) - 1 + offset, out)

    return kernel


@lie("circumstances_do_not_matter", platforms=("acme",))
def makes_its_constants_on_the_default_device():
    def kernel(seq_lens, *, out=None):
        floor = torch.ones((), dtype=torch.int64)
        return delivered(torch.maximum(seq_lens.to(torch.int64), floor).sub_(1), out)

    return kernel


@lie("circumstances_do_not_matter")
def starts_an_event_loop():
    def kernel(seq_lens, *, out=None):
        async def work():
            return right(seq_lens, out)

        running = work()
        try:
            return asyncio.run(running)
        finally:
            running.close()

    return kernel


@lie("circumstances_do_not_matter")
def counts_on_fresh_memory_being_zero():
    def kernel(seq_lens, *, out=None):
        if out is not None:
            return right(seq_lens, out)
        result = torch.empty(seq_lens.shape, dtype=torch.int64, device=seq_lens.device)
        filled = torch.are_deterministic_algorithms_enabled()
        result.copy_(right(seq_lens))
        return result if not filled else torch.empty_like(result)

    return kernel


@lie("calls_are_quiet")
def prints():
    def kernel(seq_lens, *, out=None):
        print("launch", len(seq_lens))  # noqa: T201 - the fault
        return right(seq_lens, out)

    return kernel


@lie("calls_are_quiet")
def warns():
    def kernel(seq_lens, *, out=None):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("clamp_position is slow on this machine", stacklevel=2)
        return right(seq_lens, out)

    return kernel


# -- ops of several results, and ops that change an input --------------------------------------------------------------

COMPACT = "attention.compact_valid_indices"
VALID = "attention.topk_valid_length"


def _native(op_id: str) -> Callable[..., Any]:
    return opgraft.op(op_id).op.forward_native


@lie("result_has_natives_structure", op=COMPACT)
def returns_a_list_of_results():
    def kernel(indices, indptr=None, *, out=None):
        return list(_native(COMPACT)(indices, indptr, out=out))

    return kernel


@lie("result_has_natives_structure", op=COMPACT)
def returns_one_result_of_two():
    def kernel(indices, indptr=None, *, out=None):
        return _native(COMPACT)(indices, indptr, out=out)[1]

    return kernel


@lie("result_has_the_declared_dtype", op=COMPACT)
def gives_the_second_result_another_dtype():
    def kernel(indices, indptr=None, *, out=None):
        places, values = _native(COMPACT)(indices, indptr, out=out)
        return places.to(torch.int64), values

    return kernel


@lie("edge_cases", op=COMPACT)
def takes_minus_one_alone_for_a_hole():
    def kernel(indices, indptr=None, *, out=None):
        return _native(COMPACT)(torch.where(indices < -1, 0, indices), indptr, out=out)

    return kernel


@lie("buffer_edge_cases", op=COMPACT)
def clears_the_rest_of_the_buffer():
    def kernel(indices, indptr=None, *, out=None):
        if out is not None:
            out.fill_(-1)
        return _native(COMPACT)(indices, indptr, out=out)

    return kernel


@lie("edge_cases", op=VALID)
def leaves_the_input_as_it_is_where_the_op_changes_it():
    def kernel(topk, *, rule="last", minimum=1, repair=False):
        return _native(VALID)(topk.clone(), rule=rule, minimum=minimum, repair=repair)

    return kernel


@lie("edge_cases", op=VALID)
def changes_more_of_the_input_than_the_op_does():
    def kernel(topk, *, rule="last", minimum=1, repair=False):
        lengths = _native(VALID)(topk, rule=rule, minimum=minimum, repair=repair)
        if repair:
            topk.clamp_(min=0)
        return lengths

    return kernel


def _honest(seq_lens, *, out=None):
    return right(seq_lens, out)
