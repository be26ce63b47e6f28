"""Statements 41 to 51: a forward for a platform key that the core does not list."""

from __future__ import annotations

import re

import pytest
import torch
from simulated import offer, registry_on

import opgraft
from opgraft import ANY, BaseFusedOp, CapabilityRequirement, KernelBackend, RegistrationError
from opgraft.compat import MultiPlatformOp

X = torch.tensor([1])


class Positions(BaseFusedOp):
    op = "oot.positions"

    def forward_native(self, x):
        return "native"

    def forward_cuda(self, x):
        return "cuda"


class OnAcme(Positions):
    def forward_acme(self, x):
        return "acme"


def registered(op, x):
    return "registered"


def other(op, x):
    return "other"


@pytest.fixture
def registry():
    return registry_on("acme")


def test_041_a_registered_forward_wins_over_the_platform_method(registry):
    registry.register_oot(OnAcme, registered, "acme")

    assert "registered" == OnAcme().attach(registry)(X)
    assert "oot" == OnAcme().attach(registry).dispatcher.explain((X,)).decided_by


def test_041_a_registered_forward_wins_over_a_kernel_and_over_the_policys_order(registry):
    offer(registry, Positions.op, lambda x: "kernel", capabilities=ANY, priority=1000)
    registry.register_oot(Positions, registered, "acme")
    registry.policy.set(order="there")

    assert "registered" == Positions().attach(registry)(X)


def test_042_without_a_registration_the_platforms_own_method_runs(registry):
    op = OnAcme().attach(registry)

    assert "acme" == op(X)
    assert "oot" == op.dispatcher.explain((X,)).decided_by


def test_043_without_either_native_runs_never_an_in_tree_platform_method(registry):
    assert "native" == Positions().attach(registry)(X)


def test_043_kernels_whose_capabilities_name_the_key_or_any_device_come_before_native(registry):
    op = Positions().attach(registry)
    offer(registry, op.op, lambda x: "cuda kernel", name="c", capabilities=CapabilityRequirement.CUDA)

    assert "native" == op(X)

    offer(registry, op.op, lambda x: "any", name="a", capabilities=ANY)

    assert "any" == op(X)

    offer(registry, op.op, lambda x: "acme", name="b", priority=60, capabilities=CapabilityRequirement.device("acme"))

    assert "acme" == op(X)


def test_044_a_subclass_does_not_inherit_a_registration(registry):
    registry.register_oot(Positions, registered, "acme")

    class Below(Positions):
        pass

    assert ("registered", "native") == (Positions().attach(registry)(X), Below().attach(registry)(X))


def test_045_the_function_gets_the_op_first(registry):
    registry.register_oot(Positions, lambda op, x: (op, x), "acme")
    op = Positions().attach(registry)

    assert (op, X) == op(X)


def test_046_a_registration_for_one_key_has_no_effect_on_another(registry):
    registry.register_oot(OnAcme, registered, "vulkan")

    assert "acme" == OnAcme().attach(registry)(X)


def test_047_a_second_registration_replaces_the_first_and_warns_naming_both(registry):
    op = Positions().attach(registry)
    registry.register_oot(Positions, registered, "acme")

    with pytest.warns(UserWarning, match="^out-of-tree forward") as caught:
        registry.register_oot(Positions, other, "acme")

    assert [f"out-of-tree forward of Positions on acme: {other} replaces {registered}"] == [
        str(one.message) for one in caught
    ]
    assert "other" == op(X)


def test_047_the_same_registration_again_says_nothing(registry):
    registry.register_oot(Positions, registered, "acme")
    registry.register_oot(Positions, registered, "acme")


def test_047_the_warning_points_at_the_callers_line():
    class Own(Positions):
        op = "oot.warned"

    opgraft.register_oot_forward(Own, registered, "acme")

    with pytest.warns(UserWarning, match=r"Own on acme") as module:
        opgraft.register_oot_forward(Own, other, "acme")
    with pytest.warns(UserWarning, match=r"Own on acme") as method:
        BaseFusedOp.register_oot_forward(Own, registered, "acme")

    assert [__file__] * 2 == [module[0].filename, method[0].filename]


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_048_on_an_in_tree_platform_registrations_are_ignored(platform):
    registry = registry_on(platform)
    registry.register_oot(OnAcme, registered, platform)

    assert {"cuda": "cuda", "cpu": "native"}[platform] == OnAcme().attach(registry)(X)


def test_049_a_registration_after_the_first_call_takes_effect_at_the_next(registry):
    Positions.publish(registry)
    function = registry.handle(Positions.op).function

    assert ["native"] * 3 == [function(X) for _ in range(3)]

    registry.register_oot(Positions, registered, "acme")

    assert ["registered"] * 3 == [function(X) for _ in range(3)]


def test_050_an_id_is_accepted_before_the_op_exists_and_the_class_rules_over_the_id(registry):
    registry.register_oot("oot.later", registered, "acme")

    class Later(Positions):
        op = "oot.later"

    assert "registered" == Later().attach(registry)(X)

    registry.register_oot(Later, other, "acme")

    assert "other" == Later().attach(registry)(X)


def test_050_an_id_counts_for_every_class_of_it(registry):
    registry.register_oot(Positions.op, registered, "acme")

    class Below(Positions):
        pass

    assert "registered" == Below().attach(registry)(X)


@pytest.mark.parametrize(
    ("target", "function", "message"),
    [
        (
            "oot.positions",
            None,
            "register_oot_forward takes an op id or a class, and a function, got 'oot.positions', None",
        ),
        (7, registered, f"register_oot_forward takes an op id or a class, and a function, got 7, {registered!r}"),
        (
            "Positions",
            registered,
            "an op id is 'group.name' in lower case, without underscore in the group, got 'Positions'",
        ),
    ],
)
def test_050_anything_else_is_refused(registry, target, function, message):
    with pytest.raises(RegistrationError, match=f"^{re.escape(message)}$"):
        registry.register_oot(target, function, "acme")


def test_051_118_all_ops_and_the_alias_share_one_registry():
    with pytest.warns(DeprecationWarning, match=r"^Legacy: MultiPlatformOp is deprecated"):

        class Legacy(MultiPlatformOp):
            op = "oot.legacy"

            def forward_native(self, x):
                return "native"

    MultiPlatformOp.register_oot_forward(Legacy, registered, "acme")
    BaseFusedOp.register_oot_forward(OnAcme, registered, "acme")
    shared = opgraft.registry

    assert [registered] * 2 == [shared.oot(Legacy(), "acme"), shared.oot(OnAcme(), "acme")]


def test_a_registered_forward_is_passed_over_where_gradients_are_recorded(registry):
    registry.register_oot(Positions, registered, "acme")
    op = Positions().attach(registry)
    trained = torch.tensor([1.0], requires_grad=True)

    assert "native" == op(trained)
    with torch.no_grad():
        assert "registered" == op(trained)


def test_a_registered_forward_is_named_by_its_own_name_in_traces_and_selections(registry):
    registry.register_oot(Positions, registered, "acme")
    op = Positions().attach(registry)

    with registry.tracing(registry.process_trace) as trace:
        op(X)

    winner = op.dispatcher.explain((X,)).winner
    assert ["registered"] == [record.kernel for record in trace]
    assert ("op/acme", "op/acme registered") == (winner.selector, str(winner))
    assert KernelBackend.PLUGIN is winner.kernel_backend
    assert "registered" == op(X, backend="op/acme")
