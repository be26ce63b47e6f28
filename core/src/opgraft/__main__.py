"""``python -m opgraft`` is the command line."""

from __future__ import annotations

from opgraft.cli import app

app(prog_name="opgraft")
