"""What opgraft loads: the hooks of the backend ``hip``, which runs every portable Triton kernel."""

from __future__ import annotations

from opgraft import Available, Backend, CapabilityRequirement, Unavailable, hookimpl
from opgraft_triton_kernels.forwards import offered

# The archs for which the tests compile every kernel below; no other is claimed.
ARCHS = CapabilityRequirement.hip(archs=("gfx942", "gfx950", "gfx1201"))


@hookimpl
def opgraft_backend() -> Backend:
    """Name the backend and its platform."""
    return Backend(name="hip", platforms=("hip",), summary="AMD GPUs through ROCm")


@hookimpl
def opgraft_probe() -> Available | Unavailable:
    """Ask torch's build and its device count; neither initialises a device."""
    import torch

    if torch.version.hip is None:
        return Unavailable("this torch was built without ROCm")
    # A ROCm build of torch calls its devices "cuda".
    count = torch.cuda.device_count()
    return Available(count) if count else Unavailable("torch sees no ROCm device")


globals().update(offered(capabilities=ARCHS))
