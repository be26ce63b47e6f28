"""Acme's plugin through opgraft: found by its metadata, chosen on its device, light to load."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import opgraft
from opgraft.hookspecs import offer_of
from opgraft_acme import plugin
from opgraft_acme.pretend_device import autoload
from opgraft_acme.pretend_device.processor import launches

autoload()

OP = "attention.clamp_position"
ACME = torch.device("acme", 0)
EXAMPLE = Path(__file__).parents[2] / "examples" / "oot_vendor_plugin"
clamp_position = opgraft.ops.attention.clamp_position


@pytest.fixture
def seq_lens():
    return torch.tensor([5, 0, -3, 2**31 - 1, -(2**31)], dtype=torch.int32)


def test_a_tensor_on_acme_runs_acmes_kernel(seq_lens):
    before = launches()

    positions = clamp_position(seq_lens.to("acme"))

    assert before + 1 == launches()
    assert ACME == positions.device
    assert [4, 0, 0, 2**31 - 2, 0] == positions.tolist()


def test_a_cpu_tensor_in_the_same_process_does_not(seq_lens):
    clamp_position(seq_lens.to("acme"))
    before = launches()

    positions = clamp_position(seq_lens)

    assert before == launches()
    assert "cpu" == positions.device.type
    assert "acme" != opgraft.explain(OP, seq_lens).winner.backend


def test_out_on_acme_is_returned(seq_lens):
    out = torch.zeros(10, dtype=torch.int64, device="acme")[::2]

    assert out is clamp_position(seq_lens.to("acme"), out=out)
    assert [4, 0, 0, 2**31 - 2, 0] == out.tolist()


def test_the_choice_is_explained(seq_lens):
    selection = opgraft.explain(OP, seq_lens.to("acme"))

    assert "acme/plugin" == selection.winner.selector
    assert "priority" == selection.decided_by
    assert ("opgraft-acme", "0.3.1") == (selection.winner.distribution, selection.winner.version)


@pytest.mark.parametrize("how", [{"deny": ("acme",)}, {"force": "native"}])
def test_without_acmes_kernel_the_native_runs_on_its_device(how, seq_lens):
    tensor, before = seq_lens.to("acme"), launches()

    with opgraft.use(**how):
        positions = clamp_position(tensor)

    assert before == launches()
    assert ACME == positions.device
    assert [4, 0, 0, 2**31 - 2, 0] == positions.tolist()


def test_acmes_kernel_is_refused_for_a_cpu_tensor(seq_lens):
    with pytest.raises(opgraft.NoKernelError, match="device is cpu, needs acme"):
        clamp_position(seq_lens, backend="acme")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (lambda t: {"seq_lens": t.float()}, opgraft.ArgumentTypeError),
        (lambda t: {"seq_lens": t, "out": t.clone()}, opgraft.ArgumentTypeError),
        (lambda t: {"seq_lens": t, "out": t.cpu().long()}, opgraft.ArgumentValueError),
        (lambda t: {"seq_lens": t, "out": t.long()[1:]}, opgraft.ArgumentValueError),
    ],
)
def test_a_mistake_is_named_before_any_launch(arguments, error, seq_lens):
    tensor, before = seq_lens.to("acme"), launches()

    with pytest.raises(error, match=f"^{OP}: "):
        clamp_position(**arguments(tensor))

    assert before == launches()


def test_an_out_that_overlaps_the_input_is_refused():
    tensor = torch.zeros(6, dtype=torch.int64, device="acme")

    with pytest.raises(opgraft.ArgumentValueError, match="overlap"):
        clamp_position(tensor[:4], out=tensor[2:])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_calls_acmes_kernel(backend, seq_lens):
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: clamp_position(t) + 1, backend=backend, fullgraph=True)
    before = launches()

    result = compiled(seq_lens.to("acme"))

    assert before < launches()
    assert [5, 1, 1, 2**31 - 1, 1] == result.tolist()


def test_the_op_is_a_proper_torch_operator_on_acme(seq_lens):
    tensor, out = seq_lens.to("acme"), torch.empty(5, dtype=torch.int64, device="acme")
    operator = torch.ops.opgraft.attention_clamp_position

    torch.library.opcheck(operator.default, (tensor,))
    torch.library.opcheck(operator.out, (tensor,), {"out": out})


@pytest.mark.parametrize("name", sorted(opgraft.ops.attention.__all__))
def test_every_native_means_the_same_on_acme(name):
    handle = getattr(opgraft.ops.attention, name)
    rule = handle.op.format_signature.supported_dtypes
    generator = torch.Generator().manual_seed(0)
    dtypes = {
        parameter: getattr(torch, (rule if isinstance(rule, tuple) else rule[parameter])[-1])
        for parameter in inspect.signature(handle.op.forward_native).parameters
        if isinstance(rule, tuple) or parameter in rule
    }
    cases = [
        *(handle.op.sample(size, dtypes=dtypes, generator=generator) for size in (0, 1, 64)),
        *(case for _, case in handle.op.edge_samples(dtypes=dtypes, generator=generator)),
    ]

    for case in cases:
        there = tree_map_only(torch.Tensor, lambda tensor: tensor.to("acme"), case)
        results = tree_leaves(handle(**there, backend="native"))
        expected = tree_leaves(handle(**case, backend="native"))

        assert {ACME} == {result.device for result in results}
        for one, other in zip(expected, results, strict=True):
            assert one.dtype is other.dtype
            assert one.stride() == other.stride()
            assert torch.equal(one, other.cpu())


def run_python(code):
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, check=False, text=True)


@pytest.mark.parametrize(
    "order",
    [
        "import opgraft_acme.plugin, opgraft",
        "import opgraft, opgraft_acme.plugin",
        "import torch, opgraft",
        "import opgraft, torch",
        "import opgraft_acme.kernels.clamp_position, opgraft",
        "import opgraft_acme.pretend_device, opgraft, torch",
    ],
)
def test_the_order_of_imports_does_not_matter(order):
    done = run_python(
        f"{order}\nimport torch\nprint(opgraft.explain({OP!r}, torch.zeros(1, device='acme').long()).winner.selector)"
    )

    assert ("acme/plugin\n", "") == (done.stdout, done.stderr)


def test_the_plugin_module_loads_without_torch_and_without_a_kernel():
    done = run_python(
        "import sys, opgraft_acme.plugin\n"
        "print([name for name in sys.modules if name == 'torch' or 'kernels' in name "
        "or 'pretend_device' in name])"
    )

    assert ("[]\n", "") == (done.stdout, done.stderr)


def test_listing_the_backends_imports_no_kernel():
    done = run_python(
        "import sys, opgraft\n"
        "print([record.status for record in opgraft.backends() if record.name == 'acme'])\n"
        "print('opgraft_acme.kernels' in sys.modules)"
    )

    assert ("['active']\nFalse\n", "") == (done.stdout, done.stderr)


def test_where_torch_does_not_load_the_device_the_backend_is_inactive(monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    done = run_python(
        "import opgraft\n"
        "record = next(one for one in opgraft.backends() if one.name == 'acme')\n"
        "print(record.status, '|', record.reason)"
    )

    assert ("inactive | this torch knows no device 'acme'\n", "") == (done.stdout, done.stderr)


def blocks(language):
    text = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_the_readme_shows_the_plugin_as_it_is():
    shown = {}
    exec(blocks("python")[0], shown)  # noqa: S102 - what a reader pastes

    assert plugin.opgraft_backend() == shown["opgraft_backend"]()
    assert offer_of(plugin.clamp_position) == offer_of(shown["clamp_position"])
    assert [
        (one.name, one.kind, one.default) for one in inspect.signature(plugin.clamp_position).parameters.values()
    ] == [(one.name, one.kind, one.default) for one in inspect.signature(shown["clamp_position"]).parameters.values()]
    assert blocks("toml")[0] in (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")


def test_the_readmes_commands_print_what_it_shows():
    shown = re.findall(r"^\$ opgraft (.*)\n((?:[^$].*\n)*)", blocks("console")[0], re.MULTILINE)
    assert ["list", "explain", "run", "conformance"] == [words.split()[0] for words, _ in shown]

    # The last one is tests/test_conformance.py of the example.
    for words, output in shown[:-1]:
        command = [sys.executable, "-m", "opgraft", *words.split()]
        done = subprocess.run(command, capture_output=True, check=True, text=True)
        assert output in {"", done.stdout}


def test_the_readmes_call_runs():
    before = launches()

    exec(blocks("python")[1], {})  # noqa: S102 - what a reader pastes

    assert before + 1 == launches()
