"""A plugin is loaded, asked and checked: every way to fail has its status and its whole reason."""

from __future__ import annotations

import inspect
import sys
import types

import pytest
from installation import CATALOGUE, OP, NoHardware, Site, plugin_source

from opgraft import plugins
from opgraft.discovery import Installation, discover
from opgraft.errors import RegistrationError
from opgraft.hardware import CapabilityRequirement
from opgraft.hookspecs import forward, hookimpl
from opgraft.plugins import cause
from opgraft.policy import Policy
from opgraft.spec import Available, Backend, KernelBackend, Unavailable


@pytest.fixture
def site(tmp_path):
    """Give an empty folder for ``sys.path``."""
    return Site(tmp_path)


def by_hand(*things, catalogue=CATALOGUE, detector=None, **policy):
    found = discover(Installation(), Policy(**policy), catalogue, detector or NoHardware(), things)
    return found.records


class Acme:
    """The least that a plugin can be."""

    @hookimpl
    def opgraft_backend(self):
        return Backend(name="acme", platforms=("cpu",))


HEAD = "from opgraft import Backend, forward, hookimpl, Available, Unavailable\n"
BACKEND = HEAD + "@hookimpl\ndef opgraft_backend(): return Backend(name='acme', platforms=('cpu',))\n"


# ---------------------------------------------------------------------------------------- loading


def test_a_plugin_is_loaded_asked_and_its_kernel_collected(site):
    module = site.plugin("acme")
    record = site.records()["acme"]
    (kernel,) = record.kernels
    assert ("acme", "active", "", "made-up-acme", "1.0", module, ("cpu",)) == (
        record.name,
        record.status,
        record.reason,
        record.distribution,
        record.version,
        record.entry_point,
        record.platforms,
    )
    assert str(site.path / "made_up_acme-1.0.dist-info") == record.location
    assert (OP, "acme", "plugin", "clamp_position", 50) == (
        kernel.op,
        kernel.backend,
        kernel.kernel_backend,
        kernel.name,
        kernel.priority,
    )
    assert (frozenset({CapabilityRequirement.CPU}), frozenset(), "made-up-acme", "1.0") == (
        kernel.capabilities,
        kernel.leaves_out,
        kernel.distribution,
        kernel.version,
    )
    assert "acme" == kernel.target(None)


def test_an_entry_point_may_name_an_object_in_a_module(site):
    source = HEAD + (
        "class Plugin:\n"
        "    @hookimpl\n"
        "    def opgraft_backend(self): return Backend(name='acme', platforms=('cpu',))\n"
        "    @forward('attention.clamp_position', kernel_backend='plugin')\n"
        "    def clamp_position(self, seq_lens, *, out=None): return self\n"
        "class holder:\n"
        "    plugin = Plugin()\n"
    )
    site.distribution("opgraft-acme", {"acme": f"{site.module('deep.inside.plugin', source)}:holder.plugin [extra]"})
    record = site.records()["acme"]
    assert "active" == record.status
    assert record.plugin is record.kernels[0].target(None)


def test_static_and_class_methods_are_kernels_too(site):
    class Plugin(Acme):
        @staticmethod
        @forward(OP, kernel_backend="plugin")
        def one(seq_lens, *, out=None): ...

        @classmethod
        @forward(OP, kernel_backend="plugin")
        def two(cls, seq_lens, *, out=None): ...

    (record,) = by_hand(Plugin())
    assert ["one", "two"] == [kernel.name for kernel in record.kernels]
    assert ((), ()) == (record.refused, record.findings)


FAULTS = {
    "absent module": (
        "import a_module_that_nobody_has",
        "ModuleNotFoundError: No module named 'a_module_that_nobody_has'",
    ),
    "undefined symbol": (
        "raise OSError('libacme.so: undefined symbol: acme_go')",
        "OSError: libacme.so: undefined symbol: acme_go",
    ),
    "exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "base exception": ("class Odd(BaseException): ...\nraise Odd('odd')", "{module}.Odd: odd"),
    "generator exit": ("raise GeneratorExit", "GeneratorExit"),
    "recursion": ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
    "unprintable": (
        "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd",
        "{module}.Odd: <exception str() failed>",
    ),
    "two lines": ("raise RuntimeError('one\\n  two')", "RuntimeError: one two"),
    "chained": (
        "try:\n    import a_module_that_nobody_has\nexcept ImportError as e:\n    raise RuntimeError('no driver') from e",
        "RuntimeError: no driver (caused by ModuleNotFoundError: No module named 'a_module_that_nobody_has')",
    ),
    "chained by itself": (
        "try:\n    {}['x']\nexcept KeyError:\n    raise RuntimeError('no driver')",
        "RuntimeError: no driver (caused by KeyError: 'x')",
    ),
    "cause hidden on purpose": (
        "try:\n    {}['x']\nexcept KeyError:\n    raise RuntimeError('no driver') from None",
        "RuntimeError: no driver",
    ),
}


