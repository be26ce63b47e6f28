"""What the host alone decides before a launch: buffer sizes, grids, strides. Imports no torch.

Everything here takes integers that the host already has. A number that is still on a device is
refused rather than read: reading it would hide a synchronisation.
"""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Any, Final

from opgraft.errors import ArgumentTypeError, ArgumentValueError, BufferOverflowError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["canonicalize_stride", "check_buffer_fits", "kv_index_grid", "token_blocks"]

_TOKENS_PER_BLOCK: Final = 4096
_COLUMNS_PER_PROGRAM: Final = 8192
_PROGRAMS_WANTED: Final = 512


def check_buffer_fits(used: int, capacity: int, what: str, **context: object) -> None:
    """Refuse to fill a preallocated buffer beyond its end.

    Kernels that are bounded by rows cannot see the end of their destination; the host can.

    Parameters
    ----------
    used
        Elements that are about to be written, not negative.
    capacity
        Elements that the buffer has, not negative.
    what
        What is being filled, for the message.
    **context
        Anything that explains the numbers; it appears in the message in this order.

    Raises
    ------
    BufferOverflowError
        If `used` exceeds `capacity`; equal fits.
    ArgumentTypeError
        If a number is no int.
    ArgumentValueError
        If a number is negative.

    Notes
    -----
    *Source.* Corresponds to ``assert_buffer_fits`` of SGLang, as an error that ``python -O`` keeps.

    Examples
    --------
    >>> check_buffer_fits(8, 8, "page table")
    >>> check_buffer_fits(9, 8, "page table", batch=3, page_size=64)
    Traceback (most recent call last):
        ...
    opgraft.errors.BufferOverflowError: page table: 9 used, capacity 8 (batch=3, page_size=64)

    """
    _require_int("check_buffer_fits", "used", used, 0)
    _require_int("check_buffer_fits", "capacity", capacity, 0)
    if used <= capacity:
        return
    explained = ", ".join(f"{name}={value}" for name, value in context.items())
    message = f"{what}: {used} used, capacity {capacity}{explained and f' ({explained})'}"
    raise BufferOverflowError(message)


def kv_index_grid(width: int, page_size: int) -> int:
    """Say how many blocks of about 4096 tokens a row of a page table takes.

    Parameters
    ----------
    width
        Pages in a row, not negative.
    page_size
        Tokens per page, at least 1.

    Returns
    -------
    int
        ``ceil(width / max(1, 4096 // page_size))``, 0 for an empty row.

    Raises
    ------
    ArgumentTypeError
        If a number is no int.
    ArgumentValueError
        If a number is out of range.

    Notes
    -----
    *Source.* Corresponds to ``get_num_kv_index_blocks_flashmla`` of SGLang, for any page size.

    Examples
    --------
    >>> kv_index_grid(2048, 64)
    32

    """
    _require_int("kv_index_grid", "width", width, 0)
    _require_int("kv_index_grid", "page_size", page_size, 1)
    return _ceil_div(width, max(1, _TOKENS_PER_BLOCK // page_size))


def token_blocks(table_width: int, base_programs: int) -> int:
    """Say how many programs share a row of a token table.

    Parameters
    ----------
    table_width
        Columns of the table, not negative.
    base_programs
        Programs there are anyway, such as one a request; not negative.

    Returns
    -------
    int
        At least 1, at most one for each 8192 columns, and about 512 programs in all. Any number
        gives the same result; only the parallelism differs.

    Raises
    ------
    ArgumentTypeError
        If a number is no int.
    ArgumentValueError
        If a number is negative.

    Notes
    -----
    *Source.* Corresponds to the launch rule beside ``create_flashinfer_kv_indices_triton`` of
    SGLang.

    Examples
    --------
    >>> token_blocks(131072, 8)
    16

    """
    _require_int("token_blocks", "table_width", table_width, 0)
    _require_int("token_blocks", "base_programs", base_programs, 0)
    wide = _ceil_div(table_width, _COLUMNS_PER_PROGRAM)
    return max(1, min(wide, _PROGRAMS_WANTED // max(1, base_programs)))


def canonicalize_stride(tensor: Tensor) -> Tensor:
    """Give axes of size 1 the stride they would have if the tensor were laid out for it.

    The stride of such an axis means nothing to a reader, yet descriptors of bulk copies refuse
    strides that collide. From the second-last axis to the first: where the size is 1 and the
    stride is that of the next axis, it becomes the next axis's stride times its size, as these
    are by then; so a chain of such axes resolves from the right.

    Parameters
    ----------
    tensor
        Any tensor.

    Returns
    -------
    Tensor
        The tensor itself where nothing changes, else a view of the same storage, offset and shape.

    Raises
    ------
    ArgumentTypeError
        If it is no tensor.

    Notes
    -----
    *Source.* Corresponds to the stride canonicalisation beside SGLang's attention kernels.

    Examples
    --------
    >>> import torch
    >>> canonicalize_stride(torch.empty_strided((4, 1, 64, 128), (8192, 128, 128, 1))).stride()
    (8192, 8192, 128, 1)

    """
    if not (hasattr(tensor, "as_strided") and callable(getattr(tensor, "stride", None))):
        message = f"canonicalize_stride: tensor must be a tensor, got {type(tensor).__name__}"
        raise ArgumentTypeError(message)
    shape, given = tensor.shape, tensor.stride()
    strides = list(given)
    for axis in range(len(shape) - 2, -1, -1):
        if shape[axis] == 1 and given[axis] == given[axis + 1]:
            strides[axis] = strides[axis + 1] * shape[axis + 1]
    if tuple(strides) == tuple(given):
        return tensor
    return tensor.as_strided(shape, strides)


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _require_int(function: str, name: str, value: Any, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        message = f"{function}: {name} must be an int, got {type(value).__name__}"
        raise ArgumentTypeError(message)
    if int(value) < at_least:
        message = f"{function}: {name} must be at least {at_least}, got {value}"
        raise ArgumentValueError(message)
