"""What the commands print and how they exit, run in this process on what is installed here."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

import opgraft
from opgraft.cli import app
from opgraft.cli._commands import COMMANDS

OP = "attention.clamp_position"


@pytest.fixture
def command():
    """Give a function that runs a command and gives exit code, output and errors."""

    def run(*arguments, env=None):
        result = CliRunner().invoke(app, list(arguments), env=env)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    return run


def test_every_command_has_help_of_one_unbroken_line(command):
    code, output, _ = command("--help")
    assert 0 == code
    for name, function in COMMANDS.items():
        (line,) = (line for line in output.splitlines() if line.startswith(f"  {name} "))
        assert line.endswith(f" {function.__doc__.splitlines()[0]}")


def test_the_version_is_that_of_the_package(command):
    assert (0, f"{opgraft.__version__}\n", "") == command("--version")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lst"], "No such command 'lst'. Did you mean 'list'?"),
        (["list", "--jsn"], "No such option: --jsn"),
        (["explain"], "Missing argument"),
        (["list", "--installed", "--ops"], "--ops needs loaded plugins, --installed loads none; give one of them"),
    ],
)
def test_wrong_usage_exits_with_two_and_says_what_was_meant(command, arguments, said):
    code, output, errors = command(*arguments)
    assert (2, "") == (code, output)
    assert said in errors


# ------------------------------------------------------------------------------------------- list


def test_list_shows_every_record(command):
    code, output, _ = command("list")
    assert 0 == code
    header, *lines = output.splitlines()
    assert ["NAME", "STATUS", "DISTRIBUTION", "PLATFORMS", "KERNELS"] == header.split()
    for record in opgraft.backends():
        assert any(line.split()[:2] == [record.name, record.status] for line in lines)
        if record.reason:
            assert f"    {record.reason}" in lines


def test_list_as_json_has_the_designed_keys(command):
    code, output, _ = command("list", "--json")
    data = json.loads(output)
    assert (0, {"backends"}) == (code, data.keys())
    for shown, record in zip(data["backends"], opgraft.backends(), strict=True):
        assert {
            "name": record.name,
            "status": record.status,
            "reason": record.reason,
            "distribution": record.distribution,
            "version": record.version,
            "entry_point": record.entry_point,
            "location": record.location,
            "platforms": list(record.platforms),
            "kernels": [f"{kernel.op} {kernel}" for kernel in record.kernels],
        } == shown


def test_the_matrix_has_a_row_for_each_op_and_a_column_for_each_loaded_backend(command):
    _, output, _ = command("list", "--ops")
    header, *rows = output.splitlines()
    loaded = [r for r in opgraft.backends() if r.status in {"active", "inactive"}]
    assert ["OP", *(record.name for record in loaded)] == header.split()
    assert opgraft.registry.ops() == [row.split()[0] for row in rows]
    counts = [str(sum(k.op == OP for k in record.kernels) or "-") for record in loaded]
    assert [OP, *counts] in [row.split() for row in rows]
    _, output, _ = command("list", "--ops", "--json")
    data = json.loads(output)
    assert {"backends", "ops"} == data.keys()
    assert {record.name for record in loaded} == data["ops"][OP].keys()


def test_the_installed_list_is_the_same_through_typer(command, capsys, monkeypatch):
    _, output, _ = command("list", "--installed", "--json")
    monkeypatch.setattr(sys, "argv", ["opgraft", "list", "--installed", "--json"])
    app()
    assert output == capsys.readouterr().out
    assert {"name", "distribution", "version", "entry_point", "location", "locations", "requires"} == json.loads(
        output
    )["backends"][0].keys()


# ---------------------------------------------------------------------------------------- explain


def test_explain_as_json_is_the_selection(command):
    selection = opgraft.explain_for(OP, device="cuda", arch="9.0", dtype="int32")
    code, output, _ = command("explain", OP, "--device", "cuda", "--arch", "9.0", "--dtype", "int32", "--json")
    assert 0 == code
    assert {
        "op": OP,
        "winner": str(selection.winner),
        "decided_by": selection.decided_by,
        "candidates": [
            {"kernel": str(c.kernel), "accepted": c.accepted, "reason": c.reason} for c in selection.candidates
        ],
    } == json.loads(output)


def test_explain_shows_each_candidate_with_its_reason_below(command):
    selection = opgraft.explain_for(OP, device="cpu", dtype="int32")
    _, output, _ = command("explain", OP, "--dtype", "int32")
    first, blank, header, *lines = output.splitlines()
    assert f"{OP} with int32 tensors on cpu: {selection.winner}, by {selection.decided_by}" == first
    assert ("", ["KERNEL", "NAME", "OF", "VERDICT"]) == (blank, header.split())
    assert [f"    {c.reason}" for c in selection.candidates] == lines[1::2]
    assert [line.split()[-1] for line in lines[::2]].count("wins") == 1


def test_explain_takes_a_torch_device_for_its_platform_key(command):
    by_key, by_device = (command("explain", OP, "--device", d)[1] for d in ("cpu", "cpu:0"))
    assert by_key == by_device


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["attention.clamp_positio"],
            "opgraft: unknown op 'attention.clamp_positio'; did you mean 'attention.clamp_position'",
        ),
        ([OP, "--device", "cuad"], "opgraft: unknown device 'cuad'; did you mean 'cuda'?"),
        ([OP, "--device", "cuda:x"], "opgraft: unknown device 'cuda:x'; did you mean 'cuda'?"),
        ([OP, "--dtype", "int3"], f"opgraft: {OP}: dtype must be int32 or int64, got int3"),
    ],
)
def test_explain_answers_wrong_names_with_the_nearest(command, arguments, said):
    code, output, errors = command("explain", *arguments)
    assert (2, "") == (code, output)
    assert errors.startswith(said)


# -------------------------------------------------------------------------------------------- run


@pytest.mark.parametrize("values", ["0,1,5,-7", "[0, 1, 5, -7]", "[0,1,5,-7]", "(0,1,5,-7)", " 0 , 1,5,-7"])
def test_run_reads_lists_and_says_which_kernel_ran(command, values):
    code, output, _ = command("run", OP, f"seq_lens={values}", "--backend", "native")
    assert (0, f"{OP} ran native\nint64 (4,) cpu\n[0, 0, 4, 0]\n") == (code, output)


def test_run_as_json_has_the_designed_keys(command):
    _, output, _ = command("run", OP, "seq_lens=0,1,5", "--dtype", "int64", "--backend", "native", "--json")
    assert {
        "op": OP,
        "kernel": "native",
        "outputs": [{"dtype": "int64", "shape": [3], "device": "cpu", "values": [0, 0, 4]}],
    } == json.loads(output)


def test_run_makes_a_scalar_a_tensor_of_as_many_dims_as_the_op_has(command):
    assert "int64 (1,) cpu\n[6]\n" in command("run", OP, "seq_lens=7", "--backend", "native")[1]
    assert "int64 (0,) cpu\n[]\n" in command("run", OP, "seq_lens=", "--backend", "native")[1]


def test_run_takes_several_tensors_scalars_words_and_none(command):
    table = "req_to_token=[[1,2,3,4],[5,6,7,8]]"
    arguments = (table, "req_pool_indices=0,1", "kv_lens=4,3", "kv_starts=none", "page_size=2", "max_pages=2")
    code, output, _ = command("run", "attention.block_table", *arguments, "--backend", "native", "--json")
    assert (0, [2, 2]) == (code, json.loads(output)["outputs"][0]["shape"])


def test_run_gives_every_output_of_an_op_that_has_several(command):
    arguments = ("extend_lens=4,5", "world_size=2", "rank=0")
    _, output, _ = command("run", "attention.cp_interleave_split", *arguments, "--backend", "native", "--json")
    assert 2 == len(json.loads(output)["outputs"])


def test_run_shows_the_calls_that_were_traced(command):
    _, output, _ = command("run", OP, "seq_lens=1", "--backend", "native", "--trace")
    assert ["calls", "op", "kernel", "tensors"] == output.splitlines()[-2].split()
    assert ["1", OP, "native", "torch.int32[1]"] == output.splitlines()[-1].split()
    _, output, _ = command("run", OP, "seq_lens=1", "--backend", "native", "--trace", "--json")
    assert [OP] == [row["op"] for row in json.loads(output)["trace"]]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["seq_lens"], 2, "an argument is NAME=VALUE, got 'seq_lens'; did you mean 'seq_lens'? Known: out, seq_lens"),
        (["seq_len=1"], 2, f"{OP} has no parameter 'seq_len'; did you mean 'seq_lens'? Known: out, seq_lens"),
        (["seq_lens=1", "seq_lens=2"], 2, "seq_lens is given twice"),
        ([], 2, f"{OP} needs seq_lens=... too"),
        (["seq_lens=a,b"], 2, "seq_lens: the value cannot be read: 'a' is no number"),
        (["seq_lens=1.5"], 2, "seq_lens: the value cannot be read: 1.5 is no int32"),
        (["seq_lens=nan"], 2, "seq_lens: the value cannot be read: nan is no int32"),
        (
            ["seq_lens=99999999999"],
            2,
            (
                "seq_lens: the value cannot be read: it makes no int32 tensor: value cannot be converted to type int32 "
                "without overflow"
            ),
        ),
        (["seq_lens=[[1],[2,3]]"], 2, "seq_lens: the value cannot be read: it makes no int32 tensor: "),
        (["seq_lens=1", "--dtype", "int3"], 2, "unknown dtype 'int3'; did you mean 'int32' or "),
        (["seq_lens=1", "--dtype", "float32"], 2, f"{OP}: seq_lens must be int32 or int64, got float32"),
        (["seq_lens=1", "--device", "gpu"], 2, "unknown device 'gpu'"),
        (["seq_lens=1", "--backend", "natve"], 2, "unknown selector 'natve'; did you mean 'native'"),
        (["seq_lens=1", "--backend", "cuda"], 1, f"no kernel can run '{OP}' by selector 'cuda'"),
    ],
)
def test_run_says_what_is_wrong_with_an_argument(command, arguments, code, said):
    got, output, errors = command("run", OP, *arguments)
    assert (code, "") == (got, output)
    assert errors.startswith(f"opgraft: {said}")


def test_a_device_that_is_not_here_is_no_wrong_usage(command):
    if opgraft.registry.detector.count("xpu")[0]:
        pytest.skip("this machine has such a device")
    code, _, errors = command("run", OP, "seq_lens=1", "--device", "xpu")
    assert 1 == code
    assert errors.startswith("opgraft: seq_lens cannot be put on xpu: ")


# ------------------------------------------------------------------------------------------- lock


def test_a_lock_written_here_holds_here(command, tmp_path):
    path = str(tmp_path / "opgraft.lock")
    code, output, _ = command("lock", path)
    assert (0, f"{path} written; a process with OPGRAFT_LOCK={path} is held against it\n") == (code, output)
    assert (0, f"as {path} says\n", "") == command("lock", path, "--check")


def test_a_lock_that_does_not_hold_is_explained_line_by_line(command, tmp_path):
    path = tmp_path / "opgraft.lock"
    command("lock", str(path))
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(f'version = "{opgraft.__version__}"', 'version = "9"', 1), encoding="utf-8")
    with opgraft.use(order="*=native"):
        code, output, _ = command("lock", str(path), "--check")
    lines = output.splitlines()
    assert 1 == code
    assert any(line.endswith(": 9 in the lock, 0.1.0 here") for line in lines)
    assert f"{len(lines) - 1} differences from {path}" == lines[-1]


def test_what_is_no_lock_is_named(command, tmp_path):
    path = tmp_path / "opgraft.lock"
    assert (2, "", f"opgraft: {path}, a lock, cannot be read: No such file or directory\n") == command(
        "lock", str(path), "--check"
    )
    path.write_text("plan = []", encoding="utf-8")
    assert (2, "", f"opgraft: {path} is no lock: KeyError: 'distribution'; write one with `opgraft lock`\n") == command(
        "lock", str(path), "--check"
    )
