"""Triton kernels of the ops of the group ``attention``, by the ops' names."""

from __future__ import annotations

from opgraft_triton_kernels.attention._block_table import block_table
from opgraft_triton_kernels.attention._clamp_position import clamp_position
from opgraft_triton_kernels.attention._compact_valid_indices import compact_valid_indices
from opgraft_triton_kernels.attention._cp_interleave_split import cp_interleave_split
from opgraft_triton_kernels.attention._csr_kv_indices import csr_kv_indices
from opgraft_triton_kernels.attention._extend_positions import extend_positions
from opgraft_triton_kernels.attention._prefill_aware_page_table import prefill_aware_page_table
from opgraft_triton_kernels.attention._seqlens_expand import seqlens_expand
from opgraft_triton_kernels.attention._topk_to_slots import topk_to_slots
from opgraft_triton_kernels.attention._topk_to_slots_dcp import topk_to_slots_dcp
from opgraft_triton_kernels.attention._topk_valid_length import topk_valid_length

__all__ = [
    "block_table",
    "clamp_position",
    "compact_valid_indices",
    "cp_interleave_split",
    "csr_kv_indices",
    "extend_positions",
    "prefill_aware_page_table",
    "seqlens_expand",
    "topk_to_slots",
    "topk_to_slots_dcp",
    "topk_valid_length",
]
