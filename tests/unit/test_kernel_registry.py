"""Ops, kernels and backends of a process: first use, change, and what a policy may demand."""

from __future__ import annotations

import copy
import logging
import pickle
import re
import sys
import textwrap
import threading
from types import SimpleNamespace

import pytest
import torch
from installation import Site, plugin_source
from simulated import SimulatedDetector, offer, registry_on
from torch import Tensor

import opgraft
from opgraft import (
    Backend,
    BaseFusedOp,
    KernelBackend,
    NoKernelError,
    PluginError,
    Unavailable,
    UnknownOpError,
    UnknownSelectorError,
    forward,
    hookimpl,
)
from opgraft.kernel_registry import KernelRegistry, default_registry
from opgraft.policy import PolicyStore

X = torch.tensor([1, 2], dtype=torch.int32)
OP = "registryunit.scale"
BROKEN = "quarantined: loading broken_plugin raised OSError: undefined symbol: x"


class Scale(BaseFusedOp):
    op = OP

    def forward_native(self, x: Tensor):
        return "native"


def plugin(name="made_up", *, ops=(), absent="", kernel=True, platforms=("cpu",)):
    """Make a plugin as an object with hooks."""

    class Plugin:
        @hookimpl
        def opgraft_backend(self):
            return Backend(name=name, platforms=platforms)

        @hookimpl
        def opgraft_ops(self):
            return list(ops)

        if absent:

            @hookimpl
            def opgraft_probe(self):
                return Unavailable(absent)

        if kernel:

            @forward(OP, kernel_backend=KernelBackend.PLUGIN)
            def scale(self, x):
                return name

    return Plugin()


@pytest.fixture
def registry():
    registry = registry_on()
    Scale.publish(registry)
    return registry


@pytest.fixture
def function(registry):
    return registry.handle(OP).function


class TestBackendsByHand:
    def test_one_that_is_registered_takes_effect_at_once(self, registry, function):
        before = function(X), function(X)

        record = registry.register_backend(plugin())

        assert ("native", "native") == before
        assert ("made_up", "active", ("cpu",)) == (record.name, record.status, record.platforms)
        assert ["made_up"] * 2 == [function(X), function(X)]
        assert [record] == [*registry.backends()]

    def test_registering_it_again_changes_nothing(self, registry):
        one = plugin()

        assert registry.register_backend(one) == registry.register_backend(one)
        assert 1 == len(registry.backends())

    def test_one_that_is_broken_is_refused_and_not_kept(self, registry, function):
        broken = SimpleNamespace(opgraft_backend=hookimpl(lambda: 1 / 0), __name__="broken")

        with pytest.raises(PluginError) as caught:
            registry.register_backend(broken)

        assert (
            "backend 'broken' (broken) is quarantined: its hook opgraft_backend raised ZeroDivisionError: "
            "division by zero, so it is not registered"
        ) == str(caught.value)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert ((), "native") == (registry.backends(), function(X))

    def test_a_second_one_of_the_same_name_is_refused_and_the_first_stays(self, registry, function):
        registry.register_backend(plugin())

        with pytest.raises(
            PluginError, match=r"^backend 'made_up' .* is conflict: the name is taken by .*, so it is not"
        ):
            registry.register_backend(plugin())

        assert "made_up" == function(X)

    def test_without_hardware_it_is_kept_as_inactive(self, registry, function):
        record = registry.register_backend(plugin(absent="no card"))

        assert ("inactive", "no card", "native") == (record.status, record.reason, function(X))
        with pytest.raises(NoKernelError, match=r"made_up .* inactive: no card"):
            function(X, backend="made_up")


class TestPluginsOps:
    def test_an_op_comes_with_its_plugin_and_goes_with_it(self):
        registry = registry_on()
        one = plugin(ops=[Scale])
        registry.register_backend(one)
        function = registry.handle(OP).function

        assert (["made_up"], [OP]) == ([function(X)], registry.ops())

        registry.policy.set(deny="made_up")

        assert [] == registry.ops()

        registry.policy.set(deny=None)

        assert [OP] == registry.ops()
        assert function is registry.handle(OP).function
        assert "made_up" == function(X)

    def test_another_plugin_may_bring_an_op_of_the_id_that_is_free_again(self):
        class Other(Scale):
            def forward_native(self, x):
                return "other"

        registry = registry_on()
        registry.register_backend(plugin("first", ops=[Scale], kernel=False))
        function = registry.handle(OP).function
        assert "native" == function(X)

        registry.policy.set(deny="first")
        registry.register_backend(plugin("second", ops=[Other], kernel=False))

        assert ["other", "other"] == [function(X), registry.handle(OP).function(X)]

    def test_one_that_cannot_be_built_is_its_plugins_fault(self, function, registry):
        class Needy(BaseFusedOp):
            op = "registryunit.needy"

            def __init__(self, width):
                super().__init__()

            def forward_native(self, x):
                return x

        with pytest.raises(
            PluginError, match=r"missing 1 required positional argument: 'width', so it is not registered$"
        ):
            registry.register_backend(plugin(ops=[Needy]))

        assert "native" == function(X)