@pytest.mark.parametrize(("source", "expected"), FAULTS.values(), ids=FAULTS)
def test_whatever_loading_raises_is_the_reason_of_a_quarantine(site, source, expected):
    module = site.plugin("acme", source)
    record = site.records()["acme"]
    assert "quarantined" == record.status
    assert f"loading {module} raised {expected.format(module=module)}" == record.reason
    assert record.error is not None
    assert ((), ()) == (record.kernels, record.platforms)


def test_a_module_that_is_no_python_is_quarantined_with_the_place(site):
    module = site.plugin("acme", "this is no python")
    reason = site.records()["acme"].reason
    assert reason.startswith(f'loading {module} raised File "{site.path / module}.py", line 1 this is no python')
    assert reason.endswith("SyntaxError: invalid syntax")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("a b", "its entry point 'a b' is not 'module' or 'module:object'"),
        ("a:b:c", "its entry point 'a:b:c' is not 'module' or 'module:object'"),
        ("", "its entry point '' is not 'module' or 'module:object'"),
        ("nobody.has.this", "loading nobody.has.this raised ModuleNotFoundError: No module named 'nobody'"),
        ("json:nothing", "loading json:nothing raised AttributeError: module 'json' has no attribute 'nothing'"),
        ("json", "json has no hook opgraft_backend"),
        ("json:decoder", "json:decoder has no hook opgraft_backend"),
    ],
)
def test_an_entry_point_that_leads_nowhere_is_quarantined(site, value, reason):
    site.distribution("made-up", {"acme": value})
    record = site.records()["acme"]
    assert ("quarantined", reason) == (record.status, record.reason)


def test_a_module_that_puts_another_object_in_its_place_is_a_plugin_too(site):
    source = plugin_source("acme") + (
        "import sys, types\n"
        "sys.modules[__name__] = types.SimpleNamespace(opgraft_backend=opgraft_backend, kernel=clamp_position)\n"
    )
    site.plugin("acme", source)
    record = site.records()["acme"]
    assert ("active", 1) == (record.status, len(record.kernels))


def test_objects_in_a_plugin_that_do_not_like_to_be_asked_are_left_alone(site):
    body = (
        "class Shy:\n    def __getattr__(self, name): raise RuntimeError('not now')\nshy, opgraft_shy = Shy(), Shy()\n"
    )
    site.plugin("acme", plugin_source("acme", body))
    assert ("active", ()) == (site.records()["acme"].status, site.records()["acme"].findings)


def test_an_error_of_ours_that_a_plugin_raises_with_something_unprintable_is_its_fault(site):
    body = "class Odd:\n    def __str__(self): raise ValueError\nimport opgraft\nraise opgraft.PluginError(Odd())"
    module = site.plugin("acme", body)
    assert (
        f"loading {module} raised opgraft.errors.PluginError: <exception str() failed>" == site.records()["acme"].reason
    )


