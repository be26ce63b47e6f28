"""What every process of a job must agree on: which kernel wins, for everything that is here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from opgraft.errors import PolicyError
from opgraft.kernel_registry import KernelRegistry, default_registry

if TYPE_CHECKING:
    from opgraft.fused_op import BaseFusedOp


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PlanRow:
    """The winner for one op on one kind of device and one dtype.

    Parameters
    ----------
    op, platform, arch, dtype
        What was asked; an empty dtype where the op states none.
    winner
        Its selector, with the name of the kernel.
    distribution, version
        Whose it is.

    """

    op: str
    platform: str
    arch: str
    dtype: str
    winner: str
    distribution: str
    version: str


@dataclass(frozen=True, slots=True)
class Plan:
    """All rows, sorted; plain data that pickles."""

    rows: tuple[PlanRow, ...]

    @property
    def fingerprint(self) -> str:
        """A hash that is equal wherever installation, policy and kinds of device are equal."""
        text = json.dumps([asdict(row) for row in self.rows], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, other: Plan) -> list[str]:
        """Say which rows differ, one line each."""
        mine = {(r.op, r.platform, r.arch, r.dtype): r for r in self.rows}
        theirs = {(r.op, r.platform, r.arch, r.dtype): r for r in other.rows}
        lines = []
        for key in sorted(mine.keys() | theirs.keys()):
            one, two = mine.get(key), theirs.get(key)
            if one != two:
                where = " ".join(part for part in key if part)
                lines.append(f"{where}: {_won(one)} against {_won(two)}")
        return lines

    def __str__(self) -> str:
        """Write one line a row."""
        return "\n".join(f"{r.op} {r.platform} {r.arch or '-'} {r.dtype or '-'}: {_won(r)}" for r in self.rows)


def _won(row: PlanRow | None) -> str:
    if row is None:
        return "no such row"
    return f"{row.winner or 'no kernel'} ({row.distribution} {row.version})".replace(" ( )", "")


def plan(registry: KernelRegistry | None = None) -> Plan:
    """Choose, for every op, kind of device and dtype that is here.

    Devices of the active backends are asked for their arch, which may initialise them: call this
    before forking.

    Returns
    -------
    Plan
        Rows (op, platform key, arch, dtype) with the winner and its version; no device index, no
        path.

    """
    registry = registry or default_registry()
    kinds = sorted({registry.place(device) for device in devices(registry)})
    rows = []
    for op_id in registry.ops():
        op = registry.handle(op_id).op
        for platform, arch in kinds:
            for dtype in op_dtypes(op):
                won = op.dispatcher.select_on(platform, arch, dtype).winner
                rows.append(
                    PlanRow(
                        op=op_id,
                        platform=platform,
                        arch=arch,
                        dtype=dtype,
                        winner=f"{won.selector} {won.name}".strip() if won else "",
                        distribution=won.distribution if won else "",
                        version=won.version if won else "",
                    )
                )
    return Plan(tuple(sorted(rows)))


def devices(registry: KernelRegistry) -> list[torch.device]:
    """List the CPU and every device of the active backends' platform keys."""
    found = [torch.device("cpu")]
    active = [r for r in registry.backends() if r.status == "active"]
    for platform in sorted({key for record in active for key in record.platforms} - {"cpu"}):
        count, _ = registry.detector.count(platform)
        kind = registry.detector.device_type(platform)
        found += [torch.device(kind, index) for index in range(count)]
    return found


def op_dtypes(op: BaseFusedOp) -> tuple[str, ...]:
    """List the dtypes that an op's first tensor parameter may have."""
    required, form = op.arguments().required, op.format_signature
    return (form.dtypes(required[0]) if form and required else None) or ("",)


def check_agreement(group: Any = None, *, registry: KernelRegistry | None = None) -> Plan:
    """Make sure that every rank of a group chooses the same kernels.

    Parameters
    ----------
    group
        A ``torch.distributed`` group; None is the default one.
    registry
        Default: the process's own.

    Returns
    -------
    Plan
        This rank's plan, equal to every other's.

    Raises
    ------
    PolicyError
        On every rank, naming the ranks that differ and their rows.

    """
    from torch import distributed

    mine = plan(registry)
    ranks = distributed.get_world_size(group)
    fingerprints: list[str] = [""] * ranks
    distributed.all_gather_object(fingerprints, mine.fingerprint, group=group)
    if len(set(fingerprints)) == 1:
        return mine
    plans: list[Plan] = [mine] * ranks
    distributed.all_gather_object(plans, mine, group=group)
    raise PolicyError(_disagreement(plans))


def _disagreement(plans: Sequence[Plan]) -> str:
    lines = ["the ranks of this group choose different kernels"]
    for rank, other in enumerate(plans[1:], start=1):
        lines += [f"  rank 0 against rank {rank}: {one}" for one in plans[0].differences(other)]
    lines.append("Install the same distributions and give every rank the same policy.")
    return "\n".join(lines)


__all__ = ["Plan", "PlanRow", "check_agreement", "plan"]
