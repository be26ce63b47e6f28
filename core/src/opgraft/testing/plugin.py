"""The pytest plugin: every rule on every kernel of ``--opgraft-backend`` becomes a test.

Load it with ``-p opgraft.testing.plugin``, or by ``pytest_plugins`` in a ``conftest.py``. A test of
your own that takes the fixture ``opgraft_check`` is run once a rule too; give it to :func:`settle`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from opgraft.testing.conformance import Check

__all__ = ["settle"]

_FIXTURE = "opgraft_check"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("opgraft", "opgraft conformance")
    group.addoption("--opgraft-backend", metavar="NAME", help="backend whose kernels are held to the suite")
    group.addoption("--require-device", action="store_true", help="fail where the backend's device is absent")
    group.addoption("--opgraft-thorough", action="store_true", help="larger sizes, more random calls")
    group.addoption("--opgraft-op", metavar="PATTERN", default="*", help="ops to try")
    group.addoption("--opgraft-xfails", metavar="FILE", type=Path, help="list of expected failures")
    group.addoption("--opgraft-seed", metavar="N", type=int, help="seed of the random calls; fixed by default")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of every rule."""
    if _FIXTURE not in metafunc.fixturenames:
        return
    checks = _checks(metafunc.config)
    metafunc.parametrize(_FIXTURE, checks, ids=[check.id for check in checks])


def _checks(config: pytest.Config) -> list[Check]:
    from opgraft.errors import OpgraftError
    from opgraft.testing.conformance import Options, Suite

    backend = config.getoption("--opgraft-backend")
    if not backend:
        raise pytest.UsageError("the conformance suite needs --opgraft-backend NAME")
    options = Options(
        require_device=config.getoption("--require-device"),
        thorough=config.getoption("--opgraft-thorough"),
        pattern=config.getoption("--opgraft-op"),
        xfails=config.getoption("--opgraft-xfails"),
        seed=config.getoption("--opgraft-seed"),
    )
    try:
        return list(Suite(backend, options).checks())
    except OpgraftError as error:
        raise pytest.UsageError(str(error)) from error


def settle(check: Check) -> None:
    """Run a check and end the test as it ended.

    Parameters
    ----------
    check
        What the fixture ``opgraft_check`` gave.

    """
    result = check.result()
    if result.outcome == "skipped":
        pytest.skip(result.message)
    if result.outcome == "expected failure":
        pytest.xfail(result.message)
    if result.is_bad:
        pytest.fail(result.text(), pytrace=False)
