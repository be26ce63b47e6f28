"""The forwards of every portable kernel, for a backend to offer with its own capabilities.

Loading this module imports neither torch nor triton; a kernel is imported when it first runs.
"""

# A kernel is looked up by name, so that mypy cannot see what it returns: what its op returns.
# mypy: no-warn-return-any

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from opgraft import CapabilityRequirement, KernelBackend, forward

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["offered"]


@functools.cache
def _triton(op: str) -> Callable[..., Any]:
    """Import a portable kernel once: an import statement in its place costs 0.3 us a call."""
    from opgraft_triton_kernels import attention

    return getattr(attention, op)


def clamp_position(seq_lens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Run the portable Triton kernel."""
    return _triton("clamp_position")(seq_lens, out=out)


def csr_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: Tensor,
    kv_indptr: Tensor,
    kv_starts: Tensor | None = None,
    *,
    page_size: int = 1,
    token_map: Tensor | None = None,
    total: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Run the portable Triton kernel."""
    return _triton("csr_kv_indices")(
        req_to_token,
        req_pool_indices,
        kv_lens,
        kv_indptr,
        kv_starts,
        page_size=page_size,
        token_map=token_map,
        total=total,
        out=out,
    )


def block_table(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: Tensor,
    kv_starts: Tensor | None = None,
    *,
    page_size: int,
    max_pages: int | None = None,
    tail: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Run the portable Triton kernel."""
    return _triton("block_table")(
        req_to_token, req_pool_indices, kv_lens, kv_starts, page_size=page_size, max_pages=max_pages, tail=tail, out=out
    )


def prefill_aware_page_table(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    prefill_lens: Tensor,
    *,
    window: int,
    max_kv: int | None = None,
    out: Tensor | None = None,
    out_lens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the portable Triton kernel."""
    return _triton("prefill_aware_page_table")(
        req_to_token, req_pool_indices, seq_lens, prefill_lens, window=window, max_kv=max_kv, out=out, out_lens=out_lens
    )


def seqlens_expand(q_lens: Tensor, kv_lens: Tensor, *, total: int, out: Tensor | None = None) -> Tensor:
    """Run the portable Triton kernel."""
    return _triton("seqlens_expand")(q_lens, kv_lens, total=total, out=out)


def extend_positions(prefix_lens: Tensor, extend_lens: Tensor, *, total: int, out: Tensor | None = None) -> Tensor:
    """Run the portable Triton kernel."""
    return _triton("extend_positions")(prefix_lens, extend_lens, total=total, out=out)


def compact_valid_indices(
    indices: Tensor, indptr: Tensor | None = None, *, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the portable Triton kernels."""
    return _triton("compact_valid_indices")(indices, indptr, out=out)


def topk_to_slots(
    table: Tensor,
    topk: Tensor,
    *,
    cu_q: Tensor | None = None,
    output_rows: int | None = None,
    page_size: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Run the portable Triton kernel."""
    return _triton("topk_to_slots")(table, topk, cu_q=cu_q, output_rows=output_rows, page_size=page_size, out=out)


def topk_valid_length(topk: Tensor, *, rule: str = "last", minimum: int = 1, repair: bool = False) -> Tensor:
    """Run the portable Triton kernel."""
    return _triton("topk_valid_length")(topk, rule=rule, minimum=minimum, repair=repair)


def topk_to_slots_dcp(slots: Tensor, *, world_size: int, rank: int) -> tuple[Tensor, Tensor]:
    """Run the portable Triton kernel."""
    return _triton("topk_to_slots_dcp")(slots, world_size=world_size, rank=rank)


def cp_interleave_split(extend_lens: Tensor, *, world_size: int, rank: int) -> tuple[Tensor, Tensor]:
    """Run the portable Triton kernel."""
    return _triton("cp_interleave_split")(extend_lens, world_size=world_size, rank=rank)


_FORWARDS: tuple[Any, ...] = (
    clamp_position,
    csr_kv_indices,
    block_table,
    prefill_aware_page_table,
    seqlens_expand,
    extend_positions,
    compact_valid_indices,
    topk_to_slots,
    topk_valid_length,
    topk_to_slots_dcp,
    cp_interleave_split,
)


def offered(*, capabilities: CapabilityRequirement) -> dict[str, Callable[..., Any]]:
    """Offer every kernel on hardware that runs Triton.

    Parameters
    ----------
    capabilities
        The hardware for which the backend vouches.

    Returns
    -------
    dict
        A function of its own for each op, marked as that op's forward, by its name: what a plugin module adds to
        its names.

    """
    return {one.__name__: _mark(one, capabilities) for one in _FORWARDS}


def _mark(one: Any, capabilities: CapabilityRequirement) -> Callable[..., Any]:
    # A copy, since the mark of one backend is not that of another.
    function = types.FunctionType(one.__code__, one.__globals__, one.__name__, one.__defaults__)
    function.__kwdefaults__, function.__annotations__ = one.__kwdefaults__, one.__annotations__
    function.__doc__ = one.__doc__
    marked = forward(f"attention.{one.__name__}", kernel_backend=KernelBackend.TRITON, capabilities=capabilities)
    return marked(function)
