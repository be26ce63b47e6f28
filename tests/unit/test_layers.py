"""The worked example of docs/layers.md, run as it stands there, and what a layer has to bear."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from simulated import registry_on
from torch import nn

import opgraft
from opgraft import ANY, ArgumentTypeError, ArgumentValueError, KernelBackend

PAGE = Path(__file__).parents[2] / "docs/layers.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write the page's modules, and give the folder."""
    made = tmp_path_factory.mktemp("layers")
    for name, source in zip(("norm.py", "norm_kernel.py", "use.py"), BLOCKS, strict=True):
        (made / name).write_text(source)
    return made


@pytest.fixture
def norm_class(folder, monkeypatch):
    """Give the page's class with a stand-in for its Triton kernel that tells that it ran."""
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module("norm")
    if not hasattr(module, "Simulated"):

        class Simulated(module.RMSNorm):
            def forward_triton(self, x):
                self.launches = getattr(self, "launches", 0) + 1
                return self.forward_native(x).detach()

        Simulated.__module__, Simulated.__qualname__ = "norm", "Simulated"
        module.Simulated = Simulated
    return module.Simulated


@pytest.fixture
def norm(norm_class):
    return norm_class(8).attach(registry_on("cuda", "9.0")).requires_grad_(False)


X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def launches(layer):
    return getattr(layer, "launches", 0)


def test_the_page_runs_as_it_stands(folder):
    done = subprocess.run(
        [sys.executable, "use.py"],
        capture_output=True,
        check=False,
        cwd=folder,
        env=os.environ | {"OPGRAFT_PLUGINS": ""},
        text=True,
    )

    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith("RMSNorm with bfloat16 tensors on cuda 9.0: op/triton, decided by priority\n")


def test_the_pages_kernel_agrees_with_native_in_tritons_interpreter(folder):
    code = (
        "import torch; from norm import RMSNorm; from simulated import registry_on\n"
        "norm = RMSNorm(100).attach(registry_on('cuda', '9.0')).requires_grad_(False)\n"
        "norm.weight.copy_(torch.randn(100))\n"
        "for shape in ((1, 100), (5, 100), (0, 100)):\n"
        "    for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 2e-2)):\n"
        "        x = torch.randn(shape).to(dtype)\n"
        "        torch.testing.assert_close(norm(x), norm(x, backend='native'), rtol=limit, atol=limit)\n"
        "wide = torch.randn(5, 200)[:, :100]\n"
        "torch.testing.assert_close(norm(wide), norm(wide, backend='native'))\n"
        "print(norm.dispatcher.explain((wide,)).winner.selector, norm.dispatcher.explain((wide.t().contiguous().t(),)).winner.selector)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{Path(__file__).parents[1]}", "TRITON_INTERPRET": "1"},
        text=True,
    )

    assert (0, "op/triton native\n") == (done.returncode, done.stdout), done.stderr


def test_the_kernel_runs_on_its_hardware_and_native_elsewhere(norm, norm_class):
    elsewhere = norm_class(8).attach(registry_on("npu")).requires_grad_(False)

    assert torch.equal(norm(X), elsewhere(X))
    assert (1, 0) == (launches(norm), launches(elsewhere))


def test_misuse_is_refused_before_a_launch(norm):
    with pytest.raises(ArgumentValueError, match=r"^RMSNorm: x must have 8 columns, got 7$"):
        norm(X[:, :7])
    with pytest.raises(ArgumentValueError, match=r"^Simulated: x must be of shape \[rows, width\], got \(8,\)$"):
        norm(X[0])
    with pytest.raises(ArgumentTypeError, match=r"^Simulated: x must be float16 or bfloat16 or float32, got float64$"):
        norm(X.double())
    assert 0 == launches(norm)


def test_a_layout_that_the_kernel_rejects_takes_native(norm):
    norm(X.t().contiguous().t())

    assert 0 == launches(norm)
    assert "rejected: column stride is 3, the kernel needs 1" in str(norm.dispatcher.explain((X.t().contiguous().t(),)))


