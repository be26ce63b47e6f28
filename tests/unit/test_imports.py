"""Imports go one way, importing the package is light, and some things one module alone may know."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import opgraft

CORE = Path(opgraft.__file__).parent
ROOT = CORE.parents[2]

# Each line may import from those above it, and from its own line.
TIERS = (
    ("__init__",),
    ("errors",),
    ("hardware",),
    ("spec",),
    ("hookspecs", "policy", "tracing"),
    ("plugins", "discovery", "lockfile", "kernel_registry", "selection"),
    ("arguments", "checked"),
    ("dispatch",),
    ("handle",),
    ("fused_op",),
    ("ops", "torch_ops", "planning", "host", "compat", "api"),
    ("cli", "testing", "__main__"),
)
TIER = {name: place for place, names in enumerate(TIERS) for name in names}
DEFERRED = {("lockfile", "planning")}
"""Imports inside functions that go the other way: a lock holds plans, and the registry holds locks."""


def modules():
    return {path.relative_to(CORE).as_posix(): ast.parse(path.read_text()) for path in sorted(CORE.rglob("*.py"))}


def imported(tree, *, deferred):
    """List the modules that are imported where the module is loaded, or, if deferred, anywhere but for types."""
    found = []
    waiting = [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not deferred:
            continue
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            waiting += ast.iter_child_nodes(node)
    return found


def names_of(tree):
    """List every name, attribute and string of a module, docstrings left out."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    attribute_docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs | attribute_docs:
            yield node.value


def run(code, **environ):
    environment = {name: one for name, one in os.environ.items() if not name.startswith("OPGRAFT_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        check=False,
        env=environment | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} | environ,
        text=True,
    )
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout


def test_every_module_has_a_place_in_the_order():
    known = {name.partition("/")[0].removesuffix(".py") for name in modules()}

    assert known == set(TIER)


@pytest.mark.parametrize("deferred", [False, True])
def test_imports_go_one_way(deferred):
    backwards = []
    for path, tree in modules().items():
        here = path.partition("/")[0].removesuffix(".py")
        for name in imported(tree, deferred=deferred):
            package, _, rest = name.partition(".")
            there = rest.partition(".")[0]
            up = package == "opgraft" and there in TIER and TIER[there] > TIER[here]
            if up and not (deferred and (here, there) in DEFERRED):
                backwards.append(f"{path} imports {name}")

    assert [] == backwards


def test_the_core_imports_no_plugin_and_plugins_no_other():
    folders = {path.parent.name: path for path in ROOT.glob("*/*/src/opgraft_*") if path.is_dir()}
    packages = {path.name: path for path in ROOT.glob("*/*/src/opgraft_*") if path.is_dir()}
    assert folders
    allowed = {"opgraft_cuda": {"opgraft_triton_kernels"}, "opgraft_hip": {"opgraft_triton_kernels"}}
    wrong = []
    for package, folder in {"opgraft": CORE, **packages}.items():
        for path in folder.rglob("*.py"):
            for name in imported(ast.parse(path.read_text()), deferred=True):
                other = name.partition(".")[0]
                if other in packages and other != package and other not in allowed.get(package, set()):
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")

    assert [] == wrong


def test_importing_the_package_imports_neither_torch_nor_a_plugin_nor_what_is_not_used():
    code = (
        "import sys; before = set(sys.modules); import opgraft\n"
        "new = set(sys.modules) - before - set(sys.stdlib_module_names)\n"
        "print(sorted(name for name in new if name.partition('.')[0] not in sys.stdlib_module_names))"
    )

    assert "['opgraft']\n" == run(code)


def test_what_a_plugin_uses_imports_no_torch():
    names = "Backend KernelBackend CapabilityRequirement forward hookimpl NoKernelError host.check_buffer_fits"
    code = (
        f"import sys, opgraft; {'; '.join(f'opgraft.{name}' for name in names.split())}; print('torch' in sys.modules)"
    )

    assert "False\n" == run(code)


def test_the_metadata_alone_is_read_without_torch():
    code = "import sys; from opgraft.discovery import scan; scan(); print('torch' in sys.modules)"

    assert "False\n" == run(code)


