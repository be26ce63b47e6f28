"""Field reports C and K: duplicates, order, ties, and what a user forces, prefers or denies."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import random
import stat

import pytest
import torch
from installation import NoHardware, plugin_source

import opgraft
from opgraft.discovery import scan
from opgraft.hardware import Detector
from opgraft.hookspecs import forward, hookimpl
from opgraft.kernel_registry import KernelRegistry
from opgraft.spec import Backend, KernelBackend, KernelSpec

OP = "attention.clamp_position"
NATIVE = torch.tensor([0, 0, 4])


def selection(made, platform="cpu", arch="", dtype="int32"):
    return made.registry.handle(OP).op.dispatcher.select_on(platform, arch, dtype)


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_c1_a_reloaded_catalogue_defines_nothing_twice():
    import opgraft.ops.attention as catalogue

    before = opgraft.ops.attention.clamp_position
    importlib.reload(catalogue)
    seq_lens = torch.tensor([0, 1, 5])
    for call in (before, catalogue.clamp_position, torch.ops.opgraft.attention_clamp_position):
        assert torch.equal(NATIVE, call(seq_lens, backend="native"))


def test_c1_two_backends_of_one_op_live_side_by_side_and_through_a_refresh(process, site):
    for name in ("one", "two"):
        site.plugin(name)
    made = process()
    assert ["one", "two"] == [made.call(backend=name) for name in ("one", "two")]
    made.registry.refresh()
    assert ["one", "two"] == [made.call(backend=name) for name in ("one", "two")]


def test_c2_equal_priorities_give_one_winner_whatever_the_order_of_discovery(process, site, monkeypatch):
    for name in ("zeta", "alpha", "mid"):
        site.plugin(name, plugin_source(name, priority=70))
    found = scan([str(site.path)])
    winners = set()
    for seed in range(100):
        entries = list(found.entries)
        random.Random(seed).shuffle(entries)  # noqa: S311 - orders that a failure repeats
        shuffled = type(found)(entries=tuple(entries), versions=found.versions)
        monkeypatch.setattr("opgraft.kernel_registry.scan", lambda path, shuffled=shuffled: shuffled)
        winners.add(process().call())
    assert {"alpha"} == winners


def test_c3_two_distributions_of_one_name_replace_nobody_and_are_both_named(process, site, caplog):
    one, two = (site.module(f"claims_{n}", plugin_source("npu")) for n in "ab")
    site.distribution("dist-a", {"npu": one})
    site.distribution("dist-b", {"npu": two}, version="2.0")
    made = process()
    assert torch.equal(NATIVE, made.call())
    reason = (
        f"claimed by dist-a 1.0 ({one}), dist-b 2.0 ({two}); none is used: name one distribution in "
        "OPGRAFT_PLUGINS, or the others in OPGRAFT_DENY"
    )
    assert [f"backend 'npu' (dist-a, dist-b 1.0, 2.0) conflict: {reason}"] == messages(caplog)
    assert "dist-b" == process(PLUGINS="dist-b").backends["npu"].distribution


def test_c3_a_hand_made_kernel_does_not_replace_another_of_its_identity():
    registry = KernelRegistry(detector=NoHardware())
    spec = {"op": OP, "backend": "acme", "kernel_backend": KernelBackend.PLUGIN, "name": "k"}
    first = registry.register(KernelSpec(target="acme:one", **spec))
    with pytest.raises(opgraft.RegistrationError):
        registry.register(KernelSpec(target="acme:two", **spec))
    assert first is next(k for k in registry.candidates(OP) if k.backend == "acme")


@pytest.mark.parametrize("order", list(itertools.permutations(["cuda", "hip"])))
def test_c4_a_second_platform_overwrites_nothing(process, site, order):
    for name in order:
        site.plugin(f"{name}s", plugin_source(f"{name}s", platform=name))
    made = process(NoHardware(cuda=1, hip=1))
    winners = {platform: selection(made, platform).winner.selector for platform in ("cuda", "hip")}
    assert {"cuda": "cudas/plugin", "hip": "hips/plugin"} == winners


def test_c5_several_active_backends_are_normal_and_the_tensor_decides(process, site):
    for name, platform in (("ones", "cpu"), ("twos", "cuda"), ("npus", "npu")):
        site.plugin(name, plugin_source(name, platform=platform))
    made = process(NoHardware(cuda=1, npu=2))
    assert {"active"} == {record.status for record in made.backends.values()}
    assert "ones" == made.call()
    assert ["ones/plugin", "twos/plugin", "npus/plugin"] == [
        selection(made, platform).winner.selector for platform in ("cpu", "cuda", "npu")
    ]


def test_c6_vendors_tools_on_the_path_make_no_hardware(process, site, tmp_path, monkeypatch):
    for name in ("nvidia-smi", "rocm-smi", "hipcc"):
        tool = tmp_path / name
        tool.write_text("#!/bin/sh\necho a device\n", encoding="utf-8")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    for name in ("cuda", "hip"):
        site.plugin(name, plugin_source(name, platform=name))
    assert {"cuda": "this torch was built without CUDA", "hip": "this torch was built without ROCm"} == {
        name: record.reason for name, record in process().backends.items()
    }


def test_c7_a_cuda_tensor_of_a_rocm_build_is_hip(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert ("hip", "cuda") == (Detector().platform_key(torch.device("cuda")), Detector().device_type("hip"))


def test_c9_the_explanation_names_the_level_that_decided(process, site):
    site.plugin("fast", plugin_source("fast", priority=90))
    site.plugin("slow", plugin_source("slow", priority=10))
    made = process()
    use = made.registry.policy.use
    decided = [(selection(made).winner.selector, selection(made).decided_by)]
    for settings in ({"order": "*=slow"}, {"force": "native"}):
        with use(**settings):
            decided.append((selection(made).winner.selector, selection(made).decided_by))
    assert [("fast/plugin", "priority"), ("slow/plugin", "order"), ("native", "force")] == decided
    assert "slow" == made.call(backend="slow")


def test_c9_an_op_has_its_own_order(process, site):
    for name in ("one", "two"):
        site.plugin(name)
    assert "two" == process(ORDER="attention.clamp_position=two;*=one").call()
    assert "one" == process(ORDER="moe.*=two;*=one").call()


# ----------------------------------------------------------------------------------------------- K


@pytest.mark.parametrize("word", ["tritn", "cuda/tritn", "acme/triton"])
def test_k1_a_forced_word_that_nobody_knows_fails_with_the_nearest(process, word):
    with pytest.raises(opgraft.UnknownSelectorError) as caught:
        process(FORCE=word).call()
    assert str(caught.value).startswith(f"unknown selector {word!r}")
    assert "Known: " in str(caught.value)


def test_k1_a_forced_word_that_nothing_offers_fails(process):
    with pytest.raises(opgraft.NoKernelError) as caught:
        process(FORCE="cute_dsl").call()
    assert "forced selector 'cute_dsl': no kernel in this process is offered by it" == str(caught.value)


def test_k4_a_preferred_backend_that_is_absent_warns_once_and_fails_nothing(process, site, caplog):
    site.plugin("npus", plugin_source("npus", platform="npu"))
    made = process(NoHardware(), ORDER="*=npus,nobody")
    for _ in range(3):
        assert torch.equal(NATIVE, made.call())
    told = messages(caplog)
    assert len(told) == len(set(told))
    assert any("nobody" in message for message in told)


def test_k7_a_forced_selector_passes_over_an_op_that_has_no_such_kernel_with_one_warning(process, site, caplog):
    body = "@forward('attention.clamp_position', kernel_backend='triton', dtypes=('int64',))\ndef other(seq_lens, *, out=None): ..."
    site.plugin("acme", plugin_source("acme", body))
    made = process(FORCE="triton")
    for _ in range(3):
        assert "acme" == made.call()
    (told,) = messages(caplog)
    assert "triton" in told
    assert OP in told
    with pytest.raises(opgraft.NoKernelError):
        process(FORCE="triton", STRICT="1").call()


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), MemoryError(), KeyError("x"), NotImplementedError()])
def test_k8_a_kernels_exception_passes_and_nothing_runs_a_second_time(process, error):
    ran = []

    class Acme:
        @hookimpl
        def opgraft_backend(self):
            return Backend(name="acme", platforms=("cpu",))

        @forward(OP, kernel_backend="plugin", priority=90)
        def fails(self, seq_lens, *, out=None):
            ran.append("fails")
            raise error

        @forward(OP, kernel_backend="plugin", priority=80)
        def never(self, seq_lens, *, out=None):
            ran.append("never")

    made = process()
    made.registry.register_backend(Acme())
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            made.call()
        assert caught.value is error
        assert ["acme/plugin"] == [note.split("kernel ")[1].split()[0] for note in error.__notes__]
    assert ["fails", "fails"] == ran


@pytest.mark.parametrize(
    ("listed", "active"),
    [
        (None, {"one", "two"}),
        ("", set()),
        ("one", {"one"}),
        ("made-up-two", {"two"}),
        ("Made_Up_Two", {"two"}),
        ("x", set()),
    ],
)
def test_k9_the_allow_list(process, site, listed, active):
    for name in ("one", "two"):
        site.plugin(name)
    variables = {} if listed is None else {"PLUGINS": listed}
    assert active == {name for name, record in process(**variables).backends.items() if record.status == "active"}


def test_a_denial_taken_back_loads_the_backend_without_a_refresh(process, site):
    site.plugin("acme")
    made = process()
    made.registry.policy.set(deny="acme")
    assert torch.equal(NATIVE, made.call())
    made.registry.policy.set(deny=None)
    assert "acme" == made.call()
