"""Index arithmetic on runs of unequal length, laid end to end or with gaps.

Everything here has sizes that the host knows, so that it neither reads a value back from the
device nor depends on one while a graph is captured or traced. All of it is 64-bit: products and
sums of 32-bit indices do not fit 32 bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["FAR", "counts_before", "deliver", "place", "spread", "within_reach"]

FAR = 2**61
"""Beyond every real position; a few of them still add up in 64 bit."""


def within_reach(values: Tensor, low: int = -FAR) -> Tensor:
    """Widen to int64 and keep within `FAR`, so that sums of a few cannot wrap round."""
    return values.to(torch.int64).clamp(low, FAR)


def counts_before(counts: Tensor) -> Tensor:
    """Sum all earlier counts, and at the end all of them: [n] gives [n + 1]."""
    return functional.pad(counts.cumsum(0, dtype=torch.int64), (1, 0))


def spread(lengths: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Say for each of `total` places in which run it lies, and where in that run.

    Parameters
    ----------
    lengths
        [n], n at least 1, int64, not negative: the runs, laid end to end.
    total
        Number of places; runs beyond it are cut off.

    Returns
    -------
    tuple of Tensor
        Run, rank within the run, and whether any run covers the place, [total] each.

    """
    bounded = lengths.clamp(max=total)
    ends = bounded.cumsum(0)
    places = torch.arange(total, device=lengths.device)
    run = torch.searchsorted(ends, places, right=True)
    covered = run < lengths.shape[0]
    run = run.clamp(max=lengths.shape[0] - 1)
    return run, places - (ends - bounded)[run], covered


def place(values: Tensor, destinations: Tensor, kept: Tensor, into: Tensor) -> Tensor:
    """Copy `into`, with every kept value at its destination along the last dimension.

    Destinations beyond either end are dropped. Nothing depends on how many are kept.
    """
    size = into.shape[-1]
    fits = kept & (destinations >= 0) & (destinations < size)
    room = functional.pad(into, (0, 1))
    room.scatter_(-1, torch.where(fits, destinations, size), values.to(into.dtype))
    return room[..., :size]


def deliver(result: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Give the result in the caller's buffer, or contiguous and of the dtype where there is none.

    An id that the dtype cannot hold wraps round, as an integer cast does.
    """
    if out is None:
        return result.to(dtype).contiguous()
    return out.copy_(result)
