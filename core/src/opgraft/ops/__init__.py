"""The catalogue: ``opgraft.ops.<group>.<name>`` is the function to call.

Groups of the core are packages; a group that only a plugin adds is found by its ops.
"""

from __future__ import annotations

from typing import Any

from opgraft.errors import UnknownOpError
from opgraft.kernel_registry import default_registry
from opgraft.ops import attention

__all__ = ["attention"]


class Group:
    """The ops of a group that plugins add.

    Parameters
    ----------
    name
        The group.

    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        """Give an op's handle."""
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            function = default_registry().handle(f"{self._name}.{name}").function
        except UnknownOpError as error:
            raise AttributeError(str(error)) from error
        setattr(self, name, function)  # a handle is valid for ever, and torch.compile reads attributes
        return function

    def __dir__(self) -> list[str]:
        """List the group's ops."""
        ops = (op_id.partition(".") for op_id in default_registry().ops())
        return [name for group, _, name in ops if group == self._name]


def __getattr__(name: str) -> Group:
    """Give a group that only plugins have."""
    if not name.startswith("_") and any(op_id.startswith(f"{name}.") for op_id in default_registry().ops()):
        group = globals()[name] = Group(name)
        return group
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
