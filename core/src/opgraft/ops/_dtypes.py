"""The dtypes that the ops on indices take and give, by name."""

from __future__ import annotations

__all__ = ["INDEX", "INT32", "INT64"]

INDEX = ("int32", "int64")
"""Index inputs are either, each independently of the others."""

INT32 = ("int32",)
INT64 = ("int64",)
