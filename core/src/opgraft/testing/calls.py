"""The calls that a kernel is tried with, made from what its op says about itself.

A :class:`Call` is a recipe: small, frozen, comparable. :class:`Material` knows one op (and which
of its dtypes a kernel declares) and turns a recipe into arguments; nothing here knows a kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from opgraft.spec import dtypes_of
from opgraft.testing.faults import NotApplicable
from opgraft.testing.layouts import PLAIN

if TYPE_CHECKING:
    from opgraft.fused_op import BaseFusedOp
    from opgraft.spec import DtypeRule

__all__ = ["BOUNDARY_SIZES", "LARGER_SIZES", "LARGE_SIZES", "Call", "Material"]

SAMPLE: Final = "sample"
VALUES: Final = "values"

BOUNDARY_SIZES: Final = tuple(
    sorted(
        {2**power + step for power in range(5, 18) for step in (-1, 0, 1)}
        | {block * count + 1 for block in (96, 384, 1000, 1536) for count in (1, 2, 3)}
        | {100, 1000, 3001, 10_000, 50_000, 100_000}
    )
)
"""Around powers of two, multiples of usual block sizes, and what people type."""

LARGE_SIZES: Final = (2**20 + 3, 2**20 + 64)
LARGER_SIZES: Final = (2**22 + 1, 2**24 + 5)
"""More than any block, grid row or 16-bit count; the second only where time does not matter."""

_COMBINATIONS: Final = 16
_FURTHER_DIM: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How to make the arguments of one call.

    Parameters
    ----------
    source
        ``"sample"`` (the op's own random arguments), ``"values"`` (a list of numbers, for ops
        that work element by element) or the name of one of the op's edge cases.
    size
        What the op's ``sample`` is asked for.
    seed
        Of the random generator.
    host_seed
        Seed of the sample from which everything but the tensors comes; the same one if None.
    dtypes
        Dtype name of each tensor parameter.
    layouts
        Layout of each tensor argument that is not laid out plainly.
    buffers
        Caller buffers to pass, each with its layout.
    values
        The numbers, where the source is ``"values"``.
    by_keyword
        Whether every argument is passed by its name.

    """

    source: str = SAMPLE
    size: int = 0
    seed: int = 0
    host_seed: int | None = None
    dtypes: tuple[tuple[str, str], ...] = ()
    layouts: tuple[tuple[str, str], ...] = ()
    buffers: tuple[tuple[str, str], ...] = ()
    values: tuple[float, ...] = ()
    by_keyword: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether all tensors lie in memory in the plainest way."""
        return all(layout == PLAIN for _, layout in (*self.layouts, *self.buffers))

    def but(self, **changes: Any) -> Call:
        """Give the same recipe with some parts changed."""
        return dataclasses.replace(self, **changes)

    def smaller(self) -> Iterator[Call]:
        """Give recipes that are simpler than this one, the simplest first."""
        if self.source == SAMPLE:
            yield from (self.but(size=size) for size in _shrunk_sizes(self.size))
        if self.source == VALUES:
            yield from (self.but(values=part) for part in _shrunk_values(self.values))
        for field in ("layouts", "buffers"):
            pairs: tuple[tuple[str, str], ...] = getattr(self, field)
            for place, (name, layout) in enumerate(pairs):
                rest = (*pairs[:place], *pairs[place + 1 :])
                yield self.but(**{field: rest})
                if field == "buffers" and layout != PLAIN:
                    yield self.but(buffers=(*rest, (name, PLAIN)))
        if self.seed:
            yield self.but(seed=0)
        if self.by_keyword:
            yield self.but(by_keyword=False)


def _shrunk_sizes(size: int) -> Iterator[int]:
    yield from range(min(size, 4))
    yield from (2**power for power in range(2, max(size, 1).bit_length()) if 2**power < size)
    step = size // 2
    while step:
        if size - step > 4:  # noqa: PLR2004 - those have been given above
            yield size - step
        step //= 2


def _shrunk_values(values: tuple[float, ...]) -> Iterator[tuple[float, ...]]:
    count = len(values)
    if count > 1:
        half = count // 2
        yield values[:half]
        yield values[half:]
        if count <= 32:  # noqa: PLR2004 - one by one only where there are few
            yield from (values[:place] + values[place + 1 :] for place in range(count))
    elif count == 1 and values[0] not in {0, 1}:
        yield (0,)
        yield (1,)


class Material:
    """What an op says about itself, and calls made from it.

    Parameters
    ----------
    op
        The op.
    narrowed
        Dtypes that a kernel declares, or None for all of the op's.

    """

    def __init__(self, op: BaseFusedOp, narrowed: DtypeRule | None = None) -> None:
        self.op = op
        self.form = op.format_signature
        self.signature = inspect.signature(op.forward_native)
        parameters = self.signature.parameters.values()
        tensors = [p for p in parameters if "Tensor" in str(p.annotation)]
        self.writes: Mapping[str, int] = {
            name: place for name, place in op.writes.items() if name in self.signature.parameters
        }
        self.inputs = tuple(p.name for p in tensors if p.name not in self.writes)
        self.required = tuple(p.name for p in tensors if p.default is p.empty and p.name not in self.writes)
        self.narrowed = narrowed
        self._sample: Callable[..., Mapping[str, Any]] = getattr(op, "sample", self._generic)
        self._kept_edges: tuple[object, dict[str, dict[str, Any]]] = (None, {})

    # -- dtypes --------------------------------------------------------------------------------

    def declared(self, parameter: str) -> tuple[str, ...]:
        """Give the dtypes that the kernel declares for a parameter."""
        own = self.form.dtypes(parameter) if self.form is not None else None
        if parameter in self.writes and (own is None or not self._per_parameter):
            own = self._output_dtypes(parameter)
        narrowed = dtypes_of(self.narrowed, parameter)
        if own is None:
            return narrowed or ("float32",)
        if narrowed is None or (parameter in self.writes and not isinstance(narrowed, Mapping)):
            return own
        return tuple(name for name in own if name in narrowed)

    @property
    def _per_parameter(self) -> bool:
        return self.form is not None and isinstance(self.form.supported_dtypes, Mapping)

    def _output_dtypes(self, buffer: str) -> tuple[str, ...]:
        outputs = self.form.outputs if self.form is not None else ()
        name = outputs[self.writes[buffer]] if outputs else "float32"
        if name.startswith("like:"):
            return self.declared(name.removeprefix("like:"))
        return (name,)

    @functools.cached_property
    def combinations(self) -> tuple[tuple[tuple[str, str], ...], ...]:
        """List which dtypes the inputs may have together: every pair of two occurs at least."""
        choices = [self.declared(name) for name in self.inputs]
        if not all(choices):
            return ()
        if math.prod(map(len, choices)) <= _COMBINATIONS:
            rows: list[tuple[str, ...]] = list(itertools.product(*choices))
        else:
            rows = _pairwise(choices)
        return tuple(self._with_buffers(dict(zip(self.inputs, row, strict=True))) for row in rows)

    def _with_buffers(self, dtypes: dict[str, str]) -> tuple[tuple[str, str], ...]:
        for buffer in self.writes:
            name = self.declared(buffer)[0] if self.declared(buffer) else "float32"
            like = self.form.outputs[self.writes[buffer]] if self.form and self.form.outputs else ""
            if like.startswith("like:"):
                name = dtypes[like.removeprefix("like:")]
            dtypes[buffer] = name
        return tuple(dtypes.items())

    def buffer_combinations(self) -> Iterator[tuple[tuple[str, str], ...]]:
        """List dtypes of the caller buffers, inputs at their first."""
        if not self.combinations:
            return
        first = dict(self.combinations[0])
        yield self.combinations[0]
        for buffer in self.writes:
            outputs = self.form.outputs if self.form is not None else ()
            if not (outputs and outputs[self.writes[buffer]].startswith("like:")):
                for name in self.declared(buffer)[1:]:
                    yield tuple((first | {buffer: name}).items())

    # -- arguments -----------------------------------------------------------------------------

    def arguments(self, call: Call) -> dict[str, Any]:
        """Make the CPU arguments of a recipe; buffers are not among them."""
        if call.source == VALUES:
            name = self.inputs[0]
            dtype = torch_dtype(dict(call.dtypes)[name])
            return {name: _tensor_of(call.values, dtype)}
        if call.source == SAMPLE:
            arguments = self._sampled(call, call.seed)
            if call.host_seed is not None:
                known = self._sampled(call, call.host_seed)
                arguments |= {name: value for name, value in known.items() if not isinstance(value, Tensor)}
            return arguments
        return dict(self._edge_cases(call.dtypes)[call.source])

    def _sampled(self, call: Call, seed: int) -> dict[str, Any]:
        dtypes = {name: torch_dtype(word) for name, word in call.dtypes}
        return dict(self._sample(call.size, dtypes=dtypes, generator=torch.Generator().manual_seed(seed)))

    def _generic(self, size: int, *, dtypes: Mapping[str, torch.dtype], generator: torch.Generator) -> dict[str, Any]:
        """Draw arguments for an op that has no ``sample``, from the shapes it states.

        The first dim named has the size; further ones are small.
        """
        shapes = self.form.shapes if self.form is not None else {}
        sizes: dict[str, int] = {}
        arguments: dict[str, Any] = {}
        for name in self.required:
            if name not in shapes:
                raise NotApplicable(f"the op has no sample() and states no shape of {name}")
            shape = []
            for dim in shapes[name]:
                word, _, plus = dim.partition(" + ")
                known = sizes.setdefault(word, min(size, _FURTHER_DIM) if sizes else size)
                shape.append(known + int(plus or 0))
            arguments[name] = _drawn(shape, dtypes[name], generator)
        others = [p.name for p in self.signature.parameters.values() if p.default is p.empty]
        if set(others) - set(arguments):
            raise NotApplicable("the op has no sample() and needs more than tensors")
        return arguments

    def _edge_cases(self, combination: tuple[tuple[str, str], ...]) -> dict[str, dict[str, Any]]:
        if self._kept_edges[0] != combination:
            dtypes = {name: torch_dtype(word) for name, word in combination}
            generator = torch.Generator().manual_seed(0)
            edge_samples = getattr(self.op, "edge_samples", None)
            given = edge_samples(dtypes=dtypes, generator=generator) if edge_samples else ()
            cases = dict(given)
            self._kept_edges = combination, cases
        return self._kept_edges[1]

    def edges(self, combination: tuple[tuple[str, str], ...]) -> Iterator[Call]:
        """Give the op's own edge cases for a combination of dtypes."""
        for name in tuple(self._edge_cases(combination)):
            yield Call(source=name, dtypes=combination)

    # -- ops that work element by element ------------------------------------------------------

    @functools.cached_property
    def is_elementwise(self) -> bool:
        """Whether any values make a valid call: one 1-D input, each result from its own element.

        Found out by trying: native of permuted input is the permuted result.
        """
        if len(self.inputs) != 1 or self.form is None or self.op.mutates:
            return False
        (name,) = self.inputs
        if len(self.form.shapes.get(name, ())) != 1 or not self.combinations:
            return False
        others = self.signature.parameters.values()
        if any(p.default is p.empty for p in others if p.name != name):
            return False
        dtype = torch_dtype(dict(self.combinations[0])[name])
        values = _tensor_of((5, 0, -7, 2, 99, 5, -1, 40, 7, 1, 0), dtype)
        order = torch.tensor([3, 0, 10, 7, 1, 2, 9, 8, 4, 6, 5])
        whole = self.op.forward_native(values)
        if not isinstance(whole, Tensor) or whole.shape != values.shape:
            return False
        permuted = self.op.forward_native(values[order])
        part = self.op.forward_native(values[:4])
        return torch.equal(permuted, whole[order]) and torch.equal(part, whole[:4])

    def of_values(self, values: tuple[float, ...], combination: tuple[tuple[str, str], ...]) -> Call:
        """Make a recipe from numbers; those that the dtype cannot hold are left out."""
        dtype = torch_dtype(dict(combination)[self.inputs[0]])
        return Call(source=VALUES, values=_fitting(values, dtype), dtypes=combination)


