"""Statements 98 to 105: what ran."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from simulated import offer, registry_on
from torch import Tensor

from opgraft import ANY, BaseFusedOp, KernelBackend, NotSupported
from opgraft.tracing import Trace, TraceRecord

X = torch.ones(2, 3)


class Scale(BaseFusedOp):
    op = "trace.scale"
    capabilities = {KernelBackend.JIT: ANY}

    def forward_native(self, x: Tensor, *, out: Tensor | None = None, power: int = 1):
        return "native"

    def forward_jit(self, x, *, out=None, power=1):
        return "jit"

    def forward_cuda(self, x, *, out=None, power=1):
        return "cuda"


class Native(BaseFusedOp):
    def forward_native(self, x):
        return "native"

    def forward_cuda(self, x):
        return "cuda"


def labels(op, *calls):
    with op.registry.tracing(Trace()) as trace:
        for call in calls:
            call(op)
    return [record.kernel for record in trace]


def test_098_nothing_is_recorded_by_default():
    op = Scale().attach(registry_on())
    op(X)

    assert [] == op.registry.process_trace.records


def test_099_one_record_a_call_with_every_tensor_argument():
    op = Scale().attach(registry_on())

    with op.registry.tracing(Trace()) as trace:
        op(X, out=torch.empty(0, dtype=torch.int64), power=2)
        op(torch.tensor(1, dtype=torch.bfloat16))
    op(X)

    assert [
        TraceRecord(op="trace.scale", kernel="op/jit", tensors=("torch.float32[2, 3]", "torch.int64[0]")),
        TraceRecord(op="trace.scale", kernel="op/jit", tensors=("torch.bfloat16[]",)),
    ] == trace.records


def test_099_a_handle_that_has_kept_its_choice_is_recorded_too():
    registry = registry_on()
    Scale.publish(registry)
    function = registry.handle(Scale.op).function
    function(X)
    function(X)

    with registry.tracing(Trace()) as trace:
        function(X)
        function(X)
    function(X)

    assert ["op/jit"] * 2 == [record.kernel for record in trace]


def test_099_a_process_may_trace_from_its_environment_and_tells_at_its_end():
    code = (
        "import torch, opgraft\n"
        "for _ in range(3): opgraft.ops.attention.clamp_position(torch.tensor([1]))\n"
        "print([record.kernel for record in opgraft.get_trace()])"
    )
    environment = os.environ | {"OPGRAFT_TRACE": "1", "OPGRAFT_PLUGINS": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment, text=True)

    assert "['native', 'native', 'native']\n" == done.stdout
    assert (
        "calls  op                        kernel  tensors\n3      attention.clamp_position  native  torch.int64[1]\n"
    ) == done.stderr


def test_100_the_label_is_the_selector_or_the_key_of_a_platform_method():
    cuda, cpu, acme = (registry_on(platform) for platform in ("cuda", "cpu", "acme"))
    acme.register_oot(Native, lambda op, x: "registered", "acme")

    assert ["op/jit", "native", "op/jit"] == labels(
        Scale().attach(cpu), lambda op: op(X), lambda op: op(X, backend="torch"), lambda op: op(X, backend="jit")
    )
    assert ["cuda", "native"] == labels(Native().attach(cuda), lambda op: op(X), lambda op: op(X, backend="native"))
    assert ["native"] == labels(Native().attach(cpu), lambda op: op(X))
    assert ["<lambda>"] == labels(Native().attach(acme), lambda op: op(X))


def test_100_a_backends_kernel_is_labelled_by_its_selector():
    op = Scale().attach(registry_on())
    offer(op.registry, op.op, lambda x, **_: "there", priority=99, name="fast")

    assert ["there/jit"] == labels(op, lambda op: op(X))


def test_101_a_gated_call_is_recorded_once_with_what_ran():
    op = Scale().attach(registry_on())
    offer(op.registry, op.op, lambda x, **_: "there", priority=99, rejects=lambda x, **_: "odd" if len(x) % 2 else None)

    assert ["there/jit", "op/jit"] == labels(op, lambda op: op(X), lambda op: op(torch.ones(1)))


def test_102_a_fallback_records_the_path_that_succeeded_alone():
    def later(x, **_):
        raise NotSupported("later")

    op = Scale().attach(registry_on(OPGRAFT_FORCE="there"))
    offer(op.registry, op.op, later)

    assert ["op/jit"] == labels(op, lambda op: op(X))


def test_103_a_call_that_raises_leaves_no_record():
    class Raises(Native):
        def forward_native(self, x):
            raise ValueError("here")

    op = Raises().attach(registry_on())

    with op.registry.tracing(Trace()) as trace, pytest.raises(ValueError, match="here"):
        op(X)

    assert [] == trace.records


def test_104_records_are_a_copy_and_clear_empties():
    trace = Trace()
    record = TraceRecord(op="a.b", kernel="native", tensors=())
    trace.add(record)
    trace.records.clear()

    assert ([record], [record], 1) == (trace.records, list(trace), len(trace))

    trace.clear()

    assert ([], [], 0) == (trace.records, trace.summary(), len(trace))


def test_105_the_buffer_is_bounded_and_drops_the_oldest_while_counts_go_on():
    trace = Trace(capacity=2)
    records = [TraceRecord(op="a.b", kernel=f"k{one}", tensors=()) for one in range(3)]
    for record in records:
        trace.add(record)

    assert records[1:] == trace.records
    assert ["k0", "k1", "k2"] == [row["kernel"] for row in trace.summary()]


def test_105_threads_may_trace_at_once():
    op = Scale().attach(registry_on())
    op(X)

    def call():
        for _ in range(200):
            op(X)

    with op.registry.tracing(Trace(capacity=1000)) as trace:
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert (800, 800) == (len(trace), trace.summary()[0]["calls"])
