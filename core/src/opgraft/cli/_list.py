"""``opgraft list``: the backends, what became of each, and which ops they serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

import opgraft
from opgraft.cli._installed import installed as show_installed
from opgraft.cli._output import USAGE, Table, fail, say, say_json

if TYPE_CHECKING:
    from opgraft.spec import BackendRecord


def list_backends(
    installed: Annotated[
        bool, typer.Option("--installed", help="Say what the metadata alone says; load nothing.")
    ] = False,
    ops: Annotated[bool, typer.Option("--ops", help="Show which backend serves which op.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the installed backends and what became of each."""
    if installed and ops:
        fail("--ops needs loaded plugins, --installed loads none; give one of them", USAGE)
    if installed:
        show_installed(as_json=as_json)
        return
    records = opgraft.backends()
    if as_json:
        data: dict[str, Any] = {"backends": [as_data(record) for record in records]}
        if ops:
            data["ops"] = {
                op: {name: [str(k) for k in offered] for name, offered in row.items()}
                for op, row in _matrix(records).items()
            }
        say_json(data)
    elif ops:
        _show_matrix(records)
    else:
        show_records(records)


def as_data(record: BackendRecord) -> dict[str, Any]:
    """Give a record as the JSON of ``list`` shows it."""
    return {
        "name": record.name,
        "status": record.status,
        "reason": record.reason,
        "distribution": record.distribution,
        "version": record.version,
        "entry_point": record.entry_point,
        "location": record.location,
        "platforms": list(record.platforms),
        "kernels": [f"{kernel.op} {kernel}" for kernel in record.kernels],
    }


def show_records(records: tuple[BackendRecord, ...]) -> None:
    """Print a row for each backend, with the reason why it is not active below."""
    if not records:
        say("No backend is installed; every op runs its native meaning.")
        return
    table = Table(("NAME", "STATUS", "DISTRIBUTION", "PLATFORMS", "KERNELS"))
    for record in records:
        table.add(
            record.name,
            record.status,
            record.owner or "-",
            ",".join(record.platforms) or "-",
            str(len(record.kernels)),
            below=[record.reason, *record.refused],
        )
    table.show()


def _matrix(records: tuple[BackendRecord, ...]) -> dict[str, dict[str, list[Any]]]:
    loaded = [record for record in records if record.status in {"active", "inactive"}]
    return {
        op: {r.name: [kernel for kernel in r.kernels if kernel.op == op] for r in loaded}
        for op in opgraft.registry.ops()
    }


def _show_matrix(records: tuple[BackendRecord, ...]) -> None:
    """Print the number of kernels that each loaded backend offers for each op."""
    matrix = _matrix(records)
    names = list(next(iter(matrix.values()), {}))
    table = Table(("OP", *names))
    for op, row in matrix.items():
        table.add(op, *(str(len(row[name]) or "-") for name in names))
    table.show()
