"""What holds for every test: a clean environment, and accelerators only when asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parent / "gpu"

# What the developer's shell says about opgraft is not what the tests are about. Done at import, before any test module
# can import opgraft, and inherited by every process that a test starts.
for _name in [name for name in os.environ if name.startswith("OPGRAFT_")]:
    del os.environ[_name]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--gpu``."""
    parser.addoption("--gpu", action="store_true", help="collect tests/gpu, which needs an accelerator")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave ``tests/gpu`` alone unless it is asked for."""
    if collection_path.is_relative_to(GPU_TESTS) and not config.getoption("--gpu"):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what was collected from ``tests/gpu``, so that ``-m gpu`` selects it."""
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
