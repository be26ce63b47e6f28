"""What ``opgraft new`` writes: names checked, nothing overwritten, the same shape as the example vendor."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from opgraft.cli._new import scaffold

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = {
    "acme": REPOSITORY / "examples" / "oot_vendor_plugin",
    "opencl": REPOSITORY / "examples" / "opencl_vendor_plugin",
}
NOT_COPIED = {
    # A pretend device stands for hardware that a vendor has, and a module that talks to it.
    "acme": "src/opgraft_acme/pretend_device/",
    "opencl": "src/opgraft_opencl/device.py",
}


def new(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "opgraft", "new", *arguments], capture_output=True, check=False, cwd=cwd, text=True
    )


def files_of(folder: Path) -> set[str]:
    tracked = subprocess.run(["git", "ls-files", "."], capture_output=True, check=False, cwd=folder, text=True)
    if tracked.returncode == 0 and tracked.stdout:
        return set(tracked.stdout.split())
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and "__pycache__" not in str(path)
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_scaffold_has_the_files_of_the_examples(name):
    example = {place for place in files_of(EXAMPLES[name]) if not place.startswith(NOT_COPIED[name])}

    assert example == set(scaffold(name)) - {".github/workflows/ci.yml"}


def _shape(source: str) -> str:
    """Give the structure of a module, without what it says in words and numbers."""

    class Forget(ast.NodeTransformer):
        def visit_Constant(self, node):
            return ast.Constant(value=type(node.value).__name__)

        def visit_UnaryOp(self, node):
            return self.visit(node.operand)

    return ast.dump(Forget().visit(ast.parse(source)))


def test_the_plugin_module_of_the_scaffold_has_the_shape_of_the_examples():
    example = (EXAMPLES["acme"] / "src/opgraft_acme/plugin.py").read_text()

    assert _shape(example) == _shape(scaffold("acme")["src/opgraft_acme/plugin.py"])


def test_the_kernel_of_the_scaffold_has_the_signature_of_the_examples():
    def signature(source: str) -> str:
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        return ast.unparse(next(one.args for one in functions if one.name == "clamp_position"))

    example = (EXAMPLES["acme"] / "src/opgraft_acme/kernels/clamp_position.py").read_text()

    assert signature(example) == signature(scaffold("acme")["src/opgraft_acme/kernels/clamp_position.py"])


def test_the_conformance_test_of_the_scaffold_is_that_of_the_example():
    example = (EXAMPLES["acme"] / "tests/test_conformance.py").read_text()

    assert example == scaffold("acme")["tests/test_conformance.py"]


def test_the_metadata_of_the_scaffold_has_the_tables_of_the_example():
    def tables(text: str) -> set[str]:
        return set(re.findall(r"^\[(.*)\]$", text, flags=re.MULTILINE)) - {'project.entry-points."torch.backends"'}

    example = (EXAMPLES["acme"] / "pyproject.toml").read_text()

    assert tables(example) == tables(scaffold("acme")["pyproject.toml"])


def test_a_new_backend_is_less_than_40_lines_of_code():
    def lines(source: str) -> int:
        tree = ast.parse(source)
        told = {
            line
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            for line in range(node.lineno, node.end_lineno + 1)
        }
        text = enumerate(source.splitlines(), 1)
        return len(
            [line for number, line in text if line.strip() and not line.strip().startswith("#") and number not in told]
        )

    written = scaffold("my_npu")

    assert sum(lines(text) for place, text in written.items() if place.startswith("src") and place.endswith(".py")) < 40


def test_nothing_of_the_templates_is_left_unfilled():
    assert [] == [place for place, text in scaffold("my_npu").items() if "{{" in text or "{{" in place]


def test_names_are_written_as_metadata_modules_and_people_want_them():
    written = scaffold("my_npu")

    assert 'name = "opgraft-my-npu"' in written["pyproject.toml"]
    assert 'my_npu = "opgraft_my_npu.plugin"' in written["pyproject.toml"]
    assert 'Backend(name="my_npu", platforms=("cpu",), summary="My Npu")' in written["src/opgraft_my_npu/plugin.py"]


def test_the_command_writes_a_folder_and_says_what_to_do_next(tmp_path):
    done = new("my_npu", cwd=tmp_path)

    assert 0 == done.returncode, done.stderr
    assert set(scaffold("my_npu")) == files_of(tmp_path / "opgraft-my-npu")
    assert (
        "opgraft-my-npu is backend 'my_npu' of distribution opgraft-my-npu\n"
        "next: install it with its tests' needs, and hold it to the conformance suite:\n"
        "  pip install -e opgraft-my-npu 'opgraft[testing]'\n"
        "  opgraft conformance my_npu\n"
    ) == done.stdout


def test_a_folder_that_exists_is_left_alone(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes").write_text("mine")

    done = new("my_npu", str(folder), cwd=tmp_path)

    assert (2, f"opgraft: {folder} exists; nothing was written. Give another folder\n") == (
        done.returncode,
        done.stderr,
    )
    assert [folder / "notes"] == list(folder.iterdir())


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "mine").mkdir()

    assert 0 == new("my_npu", "mine", cwd=tmp_path).returncode
    assert (tmp_path / "mine" / "pyproject.toml").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "My-NPU",
            "opgraft: illegal name 'My-NPU': a backend is named by a lower-case word, no Python keyword; 'my_npu' would be one\n",
        ),
        (
            "opgraft-npu",
            "opgraft: illegal name 'opgraft-npu': a backend is named by a lower-case word, no Python keyword; 'npu' would be one\n",
        ),
        ("class", "opgraft: illegal name 'class': a backend is named by a lower-case word, no Python keyword\n"),
        ("native", "opgraft: illegal name 'native': this word is reserved\n"),
        ("triton", "opgraft: illegal name 'triton': this word is reserved\n"),
    ],
)
def test_a_name_that_cannot_be_is_refused_and_nothing_written(tmp_path, name, message):
    done = new(name, cwd=tmp_path)

    assert (2, message) == (done.returncode, done.stderr)
    assert [] == list(tmp_path.iterdir())


def test_a_name_that_another_distribution_has_is_refused(tmp_path):
    info = tmp_path / "vendor-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[opgraft.backends]\nmy_npu = vendor\n")
    done = subprocess.run(
        [sys.executable, "-m", "opgraft", "new", "my_npu"],
        capture_output=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        text=True,
    )

    message = "opgraft: backend 'my_npu' is offered by vendor 2.0 already; choose another\n"
    assert (2, message) == (done.returncode, done.stderr)
