"""A module that is imported when one of its functions is first called for."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["LateModule"]


class LateModule:
    """Stand for a module until it is needed; afterwards a name costs one look-up and no import.

    Parameters
    ----------
    name
        Of the module.

    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        """Import the module, and keep what was asked for."""
        # pluggy and opgraft look for their markers on every name that a plugin has.
        if attribute.startswith(("_", "opgraft_")):
            raise AttributeError(attribute)
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value
