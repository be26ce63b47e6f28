"""The records that describe kernels, formats and backends: frozen data, no torch.

A record is validated when it is built, so that a wrong declaration fails at its author's line.
"""

from __future__ import annotations

import importlib
import keyword
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

from opgraft.errors import RegistrationError, nearest
from opgraft.hardware import ANY, Capabilities, capability_set

_DTYPES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu complex32 complex64 complex128"
)
DTYPES: Final = frozenset(_DTYPES.split())
"""The dtype names a format signature may use."""

OWN: Final = "op"
"""The backend name of an op's own methods."""

_OP_ID = re.compile(r"[a-z][a-z0-9]*\.[a-z][a-z0-9_]*")
_WORD = re.compile(r"[a-z][a-z0-9_]*")


def check_op_id(op_id: str) -> str:
    """Return the id if it is ``group.name`` in lower case, without underscore in the group."""
    if not isinstance(op_id, str) or not _OP_ID.fullmatch(op_id) or any(map(keyword.iskeyword, op_id.split("."))):
        raise RegistrationError(
            f"an op id is 'group.name' in lower case, without underscore in the group, got {op_id!r}"
        )
    return op_id


class KernelBackend(str):
    """How a kernel is built; a string that was registered.

    ``KernelBackend("triton")`` gives a known one; ``KernelBackend.register("flydsl")`` adds one.

    Raises
    ------
    RegistrationError
        If the name is unknown, or, on registering, not a lower-case word or a reserved one.

    """

    __slots__ = ()
    _known: ClassVar[dict[str, KernelBackend]] = {}

    TORCH: ClassVar[KernelBackend]
    TORCH_COMPILE: ClassVar[KernelBackend]
    PLUGIN: ClassVar[KernelBackend]
    AOT: ClassVar[KernelBackend]
    JIT: ClassVar[KernelBackend]
    CUTE_DSL: ClassVar[KernelBackend]
    TRITON: ClassVar[KernelBackend]

    def __new__(cls, name: str) -> KernelBackend:  # noqa: PYI034 - the one that was registered
        """Return the registered kernel backend of this name."""
        if not isinstance(name, str) or name not in cls._known:
            raise RegistrationError(f"unknown kernel backend {name!r}{nearest(str(name), cls._known)}")
        return cls._known[name]

    @classmethod
    def register(cls, name: str) -> KernelBackend:
        """Make a name known; registering it twice gives the same object."""
        if not isinstance(name, str) or not _WORD.fullmatch(name) or name in RESERVED_SELECTORS:
            raise RegistrationError(f"a kernel backend's name is a lower-case word, not reserved, got {name!r}")
        return cls._known.setdefault(name, str.__new__(cls, name))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """List the known names in order of registration."""
        return tuple(cls._known)

    @property
    def value(self) -> str:
        """The plain string."""
        return str.__str__(self)

    def __repr__(self) -> str:
        """Write ``KernelBackend('triton')``."""
        return f"KernelBackend({self.value!r})"

    def __reduce__(self) -> tuple[Callable[[str], KernelBackend], tuple[str]]:
        """Pickle as a registration, so that a plugin's kernel backend arrives in a child too."""
        return KernelBackend.register, (self.value,)


RESERVED_SELECTORS: Final = frozenset({"native", "auto", "none", "all", OWN})
"""Words that may name neither a backend nor a kernel backend."""

for _name in ("torch", "torch_compile", "plugin", "aot", "jit", "cute_dsl", "triton"):
    setattr(KernelBackend, _name.upper(), KernelBackend.register(_name))

DEFAULT_PRIORITY: Final = tuple(map(KernelBackend, ("plugin", "aot", "jit", "cute_dsl", "triton", "torch")))
"""The order of kernel backends where an op states none."""

DtypeRule = tuple[str, ...] | Mapping[str, tuple[str, ...]]


def _dtype_names(names: Iterable[str], what: str) -> tuple[str, ...]:
    checked = (names,) if isinstance(names, str) else tuple(names)
    for name in checked:
        if name not in DTYPES:
            raise RegistrationError(f"{what}: unknown dtype {name!r}{nearest(str(name), DTYPES)}")
    if not checked:
        raise RegistrationError(f"{what}: no dtype is listed")
    return checked


def dtype_rule(rule: DtypeRule | str, what: str) -> DtypeRule:
    """Normalise dtypes for all tensor parameters (a tuple) or per parameter (a mapping)."""
    if isinstance(rule, Mapping):
        return {name: _dtype_names(names, f"{what}, {name}") for name, names in rule.items()}
    return _dtype_names(rule, what)


