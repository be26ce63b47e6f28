"""Index and page-table ops of paged attention, each callable as a plain function."""

from __future__ import annotations

from opgraft.fused_op import publish
from opgraft.ops.attention._block_table import BlockTable
from opgraft.ops.attention._clamp_position import ClampPosition
from opgraft.ops.attention._compact_valid_indices import CompactValidIndices
from opgraft.ops.attention._cp_interleave_split import CpInterleaveSplit
from opgraft.ops.attention._csr_kv_indices import CsrKvIndices
from opgraft.ops.attention._extend_positions import ExtendPositions
from opgraft.ops.attention._prefill_aware_page_table import PrefillAwarePageTable
from opgraft.ops.attention._seqlens_expand import SeqlensExpand
from opgraft.ops.attention._topk_to_slots import TopkToSlots
from opgraft.ops.attention._topk_to_slots_dcp import TopkToSlotsDcp
from opgraft.ops.attention._topk_valid_length import TopkValidLength

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

block_table = publish(BlockTable)
clamp_position = publish(ClampPosition)
compact_valid_indices = publish(CompactValidIndices)
cp_interleave_split = publish(CpInterleaveSplit)
csr_kv_indices = publish(CsrKvIndices)
extend_positions = publish(ExtendPositions)
prefill_aware_page_table = publish(PrefillAwarePageTable)
seqlens_expand = publish(SeqlensExpand)
topk_to_slots = publish(TopkToSlots)
topk_to_slots_dcp = publish(TopkToSlotsDcp)
topk_valid_length = publish(TopkValidLength)
