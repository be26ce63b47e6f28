"""Names that code written for SGLang knows, on top of :class:`opgraft.BaseFusedOp`.

``MultiPlatformOp`` keeps the older contract: every forward exists, HIP and MUSA call the CUDA
one, the others native, and ``backend_eligible`` decides per call.
"""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

from opgraft.fused_op import BaseFusedOp
from opgraft.spec import KernelBackend


class MultiPlatformOp(BaseFusedOp):
    """Deprecated: an op by the older contract. Write a :class:`opgraft.BaseFusedOp` instead."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Warn at the author's line."""
        message = f"{cls.__name__}: MultiPlatformOp is deprecated, derive from opgraft.BaseFusedOp"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        super().__init_subclass__(**kwargs)

    @classmethod
    def _check_forward(cls) -> None:
        if "forward" in vars(cls):
            message = f"{cls.__name__} overrides forward; no kernel will be chosen for it"
            warnings.warn(message, UserWarning, stacklevel=4)

    def _absent(self, name: str) -> NoReturn:
        raise NotImplementedError(f"{self.label} has no {name}")

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: a legacy op need not have a native."""
        del args, kwargs
        self._absent("forward_native")

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: a legacy op that meets CUDA must say what runs there."""
        del args, kwargs
        self._absent("forward_cuda")

    def forward_hip(self, *args: Any, **kwargs: Any) -> Any:
        """Run the CUDA forward."""
        return self.forward_cuda(*args, **kwargs)

    def forward_musa(self, *args: Any, **kwargs: Any) -> Any:
        """Run the CUDA forward."""
        return self.forward_cuda(*args, **kwargs)

    def forward_npu(self, *args: Any, **kwargs: Any) -> Any:
        """Run native."""
        return self.forward_native(*args, **kwargs)

    forward_xpu = forward_hpu = forward_cpu = forward_npu

    def backend_eligible(self, backend: KernelBackend, *args: Any, **kwargs: Any) -> bool:
        """Say whether a call may run on a kernel backend; override to decide per call."""
        del backend, args, kwargs
        return True

    def rejects(self, kernel_backend: KernelBackend, *args: Any, **kwargs: Any) -> str | None:
        """Ask :meth:`backend_eligible`."""
        if self.backend_eligible(kernel_backend, *args, **kwargs):
            return None
        return f"backend_eligible({kernel_backend}) is False"
