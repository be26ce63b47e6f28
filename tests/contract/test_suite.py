"""The suite itself: what it asks, how it reports, and both ways of running it."""

from __future__ import annotations

import html.parser
import json
import os
import subprocess
import sys

import pytest
import torch
from contract import made_up
from contract.dishonest_kernels import is_wrong_beyond_the_first_block, keeps_the_dtype_of_the_input
from contract.honest_kernels import HONEST

import opgraft
from opgraft.errors import UnknownOpError, UnknownSelectorError
from opgraft.testing.calls import Call, Material
from opgraft.testing.conformance import Options, Suite
from opgraft.testing.expected_failures import ExpectedFailuresError
from opgraft.testing.layouts import LAYOUTS, PLAIN, place
from opgraft.testing.page import page
from opgraft.testing.report import Report
from opgraft.testing.rule import DEFINED, Scope
from opgraft.testing.rules import RULES

CLAMP = made_up.CLAMP
RIGHT = HONEST["with_temporaries"][0]


def run(*command: str, cwd, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        check=False,
        cwd=cwd,
        env={**os.environ, **environment},
        text=True,
    )


# -- rules -----------------------------------------------------------------------------------------------------------


def test_every_rule_that_a_module_defines_is_in_the_list_once():
    assert sorted(one.name for one in DEFINED) == sorted(one.name for one in RULES)


def test_every_rule_has_a_sentence_for_the_report():
    assert [] == [one.name for one in RULES if not one.summary.endswith(".")]


def test_two_rules_cannot_have_one_name():
    from opgraft.testing.rule import rule

    def every_size(subject):
        """Do nothing."""

    with pytest.raises(ValueError, match="there are two rules 'every_size'"):
        rule()(every_size)


# -- calls made from what an op says of itself -----------------------------------------------------------------------


def test_every_pair_of_index_dtypes_occurs_among_the_combinations():
    material = Material(opgraft.op("attention.csr_kv_indices").op)
    rows = [dict(row) for row in material.combinations]

    for left in material.inputs:
        for right in material.inputs:
            pairs = {(row[left], row[right]) for row in rows}
            assert left == right or len(pairs) == 4
    assert len(rows) < 2 ** len(material.inputs)


def test_a_kernels_own_dtypes_narrow_the_combinations():
    op = opgraft.op(CLAMP).op

    assert [{"seq_lens": "int32", "out": "int64"}] == [
        dict(row) for row in Material(op, {"seq_lens": ("int32",)}).combinations
    ]
    assert () == Material(op, {"seq_lens": ("float32",)}).combinations


def test_a_call_can_keep_what_the_host_knows_of_another():
    material = Material(opgraft.op("attention.csr_kv_indices").op)
    call = Call(size=300, seed=1, dtypes=material.combinations[0])
    one, other = material.arguments(call), material.arguments(call.but(seed=2))
    both = material.arguments(call.but(seed=2, host_seed=1))
    assert one["total"] != other["total"]
    assert one["total"] == both["total"]
    assert torch.equal(other["kv_lens"], both["kv_lens"])


def test_only_an_op_that_works_element_by_element_gets_arbitrary_values():
    assert Material(opgraft.op(CLAMP).op).is_elementwise
    assert not Material(opgraft.op("attention.cp_interleave_split").op).is_elementwise
    assert not Material(opgraft.op("attention.block_table").op).is_elementwise


def test_an_op_without_samples_is_called_with_what_its_shapes_say():
    class Scale(opgraft.BaseFusedOp):
        format_signature = opgraft.FormatSignature(
            supported_dtypes=("float32",),
            output_dtype="like:rows",
            shapes={"rows": ("count", "width"), "factors": ("count + 1",)},
        )

        def forward_native(self, rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
            return rows * factors[1:, None]

    material = Material(Scale())
    arguments = material.arguments(Call(size=5, dtypes=material.combinations[0]))

    assert {"rows": (5, 5), "factors": (6,)} == {name: tuple(one.shape) for name, one in arguments.items()}


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "2**31" not in name])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (3, 4), (1, 4), (2, 3, 4), (0, 3)])
def test_a_layout_holds_the_values_and_leaves_others_around_them(layout, shape):
    values = torch.arange(60, dtype=torch.int32)[: int(torch.tensor(shape).prod())].reshape(shape)
    if "stride 0" in layout and shape:
        values = values[:1].expand(shape)

    placed = place(values, layout, torch.device("cpu"))

    if placed is not None:
        assert torch.equal(values, placed.tensor)
        assert torch.equal(placed.memory, placed.before)
        assert layout == PLAIN or not shape or placed.memory.numel() > len(set(values.flatten().tolist()))


