"""The op ``attention.topk_to_slots_dcp``."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from opgraft.fused_op import BaseFusedOp
from opgraft.ops._arguments import require_rank
from opgraft.ops._dtypes import INDEX
from opgraft.ops._ragged import place
from opgraft.ops._samples import Arguments, Cases, Dtypes, integers, tensor
from opgraft.spec import EXACT, FormatSignature

__all__ = ["TopkToSlotsDcp"]


class TopkToSlotsDcp(BaseFusedOp):
    """Keep this rank's share of selected slots, compact, and count it.

    Under decode context parallelism rank r of W owns the slots that are r modulo W, and stores
    slot s at ``s // W``.

    Parameters
    ----------
    slots
        [tokens, k], int32 or int64, any stride: selected slots; a negative one is a hole.
    world_size
        Ranks, from 1 to 2**31 - 1.
    rank
        This rank, below `world_size`.

    Returns
    -------
    tuple of Tensor
        This rank's slots [tokens, k], int32: row by row in order, then -1; and their number
        [tokens], int32.

    Raises
    ------
    ArgumentTypeError
        If a dtype is another one, or an int is none.
    ArgumentValueError
        If a shape, a range or a device does not fit.

    Notes
    -----
    *Numerics.* Exact. A slot that int32 cannot hold wraps round.

    *Source.* Written from the formula; corresponds to the top-k filter of SGLang's decode context
    parallelism.

    Examples
    --------
    >>> import torch
    >>> from opgraft.ops import attention
    >>> slots, counts = attention.topk_to_slots_dcp(
    ...     torch.tensor([[8, 3, -1, 5], [2, 4, 6, 0]]), world_size=2, rank=1
    ... )
    >>> slots
    tensor([[ 1,  2, -1, -1],
            [-1, -1, -1, -1]], dtype=torch.int32)
    >>> counts
    tensor([2, 0], dtype=torch.int32)

    """

    op = "attention.topk_to_slots_dcp"
    format_signature = FormatSignature(
        supported_dtypes={"slots": INDEX},
        output_dtype=("int32", "int32"),
        description="Selected slots in; one rank's share of them and its size out.",
        shapes={"slots": ("tokens", "k")},
    )
    tolerance = EXACT
    deterministic = True
    sample_sizes: ClassVar[tuple[int, ...]] = (1, 2048, 2**17, 2**21)

    def forward_native(self, slots: Tensor, *, world_size: int, rank: int) -> tuple[Tensor, Tensor]:
        """Compute it from the formula, in plain torch."""
        owned = (slots >= 0) & (slots.remainder(world_size) == rank)
        local = slots.div(world_size, rounding_mode="floor").to(torch.int32)
        nothing = torch.full(slots.shape, -1, dtype=torch.int32, device=slots.device)
        compact = place(local, owned.cumsum(1) - 1, owned, into=nothing)
        return compact.contiguous(), owned.sum(1, dtype=torch.int32)

    def validate(self, slots: Tensor, *, world_size: int, rank: int) -> None:  # noqa: ARG002 - the op's parameters
        """Refuse a rank that the world does not have."""
        require_rank(self.op, world_size, rank)

    def sample(self, size: int, *, dtypes: Dtypes, generator: torch.Generator) -> Arguments:
        """Draw `size` slots, up to 2048 a row, filled from the left, for rank 1 of 4."""
        k = max(1, min(2048, size))
        tokens = size // k
        slots = integers(0, 2**20, (tokens, k), dtypes["slots"], generator)
        lengths = integers(0, k + 1, (tokens, 1), torch.int64, generator)
        return {"slots": slots.masked_fill_(torch.arange(k) > lengths, -1), "world_size": 4, "rank": 1}

    def edge_samples(self, *, dtypes: Dtypes, generator: torch.Generator) -> Cases:
        """Give the selections at which an implementation goes wrong."""
        dtype = dtypes["slots"]
        limits = torch.iinfo(dtype)
        slots = integers(-4, 90, (37, 131), dtype, generator)
        slots[5:9] = -1
        slots[9] = limits.min
        slots[10, ::2] = limits.max
        for world_size in (1, 2, 3, 8, 2**31 - 1):
            for rank in sorted({0, world_size // 2, world_size - 1}):
                yield (f"rank {rank} of {world_size}", {"slots": slots, "world_size": world_size, "rank": rank})
        wide = integers(-4, 2**20, (3, 2051), dtype, generator)
        yield "2051 columns", {"slots": wide, "world_size": 3, "rank": 2}
        yield "one column", {"slots": wide[:, :1].contiguous(), "world_size": 2, "rank": 0}
        yield "no rows", {"slots": slots[:0], "world_size": 2, "rank": 1}
        yield "no columns", {"slots": slots[:, :0].contiguous(), "world_size": 2, "rank": 1}
        ends = tensor([[limits.max, limits.min, -2, -1, 0]], dtype)
        yield "extremes", {"slots": ends, "world_size": 4, "rank": 3}
