"""``opgraft bench``: how fast every kernel of an op is here, against a copy of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import opgraft
from opgraft.cli._output import USAGE, WRONG, Table, fail, say, say_json
from opgraft.errors import nearest
from opgraft.spec import KernelBackend, KernelSpec

if TYPE_CHECKING:
    import torch

    from opgraft.fused_op import BaseFusedOp

_COPY = "copy of the same bytes"
_SEED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured of one kernel at one size.

    Parameters
    ----------
    size
        Sample size, as the op counts it.
    kernel
        Selector; empty for the copy.
    correct
        Whether it agrees with native.
    host_us, gpu_us
        Microseconds per call: from Python, and inside a replayed CUDA graph (None elsewhere).
    bytes
        Bytes that a call reads and writes at the least.
    gb_per_s
        Those bytes over the GPU time, or over the host time on a CPU; in 10^9 bytes.
    times_copy
        That time over the time of a copy that moves as many bytes.

    """

    size: int
    kernel: str
    correct: bool
    host_us: float
    gpu_us: float | None
    bytes: int
    gb_per_s: float
    times_copy: float


def bench(
    op: Annotated[str, typer.Argument(metavar="OP", help="Op id, such as attention.clamp_position.")],
    device: Annotated[str, typer.Option(help="Device of the tensors, such as cuda:1.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Dtype of the tensors; default: the op's first.")] = "",
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time every kernel of an op that may run here, over the op's sample sizes."""
    one = opgraft.op(op).op
    if not one.sample_sizes or not hasattr(one, "sample"):
        fail(f"{op} defines no samples, so there is nothing to time", WRONG)
    if plot is not None:
        _pyplot()
    rows = list(_progress(one, _place(device), dtype, quiet=as_json))
    if as_json:
        say_json({"op": op, "device": device, "rows": [asdict(row) for row in rows]})
    else:
        _show(rows)
    if plot is not None:
        _draw(op, device, rows, plot)
    if not all(row.correct for row in rows):
        wrong = sorted({row.kernel for row in rows if not row.correct})
        fail(f"{op}: {', '.join(wrong)} disagrees with native; see `opgraft conformance`", WRONG)


def _place(device: str) -> torch.device:
    import torch

    try:
        place = torch.device(opgraft.registry.detector.device_type(device))
        torch.empty(0, device=place)
    except Exception as error:  # noqa: BLE001 - each device type has its own way to be absent
        known = {"cpu"} | {key for record in opgraft.backends() for key in record.platforms}
        fail(f"device {device!r} is not here ({error}){nearest(device, known)}", USAGE)
    return place


def _progress(op: BaseFusedOp, device: torch.device, dtype: str, *, quiet: bool) -> Iterator[Row]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(op.label, total=len(op.sample_sizes))
        for size in op.sample_sizes:
            progress.update(task, description=f"{op.label} at {size}")
            yield from _measure(op, size, device, dtype)
            progress.advance(task)


def _measure(op: BaseFusedOp, size: int, device: torch.device, dtype: str) -> Iterator[Row]:
    import torch

    from opgraft.checked import as_outputs
    from opgraft.cli._timing import graph_microseconds, host_microseconds

    given = _arguments(op, size, device, dtype)
    values = op.arguments().bind(**given)
    args, kwargs = op.arguments().split(values)
    kernels = {spec.selector: op.dispatcher.runner(spec).kernel for spec in _able(op, values)}
    expected = as_outputs(op.forward_native(*args, **kwargs))
    correct = {name: _agrees(op, as_outputs(kernel(*args, **kwargs)), expected) for name, kernel in kernels.items()}
    moved = _traffic(op, given, expected)
    source = torch.empty(max(moved // 2, 1), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], Any]] = {name: partial(kernel, *args, **kwargs) for name, kernel in kernels.items()}
    calls[_COPY] = partial(target.copy_, source)
    host = host_microseconds(calls, device)
    graph = graph_microseconds(calls, device)
    copy = graph[_COPY] or host[_COPY]
    for name in (*kernels, _COPY):
        gpu = graph[name]
        taken = gpu if gpu is not None else host[name]
        yield Row(
            size=size,
            kernel=name,
            correct=correct.get(name, True),
            host_us=round(host[name], 3),
            gpu_us=None if gpu is None else round(gpu, 3),
            bytes=moved,
            gb_per_s=round(moved / taken / 1e3, 3),
            times_copy=round(taken / copy, 3),
        )


def _able(op: BaseFusedOp, values: tuple[Any, ...]) -> Iterator[KernelSpec]:
    """Give the kernels that can run these values, those too that run only when named."""
    for candidate in op.dispatcher.explain(values).candidates:
        spec = candidate.kernel
        if isinstance(spec, str) or spec.kernel_backend is KernelBackend.TORCH_COMPILE:
            continue
        if candidate.accepted or op.dispatcher.explain(values, spec.selector).winner is not None:
            yield spec


def _arguments(op: BaseFusedOp, size: int, device: torch.device, dtype: str) -> dict[str, Any]:
    import torch

    arguments, form = op.arguments(), op.format_signature
    dtypes = {}
    for name in (*arguments.required, *arguments.optional):
        allowed = (form.dtypes(name) if form is not None else None) or (dtype or "float32",)
        if dtype and name == arguments.required[0] and dtype not in allowed:
            fail(f"{name} must be {' or '.join(allowed)}, got {dtype!r}{nearest(dtype, allowed)}", USAGE)
        dtypes[name] = getattr(torch, dtype if dtype in allowed else allowed[0])
    generator = torch.Generator().manual_seed(_SEED)
    sample: Callable[..., dict[str, Any]] = getattr(op, "sample")  # noqa: B009 - an op need not define it
    drawn = sample(size, dtypes=dtypes, generator=generator)
    return {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in drawn.items()}


def _agrees(op: BaseFusedOp, mine: tuple[Any, ...], native: tuple[Any, ...]) -> bool:
    import torch

    allowed = op.tolerance
    return len(mine) == len(native) and all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.allclose(a.cpu(), b.cpu(), rtol=allowed.rtol, atol=allowed.atol, equal_nan=a.is_floating_point())
        for a, b in zip(mine, native, strict=True)
    )


def _traffic(op: BaseFusedOp, given: dict[str, Any], outputs: tuple[Any, ...]) -> int:
    """Count the bytes that a call reads and writes at the least; the op says where it does not read all."""
    import torch

    traffic: Callable[..., int] | None = getattr(op, "traffic", None)
    if traffic is not None:
        return traffic(**given)
    tensors = [one for one in (*given.values(), *outputs) if isinstance(one, torch.Tensor)]
    return sum(one.numel() * one.element_size() for one in tensors)


def _show(rows: list[Row]) -> None:
    table = Table(("SIZE", "KERNEL", "HOST us", "GPU us", "GB/s", "x COPY", ""))
    for row in rows:
        gpu = "-" if row.gpu_us is None else f"{row.gpu_us:.2f}"
        numbers = (f"{row.host_us:.2f}", gpu, f"{row.gb_per_s:.2f}", f"{row.times_copy:.2f}")
        table.add(str(row.size), row.kernel, *numbers, "" if row.correct else "WRONG")
    table.show()


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError:
        fail("--plot needs matplotlib: pip install 'opgraft[bench]'", WRONG)
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _draw(op: str, device: str, rows: list[Row], path: Path) -> None:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    on_gpu = all(row.gpu_us is not None for row in rows if row.kernel == _COPY)
    for name in dict.fromkeys(row.kernel for row in rows):
        mine = [row for row in rows if row.kernel == name]
        times = [row.gpu_us if on_gpu else row.host_us for row in mine]
        style = {"color": "grey", "linestyle": "--"} if name == _COPY else {}
        axes.plot([row.size for row in mine], times, marker="o", label=name, **style)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="sample size",
        title=f"{op} on {device}",
        ylabel=f"microseconds per call, {'replayed graph' if on_gpu else 'from Python'}",
    )
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        fail(f"{path} cannot be written: {error}", WRONG)
    say(f"wrote {path}")
