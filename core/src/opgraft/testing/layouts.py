"""Where the elements of a tensor lie in memory: the ways that a caller may hand one in.

Each layout is a small function from a shape to a :class:`Placement`, or None where the shape has
no such layout. Every layout but the plain one leaves elements around the tensor's own, so that
reading or writing beside it shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

__all__ = ["INPUT_LAYOUTS", "LAYOUTS", "OUTPUT_LAYOUTS", "PLAIN", "Placed", "Placement", "fill", "place", "writes"]

PLAIN: Final = "contiguous"
FAR = 2**31 + 4096
"""Where the last row of a far layout begins; the memory before it is reserved and never touched."""

_MARGIN: Final = 32  # elements before and after; keeps the 16-byte alignment of the first one


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Strides, offset and the number of elements of the memory around.

    Parameters
    ----------
    length
        Elements of the storage.
    strides
        One a dim, in elements.
    offset
        Elements before the first one.

    """

    length: int
    strides: tuple[int, ...]
    offset: int


Shape = tuple[int, ...]


def _dense(shape: Shape) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _around(shape: Shape, strides: Sequence[int], offset: int, margin: int) -> Placement:
    reach = sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) + 1
    reach = reach if math.prod(shape) else 0
    return Placement(length=offset + reach + margin, strides=tuple(strides), offset=offset)


def _contiguous(shape: Shape) -> Placement:
    return _around(shape, _dense(shape), 0, 0)


def _slice(shape: Shape) -> Placement:
    return _around(shape, _dense(shape), _MARGIN, _MARGIN)


def _misaligned(shape: Shape) -> Placement:
    return _around(shape, _dense(shape), 1, _MARGIN)


def _wide_rows(shape: Shape) -> Placement | None:
    if len(shape) < 2:  # noqa: PLR2004 - rows need two dims
        return None
    wider = (*shape[:-1], shape[-1] + 3)
    return _around(shape, _dense(wider), 5, _MARGIN)


def _every_second(shape: Shape) -> Placement:
    doubled = (*shape[:-1], 2 * shape[-1])
    strides = (*_dense(doubled)[:-1], 2)
    return _around(shape, strides, 1, _MARGIN)


def _every_third_row(shape: Shape) -> Placement | None:
    if len(shape) < 2:  # noqa: PLR2004 - rows need two dims
        return None
    dense = _dense(shape)
    return _around(shape, (dense[0] * 3, *dense[1:]), dense[0], _MARGIN)


def _transposed(shape: Shape) -> Placement:
    if len(shape) == 1:  # a column of a matrix of seven
        return _around(shape, (7,), 3, _MARGIN)
    return _around(shape, tuple(reversed(_dense(tuple(reversed(shape))))), 2, _MARGIN)


def _odd_single(shape: Shape) -> Placement | None:
    if 1 not in shape:
        return None
    pairs = zip(shape, _dense(shape), strict=True)
    return _around(shape, [11 if size == 1 else step for size, step in pairs], 3, _MARGIN)


def _expanded(shape: Shape) -> Placement | None:
    if shape[0] < 2:  # noqa: PLR2004 - one row cannot be repeated
        return None
    return _around(shape, (0, *_dense(shape)[1:]), 3, _MARGIN)


def _far(shape: Shape) -> Placement | None:
    if not 2 <= shape[0] <= 8:  # noqa: PLR2004 - few rows, so that few pages are touched
        return None
    step = FAR // (shape[0] - 1) + 1
    return _around(shape, (max(step, _dense(shape)[0]), *_dense(shape)[1:]), 0, _MARGIN)


LAYOUTS: Final[Mapping[str, Callable[[Shape], Placement | None]]] = MappingProxyType(
    {
        PLAIN: _contiguous,
        "slice of a larger buffer": _slice,
        "slice that begins at an odd element": _misaligned,
        "rows of a wider table": _wide_rows,
        "every second element": _every_second,
        "every third row": _every_third_row,
        "transposed": _transposed,
        "a dim of size 1 with an odd stride": _odd_single,
        "expanded (stride 0)": _expanded,
        "reaching beyond 2**31 elements": _far,
    }
)
"""Every layout by its name."""

