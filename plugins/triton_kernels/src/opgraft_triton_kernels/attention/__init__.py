"""Triton kernels of the ops of the group ``attention``, by the ops' names."""

from __future__ import annotations

from opgraft_triton_kernels.attention._clamp_position import clamp_position

__all__ = ["clamp_position"]
