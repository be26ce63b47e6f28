"""Every rule of the conformance suite, in the order in which they run.

One rule is one function; its name is what ``conformance-xfails.txt`` names, and the first line of
its docstring what the report shows.
"""

from __future__ import annotations

from typing import Final

from opgraft.testing.rule import DEFINED, Rule
from opgraft.testing.rules import (
    _accelerator,
    _buffers,
    _declaration,
    _global_state,
    _gradients,
    _installation,
    _memory,
    _process,
    _random,
    _refusals,
    _results,
    _state,
    _values,
)

__all__ = ["RULES"]

_ORDER: Final = (
    _installation,
    _declaration,
    _process,
    _global_state,
    _results,
    _values,
    _memory,
    _buffers,
    _random,
    _refusals,
    _state,
    _gradients,
    _accelerator,
)

RULES: Final[tuple[Rule, ...]] = tuple(
    one for module in _ORDER for one in DEFINED if one.check.__module__ == module.__name__
)
"""Every rule, cheap ones first."""
