"""The command line: ``opgraft``, and ``python -m opgraft``.

Commands are registered in :mod:`opgraft.cli._commands`, one file a command. ``opgraft list
--installed`` is answered before any of that is imported: typer alone takes 0.2 s.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

_FAST: Final = ({"list", "--installed"}, {"list", "--installed", "--json"})


class _App:
    """Stands for the typer application, which is made when something else is asked of it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command that ``sys.argv`` names."""
        if not args and "args" not in kwargs and set(sys.argv[1:]) in _FAST:
            from opgraft.cli._installed import installed

            try:
                return installed(as_json="--json" in sys.argv)
            except BrokenPipeError:  # the reader, `head` say, has seen enough
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise SystemExit(1) from None
        return self.__getattr__("__call__")(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        from opgraft.cli._commands import application

        return getattr(application, name)


app = _App()
