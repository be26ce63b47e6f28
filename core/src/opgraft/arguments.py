"""A call's arguments: bound in the order of the op's parameters and held against its format.

Everything here looks at metadata alone and raises before any kernel is launched.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from opgraft.errors import ArgumentTypeError, ArgumentValueError

if TYPE_CHECKING:
    from opgraft.spec import FormatSignature

Values = tuple[Any, ...]
_PLANE: Final = 2

is_alias_of: Callable[[torch.Tensor, torch.Tensor], bool] = vars(torch._C)["_is_alias_of"]  # noqa: SLF001
"""Whether two tensors share storage; torch has no public reader of it that takes less than a microsecond."""

_SCALARS = {"int", "float", "bool", "str"}
_BACKEND = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY, default=None)


def dtype_name(dtype: torch.dtype) -> str:
    """Give ``"int32"`` for ``torch.int32``."""
    return str(dtype).removeprefix("torch.")


def shares_places(tensor: torch.Tensor) -> bool:
    """Say whether two elements of a tensor lie at one place: a stride of 0, or rows that overlap."""
    if not tensor.numel():
        return False
    axes = [(int(size), int(stride)) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    pairs = ((one, other, math.gcd(one[1], other[1])) for one, other in itertools.combinations(axes, 2))
    return any(not stride for _, stride in axes) or any(
        other[1] // common < one[0] and one[1] // common < other[0] for one, other, common in pairs
    )


def tensors_of(value: object) -> list[torch.Tensor]:
    """List the tensors that a value is or holds, one level deep."""
    members = value.values() if isinstance(value, Mapping) else value
    held = members if isinstance(value, (list, tuple, Mapping)) else (value,)
    return [one for one in held if isinstance(one, torch.Tensor)]  # type: ignore[attr-defined]


class _Name(str):
    """Stands for a default in generated source."""

    __slots__ = ()
    __repr__ = str.__str__


class Arguments:
    """An op's parameters, without ``self``, and what a call's values must be.

    Values are a tuple in the order of the parameters.

    Parameters
    ----------
    signature
        Of the op's native.
    label
        Op id or class name, for messages.
    form
        The op's format signature, or None where it states none.
    writes
        Caller-buffer parameters, each with the index of the output it receives.

    """

    def __init__(
        self, signature: inspect.Signature, label: str, form: FormatSignature | None, writes: Mapping[str, int]
    ) -> None:
        self.signature, self.label, self.form = signature, label, form
        every = list(signature.parameters.values())
        self.names = tuple(p.name for p in every)
        self.defaults = tuple(p.default for p in every)
        self.keyword_only = frozenset(p.name for p in every if p.kind is p.KEYWORD_ONLY)
        self.variadic = {p.name: p.kind for p in every if p.kind in {p.VAR_POSITIONAL, p.VAR_KEYWORD}}
        stated = {*(form.shapes if form else ()), *(form.supported_dtypes if form and form.by_parameter else ())}
        tensors = [p for p in every if p.name not in self.variadic and _is_tensor(p, stated)]
        self.required = tuple(p.name for p in tensors if p.default is p.empty)
        self.optional = tuple(p.name for p in tensors if p.default is not p.empty)
        self.writes = {name: index for name, index in writes.items() if name in self.names}
        others = (_words(p.annotation) for p in every if p not in tensors)
        self.keeps = bool(self.required) and all(words and words <= _SCALARS for words in others)
        """Whether all that a choice depends on is in the tensors that a guard sees."""
        self.floats = form is None or any("float" in name or "complex" in name for name in form.every_dtype)
        shapes = form.shapes if form else {}
        self.dims = {p.name: [_dim(dim) for dim in shapes[p.name]] for p in tensors if p.name in shapes}
        self._shaped = [(self.names.index(name), name, dims) for name, dims in self.dims.items()]
        self._buffers = [(self.names.index(name), name) for name in self.writes]
        self.fits: Callable[..., bool] = self.compile("fits", f"({self.listed})", f"return {self._fitting()}")["fits"]
        self._split = self.compile("split", f"({self.listed})", self._splitting())["split"]
        # Generated, because inspect's own bind costs several microseconds a call.
        name = label.rpartition(".")[2]
        self.bind: Callable[..., Values] = self.compile(name, self.source(), f"return ({self.listed})")[name]

    def _splitting(self) -> str:
        """Write how values become a call again."""
        kinds = {p.name: p.kind for p in self.signature.parameters.values()}
        lines, args = ["_named = {}"], []
        for name, kind in kinds.items():
            if kind is inspect.Parameter.KEYWORD_ONLY:
                lines.append(f"if {name} is not _default_{name}: _named[{name!r}] = {name}")
            elif kind is inspect.Parameter.VAR_KEYWORD:
                lines.append(f"_named |= {name}")
            else:
                args.append(f"*{name}" if kind is inspect.Parameter.VAR_POSITIONAL else name)
        return "\n    ".join([*lines, f"return [{', '.join(args)}], _named"])

    @property
    def listed(self) -> str:
        """The parameters' names as the source of a tuple's inside."""
        return "".join(f"{name}, " for name in self.names)

    def with_backend(self) -> inspect.Signature:
        """Give the signature that callers see: with the keyword ``backend``."""
        every = list(self.signature.parameters.values())
        last = next(iter(every[-1:]), _BACKEND)
        at = len(every) - (last.kind is last.VAR_KEYWORD)
        return self.signature.replace(parameters=[*every[:at], _BACKEND, *every[at:]])

    def source(self, signature: inspect.Signature | None = None) -> str:
        """Write the parameter list as source, ``_default_<parameter>`` for each default."""
        every = (signature or self.signature).parameters.values()
        bare = [
            p.replace(annotation=p.empty, default=p.default if p.default is p.empty else _Name(f"_default_{p.name}"))
            for p in every
        ]
        return str(inspect.Signature(bare))

    def compile(self, name: str, parameters: str, body: str) -> dict[str, Any]:
        """Compile one function whose parameter list :meth:`source` wrote."""
        names: dict[str, Any] = {f"_default_{n}": d for n, d in zip(self.names, self.defaults, strict=True)}
        names |= {"_default_backend": None, "_alias": is_alias_of}
        exec(f"def {name}{parameters}:\n    {body}\n", names)  # noqa: S102
        return names

    def split(self, values: Values) -> tuple[list[Any], dict[str, Any]]:
        """Turn values into a call; keyword-only parameters at their default are left out."""
        split: tuple[list[Any], dict[str, Any]] = self._split(*values)
        return split

    def given(self, values: Values) -> dict[str, Any]:
        """Give the values that are not their parameter's default, by name."""
        rows = zip(self.names, values, self.defaults, strict=True)
        return {name: value for name, value, default in rows if value is not default}

    def tensors(self, values: Values) -> Iterator[tuple[str, torch.Tensor]]:
        """Give every tensor among the values, with its parameter's name."""
        for name, value in zip(self.names, values, strict=True):
            for one in tensors_of(value):
                yield name, one

    def check_format(self, values: Values) -> None:
        """Check kinds, dtypes and the device: all that a choice of kernel is kept for.

        Raises
        ------
        ArgumentTypeError
            If a tensor parameter is no tensor, or a dtype is outside the format signature.
        ArgumentValueError
            If the tensors are on different devices.

        """
        for name, value, default in zip(self.names, values, self.defaults, strict=True):
            if value is default:
                continue
            if name in self.required + self.optional and not isinstance(value, torch.Tensor):
                self._wrong(ArgumentTypeError, name, "a tensor", f"{type(value).__name__} {value!r:.60}")
            for one in tensors_of(value):
                expected = self._dtypes(name, values)
                if expected and dtype_name(one.dtype) not in expected:
                    self._wrong(ArgumentTypeError, name, " or ".join(expected), dtype_name(one.dtype))
        devices = [(name, one.device) for name, one in self.tensors(values)]
        for name, device in devices[1:]:
            if device != devices[0][1]:
                self._wrong(ArgumentValueError, name, f"on {devices[0][1]} as {devices[0][0]} is", str(device))

    def _wrong(self, kind: type[Exception], name: str, expected: str, got: str) -> NoReturn:
        raise kind(f"{self.label}: {name} must be {expected}, got {got}")

    def _dtypes(self, name: str, values: Values) -> tuple[str, ...] | None:
        if self.form is None:
            return None
        if name not in self.writes or name in self.form.by_parameter:
            return self.form.dtypes(name)
        outputs = self.output_dtypes(values)
        return (outputs[self.writes[name]],) if outputs else None

    def output_dtypes(self, values: Values) -> tuple[str, ...]:
        """Give each output's dtype for this call, ``like:`` resolved."""
        given = dict(zip(self.names, values, strict=True))
        likes = ((out, given.get(out.removeprefix("like:"))) for out in (self.form.outputs if self.form else ()))
        return tuple(
            dtype_name(like.dtype) if out.startswith("like:") and like is not None else out for out, like in likes
        )

    def check_shapes(self, values: Values) -> None:
        """Check the number of dims, equal sizes, and that no caller buffer overlaps an input.

        Raises
        ------
        ArgumentValueError
            If a shape does not fit, or a buffer and an input share memory.

        """
        if self.fits(*values):
            return
        sizes: dict[str, tuple[int, str]] = {}
        for index, name, dims in self._shaped:
            value = values[index]
            if value is None:
                continue
            shape = value.shape
            if len(shape) != len(dims) or any(size < plus for size, (_, plus) in zip(shape, dims, strict=True)):
                self._misfit(name, value)
            for size, (dim, plus) in zip(shape, dims, strict=True):
                known, whose = sizes.setdefault(dim, (size - plus, name))
                if known != size - plus:
                    self._misfit(name, value, f" with {dim} = {known} as {whose} has")
        for index, name in self._buffers:
            if values[index] is not None:
                self._check_overlap(index, name, values)

    def relates(self, tensors: tuple[str, ...]) -> bool:
        """Say whether :attr:`fits` tells more of these tensors than their number of dims."""
        dims = [dim for name in tensors for dim in self.dims.get(name, ())]
        return len(tensors) > 1 or len({dim for dim, _ in dims}) < len(dims) or any(plus for _, plus in dims)

    def _fitting(self) -> str:
        """Write the whole check as one expression: true is fine, false is for the slow check to judge."""
        first: dict[str, str] = {}
        terms = []
        for at, (name, dims) in enumerate(self.dims.items()):
            own = [f"len(_s{at} := {name}.shape) == {len(dims)}"]
            for axis, (dim, plus) in enumerate(dims):
                size = f"_s{at}[{axis}] - {plus}" if plus else f"_s{at}[{axis}]"
                known = first.setdefault(dim, size)
                own += [f"{size} == {known}"] if known != size else [f"{size} >= 0"] if plus else []
            guard = "" if name in self.required else f"{name} is None or "
            terms.append(f"({guard}{' and '.join(own)})")
        for buffer in self.writes:
            others = (name for name in self.required + self.optional if name != buffer)
            apart = [f"({name} is None or not _alias({buffer}, {name}))" for name in others]
            in_rows = f"(_t := {buffer}.stride())[0] >= {buffer}.shape[1] * _t[1] > 0"
            inside = in_rows if len(self.dims.get(buffer, ())) == _PLANE else f"0 not in {buffer}.stride()"
            terms.append(f"({buffer} is None or {' and '.join([inside, *apart])})")
        return " and ".join(terms) or "True"

    def _misfit(self, name: str, value: torch.Tensor, where: str = "") -> NoReturn:
        dims = ", ".join(f"{dim} + {plus}" if plus else dim for dim, plus in self.dims[name])
        self._wrong(ArgumentValueError, name, f"of shape [{dims}]{where}", f"{tuple(value.shape)}")

    def _check_overlap(self, index: int, buffer: str, values: Values) -> None:
        target = values[index]
        if shares_places(target):
            expected = "memory in which no two elements share a place"
            self._wrong(ArgumentValueError, buffer, expected, f"strides {target.stride()}")
        for other, name in zip(values, self.names, strict=True):
            if isinstance(other, torch.Tensor) and name != buffer and is_alias_of(target, other):
                (low, high), (start, end) = _span(target), _span(other)
                if low < end and start < high:
                    self._wrong(ArgumentValueError, buffer, f"memory of its own, not {name}'s", "overlapping tensors")


def _words(annotation: object) -> set[str]:
    return {*re.findall(r"\w+", str(annotation))} - {"class", "torch", "typing", "Optional", "None"}


def _is_tensor(parameter: inspect.Parameter, stated: set[str]) -> bool:
    """Say whether a parameter is one tensor: by its annotation, or, without one, because the format names it."""
    bare = parameter.annotation is parameter.empty
    return parameter.name in stated if bare else _words(parameter.annotation) == {"Tensor"}


def _dim(dim: str) -> tuple[str, int]:
    name, _, plus = dim.partition(" + ")
    return name, int(plus or 0)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Give the first byte of a tensor in its storage and the one after its last."""
    if tensor.numel() == 0:
        return 0, 0
    extent = 1 + sum((int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + extent) * tensor.element_size()
