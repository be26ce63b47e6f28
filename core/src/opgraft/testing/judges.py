"""What may be wrong with one observed call: small functions that say it in words, or None."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opgraft.spec import EXACT, Tolerance
from opgraft.testing.layouts import writes

if TYPE_CHECKING:
    from opgraft.testing.layouts import Placed
    from opgraft.testing.subject import Observation

__all__ = [
    "aliasing",
    "buffer_identity",
    "buffer_values",
    "changed_inputs",
    "contiguity",
    "device",
    "difference",
    "dtype",
    "everything",
    "plainness",
    "shape",
    "share_memory",
    "structure",
    "surroundings",
    "values",
]

# -- values --------------------------------------------------------------------------------------


def values(seen: Observation) -> str | None:
    """Hold every output's numbers against native's, whatever their dtype."""
    for number, native in enumerate(seen.reference.outputs):
        name = seen.name_of(number)
        if number >= len(seen.outputs):
            return f"{name} is missing"
        mine = seen.outputs[number]
        if not isinstance(native, Tensor):
            if mine != native:
                return f"{name} is {mine!r}, expected {native!r}"
            continue
        if not isinstance(mine, Tensor):
            return f"{name} is {type(mine).__name__} {mine!r:.60}, expected a tensor"
        found = difference(mine, native, seen.subject.op.tolerance)
        if found:
            return f"{name}: {found}"
    return _mutated(seen)


def _mutated(seen: Observation) -> str | None:
    for name in seen.subject.op.mutates:
        if name in seen.placed:
            mine, native = _both(seen, name)
            found = difference(mine, native, EXACT)
            if found:
                return f"{name}, which the op changes in place: {found}"
    return None


def _both(seen: Observation, name: str) -> tuple[Tensor, Tensor]:
    placed = seen.placed[name]
    return placed.values(placed.after()), placed.values(seen.reference.buffers[name])


def difference(mine: Tensor, native: Tensor, tolerance: Tolerance | None) -> str | None:
    """Say where two tensors differ by more than a tolerance; NaN equals NaN.

    Parameters
    ----------
    mine
        On any device.
    native
        On the CPU.
    tolerance
        Of the op; None is exact.

    """
    if mine.shape != native.shape:
        return f"shape is {tuple(mine.shape)}, expected {tuple(native.shape)}"
    if mine.device.type == "meta":
        return "the tensor is on the meta device and holds no values"
    mine = mine.detach().cpu()
    if mine.dtype == native.dtype and torch.equal(mine, native):
        return None
    wrong = _wrong(mine, native, tolerance or EXACT)
    if not bool(wrong.any()):
        return None
    count = int(wrong.sum())
    place = tuple(int(index) for index in wrong.nonzero()[0])
    got, expected = mine[place].item(), native[place].item()
    where = f"[{', '.join(map(str, place))}]" if place else ""
    total = f" ({count} of {native.numel()} differ)" if native.numel() > 1 else ""
    return f"element {where} is {got}, expected {expected}{total}"


def _wrong(mine: Tensor, native: Tensor, tolerance: Tolerance) -> Tensor:
    inexact = mine.dtype.is_floating_point or native.dtype.is_floating_point
    if mine.dtype.is_complex or native.dtype.is_complex:
        left, right = mine.to(torch.complex128), native.to(torch.complex128)
    elif inexact:
        left, right = mine.to(torch.float64), native.to(torch.float64)
    else:
        return mine.to(torch.int64) != native.to(torch.int64)
    if math.isclose(tolerance.rtol, 0.0) and math.isclose(tolerance.atol, 0.0):
        return (left != right) & ~(left.isnan() & right.isnan())
    return ~torch.isclose(left, right, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)


# -- what kind of thing comes back ---------------------------------------------------------------


def structure(seen: Observation) -> str | None:
    """Compare tensor, tuple or nothing with what native returns."""
    native, mine = seen.reference, seen.result
    if native.is_tuple:
        if not isinstance(mine, tuple):
            return f"a tuple of {len(native.outputs)} is expected, got {type(mine).__name__}"
        if len(mine) != len(native.outputs):
            return f"{len(native.outputs)} results are expected, got {len(mine)}"
    elif not native.outputs:
        return None if mine is None else f"nothing is expected, got {type(mine).__name__}"
    elif isinstance(native.outputs[0], Tensor) and not isinstance(mine, Tensor):
        return f"a tensor is expected, got {type(mine).__name__}"
    return None


def _tensors(seen: Observation) -> list[tuple[str, Tensor, Tensor]]:
    pairs = zip(seen.outputs, seen.reference.outputs, strict=False)
    return [
        (seen.name_of(number), mine, native)
        for number, (mine, native) in enumerate(pairs)
        if isinstance(mine, Tensor) and isinstance(native, Tensor)
    ]


def dtype(seen: Observation) -> str | None:
    """Compare dtypes with those of the format signature, as native follows it."""
    for name, mine, native in _tensors(seen):
        if mine.dtype != native.dtype:
            return f"{name} is {_word(mine.dtype)}, expected {_word(native.dtype)}"
    return None


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shape(seen: Observation) -> str | None:
    """Compare shapes with native's."""
    for name, mine, native in _tensors(seen):
        if mine.shape != native.shape:
            return f"{name} has shape {tuple(mine.shape)}, expected {tuple(native.shape)}"
    return None