# -- shrinking -------------------------------------------------------------------------------------------------------


def failing(suite: Suite, rule: str):
    return next(check for check in suite.checks() if check.rule == rule).result()


def test_a_fault_at_a_block_edge_is_shrunk_to_the_first_size_that_shows_it():
    result = failing(made_up.suite(is_wrong_beyond_the_first_block()), "every_size")

    assert "clamp_position(seq_lens=int32 [1025])  # sample of size 1025, seed 0" == result.example
    assert "the result: element [1024] is 0, expected 67603 (1 of 1025 differ)" == result.message
    assert "direct" == result.route


def test_a_fault_at_one_value_is_shrunk_to_that_value():
    def kernel(seq_lens, *, out=None):
        values = RIGHT(seq_lens)
        values[seq_lens == 4242] = 7
        return values if out is None else out.copy_(values)

    result = failing(made_up.suite(kernel), "every_small_number")

    assert "clamp_position(seq_lens=[4242] int32)" == result.example
    assert "the result: element [0] is 7, expected 4241" == result.message


def test_a_random_fault_is_shrunk_by_hypothesis():
    def kernel(seq_lens, *, out=None):
        values = RIGHT(seq_lens)
        values[1:][seq_lens[1:] == seq_lens[:-1]] += 1
        return values if out is None else out.copy_(values)

    result = failing(made_up.suite(kernel), "random_calls")

    assert "clamp_position(seq_lens=[0, 0] int32)" == result.example


def test_the_random_part_draws_the_same_calls_every_time():
    seen: list[list[tuple[int, ...]]] = [[], []]

    for turn in seen:

        def kernel(seq_lens, *, out=None, turn=turn):
            turn.append((len(seq_lens), *seq_lens.stride()))
            return RIGHT(seq_lens, out=out)

        check = next(c for c in made_up.suite(_plain(kernel)).checks() if c.rule == "random_calls")
        assert "passed" == check.result().outcome
    shorter = min(map(len, seen))
    assert shorter > 50
    assert seen[0][:shorter] == seen[1][:shorter]


def _plain(kernel):
    def plain(seq_lens, *, out=None):
        return kernel(seq_lens, out=out)

    return plain


# -- the list of expected failures -----------------------------------------------------------------------------------


def listed(text: str, kernel, tmp_path) -> Suite:
    path = tmp_path / "known.txt"
    path.write_text(text)
    made = made_up.registry(CLAMP)
    made.register_backend(made_up.plugin(kernel))
    return Suite("made_up", Options(xfails=path), registry=made)


def test_a_listed_failure_is_expected_and_told_with_its_reason(tmp_path):
    suite = listed(f"# known\n{CLAMP} every_size the NPU has one block\n", is_wrong_beyond_the_first_block(), tmp_path)
    result = failing(suite, "every_size")

    assert "expected failure" == result.outcome
    assert result.message.startswith("the NPU has one block (the result: element [1024] is 0")
    assert not result.is_bad


def test_a_listed_failure_that_passes_is_a_failure(tmp_path):
    suite = listed("attention.* every_size the NPU has one block\n", RIGHT, tmp_path)
    result = failing(suite, "every_size")

    assert "unexpected pass" == result.outcome
    assert "it is listed as an expected failure (the NPU has one block); take it out" == result.message
    assert result.is_bad


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            f"{CLAMP} every_size",
            "known.txt, line 1: 'attention.clamp_position every_size' has no reason; write 'OP RULE REASON', for instance 'attention.clamp_position extreme_values the NPU saturates'",
        ),
        (f"{CLAMP} every_sise because", "known.txt, line 1: unknown rule 'every_sise'; did you mean 'every_size'?"),
        ("attention.clamp every_size so", "known.txt, line 1: no op matches 'attention.clamp'; did you mean"),
    ],
)
def test_a_line_that_cannot_be_meant_is_refused(line, message, tmp_path):
    with pytest.raises(ExpectedFailuresError) as caught:
        listed(line, RIGHT, tmp_path)

    assert str(caught.value).startswith(message)


