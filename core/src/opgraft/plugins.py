"""A plugin loaded, asked who it is, and its forwards collected: pluggy's part of the work.

Each plugin is introduced to a manager of its own, so that one that fails leaves nothing behind;
only then are the forwards of all of them registered with one more, which has a hook for each op.
pluggy compares neither keyword-only parameters nor those with defaults, so whole signatures are
compared before it sees a forward.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Final

import pluggy

from opgraft.errors import PluginError, nearest
from opgraft.hardware import CapabilityRequirement, Detector
from opgraft.hookspecs import OFFER, PROJECT, HookSpecs, Offer, forward_hook, hookspec, offer_of
from opgraft.spec import Available, Backend, BackendRecord, KernelSpec, Status, Unavailable, check_op_id

SLOW_SECONDS: Final = 2.0
"""Loading imports nothing heavy, so that even a cold network disk is quicker than this."""

_HOOKS: Final = tuple(name for name in vars(HookSpecs) if name.startswith(PROJECT))


def cause(error: BaseException, handled: BaseException | None = None) -> str:
    """Write an exception in one line, with the innermost one that led to it.

    Parameters
    ----------
    error
        What was raised.
    handled
        What the caller was handling already, which led to nothing.

    """
    chain = [error]
    while True:
        last = chain[-1]
        inner = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if inner is None or inner is handled or any(inner is known for known in chain):
            break
        chain.append(inner)
    texts = [" ".join("".join(traceback.format_exception_only(e)).split()) for e in chain]
    return texts[0] if len(texts) == 1 else f"{texts[0]} (caused by {texts[-1]})"


def introduced(record: BackendRecord, detector: Detector) -> BackendRecord:
    """Load a backend's plugin and call its hooks; whatever it raises puts it in quarantine.

    Parameters
    ----------
    record
        What its metadata says. A plugin that has none is there already, and its name is found out.
    detector
        Counts its devices if it has no probe.

    """
    handled, before, manager = sys.exc_info()[1], set(sys.modules), _Hooks(f"loading {record.entry_point}")
    try:
        record = _asked(record, detector, manager)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - SystemExit of a plugin is its failure too
        package = re.split(r"[.:]", record.entry_point)[0]
        for module in set(sys.modules) - before:
            if module.partition(".")[0] == package:
                del sys.modules[module]
        ours = type(error) is PluginError and all(isinstance(said, str) for said in error.args)
        reason = str(error) if ours else f"{manager.doing} raised {cause(error, handled)}"
        name = record.name or record.entry_point
        record = replace(record, name=name, status="quarantined", reason=reason, error=error)
    return replace(record, findings=tuple(manager.findings))


def _asked(record: BackendRecord, detector: Detector, manager: _Hooks) -> BackendRecord:
    plugin, value, began = record.plugin, record.entry_point, time.monotonic()
    if plugin is None:
        plugin = _load(value)
    took = time.monotonic() - began
    if took > SLOW_SECONDS:
        manager.findings.append(f"loading it took {took:.1f} s, over {SLOW_SECONDS:.0f} s")
    manager.doing = "registering its hooks"
    manager.register(plugin, record.name or value)
    backend = manager.answer("opgraft_backend", Backend)
    if backend is None:
        raise PluginError("; ".join([f"{value} has no hook opgraft_backend", *manager.findings]))
    if record.name not in {"", backend.name}:
        raise PluginError(f"its hook opgraft_backend says {backend.name!r}, its metadata {record.name!r}")
    ops: tuple[type[Any], ...] = tuple(manager.answer("opgraft_ops", list, tuple) or ())
    for op in ops:
        if not isinstance(op, type) or not hasattr(op, "signature"):
            raise PluginError(f"its hook opgraft_ops gave {op!r}, which is no class of an op")
        check_op_id(op.op)
        op.signature()
        op()  # one that cannot be built is this plugin's fault, not that of whoever asks for the ops
    probed = manager.answer("opgraft_probe", Available, Unavailable)
    reason = _count(backend, detector) if probed is None else getattr(probed, "reason", "")
    status: Status = "inactive" if reason else "active"
    found = {"name": backend.name, "platforms": backend.platforms, "ops": ops, "plugin": plugin}
    return replace(record, status=status, reason=reason, **found)


def _load(value: str) -> object:
    match = re.fullmatch(r"\s*([\w.]+)\s*(?::\s*([\w.]+)\s*)?(\[.*\])?\s*", value)
    if match is None:
        raise PluginError(f"its entry point {value!r} is not 'module' or 'module:object'")
    module = importlib.import_module(match[1])
    if getattr(getattr(module, "__spec__", None), "_initializing", False):
        raise PluginError(f"{match[1]} asked for backends while it was being imported itself")
    return operator.attrgetter(match[2])(module) if match[2] else module


def _count(backend: Backend, detector: Detector) -> str:
    """Ask torch for devices; give the reason where there are none."""
    reasons = []
    for platform in backend.platforms:
        try:
            count, reason = detector.count(platform)
        except Exception as error:  # noqa: BLE001 - a device module may be unable to count
            count, reason = 0, f"counting {platform} devices raised {cause(error)}"
        if count:
            return ""
        reasons.append(reason)
    return "; ".join(reasons)


class _Hooks(pluggy.PluginManager):
    """Takes one plugin's own hooks, and notes what looks like a hook and is none."""

    def __init__(self, doing: str) -> None:
        super().__init__(PROJECT)
        self.add_hookspecs(HookSpecs)
        self.doing = doing
        self.findings: list[str] = []

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> pluggy.HookimplOpts | None:
        """Keep the known hooks; forwards have their turn when all ops are known."""
        options = super().parse_hookimpl_opts(plugin, name)
        member = inspect.getattr_static(plugin, name, None)
        hook = name if options is None else options.get("specname") or name
        bare = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        offered = isinstance(inspect.getattr_static(bare, OFFER, None), Offer)
        if options is None and inspect.isroutine(member) and name.startswith(f"{PROJECT}_"):
            self.findings.append(f"{name!r} is not marked with @hookimpl, so it is no hook")
        elif options is None and offered:
            self.findings.append(f"forward {name!r} is no function, so it is no kernel")
        elif options is not None and not offered and hook not in _HOOKS:
            self.findings.append(f"unknown hook {hook!r}{nearest(hook, _HOOKS)}")
        return options if hook in _HOOKS else None

    def answer(self, hook: str, *kinds: type) -> Any:
        """Call a hook and check what it returns; None where the plugin does not have it."""
        self.doing = f"its hook {hook}"
        caller = getattr(self.hook, hook)
        if len(caller.get_hookimpls()) > 1:
            raise PluginError(f"it has several functions for the hook {hook}")
        result = caller()
        if caller.get_hookimpls() and not isinstance(result, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise PluginError(f"its hook {hook} returned {result!r}, not {wanted}")
        return result


class Forwards(pluggy.PluginManager):
    """Collects the forwards of all plugins, a hook for each op; what does not fit is refused.

    Parameters
    ----------
    signatures
        The parameters of every op, those that plugins add included.

    """

    def __init__(self, signatures: Mapping[str, inspect.Signature]) -> None:
        super().__init__(PROJECT)
        self._signatures = signatures
        self._refused: list[str] = []
        self._names: dict[tuple[str, str, str], Callable[..., Any]] = {}
        self._owners: dict[str, BackendRecord] = {}
        for op, signature in signatures.items():
            hook = staticmethod(_specification(signature))
            self.add_hookspecs(type("OpHook", (), {forward_hook(op): hook}))

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> pluggy.HookimplOpts | None:
        """Keep a forward if its op is known and takes the same parameters."""
        options = super().parse_hookimpl_opts(plugin, name)
        function = getattr(plugin, name) if options is not None else None
        offer = offer_of(function) if callable(function) else None
        if function is None or offer is None:
            return None
        identity = (offer.op, str(offer.kernel_backend), function.__name__)
        reason = self._misfit(function, offer)
        if not reason and self._names.setdefault(identity, function) != function:
            reason = "another function of this name is offered for it"
        if reason:
            self._refused.append(f"forward {name!r} for {offer.op!r} is refused: {reason}")
        return None if reason else options

    def _misfit(self, function: Callable[..., Any], offer: Offer) -> str:
        if offer.op not in self._signatures:
            return f"unknown op{nearest(offer.op, self._signatures)}"
        expected = self._signatures[offer.op]
        for name in offer.dtypes if isinstance(offer.dtypes, Mapping) else ():
            if name not in expected.parameters:
                return f"its dtypes name {name!r}{nearest(name, expected.parameters)}"
        try:
            given = inspect.signature(function)
            asked = inspect.signature(offer.rejects) if offer.rejects else given
        except (TypeError, ValueError) as error:
            return f"its parameters cannot be read: {cause(error)}"
        if _plain(given, given) != _plain(expected, given):
            return f"it takes {_plain(given, given)}, the op takes {_plain(expected, expected)}"
        if _plain(asked, asked) != _plain(given, asked):
            return f"its rejects takes {_plain(asked, asked)}, itself it takes {_plain(given, given)}"
        return ""

    def taken(self, record: BackendRecord, ops: Mapping[str, type[Any]]) -> BackendRecord:
        """Register a loaded backend's forwards, and note what of it is refused; block any other."""
        if not record.loaded:
            if record.name not in self._owners:
                self.set_blocked(record.name)
            return record
        twice = [op_class.op for op_class in record.ops if ops.get(op_class.op) is not op_class]
        self._refused = [f"op {op!r} is refused: it is defined elsewhere too" for op in twice]
        self._names = {}
        self._owners[record.name] = record
        self.register(record.plugin, record.name)
        return replace(record, refused=tuple(self._refused))

    def kernels(self) -> dict[str, tuple[KernelSpec, ...]]:
        """Make each backend's kernels of the hook implementations that were registered."""
        made: dict[str, dict[tuple[str, ...], KernelSpec]] = {name: {} for name in self._owners}
        for op, signature in self._signatures.items():
            for kept in getattr(self.hook, forward_hook(op)).get_hookimpls():
                kernel = _kernel(kept.function, self._owners[kept.plugin_name], signature)
                made[kernel.backend][kernel.identity] = kernel
        return {name: tuple(found[key] for key in sorted(found)) for name, found in made.items()}


def _kernel(function: Callable[..., Any], record: BackendRecord, expected: inspect.Signature) -> KernelSpec:
    offer = offer_of(function)
    said: dict[str, Any] = {each.name: getattr(offer, each.name) for each in fields(Offer)}
    if said["capabilities"] is None:
        said["capabilities"] = frozenset(map(CapabilityRequirement.device, record.platforms))
    said["leaves_out"] = frozenset(expected.parameters) - {*inspect.signature(function).parameters}
    said |= {"distribution": record.distribution, "version": record.version}
    return KernelSpec(backend=record.name, target=function, name=function.__name__, **said)


def _plain(signature: inspect.Signature, kernel: inspect.Signature) -> inspect.Signature:
    """Take away annotations, order of keyword-only ones, and those that a kernel may leave out."""
    kept = [
        p.replace(annotation=p.empty)
        for p in signature.parameters.values()
        if p.name in kernel.parameters or p.kind is not p.KEYWORD_ONLY or p.default is p.empty
    ]
    return inspect.Signature(sorted(kept, key=lambda p: (p.kind, p.name if p.kind is p.KEYWORD_ONLY else "")))


def _specification(signature: inspect.Signature) -> Callable[..., None]:
    """Write a function with these positional parameters: pluggy reads the code, not signatures."""
    names = [p.name for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    function: Callable[..., None] = eval(f"lambda {', '.join(names)}: None")  # noqa: S307
    return hookspec(function)
