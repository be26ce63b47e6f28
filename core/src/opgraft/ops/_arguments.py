"""Checks of what the host can see in a call: everything that dtypes and shape rules cannot say."""

from __future__ import annotations

from typing import Any, cast

import torch

from opgraft.errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "INT32_MAX",
    "INT32_MIN",
    "INT64_MAX",
    "INT64_MIN",
    "columns_of",
    "require_columns",
    "require_int",
    "require_length",
    "require_rank",
    "require_unit_column_stride",
]

INT32_MIN = -(2**31)
INT32_MAX = 2**31 - 1
INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1


def require_int(op: str, name: str, value: Any, *, at_least: int = 0, at_most: int = INT64_MAX) -> None:
    """Demand a host integer within bounds; a tensor would hide a synchronisation.

    Raises
    ------
    ArgumentTypeError
        If the value is not an int; a bool is none.
    ArgumentValueError
        If it is outside the bounds.

    """
    if type(value) is int and at_least <= value <= at_most:
        return
    if isinstance(value, torch.SymInt):
        # While a graph is traced the bound becomes a condition on the symbol.
        torch._check(value >= at_least)  # type: ignore[no-untyped-call]  # noqa: SLF001 - public
        return
    if isinstance(value, bool) or not isinstance(value, int):
        message = f"{op}: {name} must be an int, got {type(value).__name__}"
        raise ArgumentTypeError(message)
    if value < at_least:
        message = f"{op}: {name} must be at least {at_least}, got {value}"
        raise ArgumentValueError(message)
    if value > at_most:
        message = f"{op}: {name} must be at most {at_most}, got {value}"
        raise ArgumentValueError(message)


def require_rank(op: str, world_size: Any, rank: Any) -> None:
    """Demand a rank of a world that has at least one."""
    require_int(op, "world_size", world_size, at_least=1, at_most=INT32_MAX)
    require_int(op, "rank", rank)
    if rank >= world_size:
        message = f"{op}: rank must be below world_size {world_size}, got {rank}"
        raise ArgumentValueError(message)


def require_unit_column_stride(op: str, name: str, tensor: torch.Tensor) -> None:
    """Demand that the columns of a row lie side by side; one column alone always does."""
    if tensor.stride(1) != 1 and tensor.shape[1] > 1:
        message = f"{op}: {name} must have column stride 1, got {tensor.stride(1)}"
        raise ArgumentValueError(message)


def require_length(op: str, name: str, tensor: torch.Tensor, expected: int, why: str) -> None:
    """Demand a size of the first dimension; `why` says where the number comes from."""
    if tensor.shape[0] != expected:
        message = f"{op}: {name} must have {expected} {why}, got {tensor.shape[0]}"
        raise ArgumentValueError(message)


def require_columns(op: str, name: str, given: Any, out: torch.Tensor | None) -> None:
    """Demand the number of columns once: as an int, or from the caller's buffer.

    Where both are given they must agree.
    """
    if given is None:
        if out is None:
            message = f"{op}: {name} must be an int where out is not given, got None"
            raise ArgumentTypeError(message)
        return
    require_int(op, name, given)
    if out is not None and out.shape[1] != given:
        message = f"{op}: {name} must be {out.shape[1]}, the columns of out, got {given}"
        raise ArgumentValueError(message)


def columns_of(given: int | None, out: torch.Tensor | None) -> int:
    """Say how many columns a checked call wants: those of the buffer, or the number given."""
    return out.shape[1] if out is not None else cast("int", given)
