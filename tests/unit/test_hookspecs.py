"""The decorator by which a plugin offers a kernel, and the hooks it may have."""

from __future__ import annotations

import re

import pluggy
import pytest

from opgraft import ANY, CapabilityRequirement, KernelBackend, RegistrationError, forward, hookimpl
from opgraft.hookspecs import PROJECT, HookSpecs, Offer, forward_hook, offer_of

OP = "attention.clamp_position"


def test_a_forward_stays_the_function_it_is_and_carries_its_offer():
    def kernel(x):
        return x

    def rejects(x):
        return None

    marked = forward(
        OP,
        kernel_backend="triton",
        capabilities=[CapabilityRequirement.CUDA, ANY],
        priority=-3,
        rejects=rejects,
        dtypes={"x": "int32"},
        differentiable=True,
    )(kernel)

    assert kernel is marked
    assert Offer(
        op=OP,
        kernel_backend=KernelBackend.TRITON,
        capabilities=frozenset({CapabilityRequirement.CUDA, ANY}),
        priority=-3,
        rejects=rejects,
        dtypes={"x": ("int32",)},
        differentiable=True,
    ) == offer_of(marked)


def test_what_is_left_out_has_a_default():
    @forward(OP, kernel_backend=KernelBackend.AOT)
    def kernel(x):
        return x

    offer = offer_of(kernel)

    assert (None, 50, None, None, False) == (
        offer.capabilities,
        offer.priority,
        offer.rejects,
        offer.dtypes,
        offer.differentiable,
    )


def test_it_is_the_hook_implementation_of_the_ops_own_hook():
    @forward(OP, kernel_backend="jit")
    def kernel(x):
        return x

    options = pluggy.PluginManager(PROJECT).parse_hookimpl_opts(type("Plugin", (), {"kernel": kernel}), "kernel")

    assert "opgraft_forward_attention__clamp_position" == forward_hook(OP) == options["specname"]


def test_one_function_offers_a_kernel_of_one_op():
    @forward("a.b", kernel_backend="jit")
    def kernel(x):
        return x

    with pytest.raises(RegistrationError) as caught:
        forward("a.c", kernel_backend="jit")(kernel)

    assert f"@forward('a.c'): {kernel!r} is a kernel of 'a.b' already; write one for each op" == str(caught.value)


def test_what_carries_no_offer_has_none():
    assert [None, None] == [offer_of(len), offer_of(hookimpl(lambda: None))]


@pytest.mark.parametrize(
    ("op_id", "options", "message"),
    [
        (
            OP,
            {"kernel_backend": "torch"},
            f"@forward('{OP}'): kernel_backend 'torch' is native, which the op itself defines",
        ),
        (OP, {"priority": 1.5}, f"@forward('{OP}'): priority must be an int, got 1.5"),
        (OP, {"priority": True}, f"@forward('{OP}'): priority must be an int, got True"),
        (OP, {"rejects": "odd"}, f"@forward('{OP}'): rejects must be a function, got 'odd'"),
        (OP, {"capabilities": ()}, f"@forward('{OP}'): the capability set is empty; write ANY for any device"),
        (
            OP,
            {"capabilities": ["cuda"]},
            f"@forward('{OP}'): capabilities must be CapabilityRequirement or ANY, got 'cuda'",
        ),
        (OP, {"dtypes": ()}, f"@forward('{OP}'): no dtype is listed"),
        ("clamp", {}, "an op id is 'group.name' in lower case, without underscore in the group, got 'clamp'"),
        (None, {}, "an op id is 'group.name' in lower case, without underscore in the group, got None"),
    ],
)
def test_a_declaration_that_cannot_be_meant_is_refused_at_the_authors_line(op_id, options, message):
    with pytest.raises(RegistrationError, match=f"^{re.escape(message)}$"):
        forward(op_id, **{"kernel_backend": "jit", **options})


@pytest.mark.parametrize("word", ["tritn", "", None, 3])
def test_a_kernel_backend_that_nobody_knows_is_refused(word):
    with pytest.raises(RegistrationError, match=f"^unknown kernel backend {re.escape(repr(word))}; "):
        forward(OP, kernel_backend=word)


def test_a_dtype_that_nobody_knows_is_refused():
    with pytest.raises(RegistrationError, match=rf"^@forward\('{OP}'\), x: unknown dtype 'int33'; did you mean"):
        forward(OP, kernel_backend="jit", dtypes={"x": ("int33",)})


def test_these_are_the_hooks_and_each_says_what_it_is_for():
    hooks = {name: getattr(HookSpecs, name) for name in vars(HookSpecs) if name.startswith(PROJECT)}

    assert ["opgraft_backend", "opgraft_probe", "opgraft_ops"] == [*hooks]
    assert all(hook.__doc__ for hook in hooks.values())
    assert [None] * 3 == [hook(None) for hook in hooks.values()]