def test_it_moves_between_devices_and_dtypes_and_chooses_by_the_tensors_of_the_call(norm):
    there = norm.to("acme")(X.to("acme"))
    on_acme = launches(norm)
    back = norm.cpu()(X)
    half = norm.half()(X.half())

    assert ("acme", "cpu", torch.float16) == (there.device.type, back.device.type, half.dtype)
    assert torch.allclose(there.cpu(), back)
    assert (0, 2) == (on_acme, launches(norm))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_has_a_weight_of_its_own(norm, duplicate):
    norm(X)
    copied = duplicate(norm).attach(norm.registry)
    with torch.no_grad():
        copied.weight.mul_(3)

    assert torch.allclose(norm(X) * 3, copied(X))


def test_it_loads_a_state_and_is_called_with_another(norm):
    state = {"weight": torch.full((8,), 2.0)}
    plain = norm(X)

    assert torch.allclose(plain * 2, torch.func.functional_call(norm, state, (X,)))
    norm.load_state_dict(state)
    assert torch.allclose(plain * 2, norm(X))


def test_it_is_hooked_within_a_sequential(norm):
    seen = []
    model = nn.Sequential(nn.Identity(), norm, nn.ReLU())
    norm.register_forward_pre_hook(lambda layer, args: (args[0] * 0,))
    norm.register_forward_hook(lambda layer, args, result: seen.append(result.abs().sum().item()))

    assert 0.0 == model(X).sum().item()
    assert [0.0] == seen


def test_a_trained_weight_takes_native_and_gets_its_gradient(norm):
    norm.requires_grad_()
    norm(X).sum().backward()
    before = launches(norm)
    with torch.no_grad():
        norm(X)

    assert norm.weight.grad is not None
    assert (0, 1) == (before, launches(norm))


def test_parametrized_it_uses_the_weight_that_is_made(norm):
    class Thrice(nn.Module):
        def forward(self, weight):
            return weight * 3

    plain = norm(X)
    nn.utils.parametrize.register_parametrization(norm, "weight", Thrice())

    assert torch.allclose(plain * 3, norm(X))


@pytest.mark.parametrize(("num_tokens", "launched"), [(1, 0), (2, 1), (512, 1)])
def test_in_compile_mode_more_than_one_token_keeps_the_kernel(norm, num_tokens, launched):
    with opgraft.torch_compile_mode(nn.Sequential(norm), num_tokens):
        norm(X)

    assert launched == launches(norm)


@pytest.mark.parametrize("num_tokens", [1, 8])
def test_it_compiles_without_a_break_in_both_modes(norm, num_tokens):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm
            self.linear = nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x):
            return self.linear(self.norm(x))

    model = Model()
    torch._dynamo.reset()
    eager, opaque = model(X), torch.compile(model, backend="eager", fullgraph=True)(X)
    with opgraft.torch_compile_mode(model, num_tokens):
        torch._dynamo.reset()
        inlined = torch.compile(model, backend="eager", fullgraph=True)(X)
        explained = torch._dynamo.explain(model)(X)

    assert torch.allclose(eager, opaque)
    assert torch.allclose(eager, inlined)
    assert 0 == explained.graph_break_count


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_it_is_traced_by_example_and_exported(norm):
    model = nn.Sequential(norm, nn.ReLU())

    assert torch.allclose(model(X), torch.jit.trace(model, (X,))(X))
    assert torch.allclose(model(X), torch.export.export(model, (X,)).module()(X))


def test_a_differentiable_kernel_is_kept_for_training(norm_class):
    class Trained(norm_class):
        differentiable = (KernelBackend.TRITON,)
        capabilities = {KernelBackend.TRITON: ANY}

        def forward_triton(self, x):
            self.launches = launches(self) + 1
            return self.forward_native(x)

    layer = Trained(8).attach(registry_on())
    layer(X).sum().backward()

    assert (1, True) == (launches(layer), layer.weight.grad is not None)
