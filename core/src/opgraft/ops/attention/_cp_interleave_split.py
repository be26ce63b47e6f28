"""The op ``attention.cp_interleave_split``."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from opgraft.fused_op import BaseFusedOp
from opgraft.ops._arguments import INT64_MAX, INT64_MIN, require_rank
from opgraft.ops._dtypes import INDEX
from opgraft.ops._ragged import counts_before, place
from opgraft.ops._samples import Arguments, Cases, Dtypes, integers, tensor
from opgraft.spec import EXACT, FormatSignature

__all__ = ["CpInterleaveSplit"]


class CpInterleaveSplit(BaseFusedOp):
    """Say how many tokens of each request a rank of an interleaved split owns.

    The tokens of all requests lie end to end; rank r of W owns every token whose place is r modulo
    W. Requests of which it owns none are left out.

    Parameters
    ----------
    extend_lens
        [batch], int32 or int64, tokens; below 0 as 0.
    world_size
        Ranks, from 1 to 2**31 - 1.
    rank
        This rank, below `world_size`.

    Returns
    -------
    tuple of Tensor
        Shares [batch], of the dtype of `extend_lens`: owned tokens of each request that has any,
        in order, then 0; and the requests they belong to [batch], int32, then -1.

    Raises
    ------
    ArgumentTypeError
        If a dtype is another one, or an int is none.
    ArgumentValueError
        If a shape, a range or a device does not fit.

    Notes
    -----
    *Numerics.* Exact: the places of the requests are summed modulo W, which cannot overflow.

    *Source.* Written from the formula; corresponds to the interleaved context-parallel split of
    SGLang.

    Examples
    --------
    >>> import torch
    >>> from opgraft.ops import attention
    >>> shares, requests = attention.cp_interleave_split(torch.tensor([5, 1, 4]), world_size=2, rank=0)
    >>> shares
    tensor([3, 2, 0])
    >>> requests
    tensor([ 0,  2, -1], dtype=torch.int32)

    """

    op = "attention.cp_interleave_split"
    format_signature = FormatSignature(
        supported_dtypes={"extend_lens": INDEX},
        output_dtype=("like:extend_lens", "int32"),
        description="Lengths of requests in; one rank's shares and whose they are out.",
        shapes={"extend_lens": ("batch",)},
    )
    tolerance = EXACT
    deterministic = True
    sample_sizes: ClassVar[tuple[int, ...]] = (1, 64, 512, 4096)

    def forward_native(self, extend_lens: Tensor, *, world_size: int, rank: int) -> tuple[Tensor, Tensor]:
        """Compute it from the formula, in plain torch."""
        lengths = extend_lens.to(torch.int64).clamp(min=0)
        begins = counts_before(lengths.remainder(world_size))[:-1]
        # Distance from a request's first token to the first one that this rank owns.
        skipped = (rank - begins).remainder(world_size)
        shares = (lengths - skipped - 1).div(world_size, rounding_mode="floor") + 1
        owned = shares > 0
        order = owned.cumsum(0) - 1
        requests = torch.arange(lengths.shape[0], device=lengths.device)
        nothing = torch.zeros_like(lengths)
        compact = place(shares, order, owned, into=nothing).to(extend_lens.dtype)
        owners = place(requests, order, owned, into=nothing - 1).to(torch.int32)
        return compact.contiguous(), owners

    def validate(self, extend_lens: Tensor, *, world_size: int, rank: int) -> None:  # noqa: ARG002 - the op's parameters
        """Refuse a rank that the world does not have."""
        require_rank(self.op, world_size, rank)

    def sample(self, size: int, *, dtypes: Dtypes, generator: torch.Generator) -> Arguments:
        """Draw the lengths of `size` requests, some shorter than the world, for rank 1 of 4."""
        short = integers(0, 8, (size,), dtypes["extend_lens"], generator)
        long = integers(0, 4096, (size,), dtypes["extend_lens"], generator)
        chosen = integers(0, 2, (size,), torch.int64, generator) == 0
        return {"extend_lens": torch.where(chosen, short, long), "world_size": 4, "rank": 1}

    def edge_samples(self, *, dtypes: Dtypes, generator: torch.Generator) -> Cases:
        """Give the batches at which an implementation goes wrong."""
        dtype = dtypes["extend_lens"]
        mixed = integers(-2, 9, (1031,), dtype, generator)
        batches = {
            "mixed": mixed,
            "ones": torch.ones(17, dtype=dtype),
            "empty requests": tensor([0, 5, 0, 0, -3, 1, INT64_MIN], dtype),
            "all empty": tensor([0, -1, 0], dtype),
            "no requests": mixed[:0],
            "extremes": tensor([INT64_MAX, 1, INT64_MAX, 2, INT64_MAX], dtype),
        }
        for name, lengths in batches.items():
            for world_size in (1, 2, 3, 8, 2**31 - 1):
                for rank in sorted({0, world_size // 2, world_size - 1}):
                    yield (
                        f"{name}, rank {rank} of {world_size}",
                        {"extend_lens": lengths, "world_size": world_size, "rank": rank},
                    )