def dtypes_of(rule: DtypeRule | None, parameter: str) -> tuple[str, ...] | None:
    """Give the dtypes that a rule allows for a parameter; None where it says nothing."""
    if isinstance(rule, Mapping):
        return rule.get(parameter)
    return rule


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSignature:
    """What tensors an op takes and gives.

    Parameters
    ----------
    supported_dtypes
        Dtype names for all tensor parameters, or a mapping from parameter to names.
    output_dtype
        A dtype name, a tuple for several outputs, ``"like:<parameter>"``, or None (anything).
    description
        One sentence for people.
    shapes
        Mapping from parameter to its dims. A dim is a name, or a name plus a number such as
        ``"batch + 1"``; equal names are equal sizes.

    Raises
    ------
    RegistrationError
        If a dtype is unknown or a dim cannot be read.

    """

    supported_dtypes: DtypeRule
    output_dtype: str | tuple[str, ...] | None
    description: str = ""
    shapes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Normalise, and refuse unknown dtypes and unreadable dims."""
        object.__setattr__(self, "supported_dtypes", dtype_rule(self.supported_dtypes, "supported_dtypes"))
        for name in self.outputs:
            if not str(name).startswith("like:"):
                _dtype_names((name,), "output_dtype")
        shapes = {name: (dims,) if isinstance(dims, str) else tuple(dims) for name, dims in self.shapes.items()}
        object.__setattr__(self, "shapes", shapes)
        for parameter, dim in ((name, dim) for name, dims in self.shapes.items() for dim in dims):
            if not re.fullmatch(r"[a-z][a-z0-9_]*( \+ \d+)?", dim):
                raise RegistrationError(f"shapes, {parameter}: a dim is 'name' or 'name + 1', got {dim!r}")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The output dtypes as a tuple, empty where nothing is said."""
        said: Any = () if self.output_dtype is None else self.output_dtype
        return tuple(said) if isinstance(said, (tuple, list)) else (said,)

    @property
    def by_parameter(self) -> Mapping[str, tuple[str, ...]]:
        """The dtypes of each parameter; empty where one rule is for all."""
        return self.supported_dtypes if isinstance(self.supported_dtypes, Mapping) else {}

    @property
    def every_dtype(self) -> set[str]:
        """All dtypes that any parameter may have."""
        return {name for names in self.by_parameter.values() for name in names} or {*self.supported_dtypes}

    def dtypes(self, parameter: str) -> tuple[str, ...] | None:
        """Give the dtypes an input parameter may have, or None where nothing is said."""
        return dtypes_of(self.supported_dtypes, parameter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a kernel's result may be from native's, and why that far."""

    rtol: float
    atol: float
    reason: str


EXACT: Final = Tolerance(rtol=0.0, atol=0.0, reason="integer results are exact")


def check_priority(priority: int, whose: str) -> None:
    """Refuse a priority that is no int."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RegistrationError(f"{whose}: priority must be an int, got {priority!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """One implementation offered for one op.

    Its identity is (op, backend, kernel backend, name).

    Parameters
    ----------
    op
        Op id, or the class name of an op without id.
    backend
        Backend that offers it; ``"op"`` for the op's own methods.
    kernel_backend
        How it is built.
    target
        A callable, or ``"module:attr"`` resolved on first use.
    name
        Function name; empty for a hand-made spec.
    capabilities
        Where it may run.
    priority
        The higher, the earlier; a negative one is never chosen unasked.
    rejects
        Per-call refusal with the op's parameters, or None.
    dtypes
        Narrows the op's own dtypes.
    differentiable
        Whether gradients may flow through it.
    declared
        Whether it may be chosen unasked; an op's method without declaration may not.
    leaves_out
        Keyword-only parameters of the op that the target does not take.
    platform
        For an op's platform method or out-of-tree forward, the platform key; else empty.
    distribution, version
        Whose it is.

    """

    op: str
    backend: str
    kernel_backend: KernelBackend
    target: str | Callable[..., Any]
    name: str = ""
    capabilities: Capabilities = frozenset({ANY})
    priority: int = 50
    rejects: Callable[..., str | None] | None = None
    dtypes: DtypeRule | None = field(default=None, hash=False)  # a mapping has no hash
    differentiable: bool = False
    declared: bool = True
    leaves_out: frozenset[str] = frozenset()
    platform: str = ""
    distribution: str = ""
    version: str = ""

    def __post_init__(self) -> None:
        """Normalise what an author may write in short, and refuse what cannot be meant."""
        whose = f"kernel {self.backend}/{self.kernel_backend} of {self.op!r}"
        if isinstance(self.target, str) and not re.fullmatch(r"[^:\s]+:[^:\s]+", self.target):
            raise RegistrationError(f"{whose}: a target is 'module:attr', got {self.target!r}")
        object.__setattr__(self, "kernel_backend", KernelBackend(self.kernel_backend))
        object.__setattr__(self, "capabilities", capability_set(self.capabilities, whose))
        if self.dtypes is not None:
            object.__setattr__(self, "dtypes", dtype_rule(self.dtypes, whose))
        check_priority(self.priority, whose)

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """What makes two specs the same kernel."""
        return self.op, self.backend, f"{self.kernel_backend}{self.platform}", self.name

    @property
    def selector(self) -> str:
        """What a user types to name it: ``cuda/triton``, ``op/triton``, ``op/cuda``, ``native``."""
        if self.platform:
            return f"{self.backend}/{self.platform}"
        if self.kernel_backend is KernelBackend.TORCH and self.backend == OWN:
            return "native"
        return f"{self.backend}/{self.kernel_backend}"

    @property
    def label(self) -> str:
        """What a trace calls it: the selector, or the platform key, or the forward's name."""
        if not self.platform:
            return self.selector
        return self.name or self.platform

    @property
    def owner(self) -> str:
        """Name whose kernel it is: ``opgraft-cuda 0.1.0``."""
        whose = "the op itself" if self.backend == OWN else f"backend {self.backend}"
        return f"{self.distribution} {self.version}".strip() or whose

    def matches(self, selector: str) -> bool:
        """Say whether a selector names this kernel."""
        if selector in {"native", "torch"}:
            return self.selector == "native"
        if "/" in selector:
            return self.selector == selector
        if self.platform:
            return selector == self.backend
        return selector in {self.backend, str(self.kernel_backend)} and self.selector != "native"

    def load(self) -> Callable[..., Any]:
        """Resolve the target: a callable is itself, ``"module:attr"`` is imported.

        Raises
        ------
        ImportError
            If the module does not exist or fails to import.
        AttributeError
            If the module lacks the attribute.

        """
        if not isinstance(self.target, str):
            return self.target
        module, _, path = self.target.partition(":")
        found: Callable[..., Any] = operator.attrgetter(path)(importlib.import_module(module))
        return found

    def __str__(self) -> str:
        """Write the selector first, then name and owner."""
        parts = (self.selector, self.name, f"({self.distribution} {self.version})")
        return " ".join(part for part in parts if part and part != "( )")


@dataclass(frozen=True, slots=True)
class Available:
    """A probe's answer: so many devices are there."""

    count: int

    def __post_init__(self) -> None:
        """Refuse a count that is none."""
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise RegistrationError(f"Available takes a count of at least 1, got {self.count!r}")


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A probe's answer: no such hardware, and why."""

    reason: str

    def __post_init__(self) -> None:
        """Refuse an answer without a reason."""
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise RegistrationError(f"Unavailable takes a reason, got {self.reason!r}")


@dataclass(frozen=True, slots=True)
class Backend:
    """A family of hardware offered by one distribution.

    Parameters
    ----------
    name
        Lower-case word, equal to the entry point's name.
    platforms
        Platform keys of its devices.
    summary
        One line for people.

    """

    name: str
    platforms: tuple[str, ...]
    summary: str = ""

    def __post_init__(self) -> None:
        """Refuse a nameless backend and one without platforms."""
        platforms = (self.platforms,) if isinstance(self.platforms, str) else tuple(self.platforms)
        object.__setattr__(self, "platforms", platforms)
        for what, word in (("a backend's name", self.name), *(("a platform key", key) for key in platforms)):
            if not isinstance(word, str) or not _WORD.fullmatch(word):
                raise RegistrationError(f"backend {self.name!r}: {what} is a lower-case word, got {word!r}")
        if not platforms:
            raise RegistrationError(f"backend {self.name!r} names no platform key")


Status = Literal["active", "inactive", "incompatible", "conflict", "denied", "quarantined"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRecord:
    """What became of one backend that some distribution advertises.

    Parameters
    ----------
    name
        The entry point's name.
    status
        ``active``, ``inactive``, ``incompatible``, ``conflict``, ``denied`` or ``quarantined``.
    reason
        Why it has that status; empty where it is active.
    distribution, version, entry_point, location
        What the metadata says: project name, version, value, folder of the metadata.
    platforms
        Platform keys, empty until it is loaded.
    kernels
        The kernels it offers.
    ops
        The op classes it adds to the catalogue.
    refused
        Forwards that were refused alone, each with its reason.
    findings
        What else ``opgraft doctor`` tells of it, such as a misspelt hook.
    error
        What a quarantined backend raised.
    plugin
        The loaded module or object that carries the hooks.

    """

    name: str
    status: Status
    reason: str = ""
    distribution: str = ""
    version: str = ""
    entry_point: str = ""
    location: str = ""
    platforms: tuple[str, ...] = ()
    kernels: tuple[KernelSpec, ...] = ()
    ops: tuple[type[Any], ...] = ()
    refused: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    error: BaseException | None = None
    plugin: object = None

    @property
    def owner(self) -> str:
        """Name whose it is: ``opgraft-acme 0.3.1``."""
        return f"{self.distribution} {self.version}".strip()

    @property
    def loaded(self) -> bool:
        """Whether its plugin came through, with hardware here or without."""
        return self.status in {"active", "inactive"}

    @property
    def described(self) -> str:
        """Say whose it is and what became of it."""
        return f"backend {self.name!r} ({self.owner or self.entry_point}) is {self.status}: {self.reason}"

    @property
    def faults(self) -> tuple[str, ...]:
        """What an operator should know of: refused forwards, a quarantine, a conflict."""
        broken = self.status in {"quarantined", "conflict"}
        return (*self.refused, *([f"{self.status}: {self.reason}"] if broken else []))
