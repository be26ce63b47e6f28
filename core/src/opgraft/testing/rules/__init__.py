"""Every rule of the conformance suite, in the order in which they run.

One rule is one function; its name is what ``conformance-xfails.txt`` names, and the first line of
its docstring what the report shows.
"""

from __future__ import annotations

from opgraft.testing.rule import RULES
from opgraft.testing.rules import (  # noqa: I001 - the order of these imports is that of the rules
    _installation,
    _declaration,
    _process,
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

__all__ = ["RULES"]

_ORDER = (
    _installation,
    _declaration,
    _process,
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
