"""Acme's backend for opgraft. Importing this package loads neither torch nor a kernel."""
