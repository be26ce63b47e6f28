"""Field reports J and the first calls of many threads: one load, one winner, nobody stuck."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from installation import plugin_source

import opgraft
from opgraft.hookspecs import forward, hookimpl
from opgraft.spec import Backend
from opgraft.tracing import Trace

OP = "attention.clamp_position"
THREADS = 32


def together(function, count=THREADS):
    """Run a function in many threads that start at the same moment; give what each returned."""
    barrier = threading.Barrier(count)

    def started(number):
        barrier.wait(30)
        return function(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(started, range(count), timeout=60))


SLOW = {
    "plain": "",
    "slow import": "import time; time.sleep(1)\n",
    "threads of its own": (
        "import threading, time\n"
        "threads = [threading.Thread(target=lambda: (time.sleep(0.2), __import__('decimal'))) for _ in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
    ),
}


@pytest.mark.parametrize("prefix", SLOW.values(), ids=SLOW)
def test_the_first_call_of_many_threads_loads_once_and_has_one_winner(process, site, prefix):
    module = site.plugin("acme", f"import builtins; builtins.loads.append(1)\n{prefix}" + plugin_source("acme"))
    import builtins

    builtins.loads = []
    try:
        made = process()
        results = together(lambda _: made.call())
        loads = len(builtins.loads)
    finally:
        del builtins.loads
    assert (["acme"] * THREADS, 1) == (results, loads)
    assert module in sys.modules


def test_a_plugin_that_waits_for_a_call_in_a_thread_of_its_own_is_no_deadlock(process, site, monkeypatch):
    monkeypatch.setattr("opgraft.kernel_registry._PATIENCE", 1.0)
    made = process()
    site.module("made_up_bridge", "ask = None")
    import made_up_bridge

    made_up_bridge.ask = made.registry.backends
    body = (
        "import threading, made_up_bridge\n"
        "seen = []\n"
        "def ask():\n"
        "    try: made_up_bridge.ask()\n"
        "    except Exception as error: seen.append(str(error))\n"
        "thread = threading.Thread(target=ask); thread.start(); thread.join()\n"
        "if seen: raise RuntimeError(seen[0])\n"
    )
    site.plugin("acme", body + plugin_source("acme"))
    record = made.backends["acme"]
    assert "quarantined" == record.status
    assert record.reason.endswith("RuntimeError: another thread has been loading plugins for 1 s")


def test_many_threads_that_meet_a_required_broken_backend_all_hear_of_it(process, site):
    site.plugin("acme", "raise OSError('no driver')")
    made = process(REQUIRE="acme")

    def called(_):
        with pytest.raises(opgraft.PluginError) as caught:
            made.call()
        return str(caught.value)

    assert 1 == len(set(together(called)))


def test_each_thread_has_its_own_policy(process, site):
    for name in ("one", "two"):
        site.plugin(name)
    made = process()

    def called(number):
        name = ("one", "two")[number % 2]
        results = set()
        for _ in range(50):
            with made.registry.policy.use(force=name):
                results.add(made.call())
        return results == {name}

    assert all(together(called))
    assert "one" == made.call()


def test_each_task_has_its_own_policy_and_a_copied_context_keeps_it(process, site):
    for name in ("one", "two"):
        site.plugin(name)
    made = process()

    async def called(name):
        with made.registry.policy.use(force=name):
            kept = contextvars.copy_context()
            await asyncio.sleep(0)
            results = {made.call() for _ in range(20)}
            await asyncio.sleep(0)
        return results == {name} == {kept.run(made.call)}

    async def main():
        return await asyncio.gather(*(called(name) for name in ("one", "two") * 8))

    assert all(asyncio.run(main()))
    assert "one" == made.call()


def test_refreshes_while_calls_run_give_only_right_answers(process, site):
    site.plugin("acme")
    made = process()
    until = time.monotonic() + 1.5
    stop = threading.Event()

    def called(number):
        results = set()
        if number == 0:
            while time.monotonic() < until:
                made.registry.refresh()
                time.sleep(0.002)
            stop.set()
            return {"acme"}
        while not stop.is_set():
            results.add(made.call())
        return results

    assert [{"acme"}] * 8 == together(called, 8)


def test_a_backend_registered_while_calls_run_is_used_from_then_on(process, site):
    site.plugin("acme")
    made = process()
    stop = threading.Event()

    class Better:
        @hookimpl
        def opgraft_backend(self):
            return Backend(name="better", platforms=("cpu",))

        @staticmethod
        @forward(OP, kernel_backend="plugin", priority=90)
        def clamp_position(seq_lens, *, out=None):
            return "better"

    def called(number):
        if number == 0:
            time.sleep(0.1)
            made.registry.register_backend(Better())
            after = made.call()
            stop.set()
            return [after]
        seen = []
        while not stop.is_set():
            result = made.call()
            if result not in seen[-1:]:
                seen.append(result)
        return seen

    first, *others = together(called, 8)
    assert ["better"] == first
    assert all(seen in (["acme"], ["acme", "better"], ["better"]) for seen in others)
    assert "better" == made.call()


def test_j2_kernels_of_many_threads_run_at_the_same_time(process):
    inside = threading.Barrier(4)

    class Acme:
        @hookimpl
        def opgraft_backend(self):
            return Backend(name="acme", platforms=("cpu",))

        @staticmethod
        @forward(OP, kernel_backend="plugin")
        def clamp_position(seq_lens, *, out=None):
            return inside.wait(20) >= 0

    made = process()
    made.registry.register_backend(Acme())
    assert [True] * 4 == together(lambda _: made.call(), 4)


def test_traces_of_many_threads_lose_no_call(process):
    made = process()
    made.call()
    with made.registry.tracing(Trace()) as traced:
        together(lambda _: [made.call() for _ in range(50)], 8)
    assert 400 == sum(row["calls"] for row in traced.summary())


def test_results_are_right_in_every_thread(process):
    made = process()
    seq_lens = torch.arange(-5, 100, dtype=torch.int32)
    expected = (seq_lens.clamp(min=1) - 1).long()
    assert all(together(lambda _: torch.equal(expected, made.op(seq_lens))))