def test_a_keyboard_interrupt_is_the_users_and_passes(site):
    site.plugin("acme", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        site.records()


def test_what_the_caller_was_handling_is_no_cause(site):
    site.plugin("acme", "raise RuntimeError('mine')")
    try:
        {}["yours"]
    except KeyError:
        reason = site.records()["acme"].reason
    assert reason.endswith("raised RuntimeError: mine")


def test_an_exception_that_is_its_own_cause_is_written_once():
    one, two = RuntimeError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert "RuntimeError: one (caused by ValueError: two)" == cause(one)


def test_a_failure_leaves_no_module_behind_and_a_retry_loads_the_mended_file(site):
    module = site.plugin(
        "acme", BACKEND + "import json\nimport shutil\n@hookimpl\ndef opgraft_probe(): raise OSError('no driver')\n"
    )
    with site.on_path():
        assert "its hook opgraft_probe raised OSError: no driver" == site.records()["acme"].reason
        assert module not in sys.modules
        assert "json" in sys.modules
        site.module(module, plugin_source("acme"))
        assert "active" == site.records()["acme"].status


def test_a_module_that_was_imported_before_stays_imported(site):
    module = site.plugin("acme", "x = 1")
    with site.on_path():
        __import__(module)
        assert f"{module} has no hook opgraft_backend" == site.records()["acme"].reason
        assert module in sys.modules


def test_a_plugin_that_starts_discovery_while_it_is_imported_is_told_so(site):
    module = site.plugin("acme", "import installation\nseen = installation.FOUND()\n")
    import installation

    installation.FOUND = lambda: site.records()["acme"]
    try:
        with site.on_path():
            __import__(module)
            seen = sys.modules[module].seen
    finally:
        del installation.FOUND
    assert ("quarantined", f"{module} asked for backends while it was being imported itself") == (
        seen.status,
        seen.reason,
    )


def test_a_slow_plugin_is_used_and_reported(site, monkeypatch):
    monkeypatch.setattr(plugins, "SLOW_SECONDS", 0.05)
    site.plugin("acme", "import time; time.sleep(0.1)\n" + BACKEND)
    record = site.records()["acme"]
    assert ("active", ("loading it took 0.1 s, over 0 s",)) == (record.status, record.findings)


# ------------------------------------------------------------------------------------------ hooks


HOOK_FAULTS = {
    "no hooks": ("x = 1", "{module} has no hook opgraft_backend"),
    "another name": (
        HEAD + "@hookimpl\ndef opgraft_backend(): return Backend(name='other', platforms=('cpu',))\n",
        "its hook opgraft_backend says 'other', its metadata 'acme'",
    ),
    "wrong type": (
        HEAD + "@hookimpl\ndef opgraft_backend(): return {'name': 'acme'}\n",
        "its hook opgraft_backend returned {'name': 'acme'}, not Backend",
    ),
    "nothing": (
        HEAD + "@hookimpl\ndef opgraft_backend(): pass\n",
        "its hook opgraft_backend returned None, not Backend",
    ),
    "invalid record": (
        HEAD + "@hookimpl\ndef opgraft_backend(): return Backend(name='acme', platforms=())\n",
        "its hook opgraft_backend raised opgraft.errors.RegistrationError: backend 'acme' names no platform key",
    ),
    "argument": (
        HEAD + "@hookimpl\ndef opgraft_backend(config): return Backend(name='acme', platforms=('cpu',))\n",
        (
            "registering its hooks raised pluggy._manager.PluginValidationError: Plugin 'acme' for hook 'opgraft_backend' "
            "hookimpl definition: opgraft_backend(config) Argument(s) {{'config'}} are declared in the hookimpl but can "
            "not be found in the hookspec"
        ),
    ),
    "twice": (
        BACKEND + "@hookimpl(specname='opgraft_backend')\ndef again(): return Backend(name='acme', platforms=('x',))\n",
        "it has several functions for the hook opgraft_backend",
    ),
    "wrapper": (
        HEAD + "@hookimpl(wrapper=True)\ndef opgraft_backend():\n    return (yield)\n",
        "its hook opgraft_backend returned None, not Backend",
    ),
    "probe of a wrong type": (
        BACKEND + "@hookimpl\ndef opgraft_probe(): return True\n",
        "its hook opgraft_probe returned True, not Available or Unavailable",
    ),
    "probe that raises": (
        BACKEND + "@hookimpl\ndef opgraft_probe(): return 1 / 0\n",
        "its hook opgraft_probe raised ZeroDivisionError: division by zero",
    ),
    "probe that exits": (
        BACKEND + "@hookimpl\ndef opgraft_probe(): raise SystemExit\n",
        "its hook opgraft_probe raised SystemExit",
    ),
    "ops of a wrong type": (
        BACKEND + "@hookimpl\ndef opgraft_ops(): return 3\n",
        "its hook opgraft_ops returned 3, not list or tuple",
    ),
    "an op that is no class": (
        BACKEND + "@hookimpl\ndef opgraft_ops(): return [3]\n",
        "its hook opgraft_ops gave 3, which is no class of an op",
    ),
    "an op without legal id": (
        BACKEND + "class Op:\n    op = 'Bad'\n    signature = None\n@hookimpl\ndef opgraft_ops(): return [Op]\n",
        (
            "its hook opgraft_ops raised opgraft.errors.RegistrationError: an op id is 'group.name' in lower case, "
            "without underscore in the group, got 'Bad'"
        ),
    ),
}


@pytest.mark.parametrize(("source", "reason"), HOOK_FAULTS.values(), ids=HOOK_FAULTS)
def test_a_hook_that_breaks_its_contract_quarantines_the_backend_whole(site, source, reason):
    forwards = plugin_source("acme").partition("@forward")
    module = site.plugin("acme", f"{source}\n{HEAD}" + forwards[1] + forwards[2])
    record = site.records()["acme"]
    expected = reason.format(module=module) if "{" in reason and "'name'" not in reason else reason
    assert ("quarantined", expected, ()) == (record.status, record.reason, record.kernels)


def test_misspelt_and_unmarked_hooks_are_findings(site):
    source = BACKEND + (
        "@hookimpl\ndef opgraft_prob(): ...\n"
        "def opgraft_ops(): ...\n"
        "@hookimpl\ndef opgraft_forward_attention__clamp_position(seq_lens, *, out=None): ...\n"
    )
    site.plugin("acme", source)
    record = site.records()["acme"]
    known = "Known: opgraft_backend, opgraft_ops, opgraft_probe"
    assert (
        "unknown hook 'opgraft_forward_attention__clamp_position'; " + known,
        "'opgraft_ops' is not marked with @hookimpl, so it is no hook",
        f"unknown hook 'opgraft_prob'; did you mean 'opgraft_probe' or 'opgraft_ops' or 'opgraft_backend'? {known}",
    ) == record.findings
    assert ("active", ()) == (record.status, record.kernels)


def test_a_misspelt_backend_hook_says_so_in_the_reason(site):
    module = site.plugin("acme", BACKEND.replace("opgraft_backend", "opgraft_backnd"))
    assert (
        f"{module} has no hook opgraft_backend; unknown hook 'opgraft_backnd'; did you mean 'opgraft_backend' or "
        "'opgraft_probe' or 'opgraft_ops'? Known: opgraft_backend, opgraft_ops, opgraft_probe"
    ) == site.records()["acme"].reason


def test_a_forward_that_is_no_function_is_a_finding():
    class Kernel:
        def __call__(self, seq_lens, *, out=None): ...

    class Plugin(Acme):
        kernel = forward(OP, kernel_backend="plugin")(Kernel())

    (record,) = by_hand(Plugin())
    assert ("forward 'kernel' is no function, so it is no kernel",) == record.findings


# ------------------------------------------------------------------------------------------ probes


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [(Available(2), "active", ""), (Unavailable("the driver is too old"), "inactive", "the driver is too old")],
)
def test_a_probe_decides_whether_the_hardware_is_here(answer, status, reason):
    class Plugin(Acme):
        @hookimpl
        def opgraft_probe(self):
            return answer

    (record,) = by_hand(Plugin())
    assert (status, reason) == (record.status, record.reason)


