"""The OpenCL kernel of `attention.clamp_position`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from opgraft_opencl.device import launch

if TYPE_CHECKING:
    from torch import Tensor

_SOURCE: Final = """
kernel void clamp_position(global const LENGTH *seq_lens, long seq_lens_stride,
                           global long *out, long out_stride)
{
    const long request = get_global_id(0);
    const LENGTH length = max(seq_lens[request * seq_lens_stride], (LENGTH)1);
    out[request * out_stride] = (long)length - 1;
}
"""
_C_TYPES: Final = {torch.int32: "int", torch.int64: "long"}


def clamp_position(seq_lens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Give the zero-based position of the newest token of each request.

    Parameters
    ----------
    seq_lens
        ``[batch]``, int32 or int64, in tokens, on the CPU, of any stride.
    out
        ``[batch]``, int64, on the CPU, of any stride but 0: receives the result.

    Returns
    -------
    Tensor
        ``[batch]``, int64: ``max(seq_lens, 1) - 1``; `out` itself where it is given.

    Raises
    ------
    opgraft.NotSupported
        If no OpenCL device can be used in this process.

    Notes
    -----
    *Numerics.* Exact: the maximum is taken before the subtraction, so the smallest integer does
    not wrap.

    *Source.* Written from the formula of the op.

    """
    if out is None:
        out = torch.empty(seq_lens.shape, dtype=torch.int64, device=seq_lens.device)
    if seq_lens.numel():
        launch(
            _SOURCE,
            "clamp_position",
            options=f"-D LENGTH={_C_TYPES[seq_lens.dtype]}",
            count=seq_lens.numel(),
            inputs=[seq_lens],
            outputs=[out],
        )
    return out
