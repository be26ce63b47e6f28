"""``attention.clamp_position`` from CUDA C++."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from opgraft_cuda.nvrtc import CudaSource, launch_function

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["clamp_position"]

_THREADS = 256
_ENTRY_POINTS = {torch.int32: ("contiguous_int32", "strided_int32"), torch.int64: ("contiguous_int64", "strided_int64")}
_SOURCE = CudaSource("clamp_position.cu")
_kept: dict[tuple[int, torch.dtype], tuple[Callable[..., None], int, int]] = {}

# Only CUDA builds of torch have these.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # noqa: SLF001
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001


def clamp_position(seq_lens: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Give the zero-based position of each request's newest token, in one launch.

    Parameters
    ----------
    seq_lens
        [batch], int32 or int64, tokens; any stride, any value; on a CUDA device.
    out
        [batch], int64, any stride: receives the positions. A fresh tensor if left out.

    Returns
    -------
    torch.Tensor
        [batch], int64, ``max(seq_lens, 1) - 1``; `out` itself if given.

    Raises
    ------
    opgraft.NotSupported
        Before anything is written, if the kernel cannot be compiled here.

    Numerics
    --------
    Exact. The maximum comes first, so that the smallest integer gives 0 rather than wrapping round.

    Source
    ------
    Written from the formula; corresponds to SGLang's ``clamp_position``.

    """
    if out is None:
        out = torch.empty_like(seq_lens, dtype=torch.int64, memory_format=torch.contiguous_format)
    size = seq_lens.numel()
    if size == 0:
        return out
    device = seq_lens.get_device()
    kept = _kept.get((device, seq_lens.dtype))
    if kept is None or _current_device() != device:
        with torch.cuda.device(device):
            if kept is None:
                contiguous, strided = _SOURCE.functions(device, *_ENTRY_POINTS[seq_lens.dtype])
                _kept[device, seq_lens.dtype] = launch_function(), contiguous, strided
            return clamp_position(seq_lens, out=out)
    launch, contiguous, strided = kept
    source, target = seq_lens.data_ptr(), out.data_ptr()
    stream = _raw_stream(device)
    # The contiguous kernel loads and stores 16 bytes at a time.
    if (source | target) & 15 == 0 and seq_lens.is_contiguous() and out.is_contiguous():
        blocks = (size + 2 * _THREADS - 1) // (2 * _THREADS)
        launch(contiguous, device, blocks, _THREADS, stream, source, target, size)
    else:
        blocks = (size + _THREADS - 1) // _THREADS
        steps = (seq_lens.stride(0), out.stride(0))
        launch(strided, device, blocks, _THREADS, stream, source, target, size, *steps)
    return out