_STRIDED: Final = tuple(LAYOUTS)[1:8]
INPUT_LAYOUTS: Final = _STRIDED
"""What any input may look like with its values unchanged."""

OUTPUT_LAYOUTS: Final = _STRIDED
"""What a caller's buffer may look like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A tensor on a device, the memory around it, and what that memory held before the call.

    Parameters
    ----------
    tensor
        What is handed in.
    memory
        The whole storage as a 1-D tensor.
    before
        Copy of it on the CPU.
    placement
        Where the tensor lies in it.
    shape, strides, version
        The tensor's own, when it was handed in; the version counts torch's writes.

    """

    tensor: Tensor
    memory: Tensor
    before: Tensor
    placement: Placement
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    version: int

    def after(self) -> Tensor:
        """Copy the whole storage to the CPU."""
        return self.memory.cpu()

    def values(self, memory: Tensor) -> Tensor:
        """Give the tensor's own elements, out of a copy of its memory."""
        return memory.as_strided(self.shape, self.placement.strides, self.placement.offset)


def place(values: Tensor, layout: str, device: torch.device, *, background: Tensor | None = None) -> Placed | None:
    """Lay values out on a device.

    Parameters
    ----------
    values
        CPU tensor.
    layout
        Name of the layout.
    device
        Where to.
    background
        Values of the same dtype for the memory around, repeated as often as need be; its own
        values, each changed a little, if left out.

    Returns
    -------
    Placed or None
        None where the shape has no such layout.

    """
    shape = tuple(values.shape)
    if layout == PLAIN and not values.is_contiguous():
        memory, placement = _as_given(values)
    else:
        found = LAYOUTS[layout](shape) if shape else _contiguous(shape)
        if found is None:
            return None
        placement = found
        memory = torch.empty(placement.length, dtype=values.dtype)
        if placement.length <= _FILL_LIMIT:
            fill(memory, other_values(values) if background is None else background)
        repeated = bool(shape) and placement.strides[0] == 0
        own = (1, *shape[1:]) if repeated else shape
        view = memory.as_strided(own, placement.strides, placement.offset)
        view.copy_(values[:1] if repeated else values)
    before = memory.clone() if placement.length <= _FILL_LIMIT else memory
    memory = memory.to(device)
    whole = layout == PLAIN and values.is_contiguous()
    tensor = memory.view(shape) if whole else memory.as_strided(shape, placement.strides, placement.offset)
    return Placed(
        tensor=tensor,
        memory=memory,
        before=before,
        placement=placement,
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        version=writes(tensor),
    )


def writes(tensor: Tensor) -> int:
    """Count the writes into a tensor that torch knows of; inference tensors have no count."""
    return 0 if tensor.is_inference() else int(tensor._version)  # noqa: SLF001 - it has no public name


_FILL_LIMIT: Final = 2**28  # beyond it memory is reserved only, never touched as a whole


def _as_given(values: Tensor) -> tuple[Tensor, Placement]:
    """Copy a tensor that an op's own samples laid out, with the memory around it."""
    length = values.untyped_storage().nbytes() // values.element_size()
    memory = torch.as_strided(values, (length,), (1,), 0).clone()
    return memory, Placement(length=length, strides=tuple(values.stride()), offset=int(values.storage_offset()))


def fill(memory: Tensor, pattern: Tensor) -> None:
    """Fill 1-D memory with a pattern, over and over."""
    if memory.numel():
        repeats = -(-memory.numel() // pattern.numel())
        memory.copy_(pattern.repeat(repeats)[: memory.numel()])


def other_values(values: Tensor) -> Tensor:
    """Give values that are plausible beside these and differ from them: 1-D, not empty."""
    if values.numel() == 0:
        return torch.ones(1).to(values.dtype)
    flat = values.flatten()[:_MARGIN]
    if values.dtype is torch.bool:
        return ~flat
    if values.dtype.is_floating_point or values.dtype.is_complex:
        return (flat.to(torch.float32) * 0.5 + 3).to(values.dtype)
    return flat.flip(0) ^ 1
