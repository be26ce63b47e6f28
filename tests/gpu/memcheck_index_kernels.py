"""Run the index kernels on every edge case, each tensor in an allocation of its own, for a memory checker.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=tests:tests/gpu compute-sanitizer --tool memcheck \
        --error-exitcode 1 python3 tests/gpu/memcheck_index_kernels.py
"""

from __future__ import annotations

import sys

import index_cases
import torch
from test_index_kernels_gpu import NAMES, moved, rows

from opgraft_triton_kernels import attention

MOST = 20_000
WIDE_BATCH = 300
WIDE_TABLE = 5000
# The last batch is so wide that programs share its parts.
LENGTHS = ([5000], [64] * 20 + [9000] + [64] * 20, [3000] * 40, [64] * 150 + [9000] + [10] * 149)


def main() -> int:
    """Make the calls and say how many they were."""
    calls = 0
    for name in NAMES:
        dtypes = next(index_cases.dtype_mixes(name))
        for _, arguments in index_cases.edge_cases(name, dtypes):
            if all(value.numel() <= MOST for value in arguments.values() if isinstance(value, torch.Tensor)):
                getattr(attention, name)(**moved(arguments))
                calls += 1
    for name in ("csr_kv_indices", "block_table", "prefill_aware_page_table"):
        for lengths in LENGTHS:
            longest = max(lengths)
            widths = {
                "csr_kv_indices": sum(lengths),
                "block_table": longest // 64 + 1 if len(lengths) < WIDE_BATCH else WIDE_TABLE,
            }
            getattr(attention, name)(**moved(rows(name, lengths, widths.get(name, longest), longest)))
            calls += 1
    torch.cuda.synchronize()
    sys.stdout.write(f"{calls} calls\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
