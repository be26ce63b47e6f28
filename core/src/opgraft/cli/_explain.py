"""``opgraft explain``: which kernel would win for a kind of call, and why each other would not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

import opgraft
from opgraft.cli._output import USAGE, Table, fail, say, say_json
from opgraft.errors import nearest
from opgraft.hardware import IN_TREE

if TYPE_CHECKING:
    from opgraft.selection import Candidate, Selection


def explain(
    op: Annotated[str, typer.Argument(metavar="OP", help="Op id, such as attention.clamp_position.")],
    device: Annotated[str, typer.Option(help="Platform key (cuda, hip, acme, ...) or device of the tensors.")] = "cpu",
    arch: Annotated[
        str, typer.Option(help="Arch of the device, such as 9.0 or gfx942; default: that of the device here.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="Dtype of the tensors, such as int32.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which kernel wins and why each other one does not; run nothing."""
    opgraft.op(op)
    platform, here = _platform(device)
    selection = opgraft.explain_for(op, device=platform, arch=arch or here, dtype=dtype)
    if as_json:
        say_json(
            {
                "op": selection.op,
                "winner": str(selection.winner) if selection.winner else None,
                "decided_by": selection.decided_by,
                "candidates": [
                    {"kernel": str(c.kernel), "accepted": c.accepted, "reason": c.reason} for c in selection.candidates
                ],
            }
        )
    else:
        show_selection(selection)


def show_selection(selection: Selection) -> None:
    """Print the winner and a row for each candidate with its reason below."""
    won = f"{selection.winner}, by {selection.decided_by}" if selection.winner else "no kernel"
    say(f"{selection.op} with {selection.call}: {won}", style="bold")
    say()
    table = Table(("KERNEL", "NAME", "OF", "VERDICT"))
    for candidate in selection.candidates:
        table.add(*_cells(candidate, selection.winner), below=[candidate.reason])
    table.show()


def _cells(candidate: Candidate, winner: Any) -> tuple[str, str, str, str]:
    kernel = candidate.kernel
    if isinstance(kernel, str):
        return kernel, "-", "-", "-"
    whose = f"{kernel.distribution} {kernel.version}".strip()
    verdict = "wins" if kernel is winner else "could run" if candidate.accepted else "-"
    return kernel.selector, kernel.name or "-", whose or "-", verdict


def _platform(device: str) -> tuple[str, str]:
    """Read a platform key or a torch device; give the key, and the arch where it is here."""
    import torch

    registry = opgraft.registry
    platforms = {key for record in opgraft.backends() for key in record.platforms} | {*IN_TREE}
    kind, _, index = device.partition(":")
    try:
        platform = device if device in platforms else registry.detector.platform_key(torch.device(kind))
        place = torch.device(registry.detector.device_type(platform), int(index or 0))
    except (RuntimeError, ValueError):
        fail(f"unknown device {device!r}{nearest(kind, platforms)}", USAGE)
    count, _ = registry.detector.count(platform)
    return platform, registry.place(place)[1] if count > place.index else ""
