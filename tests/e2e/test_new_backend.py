"""From an empty folder to a backend that proves itself: ``opgraft new``, pip, the conformance suite."""

from __future__ import annotations

import pytest


@pytest.fixture
def scaffolded(environment, wheels):
    environment.install(wheels["opgraft"])
    environment.opgraft("new", "my_npu")
    environment.install(environment.folder / "opgraft-my-npu", options=["--no-build-isolation"])
    return environment


def test_a_new_backend_installs_is_found_and_conforms_as_written(scaffolded):
    record = scaffolded.backends()["my_npu"]
    assert ("active", "opgraft-my-npu", "0.1.0") == (record["status"], record["distribution"], record["version"])

    told = scaffolded.opgraft("conformance", "my_npu", "--require-device", "--html", "report.html")

    assert told.splitlines()[-1].startswith("my_npu conforms (")
    assert (scaffolded.folder / "report.html").exists()


def test_the_tests_of_a_new_backend_pass(scaffolded):
    folder = str(scaffolded.folder / "opgraft-my-npu" / "tests")
    assert "1 passed" in scaffolded.run(scaffolded.interpreter, "-m", "pytest", "-q", folder).stdout


def test_a_new_backend_runs_when_asked_for_and_not_otherwise(scaffolded):
    command = ["run", "attention.clamp_position", "seq_lens=5,0,-3", "--dtype", "int32"]

    asked = scaffolded.opgraft(*command, "--backend", "my_npu")
    unasked = scaffolded.opgraft(*command)

    assert "attention.clamp_position ran my_npu/plugin\nint64 (3,) cpu\n[4, 0, 0]\n" == asked
    assert unasked.startswith("attention.clamp_position ran native\n")
