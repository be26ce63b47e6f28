"""The op ``attention.compact_valid_indices``."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from opgraft.fused_op import BaseFusedOp
from opgraft.ops._dtypes import INDEX, INT32
from opgraft.ops._ragged import counts_before, place, within_reach
from opgraft.ops._samples import Arguments, Cases, Dtypes, integers, tensor
from opgraft.spec import EXACT, FormatSignature

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CompactValidIndices"]


class CompactValidIndices(BaseFusedOp):
    """Turn a rectangular selection with holes into one stream, CSR fashion.

    Parameters
    ----------
    indices
        [rows, columns], int32 or int64, any stride: selected indices; a negative one is a hole.
    indptr
        [rows + 1], int32 or int64: place of each row's first valid index, ascending. Counted here
        where left out. Only the first `rows` entries are used; what overlapping rows give is
        undefined.
    out
        [capacity], int32, any stride: receives the indices. What would lie beyond it is
        dropped; the rest keeps its values.

    Returns
    -------
    tuple of Tensor
        Places [rows + 1], int32: the prefix sum of the rows' counts, or a copy of `indptr`; and
        the valid indices of all rows, in order, [rows * columns], int32, the rest -1, or `out`
        itself.

    Raises
    ------
    ArgumentTypeError
        If a dtype is another one.
    ArgumentValueError
        If a shape or device does not fit.

    Notes
    -----
    *Numerics.* Exact. An index that int32 cannot hold wraps round.

    *Source.* Written from the formula; corresponds to ``get_valid_kv_indices`` of SGLang.

    Examples
    --------
    >>> import torch
    >>> from opgraft.ops import attention
    >>> places, values = attention.compact_valid_indices(torch.tensor([[5, -1, 7], [-1, -1, 9]]))
    >>> places
    tensor([0, 2, 3], dtype=torch.int32)
    >>> values
    tensor([ 5,  7,  9, -1, -1, -1], dtype=torch.int32)

    """

    op = "attention.compact_valid_indices"
    format_signature = FormatSignature(
        supported_dtypes={"indices": INDEX, "indptr": INDEX, "out": INT32},
        output_dtype=("int32", "int32"),
        description="A selection with holes in; places and one stream of valid indices out.",
        shapes={"indices": ("rows", "columns"), "indptr": ("rows + 1",), "out": ("capacity",)},
    )
    writes: ClassVar[Mapping[str, int]] = {"out": 1}
    tolerance = EXACT
    deterministic = True
    sample_sizes: ClassVar[tuple[int, ...]] = (1, 2048, 2**17, 2**21)

    def forward_native(
        self, indices: Tensor, indptr: Tensor | None = None, *, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute it from the formula, in plain torch."""
        valid = indices >= 0
        if indptr is None:
            begins = counts_before(valid.sum(1))
            places = begins.to(torch.int32)
        else:
            begins = within_reach(indptr)
            places = indptr.to(torch.int32, copy=True).contiguous()
        if out is None:
            size = indices.shape[0] * indices.shape[1]
            out = torch.full((size,), -1, dtype=torch.int32, device=indices.device)
        destinations = begins[:-1, None] + (valid.cumsum(1) - 1)
        values = place(indices.flatten(), destinations.flatten(), valid.flatten(), into=out)
        return places, out.copy_(values)

    def sample(self, size: int, *, dtypes: Dtypes, generator: torch.Generator) -> Arguments:
        """Draw `size` entries, up to 2048 a row, filled from the left to a random length."""
        columns = max(1, min(2048, size))
        rows = size // columns
        selected = integers(0, 2**20, (rows, columns), dtypes["indices"], generator)
        lengths = integers(0, columns + 1, (rows, 1), torch.int64, generator)
        return {"indices": selected.masked_fill_(torch.arange(columns) > lengths, -1)}

    def edge_samples(self, *, dtypes: Dtypes, generator: torch.Generator) -> Cases:
        """Give the selections at which an implementation goes wrong."""
        dtype = dtypes["indices"]
        low, high = torch.iinfo(dtype).min, 2**31 - 1

        def canary(size: int) -> Tensor:
            return torch.full((size,), -77, dtype=torch.int32)

        def indptr(*values: int) -> Tensor:
            return tensor(list(values), dtypes["indptr"])

        for columns in (1, 31, 512, 2048, 2051):
            selected = integers(-2, 5, (3, columns), dtype, generator)
            yield f"{columns} columns", {"indices": selected}
            yield f"{columns} columns, buffer", {"indices": selected, "out": canary(3 * columns)}
        small = tensor([[-1, 3, -2, 0], [low, -1, -1, -7], [high, 8, 9, 0]], dtype)
        yield "no rows", {"indices": small[:0]}
        yield "no rows, buffer", {"indices": small[:0], "out": canary(3)}
        yield "no columns", {"indices": small[:, :0].contiguous()}
        yield ("no columns, places given", {"indices": small[:, :0].contiguous(), "indptr": indptr(4, 5, 6, 7)})
        yield "other negatives", {"indices": small}
        yield "all holes", {"indices": torch.full((4, 9), -1, dtype=dtype)}
        yield "no holes", {"indices": integers(0, 99, (4, 9), dtype, generator)}
        yield "narrow buffer", {"indices": small, "out": canary(5)}
        yield "wide buffer", {"indices": small, "out": canary(40)}
        yield "no buffer at all", {"indices": small, "out": canary(0)}
        yield "places given", {"indices": small, "indptr": indptr(0, 2, 2, 6)}
        yield "gaps", {"indices": small, "indptr": indptr(3, 7, 9, 20), "out": canary(15)}
        yield ("places outside", {"indices": small, "indptr": indptr(-1, 3, 10, 20), "out": canary(12)})
        yield (
            "places far outside",
            {"indices": small, "indptr": tensor([-(2**63), 3, 2**63 - 1, 0], dtypes["indptr"])},
        )
        yield "many rows", {"indices": integers(-3, 9, (1031, 5), dtype, generator)}
