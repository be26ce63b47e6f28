"""Statements 71 to 84: what is decided once, and what for each call."""

from __future__ import annotations

import threading
import timeit

import pytest
import torch
from simulated import SimulatedDetector, offer, registry_on
from torch import Tensor

from opgraft import ANY, BaseFusedOp, CapabilityRequirement, KernelBackend, NoKernelError
from opgraft.compat import MultiPlatformOp
from opgraft.kernel_registry import KernelRegistry
from opgraft.policy import PolicyStore

X = torch.tensor([1], dtype=torch.int32)


class Scale(BaseFusedOp):
    op = "caching.scale"
    capabilities = {KernelBackend.JIT: ANY}

    def forward_native(self, x: Tensor):
        return "native"

    def forward_jit(self, x: Tensor):
        return "jit"

    def forward_triton(self, x: Tensor):
        return "triton"


class Counted(Scale):
    """Counts how often it is asked for its kernels, which every choice begins with."""

    op = "caching.counted"
    choices = 0

    def own_kernels(self, platform=""):
        self.choices += 1
        return super().own_kernels(platform)


def test_071_a_choice_is_made_once():
    op = Counted().attach(registry_on())
    op(X)
    once = op.choices

    op(X)
    op(torch.zeros(5, dtype=torch.int32))

    assert once == op.choices > 0


@pytest.mark.parametrize("other", [X.to(torch.int64), X.to("meta"), X.float().requires_grad_()])
def test_071_another_dtype_device_or_gradient_is_another_choice(other):
    op = Counted().attach(registry_on())
    op(X)
    once = op.choices

    op(other)

    assert once < op.choices


def test_071_steady_state_asks_no_detector():
    registry = registry_on()
    Scale.publish(registry)
    function = registry.handle(Scale.op).function
    function(X)
    registry.detector.asked.clear()

    for call in (function, function.op):
        call(X)

    assert [] == registry.detector.asked


def test_072_a_pin_is_honoured_and_not_overwritten():
    registry = registry_on()
    Scale.publish(registry)
    function = registry.handle(Scale.op).function

    assert "jit" == function(X)

    function.op.pin(KernelBackend.TRITON)

    assert ["triton"] * 4 == [function(X), function(X), function.op(X), function(X)]
    with registry.policy.use(force="native", order="native"):
        assert "triton" == function(X)

    function.op.unpin()

    assert "jit" == function(X)


def test_072_a_pin_before_the_first_call_holds_and_is_strict():
    op = Scale().attach(registry_on())
    op.pin("aot")

    with pytest.raises(NoKernelError, match=r"^no kernel can run 'caching.scale' by selector 'aot' with x: int32"):
        op(X)


class Gated(Scale):
    op = "caching.gated"

    def rejects(self, kernel_backend, x):
        assert kernel_backend is KernelBackend.JIT
        return f"{x.shape[-1]} columns are odd" if x.shape[-1] % 2 else None

    def forward_cuda(self, x):
        return "cuda"


def test_073_a_gate_is_asked_for_each_call():
    op = Gated().attach(registry_on())

    assert ["jit", "native", "jit"] == [op(torch.zeros(width)) for width in (2, 3, 4)]


def test_074_without_a_gate_capabilities_alone_decide():
    class OnCuda(Scale):
        capabilities = {KernelBackend.JIT: CapabilityRequirement.CUDA}

    assert ("jit", "native") == (OnCuda().attach(registry_on("cuda"))(X), OnCuda().attach(registry_on("npu"))(X))


def test_075_a_gate_never_bypasses_capabilities():
    class Willing(Scale):
        capabilities = {KernelBackend.JIT: CapabilityRequirement.CUDA}

        def rejects(self, kernel_backend, x):
            return None

    assert "native" == Willing().attach(registry_on("npu"))(X)


def test_075_in_the_older_contract_a_gate_may_defer_to_its_base():
    with pytest.warns(DeprecationWarning, match=r"^Legacy: "):

        class Legacy(MultiPlatformOp):
            capabilities = {KernelBackend.JIT: ANY}

            def forward_native(self, x):
                return "native"

            def forward_jit(self, x):
                return "jit"

            def backend_eligible(self, backend, x):
                return super().backend_eligible(backend, x) and len(x) % 2 == 0

    op = Legacy().attach(registry_on())

    assert ("jit", "native") == (op(torch.zeros(2)), op(X))
    assert "rejected: backend_eligible(jit) is False" in str(op.dispatcher.explain((X,)))


def test_076_where_no_gated_kernel_is_left_the_platform_method_then_native_runs():
    assert ("cuda", "native") == (Gated().attach(registry_on("cuda"))(X), Gated().attach(registry_on("npu"))(X))


def test_077_a_gate_without_candidates_is_not_asked():
    class Alone(BaseFusedOp):
        def forward_native(self, x):
            return "native"

        def rejects(self, kernel_backend, x):
            raise AssertionError("asked")

    assert "native" == Alone().attach(registry_on())(X)


class Asks(Gated):
    def rejects(self, kernel_backend, x):
        raise AssertionError("asked")


@pytest.mark.parametrize(
    ("op_class", "platform", "expected"), [(Asks, "cpu", "jit"), (Scale, "meta", None), (Gated, "cuda", "jit")]
)
def test_078_the_automatic_choice_is_told_from_capabilities_alone(op_class, platform, expected):
    assert expected == op_class().attach(registry_on(platform)).auto_selected_backend()


