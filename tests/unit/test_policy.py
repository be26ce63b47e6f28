"""The policy: where settings come from, which one counts, and what cannot be read."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import json
import pickle
import threading

import pytest

from opgraft.errors import PolicyError
from opgraft.policy import OrderRule, Policy, PolicyStore
from opgraft.spec import KernelBackend, KernelSpec


@pytest.fixture
def store(tmp_path):
    """Give a function that makes a store from variables and the text of an opgraft.toml."""

    def make(toml=None, **environ):
        if toml is not None:
            (tmp_path / "opgraft.toml").write_text(toml, encoding="utf-8")
        return PolicyStore(environ={f"OPGRAFT_{k}": v for k, v in environ.items()}, folder=tmp_path)

    return make


def kernel(backend="cuda", kernel_backend="triton", distribution="opgraft-cuda"):
    return KernelSpec(
        op="attention.clamp_position",
        backend=backend,
        kernel_backend=KernelBackend(kernel_backend),
        target="module:function",
        distribution=distribution,
    )


def test_nothing_set_is_the_default_policy(store):
    policy = store().current()
    assert ((), None, frozenset(), (), False, None, False, False, None, {}) == (
        policy.order,
        policy.force,
        policy.deny,
        policy.require,
        policy.strict,
        policy.plugins,
        policy.trace,
        policy.check,
        policy.lock,
        policy.sources,
    )


def test_every_variable_is_read(store, tmp_path):
    policy = store(
        FORCE="native",
        ORDER="attention.*=acme, triton;*=cuda",
        DENY="acme, opgraft-cuda",
        PLUGINS="opgraft-cuda,hip",
        REQUIRE="cuda",
        STRICT="1",
        TRACE="on",
        CHECK="Yes",
        LOCK=str(tmp_path / "opgraft.lock"),
    ).current()
    assert "native" == policy.force
    assert (OrderRule("attention.*", ("acme", "triton")), OrderRule("*", ("cuda",))) == policy.order
    assert {"acme", "opgraft-cuda"} == policy.deny
    assert {"opgraft-cuda", "hip"} == policy.plugins
    assert ("cuda",) == policy.require
    assert (True, True, True) == (policy.strict, policy.trace, policy.check)
    assert str(tmp_path / "opgraft.lock") == policy.lock
    assert "OPGRAFT_FORCE" == policy.source("force")


def test_the_file_is_read_with_the_values_of_toml(store, tmp_path):
    policy = store(
        'force = "cuda"\ndeny = ["acme"]\nstrict = true\ntrace = "off"\nplugins = []\n'
        '[order]\n"attention.*" = ["acme", "native"]\n"*" = "cuda,triton"\n'
    ).current()
    assert ("cuda", {"acme"}, True, False, frozenset()) == (
        policy.force,
        policy.deny,
        policy.strict,
        policy.trace,
        policy.plugins,
    )
    assert (OrderRule("attention.*", ("acme", "native")), OrderRule("*", ("cuda", "triton"))) == policy.order
    assert str(tmp_path / "opgraft.toml") == policy.source("force")


def test_a_file_named_by_opgraft_config_is_read_in_place_of_the_one_in_the_folder(store, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text('force = "hip"', encoding="utf-8")
    assert "hip" == store('force = "cuda"', CONFIG=str(other)).current().force


def test_the_strongest_source_of_a_setting_counts(store):
    made = store('force = "one"\nstrict = true', FORCE="two")
    assert ("two", "OPGRAFT_FORCE") == (made.current().force, made.current().source("force"))
    made.set(force="three")
    assert "three" == made.current().force
    with made.use(force="four"), made.use(force="five"):
        assert ("five", "opgraft.use") == (made.current().force, made.current().source("force"))
    assert made.current().strict


def test_order_rules_of_stronger_sources_come_first_and_denials_add_up(store):
    made = store('deny = "a"\norder = "*=file"', DENY="b", ORDER="moe.*=env")
    made.set(deny="c", order="*=api")
    with made.use(deny="d", order="*=outer"), made.use(deny=["e"], order=["inner"]):
        policy = made.current()
    assert ["inner", "outer", "api", "env", "file"] == [r.selectors[0] for r in policy.order]
    assert set("abcde") == policy.deny
    assert "opgraft.use, opgraft.set_policy, OPGRAFT_DENY, " in policy.source("deny")


def test_the_first_pattern_that_matches_an_op_counts():
    policy = Policy(order=(OrderRule("moe.*", ("a",)), OrderRule("attention.k*", ("b",)), OrderRule("*", ("c",))))
    assert [("a",), ("b",), ("c",)] == [
        policy.selectors_for(op) for op in ("moe.gate", "attention.kv", "attention.clamp_position")
    ]
    assert () == Policy().selectors_for("moe.gate")


def test_a_list_of_selectors_alone_is_meant_for_every_op(store):
    assert (OrderRule("*", ("cuda", "triton")),) == store(ORDER="cuda,triton").current().order
    made = store()
    made.set(order=["cuda"])
    assert (OrderRule("*", ("cuda",)),) == made.current().order


def test_auto_lifts_a_force(store):
    made = store(FORCE="cuda")
    with made.use(force="auto"):
        assert (None, "opgraft.use") == (made.current().force, made.current().source("force"))
    assert "cuda" == made.current().force


def test_none_takes_a_setting_of_the_api_back(store):
    made = store(FORCE="cuda")
    made.set(force="native", strict=True)
    made.set(force=None)
    assert ("cuda", True) == (made.current().force, made.current().strict)


def test_a_blank_variable_is_one_that_is_not_set_except_for_the_allow_list(store):
    policy = store(FORCE="", ORDER="", DENY="", REQUIRE="", LOCK="", CONFIG="", PLUGINS="").current()
    assert {"plugins": "OPGRAFT_PLUGINS"} == policy.sources
    assert frozenset() == policy.plugins


@pytest.mark.parametrize(
    ("word", "meant"),
    [(word, True) for word in ("1", "true", "yes", "on", "TRUE", " on ")]
    + [(word, False) for word in ("0", "false", "no", "off", "False")],
)
def test_the_words_of_a_boolean(store, word, meant):
    assert meant is store(STRICT=word).current().strict


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"STRICT": "maybe"}, "OPGRAFT_STRICT: strict must be one of 1, true, yes, on, 0, false, no, off, got 'maybe'"),
        ({"CHECK": ""}, "OPGRAFT_CHECK: check must be one of 1, true, yes, on, 0, false, no, off, got ''"),
        (
            {"FORCE": "two words"},
            "OPGRAFT_FORCE: force must be a name such as 'cuda', 'triton' or 'cuda/triton', got 'two words'",
        ),
        (
            {"DENY": "acme,a//b"},
            "OPGRAFT_DENY: deny must be a name such as 'cuda', 'triton' or 'cuda/triton', got 'a//b'",
        ),
        ({"ORDER": "a b=cuda"}, "OPGRAFT_ORDER: order must be rules such as 'attention.*=cuda,triton', got 'a b=cuda'"),
        (
            {"CONFIG": "/nowhere/opgraft.toml"},
            "/nowhere/opgraft.toml (named by OPGRAFT_CONFIG) cannot be read: No such file or directory",
        ),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(store, variables, message):
    with pytest.raises(PolicyError) as caught:
        store(**variables).current()
    assert message == str(caught.value)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("strict = 2", "strict must be one of 1, true, yes, on, 0, false, no, off, got 2"),
        ("strict = 1.0", "strict must be one of 1, true, yes, on, 0, false, no, off, got 1.0"),
        ("deny = 3", "deny must be names separated by commas, or a list of names, got 3"),
        ("deny = [3]", "deny must be a name such as 'cuda', 'triton' or 'cuda/triton', got 3"),
        ("force = []", "force must be a name such as 'cuda', 'triton' or 'cuda/triton', got []"),
        ('[order]\n"a b" = "cuda"', "order must be rules such as 'attention.*=cuda,triton', got {'a b': 'cuda'}"),
    ],
)
def test_a_key_that_cannot_be_read_is_named_with_its_file(store, tmp_path, toml, message):
    with pytest.raises(PolicyError) as caught:
        store(toml).current()
    assert f"{tmp_path / 'opgraft.toml'}: {message}" == str(caught.value)


def test_a_lock_that_is_no_path_is_refused(store):
    with pytest.raises(PolicyError, match=r"opgraft\.toml: lock .*not .?int"):
        store("lock = 3").current()


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"force = ", "Invalid value"),
        (b"\xff\xfe", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"a = " + b"[" * 100_000, ""),
    ],
    ids=["syntax", "encoding", "depth"],
)
def test_a_file_that_is_no_toml_is_named(tmp_path, content, cause):
    path = tmp_path / "opgraft.toml"
    path.write_bytes(content)
    with pytest.raises(PolicyError) as caught:
        PolicyStore(environ={}, folder=tmp_path).current()
    assert str(caught.value).startswith(f"{path} cannot be read: {cause}")


def test_a_folder_in_place_of_the_file_is_named(tmp_path):
    path = tmp_path / "opgraft.toml"
    path.mkdir()
    with pytest.raises(PolicyError) as caught:
        PolicyStore(environ={}, folder=tmp_path).current()
    assert f"{path} cannot be read: Is a directory" == str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"force": 3}, "opgraft.set_policy: force must be a name such as 'cuda', 'triton' or 'cuda/triton', got 3"),
        ({"strict": "x"}, "opgraft.set_policy: strict must be one of 1, true, yes, on, 0, false, no, off, got 'x'"),
        (
            {"forse": "cuda"},
            (
                "opgraft.set_policy: unknown setting 'forse'; did you mean 'force' or 'order'? "
                "Known: check, deny, force, lock, order, plugins, require, strict, trace"
            ),
        ),
    ],
)
def test_a_setting_of_the_api_that_cannot_be_read_changes_nothing(store, settings, message):
    made = store()
    before = made.current()
    with pytest.raises(PolicyError) as caught:
        made.set(**settings)
    assert message == str(caught.value)
    assert before is made.current()


def test_an_unknown_variable_or_key_is_reported_with_the_nearest_one_and_stops_nothing(store, tmp_path, caplog):
    made = store('forze = "x"', FORSE="native", CONFG="x")
    assert made.current().force is None
    known = (
        "Known: OPGRAFT_CHECK, OPGRAFT_CONFIG, OPGRAFT_DENY, OPGRAFT_FORCE, OPGRAFT_LOCK, OPGRAFT_ORDER, "
        "OPGRAFT_PLUGINS, OPGRAFT_REQUIRE, OPGRAFT_STRICT, OPGRAFT_TRACE"
    )
    expected = (
        (
            "OPGRAFT_CONFG: unknown setting 'OPGRAFT_CONFG'; did you mean 'OPGRAFT_CONFIG' or 'OPGRAFT_LOCK' or "
            f"'OPGRAFT_DENY'? {known}"
        ),
        (
            "OPGRAFT_FORSE: unknown setting 'OPGRAFT_FORSE'; did you mean 'OPGRAFT_FORCE' or 'OPGRAFT_ORDER' or "
            f"'OPGRAFT_TRACE'? {known}"
        ),
        (
            f"{tmp_path / 'opgraft.toml'}: unknown setting 'forze'; did you mean 'force' or 'order'? "
            "Known: check, deny, force, lock, order, plugins, require, strict, trace"
        ),
    )
    assert expected == made.unknown
    made.current()
    assert list(expected) == [record.getMessage() for record in caplog.records]


def test_the_environment_is_read_at_first_use_and_then_at_reload(tmp_path):
    environ = {}
    made = PolicyStore(environ=environ, folder=tmp_path)
    environ["OPGRAFT_FORCE"] = "cuda"
    assert "cuda" == made.current().force
    environ["OPGRAFT_FORCE"] = "hip"
    made.set(strict=True)
    assert "cuda" == made.current().force
    made.reload()
    assert ("hip", True) == (made.current().force, made.current().strict)


def test_an_unreadable_variable_raises_until_it_is_mended(tmp_path):
    environ = {"OPGRAFT_STRICT": "maybe"}
    made = PolicyStore(environ=environ, folder=tmp_path)
    for _ in range(2):
        with pytest.raises(PolicyError):
            made.current()
    environ["OPGRAFT_STRICT"] = "1"
    assert made.current().strict


def test_the_policy_is_the_same_object_until_something_changes(store):
    made = store()
    policy = made.current()
    assert policy is made.current() is made.process()
    with made.use(force="cuda") as scoped:
        assert scoped is made.current()
        assert policy is made.process()
    assert policy is made.current()
    made.set(strict=True)
    assert policy is not made.current()


def test_entering_the_same_scope_again_gives_the_same_policy_until_the_process_changes(store):
    made = store()

    def entered():
        with made.use(force="cuda", order={"moe.*": ["a"]}), made.use(deny="b") as scoped:
            return scoped

    first = entered()
    assert first is entered()
    made.set(strict=True)
    assert first is not entered()
    with made.use(force="hip", order={"moe.*": ["a"]}), made.use(deny="b") as other:
        assert first is not other


def test_a_change_of_the_process_is_seen_inside_a_scope(store):
    made = store()
    with made.use(force="cuda"):
        made.set(strict=True)
        assert ("cuda", True) == (made.current().force, made.current().strict)


def test_a_scope_is_left_on_an_exception(store):
    made = store()
    with pytest.raises(KeyError), made.use(force="cuda"):
        raise KeyError
    assert made.current().force is None
    assert not made.any_scope()


def test_another_thread_and_another_task_are_not_in_the_scope(store):
    made = store()
    seen = []

    async def task(force):
        with made.use(force=force):
            await asyncio.sleep(0)
            seen.append((force, made.current().force))

    async def both():
        await asyncio.gather(task("cuda"), task("hip"))

    with made.use(force="native"):
        thread = threading.Thread(target=lambda: seen.append((None, made.current().force)))
        thread.start()
        thread.join()
    asyncio.run(both())
    assert [(None, None), ("cuda", "cuda"), ("hip", "hip")] == seen


def test_a_scope_lives_as_long_as_any_context_holds_it(store):
    made = store()
    assert not made.any_scope()
    with made.use(force="cuda"):
        context = contextvars.copy_context()
        assert made.any_scope()
    assert made.any_scope()
    assert "cuda" == context.run(made.current).force
    del context
    gc.collect()
    assert not made.any_scope()


def test_a_subscriber_hears_of_every_change_and_of_both_ends_of_a_scope(store):
    made = store()
    heard = []
    made.subscribe(lambda: heard.append((made.any_scope(), made.current().force)))
    made.set(force="cuda")
    with made.use(force="hip"):
        pass
    made.reload()
    made.apply({"force": "native"})
    assert [(False, "cuda"), (True, "hip"), (True, "cuda"), (False, "cuda"), (False, "native")] == heard


def test_ten_thousand_scopes_leave_nothing_behind(store):
    made = store()
    made.current()
    for number in range(10_000):
        with made.use(force=f"b{number}"):
            pass
    assert not made.any_scope()
    assert 1 == len(made._merged)
    assert len(made._recent) <= 64


def test_an_exported_policy_is_plain_data_and_rules_in_the_process_that_takes_it_over(store, tmp_path):
    parent = store(
        FORCE="cuda", ORDER="attention.*=acme;*=hip", DENY="acme", REQUIRE="cuda", PLUGINS="cuda", STRICT="1"
    )
    with parent.use(force="native", order="*=triton"):
        exported = parent.export()
    assert exported == json.loads(json.dumps(exported)) == pickle.loads(pickle.dumps(exported))
    child = PolicyStore(environ={"OPGRAFT_DENY": "hip", "OPGRAFT_TRACE": "1"}, folder=tmp_path)
    child.set(force="hip")
    child.apply(exported)
    assert exported == child.export()
    child.reload()
    assert exported == child.export()
    assert "opgraft.apply_policy" == child.current().source("force")


def test_an_exported_policy_can_be_set_setting_by_setting_too(store, tmp_path):
    exported = store(FORCE="cuda", ORDER="attention.*=acme;*=hip", DENY="acme").export()
    child = PolicyStore(environ={}, folder=tmp_path)
    child.set(**exported)
    assert exported == child.export()


def test_the_text_of_a_policy_shows_each_setting_with_its_source(store):
    text = str(store(FORCE="native", ORDER="attention.*=acme,triton;*=cuda", DENY="a,b", PLUGINS="").current())
    assert (
        "order    attention.*=acme,triton;*=cuda  OPGRAFT_ORDER\n"
        "force    native                          OPGRAFT_FORCE\n"
        "deny     a,b                             OPGRAFT_DENY\n"
        "plugins  -                               OPGRAFT_PLUGINS\n"
        "require  -                               default\n"
        "strict   False                           default\n"
        "trace    False                           default\n"
        "check    False                           default\n"
        "lock     None                            default"
    ) == text


@pytest.mark.parametrize("word", ["cuda", "triton", "cuda/triton", "opgraft-cuda", "Opgraft_CUDA"])
def test_a_kernel_is_denied_by_backend_kernel_backend_selector_or_distribution(store, word):
    assert f"{word!r} is denied by OPGRAFT_DENY" == store(DENY=word).current().denied(kernel())


def test_a_kernel_that_nothing_denies_may_run(store):
    assert store(DENY="hip,jit,hip/triton,opgraft-hip").current().denied(kernel()) is None


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({}, None),
        ({"DENY": "triton"}, None),
        ({"DENY": "acme"}, "'acme' is denied by OPGRAFT_DENY"),
        ({"DENY": "opgraft.acme"}, "'opgraft.acme' is denied by OPGRAFT_DENY"),
        ({"PLUGINS": "acme"}, None),
        ({"PLUGINS": "opgraft_acme"}, None),
        ({"PLUGINS": "acme", "DENY": "opgraft-acme"}, "'opgraft-acme' is denied by OPGRAFT_DENY"),
        ({"PLUGINS": ""}, "not in the allow-list of OPGRAFT_PLUGINS, which lists nothing"),
        ({"PLUGINS": "hip,cuda"}, "not in the allow-list of OPGRAFT_PLUGINS, which lists cuda, hip"),
    ],
)
def test_whether_a_backend_may_be_loaded(store, variables, reason):
    assert reason == store(**variables).current().allows("acme", "opgraft-acme")


def test_a_backend_without_distribution_is_allowed_by_its_name_alone(store):
    policy = store(PLUGINS="acme").current()
    assert [None, "not in the allow-list of OPGRAFT_PLUGINS, which lists acme"] == [
        policy.allows("acme", ""),
        policy.allows("other", ""),
    ]
