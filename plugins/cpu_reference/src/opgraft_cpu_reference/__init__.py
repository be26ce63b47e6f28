"""Forwards of opgraft's ops for CPU tensors, written independently of the ops' natives."""

from __future__ import annotations

__version__ = "0.1.0"