class TestFirstUse:
    def test_threads_that_import_the_catalogue_and_look_for_backends_do_not_wait_for_each_other(
        self, tmp_path, monkeypatch
    ):
        (tmp_path / "slow_catalogue.py").write_text(
            textwrap.dedent(
                """
                import catalogue_registry
                from opgraft import BaseFusedOp

                catalogue_registry.imported.set()
                catalogue_registry.go_on.wait(10)

                class Late(BaseFusedOp):
                    op = "registryunit.late"

                    def forward_native(self, x):
                        return x

                Late.publish(catalogue_registry.registry)
                """
            )
        )
        monkeypatch.syspath_prepend(tmp_path)
        registry = KernelRegistry(
            policy=PolicyStore(environ={}, folder="/nonexistent"), path=[], catalogue="slow_catalogue"
        )
        shared = SimpleNamespace(registry=registry, imported=threading.Event(), go_on=threading.Event())
        monkeypatch.setitem(sys.modules, "catalogue_registry", shared)

        importing = threading.Thread(target=registry.load_catalogue, daemon=True)
        looking = threading.Thread(target=registry.backends, daemon=True)
        importing.start()
        assert shared.imported.wait(10)
        looking.start()
        looking.join(0.2)
        shared.go_on.set()
        importing.join(10)
        looking.join(10)

        assert (False, False) == (importing.is_alive(), looking.is_alive())
        assert ["registryunit.late"] == registry.ops()

    def test_a_plugin_that_asks_for_backends_while_it_is_loaded_is_told(self, registry):
        asking = SimpleNamespace(opgraft_backend=hookimpl(lambda: [*registry.backends()]), __name__="asking")

        with pytest.raises(PluginError) as caught:
            registry.register_backend(asking)

        assert (
            "backend 'asking' (asking) is quarantined: discovery was re-entered: a plugin calls an op, or asks for the "
            "backends, while it is being loaded; do that on first use instead, so it is not registered"
        ) == str(caught.value)

    def test_a_quarantine_is_told_once(self, tmp_path, caplog):
        site = Site(tmp_path)
        site.module("broken_plugin", "raise OSError('undefined symbol: x')")
        site.distribution("opgraft-broken", {"broken": "broken_plugin"})
        registry = KernelRegistry(policy=PolicyStore(environ={}, folder="/nonexistent"), path=[str(tmp_path)])

        with site.on_path(), caplog.at_level(logging.WARNING, logger="opgraft"):
            for _ in range(2):
                registry.backends()
                registry.policy.set(deny="nobody")
                registry.policy.set(deny=None)

        assert 1 == len(caplog.messages)
        assert re.fullmatch(
            r"backend 'broken' \(opgraft-broken .*\) quarantined: loading broken_plugin raised OSError: "
            "undefined symbol: x",
            caplog.messages[0],
        )


