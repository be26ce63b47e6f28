"""Traces by themselves: nested, counted, printed. What is recorded of a call is among the statements."""

from __future__ import annotations

import torch
from simulated import registry_on

from opgraft import BaseFusedOp
from opgraft.tracing import Trace, TraceRecord

X = torch.ones(2, 3)


class Scale(BaseFusedOp):
    def forward_native(self, x):
        return x


def test_traces_nest_and_each_records_for_itself():
    op = Scale().attach(registry_on())

    with op.registry.tracing(Trace()) as outer:
        op(X)
        with op.registry.tracing(Trace()) as inner:
            op(X)
        op(X)

    assert (3, 1, ()) == (len(outer), len(inner), op.registry.traces)


def test_the_summary_counts_and_prints_as_a_table_and_as_json():
    trace = Trace()
    for _ in range(12):
        trace.add(TraceRecord(op="attention.clamp_position", kernel="cuda/triton", tensors=("torch.int32[64]",)))
    trace.add(TraceRecord(op="a.b", kernel="native", tensors=("torch.int32[1]", "torch.int64[1]")))

    assert (
        "calls  op                        kernel       tensors\n"
        "12     attention.clamp_position  cuda/triton  torch.int32[64]\n"
        "1      a.b                       native       torch.int32[1], torch.int64[1]"
    ) == str(trace)
    assert (
        '[{"op": "attention.clamp_position", "kernel": "cuda/triton", "tensors": ["torch.int32[64]"], "calls": 12}, '
        '{"op": "a.b", "kernel": "native", "tensors": ["torch.int32[1]", "torch.int64[1]"], "calls": 1}]'
    ) == trace.to_json()
