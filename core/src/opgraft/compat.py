"""Names that code written for SGLang knows, on top of :class:`opgraft.BaseFusedOp`.

``MultiPlatformOp`` keeps the older contract: every forward exists, HIP and MUSA call the CUDA
one, the others native, and ``backend_eligible`` decides per call.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

from opgraft.fused_op import BaseFusedOp
from opgraft.spec import KernelBackend


class MultiPlatformOp(BaseFusedOp):
    """Deprecated: an op by the older contract. Write a :class:`opgraft.BaseFusedOp` instead."""

    _only_stubs: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Warn at the author's line."""
        message = f"{cls.__name__}: MultiPlatformOp is deprecated, derive from opgraft.BaseFusedOp"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        cls._only_stubs = False
        super().__init_subclass__(**kwargs)

    @classmethod
    def _check_forward(cls) -> None:
        if "forward" in vars(cls):
            message = f"{cls.__name__} overrides forward; no kernel will be chosen for it"
            warnings.warn(message, UserWarning, stacklevel=4)

    @classmethod
    def own_methods(cls) -> tuple[list[KernelBackend], list[str]]:
        """List the methods; the legacy defaults count as the class's own."""
        built, platforms = super().own_methods()
        legacy = {"cuda", "hip", "musa", "npu", "xpu"}
        return [KernelBackend.TORCH, *built[("torch" in built) :]], sorted(legacy | {*platforms})

    @classmethod
    def _defines(cls, method: str) -> bool:
        return method == "forward_native" or super()._defines(method)

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: a legacy op need not have a native."""
        del args, kwargs
        message = f"{self.label} has no forward_native"
        raise NotImplementedError(message)

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: a legacy op on CUDA must say what it runs."""
        del args, kwargs
        message = f"{self.label} has no forward_cuda"
        raise NotImplementedError(message)

    def forward_hip(self, *args: Any, **kwargs: Any) -> Any:
        """Run the CUDA forward."""
        return self.forward_cuda(*args, **kwargs)

    def forward_musa(self, *args: Any, **kwargs: Any) -> Any:
        """Run the CUDA forward."""
        return self.forward_cuda(*args, **kwargs)

    def forward_npu(self, *args: Any, **kwargs: Any) -> Any:
        """Run native."""
        return self.forward_native(*args, **kwargs)

    def forward_xpu(self, *args: Any, **kwargs: Any) -> Any:
        """Run native."""
        return self.forward_native(*args, **kwargs)

    def forward_hpu(self, *args: Any, **kwargs: Any) -> Any:
        """Run native."""
        return self.forward_native(*args, **kwargs)

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        """Run native."""
        return self.forward_native(*args, **kwargs)

    def backend_eligible(self, backend: KernelBackend, *args: Any, **kwargs: Any) -> bool:
        """Say whether a call may run on a kernel backend; override to decide per call."""
        del backend, args, kwargs
        return True

    def rejects(self, kernel_backend: KernelBackend, *args: Any, **kwargs: Any) -> str | None:
        """Ask :meth:`backend_eligible`."""
        if self.backend_eligible(kernel_backend, *args, **kwargs):
            return None
        return f"backend_eligible({kernel_backend}) is False"
