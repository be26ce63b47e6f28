"""A call's arguments: bound in the order of the op's parameters and held against its format.

Everything here looks at metadata alone and raises before any kernel is launched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from opgraft.errors import ArgumentTypeError, ArgumentValueError

if TYPE_CHECKING:
    from opgraft.spec import FormatSignature

Values = tuple[Any, ...]
_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def dtype_name(dtype: torch.dtype) -> str:
    """Give ``"int32"`` for ``torch.int32``."""
    return str(dtype).removeprefix("torch.")


class Parameters:
    """An op's parameters, without ``self``: how values become a tuple in order, and a call again.

    Parameters
    ----------
    signature
        Of the op's native.
    label
        Op id or class name, for messages.

    """

    def __init__(self, signature: inspect.Signature, label: str) -> None:
        self.signature = signature
        self.label = label
        kinds = signature.parameters.values()
        self.names = tuple(signature.parameters)
        self.defaults = tuple(p.default for p in kinds)
        self.keyword_only = frozenset(p.name for p in kinds if p.kind is p.KEYWORD_ONLY)
        self.variadic = tuple(p.kind if p.kind in _VARIADIC else None for p in kinds)
        self.is_variadic = any(self.variadic)
        annotated = [p for p in kinds if "Tensor" in str(p.annotation)]
        self.tensors = frozenset(p.name for p in annotated)
        self.required = tuple(p.name for p in annotated if p.default is p.empty)
        self.optional = tuple(p.name for p in annotated if p.default is not p.empty)
        self.bind: Callable[..., Values] = self._compile_bind()

    def source(self, extra: str = "") -> str:
        """Write the parameter list as source; defaults are the names ``_default_<parameter>``."""
        text, starred = [], False
        for p in self.signature.parameters.values():
            starred = starred or p.kind is p.VAR_POSITIONAL
            if p.kind is p.KEYWORD_ONLY and not starred:
                text.append("*")
                starred = True
            star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
            default = "" if p.default is p.empty else f"=_default_{p.name}"
            text.append(f"{star}{p.name}{default}")
        if extra:
            place = len(text) - (1 if p_is_var_keyword(self.signature) else 0)
            text[place:place] = [extra] if starred else ["*", extra]
        return ", ".join(text)

    def namespace(self) -> dict[str, Any]:
        """Give the names that :meth:`source` refers to."""
        pairs = zip(self.names, self.defaults, strict=True)
        return {f"_default_{name}": default for name, default in pairs}

    def _compile_bind(self) -> Callable[..., Values]:
        # Generated because inspect's own bind costs several microseconds a call.
        name = self.label.rpartition(".")[2]
        name = name if name.isidentifier() else "call"
        namespace = self.namespace()
        body = "".join(f"{parameter}, " for parameter in self.names)
        exec(f"def {name}({self.source()}):\n    return ({body})", namespace)  # noqa: S102
        bound: Callable[..., Values] = namespace[name]
        return bound

    def split(self, values: Values) -> tuple[list[Any], dict[str, Any]]:
        """Turn values into a call; keyword-only parameters at their default are left out."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        keyword_only = self.keyword_only
        rows = zip(self.names, values, self.defaults, self.variadic, strict=True)
        for name, value, default, variadic in rows:
            if variadic is inspect.Parameter.VAR_POSITIONAL:
                args.extend(value)
            elif variadic is inspect.Parameter.VAR_KEYWORD:
                kwargs.update(value)
            elif name not in keyword_only:
                args.append(value)
            elif value is not default:
                kwargs[name] = value
        return args, kwargs

    def passed(self, values: Values) -> frozenset[str]:
        """Name the keyword-only parameters whose value is not the default."""
        rows = zip(self.names, values, self.defaults, strict=True)
        only = self.keyword_only
        return frozenset(n for n, value, default in rows if n in only and value is not default)

    def tensors_in(self, values: Values) -> Iterator[tuple[str, torch.Tensor]]:
        """Give every tensor among the values, those in lists and mappings included."""
        for name, value in zip(self.names, values, strict=True):
            for one in tensors_of(value):
                yield name, one


def tensors_of(value: object) -> list[torch.Tensor]:
    """List the tensors that a value is or holds, one level deep."""
    if isinstance(value, torch.Tensor):
        return [value]
    members = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, (list, tuple, Mapping)):
        return [one for one in members if isinstance(one, torch.Tensor)]  # type: ignore[union-attr]
    return []


def p_is_var_keyword(signature: inspect.Signature) -> bool:
    """Say whether the last parameter takes any keyword."""
    last = next(reversed(signature.parameters.values()), None)
    return last is not None and last.kind is last.VAR_KEYWORD


