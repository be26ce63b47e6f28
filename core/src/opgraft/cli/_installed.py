"""``opgraft list --installed``: what the metadata alone says, without torch, plugins or typer."""

from __future__ import annotations

from opgraft.cli._output import Table, say, say_json
from opgraft.discovery import GROUP, scan


def installed(*, as_json: bool) -> None:
    """Print every entry point with its distribution, and where its metadata lies."""
    found = scan()
    if as_json:
        say_json(
            {
                "backends": [
                    {
                        "name": entry.name,
                        "distribution": entry.distribution,
                        "version": entry.version,
                        "entry_point": entry.value,
                        "location": entry.location,
                        "locations": list(entry.locations),
                        "requires": list(entry.requirements),
                    }
                    for entry in found.entries
                ],
                "findings": [{"subject": finding.subject, "message": finding.message} for finding in found.findings],
            }
        )
        return
    table = Table(("NAME", "DISTRIBUTION", "VERSION", "ENTRY POINT"))
    for entry in found.entries:
        rivals = [e for e in found.entries if e.name == entry.name and e is not entry]
        others = [place for place in entry.locations if place != entry.location]
        table.add(
            entry.name,
            entry.distribution,
            entry.version,
            entry.value,
            below=[
                entry.location,
                *(f"also at {place}" for place in others),
                *(f"also claimed by {e.distribution} {e.version}" for e in rivals),
            ],
        )
    if found.entries:
        table.show()
    else:
        say(f"No backend is installed: no distribution has entry points in the group {GROUP!r}.")
    for finding in found.findings:
        say(f"{finding.subject}: {finding.message}")