class TestDemands:
    def registry(self, tmp_path, **environ):
        site = Site(tmp_path)
        site.module("fine_plugin", plugin_source("fine"))
        site.distribution("opgraft-fine", {"fine": "fine_plugin"})
        site.module("broken_plugin", "raise OSError('undefined symbol: x')")
        site.distribution("opgraft-broken", {"broken": "broken_plugin"})
        return site, KernelRegistry(policy=PolicyStore(environ=environ, folder="/nonexistent"), path=[str(tmp_path)])

    @pytest.mark.parametrize(
        ("environ", "message"),
        [
            ({"OPGRAFT_REQUIRE": "fine,cdua"}, "backend 'cdua' is required and not installed; Known: broken, fine"),
            ({"OPGRAFT_REQUIRE": "broken"}, f"backend 'broken' (opgraft-broken 1.0) is {BROKEN}, and it is required"),
            ({"OPGRAFT_STRICT": "1"}, f"strict: backend 'broken' (opgraft-broken 1.0) {BROKEN}"),
        ],
    )
    def test_what_is_required_must_be_active_and_strict_bears_no_fault(self, tmp_path, environ, message):
        site, registry = self.registry(tmp_path, **environ)

        with site.on_path(), pytest.raises(PluginError) as caught:
            Scale().attach(registry)(X)

        assert message == str(caught.value)
        assert isinstance(caught.value.__cause__, OSError) is ("OSError" in message)

    def test_a_forced_backend_that_is_not_active_is_an_error_with_its_reason(self, tmp_path):
        site, registry = self.registry(tmp_path, OPGRAFT_FORCE="broken")

        with site.on_path(), pytest.raises(NoKernelError) as caught:
            Scale().attach(registry)(X)

        assert (
            "backend 'broken' (opgraft-broken 1.0) is quarantined: loading broken_plugin raised OSError: undefined "
            "symbol: x, and it is forced"
        ) == str(caught.value)
        assert isinstance(caught.value.__cause__, OSError)

    def test_a_named_backend_that_is_broken_is_an_error_caused_by_what_it_raised(self, tmp_path):
        site, registry = self.registry(tmp_path)

        with site.on_path(), pytest.raises(NoKernelError, match=r"broken .* quarantined: loading") as caught:
            Scale().attach(registry)(X, backend="broken")

        assert isinstance(caught.value.__cause__, OSError)

    def test_force_is_held_against_what_the_process_offers(self, registry):
        own = registry.get(OP)

        registry.check_force("native", own)
        with pytest.raises(UnknownSelectorError, match=r"^unknown selector 'nativ'; did you mean 'native'?"):
            registry.check_force("nativ", own)
        with pytest.raises(NoKernelError, match=r"^forced selector 'aot': no kernel in this process is offered by it$"):
            registry.check_force("aot", own)
        offer(registry, "other.op", "a:b", kernel_backend="aot")
        registry.check_force("aot", own)


class TestChange:
    def test_refresh_keeps_the_policy_set_by_the_api_and_reads_devices_again(self, registry):
        registry.policy.set(deny="somebody")
        registry.place(torch.device("cpu"))
        asked = len(registry.detector.asked)

        registry.place(torch.device("cpu"))
        assert asked == len(registry.detector.asked)
        registry.refresh()
        registry.place(torch.device("cpu"))

        assert asked < len(registry.detector.asked)
        assert frozenset({"somebody"}) == registry.policy.current().deny

    def test_a_copy_is_the_registry_itself_and_a_pickle_the_processs_own(self, registry):
        assert registry is copy.deepcopy(registry)
        assert default_registry() is pickle.loads(pickle.dumps(registry))
        assert opgraft.registry is default_registry()

    def test_devices_are_told_apart_by_index(self):
        detector = SimulatedDetector()
        detector.archs = {torch.device("cuda", 0): "8.0", torch.device("cuda", 1): "9.0"}
        registry = KernelRegistry(detector=detector, policy=PolicyStore(environ={}), path=[])

        places = [registry.place(torch.device("cuda", index)) for index in (1, 0, 1)]

        assert [("cuda", "9.0"), ("cuda", "8.0"), ("cuda", "9.0")] == places

    def test_an_op_that_nobody_knows_is_an_error_with_the_nearest(self, registry):
        with pytest.raises(UnknownOpError, match=rf"^unknown op 'registryunit.scal'; did you mean '{OP}'?"):
            registry.handle("registryunit.scal")
        with pytest.raises(UnknownOpError, match=r"^unknown op 7; Known: "):
            registry.handle(7)

    def test_a_kernel_for_an_op_to_come_is_kept_for_it(self):
        registry = registry_on()
        offer(registry, OP, lambda x: "early")

        Scale.publish(registry)

        assert "early" == registry.handle(OP).function(X)
        assert (True, ["native"]) == (
            registry.has(OP),
            [s.selector for s in registry.get(OP) if s.kernel_backend == "torch"],
        )

    def test_what_is_told_once_is_told_again_after_a_refresh(self, registry):
        assert (True, False, True) == (
            registry.tell_once("a", "b"),
            registry.tell_once("a", "b"),
            registry.tell_once("a"),
        )

        registry.refresh()

        assert registry.tell_once("a")