def device(seen: Observation) -> str | None:
    """Look whether the results are where the arguments are."""
    expected = seen.subject.device
    for name, mine, _ in _tensors(seen):
        if mine.device.type != expected.type or (mine.device.index or 0) != (expected.index or 0):
            return f"{name} is on {mine.device}, expected {expected}"
    return None


def contiguity(seen: Observation) -> str | None:
    """Look whether a fresh result is laid out as native's is."""
    for name, mine, native in seen.fresh():
        if not isinstance(mine, Tensor) or not isinstance(native, Tensor):
            continue
        if mine.shape == native.shape and native.is_contiguous() and not mine.is_contiguous():
            got = tuple(mine.stride())
            return f"{name} has strides {got}, expected contiguous {tuple(native.stride())}"
    return None


def plainness(seen: Observation) -> str | None:
    """Look whether a result is a plain tensor without history."""
    for name, mine, native in _tensors(seen):
        if type(mine) is not type(native):
            return f"{name} is a {type(mine).__name__}, expected a plain {type(native).__name__}"
        if mine.layout is not torch.strided:
            return f"{name} has layout {mine.layout}, expected torch.strided"
        if mine.requires_grad != native.requires_grad:
            return f"{name} has requires_grad={mine.requires_grad}"
        if mine.is_conj() or mine.is_neg():
            return f"{name} is a lazy conjugate or negative"
        if mine.is_inference() and not torch.is_inference_mode_enabled():
            return f"{name} was made in inference mode"
    return None


# -- memory --------------------------------------------------------------------------------------


def aliasing(seen: Observation) -> str | None:
    """Look whether a fresh result shares memory with an argument."""
    for name, mine, _ in seen.fresh():
        if not isinstance(mine, Tensor):
            continue
        for argument, placed in seen.placed.items():
            if mine is placed.tensor:
                return f"{name} is {argument} itself"
            if share_memory(mine, placed.tensor):
                return f"{name} shares memory with {argument}"
    return None


def share_memory(left: Tensor, right: Tensor) -> bool:
    """Say whether two tensors' storages overlap."""
    if left.device != right.device or not left.numel() or not right.numel():
        return False
    one, other = left.untyped_storage(), right.untyped_storage()
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes() and second < first + one.nbytes()


def changed_inputs(seen: Observation) -> str | None:
    """Look whether the memory around and in the inputs is what it was."""
    for name, placed in seen.placed.items():
        if name in seen.subject.material.writes or name in seen.subject.op.mutates:
            continue
        now = tuple(placed.tensor.shape), tuple(placed.tensor.stride())
        if now != (placed.shape, placed.strides):
            return f"{name} has another shape or stride than before"
        fault = _memory(placed, placed.before)
        if fault:
            return f"{name} was changed: {fault}"
        if writes(placed.tensor) != placed.version:
            return f"{name} was written to, even if its values are what they were"
        if placed.tensor.requires_grad:
            return f"{name} now requires a gradient"
    return None


def _memory(placed: Placed, expected: Tensor) -> str | None:
    now = placed.after()
    if _same_bits(now, expected):
        return None
    place = int(_differing(now, expected)[0])
    inside = _own_elements(placed)[place]
    where = "of the tensor itself" if bool(inside) else "of the memory around it"
    return f"element {place} {where} is {now[place].item()}, expected {expected[place].item()}"


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _differing(left: Tensor, right: Tensor) -> Tensor:
    width = left.element_size()
    bits = left.view(torch.uint8) != right.view(torch.uint8)
    return bits.view(-1, width).any(1).nonzero().flatten()


def _own_elements(placed: Placed) -> Tensor:
    own = torch.zeros(placed.placement.length, dtype=torch.bool)
    shape, where = placed.shape, placed.placement
    if math.prod(shape):
        numbers = torch.arange(placed.placement.length)
        own[numbers.as_strided(shape, where.strides, where.offset).flatten()] = True
    return own


def buffer_identity(seen: Observation) -> str | None:
    """Look whether each caller buffer is returned as the very object that was passed."""
    for name, number in seen.written.items():
        if number >= len(seen.outputs):
            return f"{name} was passed and {seen.name_of(number)} is missing"
        placed = seen.placed[name]
        if seen.outputs[number] is not placed.tensor:
            return f"{seen.name_of(number)} is not the object passed as {name}"
        now = tuple(placed.tensor.shape), tuple(placed.tensor.stride())
        if now != (placed.shape, placed.strides):
            return f"{name} has another shape or stride than before"
    return None


def buffer_values(seen: Observation) -> str | None:
    """Hold what stands in each caller buffer against what native writes there."""
    for name in seen.written:
        mine, native = _both(seen, name)
        found = difference(mine, native, seen.subject.op.tolerance)
        if found:
            return f"{name}: {found}"
    return None


def surroundings(seen: Observation) -> str | None:
    """Look whether the memory around each caller buffer and mutated input is what it was."""
    for name in (*seen.written, *seen.subject.op.mutates):
        if name not in seen.placed:
            continue
        placed = seen.placed[name]
        outside = ~_own_elements(placed)
        now, before = placed.after()[outside], placed.before[outside]
        if not _same_bits(now, before):
            place = int(outside.nonzero()[_differing(now, before)[0]])
            return f"element {place} of the memory around {name} was written"
    return None


def everything(seen: Observation) -> str | None:
    """Give the first thing that is wrong with a call, of all that can be."""
    for judge in (structure, values, dtype, device, contiguity, buffer_identity, buffer_values):
        found = judge(seen)
        if found:
            return found
    return surroundings(seen) or changed_inputs(seen) or aliasing(seen) or plainness(seen)
