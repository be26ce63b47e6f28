"""``opgraft new``: write the folder of a distribution that is a backend, ready to be installed."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Final

import typer
from packaging.requirements import Requirement
from packaging.version import Version

import opgraft
from opgraft.cli._output import USAGE, fail, say
from opgraft.discovery import canonical, illegal, scan

_PLACES: Final = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "workflows/ci.yml.txt": ".github/workflows/ci.yml",
    "src/package/__init__.py.txt": "src/{{package}}/__init__.py",
    "src/package/plugin.py.txt": "src/{{package}}/plugin.py",
    "src/package/py.typed.txt": "src/{{package}}/py.typed",
    "src/package/kernels/__init__.py.txt": "src/{{package}}/kernels/__init__.py",
    "src/package/kernels/clamp_position.py.txt": "src/{{package}}/kernels/clamp_position.py",
    "tests/test_conformance.py.txt": "tests/test_conformance.py",
}
"""Each template and where it goes."""


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the backend: a lower-case word, such as acme.")],
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Where to; default: opgraft-NAME here. Must not exist.")
    ] = None,
) -> None:
    """Write a backend's distribution that installs, is found and conforms as written."""
    distribution = f"opgraft-{name.replace('_', '-')}"
    taken = _check(name, distribution)
    target = folder or Path(distribution)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        fail(f"{target} exists; nothing was written. Give another folder", USAGE)
    for place, text in scaffold(name).items():
        path = target / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    say(f"{target} is backend {name!r} of distribution {distribution}")
    say("next: install it with its tests' needs, and hold it to the conformance suite:")
    say(f"pip install -e {target} 'opgraft[testing]'", indent=2)
    say(f"opgraft conformance {name}", indent=2)
    if taken:
        say(f"note: {taken} is installed and is called the same; only one of the two can be")


def _check(name: str, distribution: str) -> str:
    """Refuse a name that cannot be, and give the distribution that is called the same."""
    reason = illegal(name)
    if reason:
        hint = name.removeprefix("opgraft-").lower().replace("-", "_")
        also = f"; {hint!r} would be one" if hint != name and not illegal(hint) else ""
        fail(f"{reason}{also}", USAGE)
    owners = [entry for entry in scan().entries if entry.name == name]
    for entry in owners:
        if canonical(entry.distribution) != distribution:
            fail(f"backend {name!r} is offered by {entry.distribution} {entry.version} already; choose another", USAGE)
    return f"{owners[0].distribution} {owners[0].version}" if owners else ""


def scaffold(name: str) -> dict[str, str]:
    """Write every file of a new backend.

    Parameters
    ----------
    name
        Of the backend.

    Returns
    -------
    dict of str to str
        Place in the folder, and text.

    """
    version = Version(opgraft.__version__)
    words = {
        "name": name,
        "title": name.replace("_", " ").title(),
        "package": f"opgraft_{name}",
        "distribution": f"opgraft-{name.replace('_', '-')}",
        "opgraft_range": f">={version.major}.{version.minor},<{version.major}.{version.minor + 1}",
        "torch_range": _own_range("torch"),
    }
    return {_filled(place, words): _filled(_template(name), words) for name, place in _PLACES.items()}


def _own_range(project: str) -> str:
    """Give the core's own range of a project that it needs."""
    from importlib_metadata import PackageNotFoundError, requires

    try:
        needed = [Requirement(text) for text in requires("opgraft") or ()]
    except PackageNotFoundError:
        needed = []
    return next((str(one.specifier) for one in needed if canonical(one.name) == project), ">=2.9")


def _template(name: str) -> str:
    return resources.files("opgraft.cli").joinpath("_scaffold", *name.split("/")).read_text(encoding="utf-8")


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(f"{{{{{word}}}}}", value)
    return text
