"""The backend ``loopback``: native, offered through the path that every plugin takes.

It shows that the suite and the plugin path work, on any machine. Its priority is negative: it runs
only when asked for. Use it with ``opgraft.register_backend(opgraft.testing.loopback)`` or
``opgraft conformance loopback``, or name it in the metadata of a test distribution.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from opgraft.hookspecs import forward, hookimpl
from opgraft.spec import Backend


@hookimpl
def opgraft_backend() -> Backend:
    """Name the backend; every machine has its device."""
    return Backend(name="loopback", platforms=("cpu",), summary="native, through the path of a plugin")


def __dir__() -> list[str]:
    """Offer a kernel for every op of the catalogue, once somebody asks what there is.

    Other plugins write a function an op. This one serves every op there is, and finding them
    imports torch, which loading a plugin must not do.
    """
    from opgraft import ops

    for group in ops.__all__:
        for name in getattr(ops, group).__all__:
            native = getattr(getattr(ops, group), name).op.forward_native
            offered = f"{group}_{name}"
            globals().setdefault(offered, _offer(f"{group}.{name}", offered, native))
    return sorted(globals())


def _offer(op_id: str, name: str, native: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return native(*args, **kwargs)

    kernel.__name__ = kernel.__qualname__ = name
    kernel.__doc__ = f"Run native of ``{op_id}``."
    kernel.__signature__ = inspect.signature(native)  # type: ignore[attr-defined]
    return forward(op_id, kernel_backend="plugin", priority=-1)(kernel)
