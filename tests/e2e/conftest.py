"""Fresh environments made of built wheels, with nothing of this checkout in them.

Third-party packages are not installed again. One folder of links shows what the running
environment holds, less every distribution of this repository and every ``.pth`` file, and each
fresh environment reaches that folder through a one-line ``.pth`` of its own. Editable installs
never leak into it, and our wheels are installed by pip as a user would install them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECTS = {
    "opgraft": REPOSITORY,
    "opgraft-cpu-reference": REPOSITORY / "plugins/cpu_reference",
    "opgraft-triton-kernels": REPOSITORY / "plugins/triton_kernels",
    "opgraft-cuda": REPOSITORY / "plugins/cuda",
    "opgraft-hip": REPOSITORY / "plugins/hip",
    "opgraft-acme": REPOSITORY / "examples/oot_vendor_plugin",
    "opgraft-opencl": REPOSITORY / "examples/opencl_vendor_plugin",
}
COMMAND_LIMIT_S = 240


def clean_environment(**extra: str) -> dict[str, str]:
    """Give the variables of a process that knows nothing of this checkout or of its shell."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPGRAFT_", "PYTHON", "PIP_", "VIRTUAL_ENV", "COV_", "PYTEST_"))
    }
    return {**kept, "PYTHONNOUSERSITE": "1", **extra}


