"""The Triton kernel of ``attention.prefill_aware_page_table``."""

# The parameters of a kernel are Triton's values, which have no Python type.
# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from opgraft_triton_kernels.attention._row_parts import (
    HAND,
    REACH,
    at,
    copy_lanes,
    copy_part,
    counted,
    deal,
    dealt,
    narrowed,
    pick,
    within,
)
from opgraft_triton_kernels.launcher import Launcher

__all__ = ["prefill_aware_page_table"]

# One H200, replayed graph, us for 1 and 8 rows of 131072, 64 of 32768, 256 of 8192, 512 of 4096, and one
# of 131072 beside 255 of 64; part/warps 1024/2 1.95 2.91 4.33 4.17 4.28 2.74, 1024/4 1.97 3.02 4.33 4.21
# 4.26 2.73, 2048/4 1.95 2.97 4.37 4.24 4.30 2.62, 512/1 2.10 3.08 5.22 5.23 5.12 3.14; a copy of the same
# bytes 1.40 2.42 3.50 3.49 3.52 1.44.
_PART = 1024
_WARPS = 2


@triton.jit
def _load_view(
    requests_ptr,
    lengths_ptr,
    prompts_ptr,
    row,
    there,
    requests_stride,
    lengths_stride,
    prompts_stride,
    pool,
    window,
    width,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Give each row's request, or -1, prompt length, positions in sight and positions forgotten."""
    request = tl.load(requests_ptr + at(row, requests_stride, UNIT), mask=there, other=-1)
    length = tl.load(lengths_ptr + at(row, lengths_stride, UNIT), mask=there, other=0)
    request = narrowed(tl.where(within(request, pool), request, -1), WIDE=False)
    prompt_ptr = prompts_ptr + at(request, prompts_stride, UNIT)
    prompt = tl.load(prompt_ptr, mask=request >= 0, other=0)
    length = tl.maximum(length, 0)
    prompt = tl.minimum(tl.maximum(prompt, 0), length)
    seen = prompt + tl.minimum(length - prompt, counted(window, WIDE))
    seen = tl.minimum(seen, counted(width, WIDE))
    return request, narrowed(prompt, WIDE), narrowed(seen, WIDE), narrowed(length - seen, WIDE)


@triton.jit
def _write_part(
    table_ptr,
    out_ptr,
    request,
    prompt,
    seen,
    forgotten,
    row,
    first,
    columns,
    row_stride,
    width,
    out_row_stride,
    out_stride,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
    FILL: tl.constexpr,
    PART: tl.constexpr,
):
    row_ptr = table_ptr + tl.maximum(request, 0).to(tl.int64) * row_stride
    readable = tl.where(request >= 0, counted(columns, WIDE), 0)
    target_ptr = out_ptr + row.to(tl.int64) * out_row_stride + at(first, out_stride, UNIT)
    end = tl.minimum(seen - first, PART)
    # Where the prompt ends in this part; nowhere, where nothing is forgotten behind it.
    edge = tl.where(forgotten == 0, end, tl.minimum(prompt - first, end))
    position = first + tl.where(edge > 0, 0, forgotten)
    leading = tl.where(edge > 0, edge, end)
    copy_part(row_ptr + position, target_ptr, out_stride, position, leading, readable, PART, UNIT)
    if leading < end:
        position = first + forgotten
        source_ptr = row_ptr + position
        copy_lanes(source_ptr, target_ptr, out_stride, position, edge, end, readable, PART, UNIT)
    if FILL and end < PART:
        lane = tl.arange(0, PART)
        behind = (lane >= end) & (lane < counted(width, WIDE) - first)
        tl.store(target_ptr + at(lane, out_stride, UNIT), 0, mask=behind)


@triton.jit(
    do_not_specialize=[
        "table_ptr",
        "requests_ptr",
        "lengths_ptr",
        "prompts_ptr",
        "out_ptr",
        "out_lengths_ptr",
        "batch",
        "parts",
        "spread",
        "turns",
        "bits",
        "pool",
        "columns",
        "row_stride",
        "requests_stride",
        "lengths_stride",
        "prompts_stride",
        "window",
        "width",
        "out_row_stride",
        "out_stride",
        "out_lengths_stride",
    ]
)
def prefill_aware_page_table_kernel(
    table_ptr,
    requests_ptr,
    lengths_ptr,
    prompts_ptr,
    out_ptr,
    out_lengths_ptr,
    batch: tl.int32,
    parts: tl.int32,
    spread: tl.int32,
    turns: tl.int32,
    bits: tl.int32,
    pool: tl.int64,
    columns: tl.int64,
    row_stride: tl.int64,
    requests_stride: tl.int64,
    lengths_stride: tl.int64,
    prompts_stride: tl.int64,
    window: tl.int64,
    width: tl.int64,
    out_row_stride: tl.int64,
    out_stride: tl.int64,
    out_lengths_stride: tl.int64,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
    FILL: tl.constexpr,
    PART: tl.constexpr,
    HAND: tl.constexpr,
) -> None:
    if (tl.program_id(0) >= spread) | (turns == 1):
        row, part, there = dealt(0, batch, parts, spread, bits, WIDE)
        request, prompt, seen, forgotten = _load_view(
            requests_ptr,
            lengths_ptr,
            prompts_ptr,
            row,
            there,
            requests_stride,
            lengths_stride,
            prompts_stride,
            pool,
            window,
            width,
            WIDE,
            UNIT,
        )
        if part == 0:
            tl.store(out_lengths_ptr + at(row, out_lengths_stride, UNIT), seen.to(tl.int32))
        # No condition on what was loaded before the table is read: it would delay the other loads.
        if there if FILL else row >= 0:
            _write_part(
                table_ptr,
                out_ptr,
                request,
                prompt,
                seen,
                forgotten,
                row,
                part * PART,
                columns,
                row_stride,
                width,
                out_row_stride,
                out_stride,
                WIDE,
                UNIT,
                FILL,
                PART,
            )
    else:
        lane = tl.arange(0, HAND)
        for turn in range(0, turns, HAND):
            row, part, there = dealt(turn + lane, batch, parts, spread, bits, WIDE)
            request, prompt, seen, forgotten = _load_view(
                requests_ptr,
                lengths_ptr,
                prompts_ptr,
                row,
                there,
                requests_stride,
                lengths_stride,
                prompts_stride,
                pool,
                window,
                width,
                WIDE,
                UNIT,
            )
            first = part * PART
            todo = tl.where(there if FILL else there & (first < seen), lane, HAND)
            current = tl.min(todo, 0)
            while current < HAND:
                chosen = lane == current
                _write_part(
                    table_ptr,
                    out_ptr,
                    pick(chosen, request),
                    pick(chosen, prompt),
                    pick(chosen, seen),
                    pick(chosen, forgotten),
                    pick(chosen, row),
                    pick(chosen, first),
                    columns,
                    row_stride,
                    width,
                    out_row_stride,
                    out_stride,
                    WIDE,
                    UNIT,
                    FILL,
                    PART,
                )
                todo = tl.where(chosen, HAND, todo)
                current = tl.min(todo, 0)


kernel = Launcher(prefill_aware_page_table_kernel, PART=_PART, HAND=HAND, num_warps=_WARPS)


def prefill_aware_page_table(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_lens: torch.Tensor,
    *,
    window: int,
    max_kv: int | None = None,
    out: torch.Tensor | None = None,
    out_lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """List the KV slots in sight of a decode step that keeps every prompt, in one launch.

    Parameters
    ----------
    req_to_token
        [pool, columns], int32 or int64, column stride 1, any row stride.
    req_pool_indices
        [batch], int32 or int64, any stride, any value.
    seq_lens
        [batch], int32 or int64, tokens, any stride, any value.
    prefill_lens
        [slots], slots at least pool, int32 or int64, tokens, any stride, any value.
    window
        Generated tokens in sight, not negative.
    max_kv
        Columns of a fresh table.
    out
        [batch, max_kv], int32, any stride: receives the slots; the rest of a row keeps its values.
        A fresh tensor, in which the rest is 0, if left out.
    out_lens
        [batch], int32, any stride: receives the lengths. A fresh tensor if left out.

    Returns
    -------
    tuple of torch.Tensor
        Table [batch, max_kv] and lengths [batch], int32; `out` and `out_lens` themselves if given.

    Raises
    ------
    Nothing of its own.

    Numerics
    --------
    Exact. Addresses are 64-bit; positions are counted in 32 bit while the columns of both tables
    stay below 2**30, where every sum that wraps is outside the table either way.

    Source
    ------
    Written from the formula; corresponds to SGLang's ``_build_pa_page_table``.
    """
    batch = req_pool_indices.shape[0]
    fill = out is None
    if out is None:
        out = torch.empty((batch, max_kv or 0), dtype=torch.int32, device=seq_lens.device)
    if out_lens is None:
        out_lens = torch.empty((batch,), dtype=torch.int32, device=seq_lens.device)
    if batch == 0:
        return out, out_lens
    pool, columns = req_to_token.shape
    width = out.shape[1]
    programs, parts, spread, turns, bits = deal(batch, width, _PART)
    requests_stride = req_pool_indices.stride(0)
    lengths_stride = seq_lens.stride(0)
    prompts_stride = prefill_lens.stride(0)
    out_row_stride, out_stride = out.stride()
    out_lengths_stride = out_lens.stride(0)
    kernel.launch(
        (programs, 1, 1),
        req_to_token,
        req_pool_indices,
        seq_lens,
        prefill_lens,
        out,
        out_lens,
        batch,
        parts,
        spread,
        turns,
        bits,
        pool,
        columns,
        req_to_token.stride(0),
        requests_stride,
        lengths_stride,
        prompts_stride,
        min(window, width),
        width,
        out_row_stride,
        out_stride,
        out_lengths_stride,
        max(columns, width, turns * spread) > REACH,
        requests_stride == lengths_stride == prompts_stride == out_stride == out_lengths_stride == 1,
        fill,
    )
    return out, out_lens
