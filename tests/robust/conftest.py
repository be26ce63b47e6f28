"""A process as a test wants it: plugins from one folder, a registry of its own."""

from __future__ import annotations

import pytest
import torch
from installation import Site

from opgraft.kernel_registry import KernelRegistry
from opgraft.ops.attention import _clamp_position
from opgraft.policy import PolicyStore


class Process:
    """A registry whose plugins come from one folder only."""

    def __init__(self, site, folder, environ, detector):
        self.site = site
        self.environ = {f"OPGRAFT_{name}": value for name, value in environ.items()}
        self.registry = KernelRegistry(
            policy=PolicyStore(self.environ, folder), detector=detector, path=[str(site.path)]
        )
        self.op = _clamp_position.ClampPosition.publish(self.registry).function

    @property
    def backends(self):
        return {record.name: record for record in self.registry.backends()}

    def call(self, *values, **options):
        """Call the op; made-up kernels answer with their backend's name."""
        return self.op(torch.tensor(values or (0, 1, 5), dtype=torch.int32), **options)


@pytest.fixture
def site(tmp_path):
    """Give a folder on ``sys.path``, the only one where plugins are looked for."""
    made = Site(tmp_path / "site")
    made.path.mkdir()
    with made.on_path():
        yield made


@pytest.fixture
def process(site, tmp_path):
    """Give a function that makes a registry, with variables of its environment."""
    return lambda detector=None, **environ: Process(site, tmp_path, environ, detector)
