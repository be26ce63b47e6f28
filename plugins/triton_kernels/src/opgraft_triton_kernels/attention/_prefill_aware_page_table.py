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
from opgraft_triton_kernels.launcher import Launcher, unspecialized

__all__ = ["prefill_aware_page_table"]

# One H200, replayed graph, over a copy of the same bytes, for 1 and 8 rows of 131072, 64 of 32768, 256
# of 8192, 512 of 4096, and one of 131072 beside 255 of 64; part/warps 1024/2 1.34 1.17 1.12 1.12 1.09
# 1.48, 1024/1 1.34 1.20 1.18 1.14 1.12 1.50, 512/1 1.36 1.19 1.19 1.17 1.20 1.65, 2048/4 1.28 1.16 1.15
# 1.10 1.08 1.65, or 1.48 with half the programs; but 256 rows with 2000 positions in sight of 92000, in a
# table of 16384, take 2.2 instead of 1.6.
_PART = 1024
_WARPS = 2


@triton.jit
def _load_request(requests_ptr, lengths_ptr, row, there, requests_stride, lengths_stride, pool, UNIT: tl.constexpr):
    """Give each row's request, or -1, and its length."""
    request = tl.load(requests_ptr + at(row, requests_stride, UNIT), mask=there, other=-1)
    length = tl.load(lengths_ptr + at(row, lengths_stride, UNIT), mask=there, other=0)
    request = narrowed(tl.where(within(request, pool), request, -1), WIDE=False)
    return request, tl.maximum(length, 0)


@triton.jit
def _load_view(
    prompts_ptr, request, length, there, prompts_stride, window, width, WIDE: tl.constexpr, UNIT: tl.constexpr
):
    """Give each row's prompt length, positions in sight and positions forgotten."""
    prompt_ptr = prompts_ptr + at(request, prompts_stride, UNIT)
    prompt = tl.load(prompt_ptr, mask=there & (request >= 0), other=0)
    prompt = tl.minimum(tl.maximum(prompt, 0), length)
    seen = prompt + tl.minimum(length - prompt, counted(window, WIDE))
    seen = tl.minimum(seen, counted(width, WIDE))
    return narrowed(prompt, WIDE), narrowed(seen, WIDE), narrowed(length - seen, WIDE)


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


@unspecialized
def prefill_aware_page_table_kernel(
    requests_ptr,
    lengths_ptr,
    prompts_ptr,
    batch: tl.int32,
    parts: tl.int32,
    dealers: tl.int32,
    turns: tl.int32,
    bits: tl.int32,
    table_ptr,
    out_ptr,
    row_stride: tl.int64,
    out_row_stride: tl.int64,
    pool: tl.int64,
    window: tl.int64,
    width: tl.int64,
    columns: tl.int64,
    out_lengths_ptr,
    requests_stride: tl.int64,
    lengths_stride: tl.int64,
    prompts_stride: tl.int64,
    out_stride: tl.int64,
    out_lengths_stride: tl.int64,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
    FILL: tl.constexpr,
    PART: tl.constexpr,
    HAND: tl.constexpr,
) -> None:
    if (tl.program_id(0) >= dealers) | (turns == 1):
        row, part, there = dealt(0, batch, parts, dealers, bits, WIDE)
        request, length = _load_request(
            requests_ptr, lengths_ptr, row, there, requests_stride, lengths_stride, pool, UNIT
        )
        prompt, seen, forgotten = _load_view(
            prompts_ptr, request, length, there, prompts_stride, window, width, WIDE, UNIT
        )
        if there & (part == 0):
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
            row, part, there = dealt(turn + lane, batch, parts, dealers, bits, WIDE)
            request, length = _load_request(
                requests_ptr, lengths_ptr, row, there, requests_stride, lengths_stride, pool, UNIT
            )
            first = part * PART
            if not FILL:
                # As many as can exist at all: known while the prompts, which say how many do, are on
                # their way.
                there = there & (first < length)
            prompt, seen, forgotten = _load_view(
                prompts_ptr, request, length, there, prompts_stride, window, width, WIDE, UNIT
            )
            todo = tl.where(there, lane, HAND)
            current = tl.min(todo, 0)
            while current < HAND:
                chosen = lane == current
                begin = pick(chosen, first)
                end = pick(chosen, seen)
                if FILL or begin < end:
                    _write_part(
                        table_ptr,
                        out_ptr,
                        pick(chosen, request),
                        pick(chosen, prompt),
                        end,
                        pick(chosen, forgotten),
                        pick(chosen, row),
                        begin,
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
    grid, parts, dealers, turns, bits = deal(batch, width, _PART)
    requests_stride = req_pool_indices.stride(0)
    lengths_stride = seq_lens.stride(0)
    prompts_stride = prefill_lens.stride(0)
    out_row_stride, out_stride = out.stride()
    out_lengths_stride = out_lens.stride(0)
    kernel.launch(
        grid,
        req_pool_indices,
        seq_lens,
        prefill_lens,
        batch,
        parts,
        dealers,
        turns,
        bits,
        req_to_token,
        out,
        req_to_token.stride(0),
        out_row_stride,
        pool,
        min(window, width),
        width,
        columns,
        out_lens,
        requests_stride,
        lengths_stride,
        prompts_stride,
        out_stride,
        out_lengths_stride,
        max(columns, width, turns * dealers) > REACH,
        requests_stride == lengths_stride == prompts_stride == out_stride == out_lengths_stride == 1,
        fill,
    )
    return out, out_lens