def test_a_list_that_is_not_there_is_refused(tmp_path):
    made = made_up.registry(CLAMP)
    made.register_backend(made_up.plugin(RIGHT))

    with pytest.raises(ExpectedFailuresError, match=r"^there is no list of expected failures 'nowhere\.txt'$"):
        Suite("made_up", Options(xfails=type(tmp_path)("nowhere.txt")), registry=made)


# -- what is asked for -----------------------------------------------------------------------------------------------


def test_an_unknown_backend_is_answered_with_near_names():
    made = made_up.registry(CLAMP)
    made.register_backend(made_up.plugin(RIGHT))

    with pytest.raises(
        UnknownSelectorError, match=r"^no backend 'made_upp' is installed; did you mean 'made_up'\? Known: "
    ):
        Suite("made_upp", registry=made)


def test_a_pattern_that_matches_no_op_is_answered_with_the_ops_of_the_backend():
    made = made_up.registry(CLAMP)
    made.register_backend(made_up.plugin(RIGHT))

    with pytest.raises(
        UnknownOpError,
        match=r"^backend 'made_up' has no op 'attention\.clamp'; did you mean 'attention\.clamp_position'\? Known: ",
    ):
        Suite("made_up", Options(pattern="attention.clamp"), registry=made)


def test_an_inactive_backend_is_tried_in_what_needs_no_hardware():
    suite = made_up.suite(RIGHT, platforms=("acme2",))
    results = [check.result() for check in suite.checks()]

    assert "inactive" == suite.record.status
    assert ["device_is_present"] == [
        one.rule for one in results if one.outcome == "skipped" and "inactive" in one.message
    ]
    assert {Scope.BACKEND, Scope.KERNEL} == {one.scope for one in RULES if one.name in {r.rule for r in results}}
    assert not any(one.is_bad for one in results)


def test_an_inactive_backend_fails_where_its_device_is_required():
    made = made_up.registry(CLAMP)
    made.register_backend(made_up.plugin(RIGHT, platforms=("acme2",)))
    suite = Suite("made_up", Options(require_device=True), registry=made)
    bad = [one for one in (check.result() for check in suite.checks()) if one.is_bad]

    assert ["device_is_present"] == [one.rule for one in bad]
    assert "the backend is inactive: this torch knows no device 'acme2'" == bad[0].message


# -- reports ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report() -> Report:
    """A report with a failure in it, of the cheap rules alone."""
    suite = made_up.suite(keeps_the_dtype_of_the_input())
    wanted = {"result_has_the_declared_dtype", "result_is_contiguous", "gradients_are_natives", "backend_loads"}
    results = tuple(check.result() for check in suite.checks() if check.rule in wanted)
    return Report(
        backend="made_up",
        distribution="opgraft-made-up",
        version="1.0",
        status="active",
        reason="",
        thorough=False,
        results=results,
    )


def test_the_report_for_a_terminal_tells_failures_in_full(report):
    text = "\n".join(report.lines())

    assert "made_up (opgraft-made-up 1.0) is active" in text
    assert (
        "  FAILED result_has_the_declared_dtype: The result has the dtype that the op's format signature states, "
        "for every input dtype.\n"
        "      the result is int32, expected int64\n"
        "      clamp_position(seq_lens=[] int32)  # sample of size 0, seed 0 (called directly)\n"
    ) in text
    assert text.endswith("made_up does not conform: 1 of 4 rules fail.")


def test_the_report_as_json_has_every_result(report):
    data = json.loads(report.json())

    assert not data["passed"]
    assert {"backend_loads": "passed", "result_has_the_declared_dtype": "failed"}.items() <= {
        one["rule"]: one["outcome"] for one in data["results"]
    }.items()
    assert ["attention.clamp_position"] == sorted({one["op"] for one in data["results"]} - {""})


class _Reader(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in {"src", "href"} and not value.startswith("#")]
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag == self.open.pop()


def test_the_report_as_a_page_is_whole_and_loads_nothing(report):
    text = page(report)
    reader = _Reader(text)

    assert [] == reader.loads
    assert [] == reader.open
    assert "<script" not in text
    assert "the result is int32, expected int64" in text
    assert all(rule.name in text for rule in RULES)


# -- the two ways of running it --------------------------------------------------------------------------------------


