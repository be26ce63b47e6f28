"""The processor of the pretend card: runs a program over the elements of tensors on the card."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final, Literal

from opgraft_acme.pretend_device.memory import memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_FORMATS: Final[dict[str, Literal["i", "q"]]] = {"torch.int32": "i", "torch.int64": "q"}
_numbers: Final = itertools.count(1)
_last = 0


def launches() -> int:
    """Count the programs that the card has run."""
    return _last


def launch(program: Callable[..., None], *tensors: Tensor) -> None:
    """Run a program on the card and wait for it.

    Parameters
    ----------
    program
        What the card executes. It gets the elements of each tensor in the card's own memory,
        as a sequence of integers; assigning to a slice writes them.
    tensors
        1-D int32 or int64 tensors on the card, of any stride; a tensor of stride 0 is read-only.
        As with a real driver, a launch on no elements is an error.

    Raises
    ------
    ValueError
        If a tensor is not of that kind.

    """
    global _last  # noqa: PLW0603 - the counter of the one card
    elements = [_elements(tensor) for tensor in tensors]
    _last = next(_numbers)
    program(*elements)


def _elements(tensor: Tensor) -> Sequence[int]:
    form = _FORMATS.get(str(tensor.dtype))
    if tensor.device.type != "acme" or tensor.dim() != 1 or not tensor.numel() or form is None:
        raise ValueError(
            "acme: a program runs over 1-D int32 or int64 tensors on acme:0 that have elements, "
            f"got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        )
    count, stride, width = tensor.numel(), tensor.stride(0), tensor.element_size()
    window = memory.window(
        tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()) * width, ((count - 1) * stride + 1) * width
    ).cast(form)
    return window[::stride] if stride else (window[0],) * count