def test_looking_at_all_backends_imports_no_kernel():
    code = (
        "import sys, opgraft; opgraft.backends(); opgraft.explain_for('attention.clamp_position', device='cuda')\n"
        "kernels = ('triton', 'opgraft_triton_kernels.attention', 'torch._dynamo', 'torch._inductor')\n"
        "print([name for name in sys.modules if name.startswith(kernels) or '.kernels' in name])\n"
        "import torch; print(torch.cuda.is_initialized())"
    )

    assert "[]\nFalse\n" == run(code)


def test_the_first_call_pulls_in_no_compiler_and_steady_state_imports_nothing():
    code = (
        "import sys, torch, opgraft; f = opgraft.ops.attention.clamp_position; x = torch.tensor([3])\n"
        "f(x); print('torch._dynamo' in sys.modules, 'torch._inductor' in sys.modules)\n"
        "before = set(sys.modules); [f(x) for _ in range(3)]; print(set(sys.modules) - before)"
    )

    assert "False False\nset()\n" == run(code, OPGRAFT_PLUGINS="")


VENDORS = {"hip", "rocm", "npu", "musa", "xpu", "hpu", "amx", "cuda", "gfx942", "sm"}


def test_hardware_alone_names_vendors_hardware():
    known = {
        "compat.py": {"cuda", "hip", "musa", "npu", "xpu", "hpu"},  # the methods of the older contract
        "dispatch.py": {"cuda", "amx"},  # whether a CUDA graph is being captured, and what the detector says of AMX
        "selection.py": {"cuda", "amx"},  # the one chain ends in the CUDA method, and the CPU's needs AMX
    }
    found = {}
    for path, tree in modules().items():
        if path.partition("/")[0] in {"hardware.py", "cli", "testing", "ops"}:
            continue
        names = (name for name in names_of(tree) if " " not in name)  # messages have examples
        words = {word for name in names for word in re.split(r"[^a-z0-9]+|_", name.lower())} & VENDORS
        if words - known.get(path, set()):
            found[path] = words - known.get(path, set())

    assert {} == found


def test_policy_alone_reads_the_environment():
    readers = [
        path
        for path, tree in modules().items()
        if not path.startswith(("cli/", "testing/")) and {"environ", "getenv"} & {*names_of(tree)}
    ]

    assert ["policy.py"] == readers


def test_discovery_alone_knows_entry_points():
    knowing = [
        path
        for path, tree in modules().items()
        if not path.startswith(("cli/", "testing/"))
        and any("entry_points" in name or name == "opgraft.backends" for name in names_of(tree))
    ]

    assert ["discovery.py"] == knowing


def test_only_modules_that_need_torch_import_it_where_they_are_loaded():
    light = {"__init__.py", "errors.py", "hardware.py", "spec.py", "hookspecs.py", "policy.py", "discovery.py"}
    light |= {"plugins.py", "lockfile.py", "kernel_registry.py", "selection.py", "tracing.py", "host.py"}
    heavy = {
        path
        for path, tree in modules().items()
        if any(name.split(".")[0] == "torch" for name in imported(tree, deferred=False))
    }

    assert set() == light & heavy


@pytest.mark.parametrize("name", opgraft.__all__)
def test_every_public_name_is_there_and_typed(name):
    assert getattr(opgraft, name) is not None
    assert name in (CORE / "__init__.pyi").read_text()
    assert name in dir(opgraft)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError) as caught:
        _ = opgraft.clamp

    assert "module 'opgraft' has no attribute 'clamp'" == str(caught.value)


def test_no_import_turns_an_object_into_a_module():
    code = (
        "import opgraft, types, pkgutil, importlib\n"
        "before = {name: getattr(opgraft, name) for name in ('plan', 'trace', 'registry', 'op', 'forward')}\n"
        "for one in pkgutil.iter_modules(opgraft.__path__):\n"
        "    if not one.name.startswith('__'): importlib.import_module('opgraft.' + one.name)\n"
        "print([name for name, one in before.items() if getattr(opgraft, name) is not one])\n"
        "print([name for name in opgraft.__all__ if isinstance(getattr(opgraft, name), types.ModuleType)])"
    )

    assert "[]\n['compat', 'host', 'ops', 'testing', 'torch_ops']\n" == run(code)