def test_without_a_probe_torch_counts_the_devices_of_each_platform():
    class Plugin:
        @hookimpl
        def opgraft_backend(self):
            return Backend(name="npus", platforms=("npu", "xpu"))

    assert [("inactive", "no npu device; no xpu device"), ("active", "")] == [
        (record.status, record.reason)
        for detector in (NoHardware(), NoHardware(xpu=1))
        for record in by_hand(Plugin(), detector=detector)
    ]


def test_b13_a_device_module_that_cannot_count_means_no_hardware():
    class Raises(NoHardware):
        def count(self, platform):
            raise NotImplementedError("no npu on this host")

    (record,) = by_hand(Acme(), detector=Raises())
    assert ("inactive", "counting cpu devices raised NotImplementedError: no npu on this host") == (
        record.status,
        record.reason,
    )


def test_an_inactive_backend_shows_its_kernels_for_those_who_ask_about_other_hardware():
    class Plugin(Acme):
        @hookimpl
        def opgraft_probe(self):
            return Unavailable("not here")

        @forward(OP, kernel_backend="plugin")
        def kernel(self, seq_lens, *, out=None): ...

    (record,) = by_hand(Plugin())
    assert ["kernel"] == [kernel.name for kernel in record.kernels]


def test_a_probe_runs_once_in_a_discovery():
    asked = []

    class Plugin(Acme):
        @hookimpl
        def opgraft_probe(self):
            asked.append(1)
            return Available(1)

    by_hand(Plugin())
    assert [1] == asked