class ArgumentCheck:
    """Holds a call's values against an op's parameters and format signature.

    Parameters
    ----------
    parameters
        The op's.
    form
        The op's format signature, or None where it states none.
    writes
        Caller-buffer parameters, each with the index of the output it receives.

    """

    def __init__(
        self, parameters: Parameters, form: FormatSignature | None, writes: Mapping[str, int]
    ) -> None:
        self.parameters = parameters
        self.form = form
        self.writes = writes
        self.dims = {
            name: [_dim(dim) for dim in dims] for name, dims in (form.shapes if form else {}).items()
        }

    def format(self, values: Values) -> None:
        """Check kinds, dtypes and the device: all that a choice of kernel is kept for.

        Raises
        ------
        ArgumentTypeError
            If a tensor parameter is no tensor, or a dtype is outside the format signature.
        ArgumentValueError
            If the tensors are on different devices.

        """
        label = self.parameters.label
        for name, value, default in zip(
            self.parameters.names, values, self.parameters.defaults, strict=True
        ):
            if name in self.parameters.tensors and value is not default:
                if not isinstance(value, torch.Tensor):
                    kind = type(value).__name__
                    message = f"{label}: {name} must be a tensor, got {kind} {value!r:.60}"
                    raise ArgumentTypeError(message)
                self._dtype(name, value, values)
        first: tuple[str, torch.device] | None = None
        for name, tensor in self.parameters.tensors_in(values):
            if first is None:
                first = name, tensor.device
            elif tensor.device != first[1]:
                message = (
                    f"{label}: {name} is on {tensor.device}, expected {first[1]} as {first[0]} is;"
                    f" move all tensors of the call to one device"
                )
                raise ArgumentValueError(message)

    def _dtype(self, name: str, tensor: torch.Tensor, values: Values) -> None:
        if self.form is None:
            return
        per_parameter = isinstance(self.form.supported_dtypes, Mapping)
        if name in self.writes and not (per_parameter and self.form.dtypes(name)):
            outputs = self.form.outputs
            allowed = self.output_dtypes(values)[self.writes[name]] if outputs else None
            expected = (allowed,) if allowed else None
        else:
            expected = self.form.dtypes(name)
        got = dtype_name(tensor.dtype)
        if expected is not None and got not in expected:
            wanted = " or ".join(expected)
            message = f"{self.parameters.label}: {name} must be {wanted}, got {got}"
            raise ArgumentTypeError(message)

    def output_dtypes(self, values: Values) -> tuple[str, ...]:
        """Give each output's dtype for this call, ``like:`` resolved."""
        by_name = dict(zip(self.parameters.names, values, strict=True))
        outputs = []
        for name in self.form.outputs if self.form else ():
            like = by_name.get(name.removeprefix("like:")) if name.startswith("like:") else None
            outputs.append(dtype_name(like.dtype) if like is not None else name)
        return tuple(outputs)

    def shapes(self, values: Values) -> None:
        """Check the number of dims, equal sizes, and that no caller buffer overlaps an input.

        Raises
        ------
        ArgumentValueError
            If a shape does not fit, or a buffer and an input share memory.

        """
        sizes: dict[str, tuple[int, str]] = {}
        for name, value in zip(self.parameters.names, values, strict=True):
            dims = self.dims.get(name)
            if dims is None or not isinstance(value, torch.Tensor):
                continue
            shape = value.shape
            if len(shape) != len(dims):
                self._misfit(name, value, _shown(dims))
            for size, (dim, plus) in zip(shape, dims, strict=True):
                known = sizes.setdefault(dim, (size - plus, name))
                if known[0] != size - plus:
                    place = f"{_shown(dims)} with {dim} = {known[0]} as {known[1]} has"
                    self._misfit(name, value, place)
        for buffer in self.writes:
            self._overlap(buffer, values)

    def _misfit(self, name: str, value: torch.Tensor, expected: str) -> None:
        got = tuple(value.shape)
        message = f"{self.parameters.label}: {name} must have shape {expected}, got {got}"
        raise ArgumentValueError(message)

    def _overlap(self, buffer: str, values: Values) -> None:
        names = self.parameters.names
        if buffer not in names:
            return
        target = values[names.index(buffer)]
        if not isinstance(target, torch.Tensor) or target.numel() == 0:
            return
        for name, other in self.parameters.tensors_in(values):
            if other is not target and torch._C._is_alias_of(target, other):  # noqa: SLF001
                mine, theirs = _span(target), _span(other)
                if mine[0] < theirs[1] and theirs[0] < mine[1]:
                    label = self.parameters.label
                    message = f"{label}: {buffer} overlaps {name} in memory; pass another buffer"
                    raise ArgumentValueError(message)
            elif other is target and name != buffer:
                message = f"{self.parameters.label}: {buffer} is {name} itself; pass another buffer"
                raise ArgumentValueError(message)


def _dim(dim: str) -> tuple[str, int]:
    name, _, plus = dim.partition(" + ")
    return name, int(plus or 0)


def _shown(dims: Sequence[tuple[str, int]]) -> str:
    return f"[{', '.join(f'{dim} + {plus}' if plus else dim for dim, plus in dims)}]"


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.storage_offset() * tensor.element_size()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    extent = sum((size - 1) * stride for size, stride in pairs) + 1
    return start, start + (extent * tensor.element_size() if tensor.numel() else 0)