def test_the_command_reports_a_backend_that_conforms(tmp_path):
    done = run("opgraft", "conformance", "loopback", "--op", CLAMP, "--html", "page.html", cwd=tmp_path)

    assert "" == done.stderr
    assert 0 == done.returncode, done.stdout
    assert done.stdout.splitlines()[-1].startswith("loopback conforms (")
    assert "Conformance of loopback" in (tmp_path / "page.html").read_text()


def test_the_command_answers_an_unknown_backend_with_usage(tmp_path):
    done = run("opgraft", "conformance", "loopbak", cwd=tmp_path)

    assert 2 == done.returncode
    assert done.stderr.startswith("opgraft: no backend 'loopbak' is installed; did you mean 'loopback'? Known: ")


def test_the_command_says_that_a_backend_is_inactive(tmp_path):
    done = run("opgraft", "conformance", "cuda", cwd=tmp_path)
    required = run("opgraft", "conformance", "cuda", "--require-device", "--json", cwd=tmp_path)

    if torch.cuda.is_available():
        pytest.skip("cuda is active here")
    assert 0 == done.returncode, done.stdout
    assert "is inactive: this torch was built without CUDA" in done.stdout.splitlines()[0]
    assert "cuda: nothing is wrong, and no kernel could be run here." == done.stdout.splitlines()[-1]
    assert 1 == required.returncode
    failed = {one["rule"] for one in json.loads(required.stdout)["results"] if one["outcome"] == "failed"}
    assert {"device_is_present"} == failed


def test_the_command_says_what_to_install_where_hypothesis_is_missing(tmp_path):
    code = (
        "import sys; sys.modules['hypothesis'] = None; sys.argv = ['opgraft', 'conformance', 'loopback'];"
        "from opgraft.cli import app; app()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, cwd=tmp_path, text=True)

    message = "opgraft: the conformance suite needs hypothesis and pytest: pip install 'opgraft[testing]'\n"
    assert (2, message) == (done.returncode, done.stderr)


def test_the_command_refuses_a_list_of_expected_failures_that_it_cannot_read(tmp_path):
    (tmp_path / "conformance-xfails.txt").write_text("attention.clamp_position every_size\n")
    done = run("opgraft", "conformance", "loopback", cwd=tmp_path)

    assert 2 == done.returncode
    assert done.stderr.startswith(
        "opgraft: conformance-xfails.txt, line 1: 'attention.clamp_position every_size' has no reason"
    )


PYTEST = ("pytest", "-q", "-p", "opgraft.testing.plugin", "--pyargs", "opgraft.testing.conformance")


def test_pytest_makes_every_rule_a_test(tmp_path):
    options = ("--opgraft-backend", "loopback", "--opgraft-op", CLAMP, "-vv", "-k", "dtype or loads")
    done = run(*PYTEST, *options, cwd=tmp_path)

    assert 0 == done.returncode, done.stdout + done.stderr
    assert "test_rule[backend_loads] PASSED" in done.stdout
    kernel = "attention.clamp_position-loopback/plugin_attention_clamp_position-cpu"
    assert f"test_rule[{kernel}-result_has_the_declared_dtype] PASSED" in done.stdout


def test_pytest_needs_to_be_told_which_backend(tmp_path):
    done = run(*PYTEST, cwd=tmp_path)

    assert 2 == done.returncode
    assert "the conformance suite needs --opgraft-backend NAME" in done.stdout + done.stderr


def test_pytest_answers_an_unknown_backend_with_near_names(tmp_path):
    done = run(*PYTEST, "--opgraft-backend", "loopbak", cwd=tmp_path)

    assert 2 == done.returncode
    assert "no backend 'loopbak' is installed; did you mean 'loopback'?" in done.stdout + done.stderr


def test_pytest_fails_where_the_device_is_required_and_absent(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("cuda is active here")
    done = run(*PYTEST, "--opgraft-backend", "cuda", "--require-device", cwd=tmp_path)

    assert 1 == done.returncode
    assert "device_is_present: A device that the kernel declares is present" in done.stdout


def test_the_suite_is_imported_by_nothing_but_the_command_line(tmp_path):
    code = "import sys, opgraft, opgraft.ops; print([m for m in sys.modules if 'opgraft.testing' in m or m == 'hypothesis'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=tmp_path, text=True)

    assert "[]" == done.stdout.strip()
