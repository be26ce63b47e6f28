"""The one place where commands are registered, in the order in which help shows them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

import opgraft
from opgraft.cli._bench import bench
from opgraft.cli._conformance import conformance
from opgraft.cli._doctor import doctor
from opgraft.cli._explain import explain
from opgraft.cli._list import list_backends
from opgraft.cli._lock import lock
from opgraft.cli._new import new
from opgraft.cli._output import answered
from opgraft.cli._run import run

COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_backends,
    "explain": explain,
    "run": run,
    "doctor": doctor,
    "conformance": conformance,
    "bench": bench,
    "new": new,
    "lock": lock,
}

_ON_TERMINAL = sys.stdout.isatty() and sys.stderr.isatty()

application = typer.Typer(
    name="opgraft",
    help="See which kernels are installed, which one wins, and why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Boxes and widths belong to a terminal; elsewhere they would wrap and cut what they hold.
    rich_markup_mode="markdown" if _ON_TERMINAL else None,
    context_settings={} if _ON_TERMINAL else {"terminal_width": 10_000},
)
for _name, _command in COMMANDS.items():
    application.command(_name)(answered(_command))


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(opgraft.__version__)
        raise typer.Exit


@application.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    del version
