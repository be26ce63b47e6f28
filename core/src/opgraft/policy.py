"""What the user wants: file, environment, API and scope, merged into one immutable policy.

The only reader of ``os.environ``. Each source becomes a *layer*, a mapping from setting to parsed
value; layers are merged strongest first. Nothing here is locked: a change replaces what was merged
before, so that a process forked at any moment finds a whole policy.
"""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from opgraft.errors import PolicyError, nearest

if TYPE_CHECKING:
    from opgraft.spec import KernelSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LOG: Final = logging.getLogger("opgraft")
_PREFIX: Final = "OPGRAFT_"
_CONFIG: Final = "OPGRAFT_CONFIG"
_FILE: Final = "opgraft.toml"
_RECENT: Final = 64
"""Policies of scopes kept, so that what was chosen under one holds when the same is entered again."""

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_SELECTOR: Final = re.compile(r"[A-Za-z0-9](?:[\w.-]*)(?:/\w+)?")

_Layer = dict[str, tuple[Any, str] | None]
_Outside = tuple[tuple[_Layer, ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class OrderRule:
    """For ops that match a pattern: the selectors to try first, in this order."""

    pattern: str
    selectors: tuple[str, ...]


def _words(value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, Iterable):
        raise TypeError(f"must be names separated by commas, or a list of names, got {value!r}")
    return tuple(dict.fromkeys(_selector(word) for word in parts if str(word).strip()))


def _selector(value: Any) -> str:
    if isinstance(value, str) and _SELECTOR.fullmatch(value.strip()):
        return value.strip()
    raise TypeError(f"must be a name such as 'cuda', 'triton' or 'cuda/triton', got {value!r}")


def _order(value: Any) -> tuple[OrderRule, ...]:
    rules: Any = value.items() if isinstance(value, Mapping) else [("*", value)]
    if isinstance(value, str):
        rules = [rule.rpartition("=")[::2] for rule in value.split(";") if rule.strip()]
    for pattern, _ in rules:
        if not re.fullmatch(r"[\w.*?\[\]!-]*", f"{pattern}".strip()):
            raise TypeError(f"must be rules such as 'attention.*=cuda,triton', got {value!r}")
    return tuple(OrderRule(f"{pattern}".strip() or "*", _words(words)) for pattern, words in rules)


def _boolean(value: Any) -> bool:
    word = str(value).strip().lower() if isinstance(value, bool | int | str) else ""
    if word not in _TRUE + _FALSE:
        raise TypeError(f"must be one of {', '.join(_TRUE + _FALSE)}, got {value!r}")
    return word in _TRUE


_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "order": _order,
    "force": _selector,
    "deny": lambda value: frozenset(_words(value)),
    "plugins": lambda value: frozenset(_words(value)),
    "require": _words,
    "strict": _boolean,
    "trace": _boolean,
    "check": _boolean,
    "lock": lambda value: str(Path(value).absolute()),
}
_BLANK_MEANS_UNSET: Final = frozenset({"order", "force", "deny", "require", "lock"})
_VARIABLES: Final = {_PREFIX + name.upper(): name for name in _READERS}


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Policy:
    """What the user wants, with where each setting comes from. Compared by identity.

    Parameters
    ----------
    order
        Rules of preference; the first whose pattern matches an op counts.
    force
        Selector that every op takes where it can, or None.
    deny
        Backends, distributions, kernel backends or selectors that may not run.
    require
        Backends that must be active.
    strict
        Whether a quarantine, a conflict or a refused forward raises.
    plugins
        The only backends or distributions that may be loaded, or None for all.
    trace
        Whether every call is reported.
    check
        Whether every call is held against the op's format signature.
    lock
        Path of the lock file that this process must agree with, or None.
    sources
        For each setting, what set it.

    """

    order: tuple[OrderRule, ...] = ()
    force: str | None = None
    deny: frozenset[str] = frozenset()
    require: tuple[str, ...] = ()
    strict: bool = False
    plugins: frozenset[str] | None = None
    trace: bool = False
    check: bool = False
    lock: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def selectors_for(self, op_id: str) -> tuple[str, ...]:
        """Give the selectors preferred for an op, best first."""
        matching = (r.selectors for r in self.order if fnmatch.fnmatchcase(op_id, r.pattern))
        return next(matching, ())

    def denied(self, kernel: KernelSpec) -> str | None:
        """Give the reason why a kernel may not run, or None if it may."""
        for word in sorted(self.deny):
            if kernel.matches(word) or _same(word, kernel.distribution):
                return f"{word!r} is denied by {self.source('deny')}"
        return None

    def allows(self, backend: str, distribution: str) -> str | None:
        """Give the reason why a backend may not be loaded, or None if it may."""
        meant = {w for w in self.deny | (self.plugins or set()) if w == backend or _same(w, distribution)}
        for word in sorted(self.deny & meant):
            return f"{word!r} is denied by {self.source('deny')}"
        if self.plugins is None or self.plugins & meant:
            return None
        listed = ", ".join(sorted(self.plugins)) or "nothing"
        return f"not in the allow-list of {self.source('plugins')}, which lists {listed}"

    def source(self, setting: str) -> str:
        """Name what set a setting."""
        return self.sources.get(setting, "default")

    def export(self) -> dict[str, Any]:
        """Give every setting as plain data, which JSON and pickle carry to another process."""
        order = {rule.pattern: list(rule.selectors) for rule in reversed(self.order)}
        plain: dict[str, Any] = {"order": dict(reversed(order.items())), "deny": sorted(self.deny)}
        plain |= {"require": list(self.require), "plugins": None if self.plugins is None else sorted(self.plugins)}
        return {name: plain.get(name, getattr(self, name)) for name in _READERS}

    def __repr__(self) -> str:
        """Write one line a setting: name, value, source."""
        texts = {name: _text(value) for name, value in self.export().items()}
        width = max(map(len, texts.values()))
        return "\n".join(f"{n:<8} {text:<{width}}  {self.source(n)}" for n, text in texts.items())


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ";".join(f"{pattern}={','.join(words)}" for pattern, words in value.items()) or "-"
    return (",".join(value) if isinstance(value, list) else str(value)) or "-"


def _same(word: str, distribution: str) -> bool:
    return len({re.sub(r"[-_.]+", "-", name).lower() for name in (word, distribution)}) == 1


def _read(given: Mapping[str, Any], source: str = "", unknown: list[str] | None = None) -> _Layer:
    """Parse one source's settings; without a ``source`` they are environment variables."""
    layer: _Layer = {}
    keys = {name: name for name in _READERS} if source else _VARIABLES
    for key, value in given.items():
        name, where = keys.get(key), source or key
        if name is None:
            known = keys if source else {*keys, _CONFIG}
            message = f"{where}: unknown setting {key!r}{nearest(key, known)}"
            if unknown is None:
                raise PolicyError(message)
            unknown.append(message)
        elif value is None or (value == "" and name in _BLANK_MEANS_UNSET):
            layer[name] = None
        else:
            try:
                layer[name] = (_READERS[name](value), where)
            except TypeError as error:
                raise PolicyError(f"{where}: {name} {error}") from None
    return layer


def _merge(layers: Iterable[_Layer]) -> Policy:
    """Let the strongest layer count, except that rules of order and denials add up."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in layers:
        for name, (value, source) in ((n, found) for n, found in layer.items() if found):
            if name not in values:
                values[name], sources[name] = value, source
            elif name in {"order", "deny"}:
                values[name] = values[name] + value if name == "order" else values[name] | value
                sources[name] = ", ".join(dict.fromkeys([*sources[name].split(", "), source]))
    if values.get("force") == "auto":
        values["force"] = None
    return Policy(**values, sources=sources)


def _outside(environ: Mapping[str, str], folder: Path | str) -> _Outside:
    """Read environment and file; say too what they hold that nobody reads."""
    given = {name: environ[name] for name in sorted(environ) if name.startswith(_PREFIX)}
    config = given.pop(_CONFIG, "").strip()
    unknown: list[str] = []
    layers = [_read(given, unknown=unknown)]
    path = Path(config or Path(folder) / _FILE).absolute()
    if config or path.exists():
        table = read_toml(path, f" (named by {_CONFIG})" if config else "")
        layers.append(_read(table, str(path), unknown))
    return tuple(layers), tuple(unknown)


def read_toml(path: Path, named: str = "") -> dict[str, Any]:
    """Read a TOML file, or raise a :class:`PolicyError` that says which one cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise PolicyError(f"{path}{named} cannot be read: {cause}") from error


@dataclass(eq=False)
class _Scope:
    """The layers of nested ``use`` blocks, innermost first. Alive while a context holds it."""

    layers: tuple[_Layer, ...] = ()


class PolicyStore:
    """The policy of one registry: read at first use, changed by the API, narrowed by scopes.

    Parameters
    ----------
    environ
        Read instead of the process's environment.
    folder
        Searched for ``opgraft.toml`` instead of the working folder.

    Raises
    ------
    PolicyError
        From every method that needs the policy, while a source cannot be read.

    """

    def __init__(self, environ: Mapping[str, str] = os.environ, folder: Path | str = "") -> None:
        self._read_outside: Callable[[], _Outside] = lambda: _outside(environ, folder)
        self._outside: _Outside | None = None
        self._api: _Layer = {}
        self._process = _Scope()
        self._scope = ContextVar("opgraft_scope", default=self._process)
        self._scopes: weakref.WeakSet[_Scope] = weakref.WeakSet()
        self._merged: weakref.WeakKeyDictionary[_Scope, Policy] = weakref.WeakKeyDictionary()
        self._recent: dict[tuple[Any, ...], Policy] = {}
        self._callbacks: list[Callable[[], None]] = []

    def current(self) -> Policy:
        """Give the policy of this context: the same object until something changes."""
        return self._policy(self._scope.get())

    def process(self) -> Policy:
        """Give the policy of the process, scopes left out."""
        return self._policy(self._process)

    def _policy(self, scope: _Scope) -> Policy:
        merged, recent = self._merged, self._recent
        if scope not in merged:
            content = tuple(tuple(layer.items()) for layer in scope.layers)
            if len(recent) >= _RECENT:
                recent.clear()
            policy = recent.get(content) or _merge((*scope.layers, dict(self._api), *self._base()[0]))
            merged.setdefault(scope, recent.setdefault(content, policy))
        return merged[scope]

    def _base(self) -> _Outside:
        base = self._outside
        if base is None:
            base = self._outside = self._read_outside()
            for message in base[1]:
                _LOG.warning("%s", message)
        return base

    @property
    def unknown(self) -> tuple[str, ...]:
        """Messages about variables and keys that nobody reads, with the nearest known ones."""
        return self._base()[1]

    def any_scope(self) -> bool:
        """Say whether any context, of whatever thread or task, still holds a scope."""
        return len(self._scopes) > 0

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call back after each change of the process's policy and at both ends of a scope."""
        self._callbacks.append(callback)

    def _changed(self, *, process: bool = True) -> None:
        if process:
            self._merged, self._recent = weakref.WeakKeyDictionary(), {}
        for callback in tuple(self._callbacks):
            callback()

    def set(self, **settings: Any) -> None:
        """Set settings for the process; None takes one back, one that is not given stays."""
        self._api.update(_read(settings, "opgraft.set_policy"))
        self._changed()

    @contextlib.contextmanager
    def use(self, **settings: Any) -> Iterator[Policy]:
        """Set settings for this context until the block is left; None leaves one as it is."""
        scope = _Scope((_read(settings, "opgraft.use"), *self._scope.get().layers))
        self._scopes.add(scope)
        token = self._scope.set(scope)
        try:
            self._changed(process=False)
            yield self.current()
        finally:
            self._scope.reset(token)
            self._changed(process=False)

    def reload(self) -> None:
        """Read environment and file again; what the API set stays."""
        self._outside = None
        self._changed()

    def export(self) -> dict[str, Any]:
        """Give this context's policy as plain data for a child process."""
        return self.current().export()

    def apply(self, data: Mapping[str, Any]) -> None:
        """Take over an exported policy, in place of this process's own environment and file."""
        given: _Outside = ((_read(data, "opgraft.apply_policy"),), ())
        self._read_outside = lambda: given
        self._api.clear()
        self.reload()