def _drawn(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


def torch_dtype(name: str) -> torch.dtype:
    """Give ``torch.int32`` for ``"int32"``."""
    found: torch.dtype = getattr(torch, name)
    return found


def _fitting(values: tuple[float, ...], dtype: torch.dtype) -> tuple[float, ...]:
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return values
    limits = torch.iinfo(dtype)
    return tuple(
        value for value in values if math.isfinite(value) and value == int(value) and limits.min <= value <= limits.max
    )


def _tensor_of(values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    fitting = _fitting(values, dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.tensor(fitting, dtype=torch.float64).to(dtype)
    return torch.tensor([int(value) for value in fitting], dtype=dtype)


def _pairwise(choices: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Choose rows in which every two columns show every pair of their values."""
    columns = range(len(choices))
    missing = {
        (left, a, right, b)
        for left, right in itertools.combinations(columns, 2)
        for a in choices[left]
        for b in choices[right]
    }
    rows = []
    while missing:
        row: list[str] = []
        for column in columns:
            row.append(max(choices[column], key=lambda c: _gain(row, column, c, missing)))
        covered = {(left, row[left], right, row[right]) for left, right in itertools.combinations(columns, 2)}
        if not covered & missing:
            left, a, right, b = min(missing)
            row[left], row[right] = a, b
            covered = {(left, a, right, b)}
        missing -= covered
        rows.append(tuple(row))
    return rows


def _gain(row: list[str], column: int, word: str, missing: set[tuple[int, str, int, str]]) -> int:
    return sum((left, other, column, word) in missing for left, other in enumerate(row))
