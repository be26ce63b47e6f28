"""Portable Triton kernels and their launcher, for every backend whose hardware runs Triton."""

from __future__ import annotations

__version__ = "0.1.0"
