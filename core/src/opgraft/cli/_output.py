"""How commands answer: tables, JSON, and exit codes.

On a terminal rich colours and wraps. Anywhere else a line is as long as it is, so that grep and
awk see what a person sees.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

from opgraft.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    OpgraftError,
    PolicyError,
    UnknownOpError,
    UnknownSelectorError,
)

FINE: Final = 0
WRONG: Final = 1
USAGE: Final = 2

_STYLES: Final = {
    "active": "green",
    "inactive": "dim",
    "denied": "yellow",
    "incompatible": "red",
    "conflict": "red",
    "quarantined": "red",
    "wins": "green",
}
_MISUSE: Final = (ArgumentTypeError, ArgumentValueError, PolicyError, UnknownOpError, UnknownSelectorError)

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


@dataclass
class Table:
    """Rows of short cells, each with the long lines that belong to it below.

    Parameters
    ----------
    header
        The columns' titles.
    rows
        The cells of a row, and the lines below it.

    """

    header: tuple[str, ...]
    rows: list[tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)

    def add(self, *cells: str, below: Sequence[str] = ()) -> None:
        """Append a row."""
        self.rows.append((cells, tuple(line for line in below if line)))

    def show(self) -> None:
        """Print the table."""
        every = [self.header, *(cells for cells, _ in self.rows)]
        widths = [max(len(cells[i]) for cells in every) for i in range(len(self.header))]
        say(_aligned(self.header, widths), style="bold")
        for cells, below in self.rows:
            style = next((_STYLES[cell] for cell in cells if cell in _STYLES), "")
            say(_aligned(cells, widths), style=style)
            for line in below:
                say(line, indent=4)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def say(text: str = "", *, style: str = "", indent: int = 0) -> None:
    """Print a line; on a terminal with colour, and wrapped behind its indentation.

    What a plugin or its metadata says may hold anything; what cannot be printed is escaped.
    """
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    encoding = sys.stdout.encoding or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    if not sys.stdout.isatty():
        sys.stdout.write(f"{' ' * indent}{text}\n")
        return
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    line = Padding(Text(text, style=style), (0, 0, 0, indent), expand=False)
    Console(highlight=False).print(line)


def say_json(data: Any) -> None:
    """Print plain data as JSON."""
    sys.stdout.write(json.dumps(data, indent=2) + "\n")


def fail(message: str, code: int) -> NoReturn:
    """Print a message to standard error and end with an exit code."""
    sys.stderr.write(f"opgraft: {message}\n")
    raise SystemExit(code)


def answered(command: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Turn the library's errors into a message and an exit code; others are faults and pass."""

    @functools.wraps(command)
    def wrapped(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        try:
            return command(*args, **kwargs)
        except OpgraftError as error:
            notes = [f"  {note}" for note in getattr(error, "__notes__", ())]
            message = "\n".join([str(error), *notes])
            fail(message, USAGE if isinstance(error, _MISUSE) else WRONG)

    return wrapped