def succeed(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command that is expected to work, and show what it said if it does not."""
    options.setdefault("timeout", COMMAND_LIMIT_S)
    result = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)
    if result.returncode != 0:
        pytest.fail(f"{command} exited {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result


@dataclass(frozen=True)
class Environment:
    """A fresh virtual environment and an empty folder to work in."""

    root: Path
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def interpreter(self) -> str:
        """The environment's own python."""
        return str(self.root / "bin" / "python")

    @property
    def site_packages(self) -> Path:
        """Where pip installs into it."""
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.root), "platbase": str(self.root)}))

    def run(self, *command: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command there and expect its exit code."""
        search_path = f"{self.root / 'bin'}{os.pathsep}{os.defpath}"
        result = subprocess.run(
            list(command),
            check=False,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            stdin=subprocess.DEVNULL,
            cwd=self.folder,
            env=clean_environment(PATH=search_path, **self.variables, **variables),
        )
        if result.returncode != code:
            pytest.fail(
                f"{' '.join(command)} exited {result.returncode}, expected {code}\n{result.stdout}\n{result.stderr}"
            )
        return result

    def python(self, source: str, **variables: str) -> str:
        """Run a program there and give what it printed."""
        return self.run(self.interpreter, "-c", source, **variables).stdout

    def opgraft(self, *arguments: str, code: int = 0, **variables: str) -> str:
        """Run the console script there and give what it printed."""
        script = str(self.root / "bin" / "opgraft")
        return self.run(script, *arguments, code=code, **variables).stdout

    def json(self, *arguments: str, code: int = 0, **variables: str) -> Any:
        """Run the console script there with ``--json`` and give what it printed, read."""
        return json.loads(self.opgraft(*arguments, "--json", code=code, **variables))

    def backends(self, **variables: str) -> dict[str, dict[str, Any]]:
        """Give ``opgraft list`` by name of the backend."""
        return {record["name"]: record for record in self.json("list", **variables)["backends"]}

    def pip(self, *arguments: str) -> None:
        """Run the checkout's pip on this environment, without any index."""
        succeed(
            [sys.executable, "-m", "pip", "--python", self.interpreter, *arguments],
            cwd=self.folder,
            env=clean_environment(PIP_CONFIG_FILE=os.devnull),
        )

    def install(self, *things: Path, options: Sequence[str] = ()) -> None:
        """Install wheels or source trees, and nothing that they ask for."""
        self.pip("install", "--no-index", "--no-deps", "--quiet", *options, *map(str, things))

    def uninstall(self, distribution: str) -> None:
        """Remove a distribution."""
        self.pip("uninstall", "--yes", "--quiet", distribution)


@pytest.fixture(scope="session")
def run_checked() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Give the function that runs a command which is expected to work."""
    return succeed


@pytest.fixture(scope="session")
def projects() -> dict[str, Path]:
    """Give the folder of each distribution of this repository, by the distribution's name."""
    return PROJECTS


@pytest.fixture(scope="session")
def third_party(projects: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with links to what the running environment holds of other people."""
    ours = set()
    for distribution in metadata.distributions():
        if canonicalize_name(distribution.metadata["Name"]) in projects:
            ours |= {file.parts[0] for file in distribution.files or ()}
    folder = tmp_path_factory.mktemp("third_party")
    for site_packages in dict.fromkeys(sysconfig.get_path(key) for key in ("purelib", "platlib")):
        for entry in sorted(Path(site_packages).iterdir()):
            if entry.suffix != ".pth" and entry.name not in {*ours, "__pycache__"}:
                link = folder / entry.name
                if not link.exists():
                    link.symlink_to(entry)
    return folder


@pytest.fixture(scope="session")
def wheels(projects: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the wheel of every distribution, by the distribution's name."""
    built = {}
    for name, source in projects.items():
        folder = tmp_path_factory.mktemp(f"wheel-{name}")
        command = [sys.executable, "-m", "build", "--no-isolation", "--wheel"]
        succeed([*command, "--outdir", str(folder), str(source)], env=clean_environment())
        (built[name],) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def new_environment(third_party: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Environment]:
    """Give a function that makes a fresh environment with no distribution of ours."""

    def make() -> Environment:
        root = tmp_path_factory.mktemp("environment")
        environment = Environment(root / "venv", root / "folder")
        environment.folder.mkdir()
        venv.create(environment.root, symlinks=True, with_pip=False)
        reach = environment.site_packages / "third_party.pth"
        reach.write_text(f"{third_party}\n", encoding="utf-8")
        return environment

    return make


@pytest.fixture
def environment(new_environment: Callable[[], Environment]) -> Environment:
    """Give a fresh environment, for a test that installs what it needs."""
    return new_environment()


@pytest.fixture(scope="module")
def core_only(new_environment: Callable[[], Environment], wheels: Mapping[str, Path]) -> Environment:
    """Give an environment with the core alone, shared by tests that do not change it."""
    made = new_environment()
    made.install(wheels["opgraft"])
    return made


@pytest.fixture(scope="module")
def everything(new_environment: Callable[[], Environment], wheels: Mapping[str, Path]) -> Environment:
    """Give an environment with every distribution, shared by tests that do not change it."""
    made = new_environment()
    made.install(*wheels.values())
    return made


PLUGIN = """\
from opgraft import Backend, KernelBackend, forward, hookimpl

@hookimpl
def opgraft_backend():
    return Backend(name={name!r}, platforms=("cpu",), summary="made up on the spot")

@forward("attention.clamp_position", kernel_backend=KernelBackend.PLUGIN, priority={priority})
def clamp_position(seq_lens, *, out=None):
    import torch
    print("{name} ran")
    return torch.sub(torch.clamp(seq_lens, min=1).to(torch.int64), 1, out=out)
"""


@dataclass(frozen=True)
class Folder:
    """A folder for PYTHONPATH, in which plugins are made up."""

    path: Path

    def plugin(self, name: str, *, priority: int = 50, source: str | None = None) -> None:
        """Make up a plugin: one module and one metadata folder."""
        module = f"made_up_{name}"
        text = PLUGIN.format(name=name, priority=priority) if source is None else source
        (self.path / f"{module}.py").write_text(text, encoding="utf-8")
        info = self.path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: made-up-{name}\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[opgraft.backends]\n{name} = {module}\n", encoding="utf-8")


@pytest.fixture
def made_up(tmp_path: Path) -> Folder:
    """Give an empty folder for plugins that are made up on the spot."""
    return Folder(tmp_path)