def test_078_none_where_a_platform_method_or_native_would_run():
    class Plain(BaseFusedOp):
        def forward_native(self, x):
            raise AssertionError("ran")

        forward_cuda = forward_native

    selected = [Plain().attach(registry_on(platform)).auto_selected_backend() for platform in ("cuda", "npu")]

    assert [None, None] == selected


def test_078_the_device_is_that_of_the_ops_own_tensors_or_the_one_named():
    class Layer(Scale):
        capabilities = {KernelBackend.JIT: CapabilityRequirement.device("acme")}

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(1, device="acme"))

    op = Layer().attach(registry_on())

    assert ("jit", None) == (op.auto_selected_backend(), op.auto_selected_backend("cpu"))


def test_079_available_backends_are_those_defined_whatever_the_platform():
    class Plain(BaseFusedOp):
        def forward_native(self, x):
            return x

    expected = ["torch", "torch_compile", "jit", "triton"]
    given = [Scale().attach(registry_on(platform)).available_backends() for platform in ("cpu", "cuda", "acme")]

    assert [expected] * 3 == given
    assert ["torch", "torch_compile"] == Plain().available_backends()
    assert all(isinstance(one, KernelBackend) for one in given[0])


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), ValueError("x"), KeyboardInterrupt(), OSError()])
def test_080_an_exception_of_the_kernel_passes_unchanged_and_nothing_else_runs(error):
    class Raises(Scale):
        ran = 0

        def forward_jit(self, x):
            self.ran += 1
            raise error

    op = Raises().attach(registry_on())

    with pytest.raises(type(error)) as caught:
        op(X)

    assert (error, 1) == (caught.value, op.ran)


def test_080_a_note_names_op_kernel_and_distribution_once_however_the_call_came():
    registry = registry_on()
    Scale.publish(registry)
    error, fails = RuntimeError("boom"), []

    def kernel(x):
        if fails:
            raise error
        return "there"

    offer(registry, Scale.op, kernel, name="k", priority=99, distribution="opgraft-there", version="1.2")
    function = registry.handle(Scale.op).function
    function(X)
    fails.append(1)

    for call in (function, function.op, function):
        with pytest.raises(RuntimeError) as caught:
            call(X)
        assert error is caught.value

    assert ["raised by kernel there/jit k (opgraft-there 1.2) of op 'caching.scale'"] == error.__notes__


def test_081_two_instances_choose_for_themselves():
    first, second = Counted().attach(registry_on("cuda")), Counted().attach(registry_on("npu"))
    first.pin("triton")

    assert ("triton", "jit") == (first(X), second(X))
    assert first.dispatcher is not second.dispatcher


def test_082_refresh_looks_at_devices_again_and_drops_what_was_chosen():
    class OnCuda(Scale):
        op = "caching.on_cuda"
        capabilities = {KernelBackend.JIT: CapabilityRequirement.CUDA}

    registry = registry_on("npu")
    OnCuda.publish(registry)
    function = registry.handle(OnCuda.op).function

    assert ["native"] * 2 == [function(X), function(X)]

    registry.detector.platform = "cuda"

    assert "native" == function(X)

    registry.refresh()

    assert ["jit"] * 3 == [function(X), function(X), function.op(X)]


def test_083_the_call_itself_costs_little():
    class Same(BaseFusedOp):
        op = "caching.same"

        def forward_native(self, x: Tensor) -> Tensor:
            return x

    registry = registry_on()
    Same.publish(registry)
    function = registry.handle(Same.op).function
    native = function.op.forward_native

    def best(call):
        return min(timeit.repeat(lambda: call(X), number=2000, repeat=15)) / 2000

    assert 5e-6 > best(function) - best(native)  # 0.2e-6 where nothing else runs; benchmarks measure it


def test_084_first_calls_of_eight_threads_give_one_result():
    for _ in range(10):
        registry = registry_on("cuda")
        Scale.publish(registry)
        function, gate, results = registry.handle(Scale.op).function, threading.Barrier(8), []

        def first(function=function, gate=gate, results=results):
            gate.wait()
            results.extend(function(X) for _ in range(20))

        threads = [threading.Thread(target=first) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert ["jit"] * 160 == results


def test_device_correct_one_instance_chooses_by_each_tensors_own_device():
    class TwoDevices(Scale):
        op = "caching.two_devices"
        capabilities = {KernelBackend.JIT: CapabilityRequirement.device("acme")}

    registry = registry_on()
    TwoDevices.publish(registry)
    function = registry.handle(TwoDevices.op).function
    there = X.to("acme")

    assert ["native", "jit", "native", "jit"] == [function(x) for x in (X, there, X, there)]
    assert ["native", "jit"] == [function.op(x) for x in (X, there)]


def test_device_correct_the_arch_is_that_of_the_tensors_own_index():
    class Hopper(Scale):
        capabilities = {KernelBackend.JIT: CapabilityRequirement.cuda(min_sm=(9, 0), max_sm=(10, 3))}

    detector = SimulatedDetector()
    detector.archs = {torch.device("cuda", 0): "10.3", torch.device("cuda", 1): "12.0"}
    op = Hopper().attach(KernelRegistry(detector=detector, policy=PolicyStore(environ={}), path=[]))
    places = [op.registry.place(torch.device("cuda", index)) for index in (0, 1)]

    assert [("cuda", "10.3"), ("cuda", "12.0")] == places
    assert ["op/jit", "native"] == [op.dispatcher.select_on(*place).winner.selector for place in places]