# ---------------------------------------------------------------------------------------- forwards


def refused(function, rejects=None, dtypes=None, catalogue=CATALOGUE):
    class Plugin(Acme):
        kernel = staticmethod(forward(OP, kernel_backend="plugin", rejects=rejects, dtypes=dtypes)(function))

    (record,) = by_hand(Plugin(), catalogue=catalogue)
    assert "active" == record.status
    return record


MISFITS = {
    "another name": (lambda lens, *, out=None: 0, "(lens, *, out=None)"),
    "keyword made positional": (lambda seq_lens, out=None: 0, "(seq_lens, out=None)"),
    "another default": (lambda seq_lens, *, out=1: 0, "(seq_lens, *, out=1)"),
    "no default": (lambda seq_lens, *, out: 0, "(seq_lens, *, out)"),
    "a default too many": (lambda seq_lens=None, *, out=None: 0, "(seq_lens=None, *, out=None)"),
    "one too many": (lambda seq_lens, more, *, out=None: 0, "(seq_lens, more, *, out=None)"),
    "a keyword too many": (lambda seq_lens, *, out=None, more=1: 0, "(seq_lens, *, more=1, out=None)"),
    "none": (lambda: 0, "()"),
    "variadic": (lambda *seq_lens, out=None: 0, "(*seq_lens, out=None)"),
    "open keywords": (lambda seq_lens, **more: 0, "(seq_lens, **more)"),
}


@pytest.mark.parametrize(("function", "shown"), MISFITS.values(), ids=MISFITS)
def test_a_forward_with_other_parameters_than_the_op_is_refused_alone(function, shown):
    record = refused(function)
    assert (
        (
            f"forward 'kernel' for 'attention.clamp_position' is refused: it takes {shown}, the op takes "
            "(seq_lens, *, out=None)"
        ),
    ) == record.refused
    assert () == record.kernels


def test_a_kernel_may_leave_out_keyword_only_parameters_that_have_defaults():
    record = refused(lambda seq_lens: 0)
    assert () == record.refused
    assert frozenset({"out"}) == record.kernels[0].leaves_out


def test_annotations_and_the_order_of_keyword_only_parameters_do_not_matter():
    def op(a: int, *, b: int = 1, c: str = "x") -> int: ...
    def kernel(a, *, c="x", b=1): ...

    assert () == refused(kernel, catalogue={OP: inspect.signature(op)}).refused


def test_positional_parameters_have_the_order_of_the_op():
    def op(a, b): ...
    def kernel(b, a): ...

    (reason,) = refused(kernel, catalogue={OP: inspect.signature(op)}).refused
    assert reason.endswith("it takes (b, a), the op takes (a, b)")


def test_a_decorated_kernel_is_known_by_the_parameters_that_it_wraps():
    import functools

    def inner(seq_lens, *, out=None): ...

    @functools.wraps(inner)
    def outer(*args, **kwargs): ...

    assert () == refused(outer).refused


def test_a_kernel_whose_parameters_cannot_be_read_is_refused():
    def kernel(seq_lens, *, out=None): ...

    kernel.__signature__ = 3
    (reason,) = refused(kernel).refused
    assert reason.startswith(
        "forward 'kernel' for 'attention.clamp_position' is refused: its parameters cannot be read: TypeError: "
    )


def test_one_function_is_a_kernel_of_one_op():
    def kernel(seq_lens, *, out=None): ...

    with pytest.raises(RegistrationError) as caught:
        forward("moe.gate", kernel_backend="plugin")(forward(OP, kernel_backend="plugin")(kernel))
    assert (
        f"@forward('moe.gate'): {kernel!r} is a kernel of 'attention.clamp_position' already; write one for each op"
    ) == str(caught.value)


def test_rejects_takes_what_the_kernel_takes():
    def kernel(seq_lens, *, out=None): ...

    assert (
        (
            "forward 'kernel' for 'attention.clamp_position' is refused: its rejects takes (lens), itself it takes "
            "(seq_lens, *, out=None)"
        ),
    ) == refused(kernel, rejects=lambda lens: None).refused
    assert () == refused(kernel, rejects=lambda seq_lens, *, out=None: None).refused


