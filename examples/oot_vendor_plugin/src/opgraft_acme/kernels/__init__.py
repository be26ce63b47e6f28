"""Acme's kernels: one module an op, imported when the op first runs on an Acme device."""
