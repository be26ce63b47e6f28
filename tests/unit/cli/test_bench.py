"""`opgraft bench`: a table, JSON, a picture, and what it says when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest


def opgraft(*words, code=0, plugin="", tmp_path=None):
    """Run the command line in a process of its own; `plugin` is source that runs before it."""
    source = (
        f"{textwrap.dedent(plugin)}\nimport sys\nfrom opgraft.cli import app\nsys.argv = ['opgraft', *{words!r}]\napp()"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=300)
    assert code == done.returncode, done.stderr
    return done


WRONG_KERNEL = """
    import types
    import opgraft
    from opgraft import Backend, BaseFusedOp, FormatSignature, forward, hookimpl
    import torch

    class Twice(BaseFusedOp):
        op = "mine.twice"
        format_signature = FormatSignature(supported_dtypes=("int64",), output_dtype="int64")
        sample_sizes = (4,)

        def forward_native(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        def sample(self, size, *, dtypes, generator):
            return {"x": torch.arange(size)}

    class Plugin:
        @hookimpl
        def opgraft_backend(self):
            return Backend(name="mine", platforms=("cpu",))

        @hookimpl
        def opgraft_ops(self):
            return [Twice]

        @forward("mine.twice", kernel_backend="jit")
        def twice(self, x):
            return x * %d

    opgraft.register_backend(Plugin())
"""


def test_every_kernel_and_a_copy_are_timed_at_every_sample_size():
    rows = json.loads(opgraft("bench", "mine.twice", "--json", plugin=WRONG_KERNEL % 2).stdout)["rows"]
    assert ["mine/jit", "native", "copy of the same bytes"] == [row["kernel"] for row in rows]
    assert [4, 4, 4] == [row["size"] for row in rows]
    assert [64, 64, 64] == [row["bytes"] for row in rows]
    assert all(row["correct"] and row["host_us"] > 0 and row["gpu_us"] is None for row in rows)


def test_a_wrong_kernel_is_marked_and_the_command_fails():
    done = opgraft("bench", "mine.twice", code=1, plugin=WRONG_KERNEL % 3)
    assert ["WRONG"] == [line.split()[-1] for line in done.stdout.splitlines() if "mine/jit" in line]
    message = "opgraft: mine.twice: mine/jit disagrees with native; see `opgraft conformance`\n"
    assert message == done.stderr


def test_the_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "twice.png"
    done = opgraft("bench", "mine.twice", "--plot", str(path), plugin=WRONG_KERNEL % 2)
    assert f"wrote {path}" == done.stdout.splitlines()[-1]
    assert b"\x89PNG" == path.read_bytes()[:4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("attention.clamp_positio",), "unknown op 'attention.clamp_positio'; did you mean 'attention.clamp_position'"),
        (("attention.clamp_position", "--device", "tpu9"), "device 'tpu9' is not here"),
        (("attention.clamp_position", "--dtype", "int31"), "seq_lens must be int32 or int64, got 'int31'"),
    ],
)
def test_wrong_words_are_wrong_usage(words, message):
    done = opgraft("bench", *words, code=2)
    assert done.stderr.startswith(f"opgraft: {message}")