def test_dtypes_name_parameters_of_the_op():
    def kernel(seq_lens, *, out=None): ...

    assert (
        (
            "forward 'kernel' for 'attention.clamp_position' is refused: its dtypes name 'seq_len'; did you mean "
            "'seq_lens'? Known: out, seq_lens"
        ),
    ) == refused(kernel, dtypes={"seq_len": ("int32",)}).refused


def test_a_forward_for_an_unknown_op_is_refused_alone_with_the_nearest_op():
    class Plugin(Acme):
        @forward("attention.clamp_positions", kernel_backend="plugin")
        def wrong(self, seq_lens, *, out=None): ...

        @forward(OP, kernel_backend="plugin")
        def right(self, seq_lens, *, out=None): ...

    (record,) = by_hand(Plugin())
    assert (
        (
            "forward 'wrong' for 'attention.clamp_positions' is refused: unknown op; did you mean "
            "'attention.clamp_position'? Known: attention.clamp_position"
        ),
    ) == record.refused
    assert ["right"] == [kernel.name for kernel in record.kernels]


def test_two_functions_of_one_name_for_one_op_are_a_conflict_and_the_second_is_refused():
    def made():
        @forward(OP, kernel_backend="plugin")
        def kernel(seq_lens, *, out=None): ...

        return staticmethod(kernel)

    class Plugin(Acme):
        one, two = made(), made()

    plugin = Plugin()
    (record,) = by_hand(plugin)
    assert (
        "forward 'two' for 'attention.clamp_position' is refused: another function of this name is offered for it",
    ) == record.refused
    assert [plugin.one] == [kernel.target for kernel in record.kernels]


def test_one_function_under_two_names_is_one_kernel():
    class Plugin(Acme):
        @staticmethod
        @forward(OP, kernel_backend="plugin")
        def kernel(seq_lens, *, out=None): ...

        again = kernel

    (record,) = by_hand(Plugin())
    assert (1, ()) == (len(record.kernels), record.refused)


def test_what_a_forward_declares_reaches_its_kernel():
    def rejects(seq_lens, *, out=None): ...

    class Plugin(Acme):
        @staticmethod
        @forward(
            OP,
            kernel_backend=KernelBackend.TRITON,
            capabilities=CapabilityRequirement.cuda(min_sm=(8, 0)),
            priority=-3,
            rejects=rejects,
            dtypes=("int32",),
            differentiable=True,
        )
        def kernel(seq_lens, *, out=None): ...

    (record,) = by_hand(Plugin())
    (kernel,) = record.kernels
    assert ("triton", frozenset({CapabilityRequirement.cuda(min_sm=(8, 0))}), -3, rejects, ("int32",), True) == (
        kernel.kernel_backend,
        kernel.capabilities,
        kernel.priority,
        kernel.rejects,
        kernel.dtypes,
        kernel.differentiable,
    )


def test_a_kernel_without_capabilities_runs_on_its_own_backends_platforms_only():
    class Plugin:
        @hookimpl
        def opgraft_backend(self):
            return Backend(name="two", platforms=("acme", "beta"))

        @forward(OP, kernel_backend="plugin")
        def kernel(self, seq_lens, *, out=None): ...

    (record,) = by_hand(Plugin())
    assert {"acme", "beta"} == {one.platform for one in record.kernels[0].capabilities}


# --------------------------------------------------------------------------------------------- ops


def op_class(op_id):
    class Op:
        op = op_id

        @classmethod
        def signature(cls):
            return inspect.signature(lambda x, *, scale=1.0: x)

    return Op


def plugin_with_ops(name, *ops, forwards=()):
    class Plugin:
        @hookimpl
        def opgraft_backend(self):
            return Backend(name=name, platforms=("cpu",))

        @hookimpl
        def opgraft_ops(self):
            return ops

    for op_id in forwards:

        @forward(op_id, kernel_backend="plugin")
        def kernel(x, *, scale=1.0): ...

        setattr(Plugin, op_id.replace(".", "_"), staticmethod(kernel))
    return Plugin()


def discovered(*things):
    return discover(Installation(), Policy(), CATALOGUE, NoHardware(), things)


