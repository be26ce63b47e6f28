"""Hold every kernel of this backend against opgraft's conformance suite."""

from __future__ import annotations

import subprocess
import sys

import pytest

from opgraft_opencl.device import find_platforms

SUITE = "-m pytest -p opgraft.testing.plugin --pyargs opgraft.testing.conformance --opgraft-backend"


@pytest.mark.skipif(not find_platforms()[0], reason=find_platforms()[1])
def test_every_kernel_passes_the_conformance_suite(tmp_path):
    command = [sys.executable, *SUITE.split(), "opencl", "--require-device"]

    done = subprocess.run(command, capture_output=True, check=False, cwd=tmp_path, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