def test_an_op_that_a_plugin_adds_can_be_served_by_another_plugin():
    scale = op_class("acme.scale")
    found = discovered(plugin_with_ops("beta", forwards=["acme.scale"]), plugin_with_ops("acme", scale))
    assert (scale,) == found.ops
    assert [(), ("acme.scale",)] == [tuple(k.op for k in record.kernels) for record in found.records]


def test_an_op_of_a_quarantined_plugin_is_unknown_to_the_others():
    class Broken:
        @hookimpl
        def opgraft_backend(self):
            return Backend(name="acme", platforms=("cpu",))

        @hookimpl
        def opgraft_ops(self):
            return [op_class("acme.scale")]

        @hookimpl
        def opgraft_probe(self):
            raise OSError("no driver")

    found = discovered(Broken(), plugin_with_ops("beta", forwards=["acme.scale"]))
    assert () == found.ops
    (reason,) = next(record.refused for record in found.records if record.name == "beta")
    assert reason.startswith("forward 'acme_scale' for 'acme.scale' is refused: unknown op")


def test_an_op_that_the_core_or_another_plugin_defines_too_is_refused():
    found = discovered(
        plugin_with_ops("acme", op_class(OP), op_class("acme.scale")),
        plugin_with_ops("beta", op_class("acme.scale"), op_class("beta.scale")),
    )
    assert ["beta.scale"] == [one.op for one in found.ops]
    assert [
        (
            "op 'attention.clamp_position' is refused: it is defined elsewhere too",
            "op 'acme.scale' is refused: it is defined elsewhere too",
        ),
        ("op 'acme.scale' is refused: it is defined elsewhere too",),
    ] == [record.refused for record in found.records]


def test_the_same_class_of_an_op_from_two_plugins_is_one_op():
    scale = op_class("acme.scale")
    found = discovered(plugin_with_ops("acme", scale), plugin_with_ops("beta", scale))
    assert ((scale,), [(), ()]) == (found.ops, [record.refused for record in found.records])


# ----------------------------------------------------------------------------------------- by hand


def test_a_plugin_without_metadata_is_registered_by_hand():
    module = types.ModuleType("notebook")
    module.opgraft_backend = hookimpl(lambda: Backend(name="acme", platforms=("cpu",)))
    module.opgraft_backend.__name__ = "opgraft_backend"
    (record,) = by_hand(module)
    assert ("acme", "active", "notebook", "", module) == (
        record.name,
        record.status,
        record.entry_point,
        record.distribution,
        record.plugin,
    )


def test_a_plugin_given_by_hand_that_its_metadata_names_too_counts_once(site):
    module = site.plugin("acme")
    with site.on_path():
        __import__(module)
        (record,) = site.discover(extra=[sys.modules[module]]).records
    assert ("active", "made-up-acme") == (record.status, record.distribution)


def test_a_name_that_is_taken_is_not_taken_over_by_hand(site):
    site.plugin("acme")
    records = site.discover(extra=[Acme()]).records
    assert [("conflict", "the name is taken by made-up-acme 1.0", "Acme"), ("active", "", "made_up_acme")] == [
        (r.status, r.reason, r.entry_point.rpartition("_")[0] or r.entry_point) for r in records
    ]


def test_a_name_whose_owner_is_denied_is_free(site):
    site.plugin("acme")
    records = site.discover(Policy(deny=frozenset({"made-up-acme"})), extra=[Acme()]).records
    assert ["active", "denied"] == sorted(record.status for record in records)


def test_a_plugin_given_by_hand_obeys_the_policy_and_the_rules_of_names():
    class Native:
        @hookimpl
        def opgraft_backend(self):
            return Backend(name="native", platforms=("cpu",))

    denied, illegal = by_hand(Acme(), Native(), plugins=frozenset({"native"}))
    assert ("denied", "not in the allow-list of default, which lists native") == (denied.status, denied.reason)
    assert ("quarantined", "illegal name 'native': this word is reserved") == (illegal.status, illegal.reason)


def test_a_plugin_given_by_hand_that_fails_is_named_by_what_it_is():
    class Failing:
        @hookimpl
        def opgraft_backend(self):
            raise OSError("no driver")

    (record,) = by_hand(Failing())
    assert ("quarantined", "its hook opgraft_backend raised OSError: no driver") == (record.status, record.reason)
    assert record.name.endswith("Failing")
