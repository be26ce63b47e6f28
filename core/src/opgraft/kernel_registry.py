"""The ops, the kernels and the backends of a process, and a number that grows as they change.

A registry is passed as an argument; the default one is built on first need. Discovery runs at
first need too, never at import and never inside itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from opgraft.discovery import Discovery, discover, scan
from opgraft.errors import (
    NoKernelError,
    PluginError,
    RegistrationError,
    UnknownOpError,
    UnknownSelectorError,
    nearest,
)
from opgraft.hardware import IN_TREE, Detector, default_detector
from opgraft.policy import Policy, PolicyStore
from opgraft.spec import OWN, BackendRecord, KernelBackend, KernelSpec, check_op_id
from opgraft.tracing import Trace

if TYPE_CHECKING:
    import torch

    from opgraft.dispatch import Handle
    from opgraft.fused_op import BaseFusedOp

logger = logging.getLogger("opgraft")
_PATIENCE: Final = 120.0  # seconds another thread waits for a discovery under way


class KernelRegistry:
    """Ops, kernels and backends; what the call path keeps is dropped when they change.

    Parameters
    ----------
    detector
        Tells what a device is.
    policy
        Tells what the user wants.
    catalogue
        Module whose import adds the ops that ship with the core.

    """

    def __init__(
        self,
        *,
        detector: Detector | None = None,
        policy: PolicyStore | None = None,
        catalogue: str | None = None,
    ) -> None:
        self.logger = logger
        self.detector = detector or default_detector()
        self.policy = policy or PolicyStore()
        self.generation = 0
        self.turn = 0
        self.traces: tuple[Trace, ...] = ()
        self.process_trace = Trace()
        self.lock = threading.RLock()
        self._catalogue = catalogue
        self._ops: dict[str, BaseFusedOp] = {}
        self._handles: dict[str, Handle] = {}
        self._specs: dict[str, list[KernelSpec]] = {}
        self._oot: dict[tuple[str | type, str], Callable[..., Any]] = {}
        self._extra: list[object] = []
        self._facts: dict[torch.device, tuple[str, str]] = {}
        self._discovery: Discovery | None = None
        self._judged_by: tuple[object, ...] = ()
        self._discovering: int | None = None
        self._plugin_ops: set[str] = set()
        self._told: set[tuple[str, ...]] = set()
        self._kept: set[Handle] = set()
        self.policy.subscribe(self._policy_changed)

    def __deepcopy__(self, memo: dict[int, Any]) -> KernelRegistry:
        """Give the registry itself: a copied op belongs to the same one."""
        return self

    def __reduce__(self) -> tuple[Callable[[], KernelRegistry], tuple[()]]:
        """Pickle as the receiving process's default registry."""
        return default_registry, ()

    # -- what the call path keeps ------------------------------------------------------------

    def drop_kept(self) -> None:
        """Take back every kept choice; none may be kept again from before this moment."""
        with self.lock:
            self.turn += 1
            for handle in self._kept:
                handle.drop()
            self._kept.clear()

    def keep(self, handle: Handle, turn: int, choice: tuple[Any, Any]) -> None:
        """Keep a handle's choice, unless something changed since ``turn`` was read."""
        with self.lock:
            if turn == self.turn and not self.policy.any_scope() and not self.traces:
                handle.keep(choice)
                self._kept.add(handle)

    def changed(self) -> None:
        """Note that ops, kernels, backends or devices changed."""
        with self.lock:
            self.generation += 1
            self.drop_kept()

    def _policy_changed(self) -> None:
        with self.lock:
            if self._discovery is not None and self._judgement() != self._judged_by:
                self._discovery = None
                self.generation += 1
            self.drop_kept()

    def _judgement(self) -> tuple[object, ...]:
        policy = self.policy.process()
        return policy.deny, policy.plugins, policy.require, policy.strict, policy.lock

    @contextlib.contextmanager
    def tracing(self, trace: Trace) -> Iterator[Trace]:
        """Record calls, of every thread, in ``trace`` while the context lasts."""
        with self.lock:
            self.traces = (*self.traces, trace)
            self.drop_kept()
        try:
            yield trace
        finally:
            with self.lock:
                self.traces = tuple(one for one in self.traces if one is not trace)
                self.drop_kept()

    # -- ops ---------------------------------------------------------------------------------

    def add(self, op: BaseFusedOp, handle: Handle, own: tuple[KernelSpec, ...]) -> BaseFusedOp:
        """Add an op with the specs of its own methods; the same op again changes nothing.

        Raises
        ------
        RegistrationError
            If the id is taken by an op whose methods are others.

        """
        with self.lock:
            known = {spec.identity: spec for spec in self._specs.get(op.op, ())}
            for spec in own:
                self._conflict(spec, known.get(spec.identity))
            others = [s for s in self._specs.get(op.op, ()) if s.backend != OWN]
            self._specs[op.op] = [*own, *others]
            self._ops[op.op] = op
            self._handles[op.op] = handle
            self.changed()
        return op

    def handle(self, op_id: str) -> Handle:
        """Give an op's handle.

        Raises
        ------
        UnknownOpError
            If there is no such op, with the nearest names.

        """
        if op_id not in self._handles:
            self.load_catalogue()
        if op_id not in self._handles:
            self.backends()
        if op_id not in self._handles:
            message = f"unknown op {op_id!r}{nearest(str(op_id), self._ops)}"
            raise UnknownOpError(message)
        return self._handles[op_id]

    def known_handle(self, op_id: str) -> Handle | None:
        """Give the handle of an id that is in use."""
        return self._handles.get(op_id)

    def load_catalogue(self) -> None:
        """Import the ops that ship with the core."""
        if self._catalogue is not None:
            importlib.import_module(self._catalogue)

    def ops(self) -> list[str]:
        """List the ids of all ops, sorted."""
        self.backends()
        return sorted(self._ops)

    # -- kernels -----------------------------------------------------------------------------

    def register(self, spec: KernelSpec) -> KernelSpec:
        """Add a kernel; the same spec again changes nothing.

        Raises
        ------
        RegistrationError
            If the same kernel is registered with another target; the registry is unchanged.

        """
        check_op_id(spec.op)
        with self.lock:
            specs = self._specs.setdefault(spec.op, [])
            for known in specs:
                self._conflict(spec, known if known.identity == spec.identity else None)
            if spec not in specs:
                specs.append(spec)
                self.changed()
        return spec

    @staticmethod
    def _conflict(spec: KernelSpec, known: KernelSpec | None) -> None:
        if known is not None and known.target != spec.target:
            message = (
                f"Conflicting kernel registration for op {spec.op!r}, {spec.selector}: "
                f"{spec.target!r} against {known.target!r}, which stays"
            )
            raise RegistrationError(message)

    def get(self, op_id: str) -> list[KernelSpec]:
        """List the kernels offered for an op, its own and the backends'; empty if unknown."""
        offered = [k for record in self.backends() for k in record.kernels if k.op == op_id]
        return [*self._specs.get(op_id, ()), *offered]

    def has(self, op_id: str) -> bool:
        """Say whether any kernel is offered for an op."""
        return bool(self.get(op_id))

    def get_backend(self, op_id: str, kernel_backend: str) -> KernelSpec:
        """Give the op's own kernel of a kernel backend, or else the first that was offered.

        Raises
        ------
        UnknownOpError
            If the op is unknown or has no kernel of that kernel backend.

        """
        specs = self.get(op_id)
        for spec in specs:
            if spec.kernel_backend == kernel_backend and not spec.platform:
                return spec
        offered = sorted({str(spec.kernel_backend) for spec in specs})
        message = f"op {op_id!r} has no kernel of kernel backend {kernel_backend!r}"
        raise UnknownOpError(message + nearest(str(kernel_backend), offered))

    def candidates(self, op_id: str, *, hardware: bool = True) -> list[KernelSpec]:
        """List the kernels that backends offer; inactive ones too where hardware is no matter."""
        wanted = {"active"} if hardware else {"active", "inactive"}
        named = [s for s in self._specs.get(op_id, ()) if s.backend != OWN]
        records = [r for r in self.backends() if r.status in wanted]
        return named + [k for record in records for k in record.kernels if k.op == op_id]

    def register_oot(
        self, op_or_class: str | type, function: Callable[..., Any], platform: str
    ) -> None:
        """Register a forward for a platform key that is not in-tree."""
        target = check_op_id(op_or_class) if isinstance(op_or_class, str) else op_or_class
        if not callable(function) or not isinstance(target, (str, type)):
            message = f"register_oot_forward takes (op id or class, function), got {function!r}"
            raise RegistrationError(message)
        with self.lock:
            former = self._oot.get((target, platform))
            self._oot[target, platform] = function
            self.changed()
        if former is not None and former is not function:
            name = target if isinstance(target, str) else target.__name__
            message = f"out-of-tree forward of {name} on {platform}: {function} replaces {former}"
            warnings.warn(message, stacklevel=3)

    def oot(self, op: BaseFusedOp, platform: str) -> Callable[..., Any] | None:
        """Give the forward registered for the exact class, or else for the id."""
        if platform in IN_TREE:
            return None
        return self._oot.get((type(op), platform)) or self._oot.get((op.op, platform))

    # -- devices -----------------------------------------------------------------------------

    def place(self, device: torch.device) -> tuple[str, str]:
        """Give platform key and arch of a device, read when it is first seen."""
        known = self._facts.get(device)
        if known is None:
            arch = self.detector.facts(device).arch
            known = self._facts[device] = (self.detector.platform_key(device), arch)
        return known

    # -- backends ----------------------------------------------------------------------------

    def backends(self) -> tuple[BackendRecord, ...]:
        """Give a record of every backend that is advertised; discovers them at first need."""
        found = self._discovery
        if found is None:
            found = self._discover()
        return found.records

    @property
    def discovery(self) -> Discovery:
        """All that discovery found, for people who look for faults."""
        self.backends()
        return self._discovery or self._discover()

    def register_backend(self, plugin: object) -> BackendRecord:
        """Add a backend that has no metadata: a module or an object with the hooks.

        Raises
        ------
        PluginError
            If it is quarantined; it is not kept then.

        """
        with self.lock:
            before = {id(one) for one in self._extra}
            if id(plugin) not in before:
                self._extra.append(plugin)
            self._discovery = None
            self.changed()
            record = next(r for r in self.discovery.records if r.plugin is plugin)
            if record.status == "quarantined" and id(plugin) not in before:
                self._extra.remove(plugin)
                self._discovery = None
                self.changed()
                message = f"backend {record.name!r} cannot be registered: {record.reason}"
                raise PluginError(message) from record.error
        return record

    def refresh(self) -> None:
        """Look again at installation, devices, environment and file; what API set stays."""
        with self.lock:
            importlib.invalidate_caches()
            self._discovery = None
            self._facts.clear()
            self._told.clear()
            self.policy.reload()
            self.changed()

    def _discover(self) -> Discovery:
        if self._discovering == threading.get_ident():
            message = (
                "discovery was re-entered: a plugin calls an op, or asks for the backends, while "
                "it is being loaded; do that on first use instead"
            )
            raise PluginError(message)
        if not self.lock.acquire(timeout=_PATIENCE):
            message = f"another thread has been loading plugins for {_PATIENCE:.0f} s"
            raise PluginError(message)
        try:
            if self._discovery is not None:
                return self._discovery
            self._discovering = threading.get_ident()
            self.load_catalogue()
            judged_by = self._judgement()
            found = discover(
                scan(),
                self.policy.process(),
                {op_id: op.call_parameters().signature for op_id, op in self._ops.items()},
                self.detector,
                tuple(self._extra),
            )
            self._tell(found)
            self._publish(found)
            self._discovery, self._judged_by = found, judged_by
            return found
        finally:
            self._discovering = None
            self.lock.release()

    def _publish(self, found: Discovery) -> None:
        for gone in self._plugin_ops - {op_class.op for op_class in found.ops}:
            self._ops.pop(gone, None)
        for op_class in found.ops:
            if type(self._ops.get(op_class.op)) is not op_class:
                op_class.publish(self)
        self._plugin_ops = {op_class.op for op_class in found.ops}

    def usable(self) -> None:
        """Discover, and refuse to go on where the policy is stricter than what was found.

        Raises
        ------
        PluginError
            If a required backend is not active, or, under ``strict``, anything is quarantined,
            in conflict or refused.

        """
        records = {record.name: record for record in self.backends()}
        policy = self.policy.process()
        for name in policy.require:
            record = records.get(name)
            if record is None:
                message = f"backend {name!r} is required and not installed{nearest(name, records)}"
                raise PluginError(message)
            if record.status != "active":
                message = (
                    f"backend {name!r} ({record.owner}) is required and is {record.status}: "
                    f"{record.reason}"
                )
                raise PluginError(message) from record.error
        if self.policy.current().strict:
            for record in records.values():
                faults = [*record.refused]
                if record.status in {"quarantined", "conflict"}:
                    faults.append(f"{record.status}: {record.reason}")
                if faults:
                    message = f"strict: backend {record.name!r} ({record.owner}) {faults[0]}"
                    raise PluginError(message) from record.error

    def _tell(self, found: Discovery) -> None:
        for record in found.records:
            faults = [*record.refused]
            if record.status in {"quarantined", "conflict"}:
                faults.append(f"{record.status}: {record.reason}")
            for fault in faults:
                if (record.name, fault) not in self._told:
                    self._told.add((record.name, fault))
                    owner = record.owner or record.entry_point
                    logger.warning("backend %r (%s) %s", record.name, owner, fault)

    def warn_once(self, *key: str) -> bool:
        """Say whether this is the first time that ``key`` is worth a warning."""
        fresh = key not in self._told
        self._told.add(key)
        return fresh

    # -- selectors ---------------------------------------------------------------------------

    def check_selector(self, word: str, own: tuple[KernelSpec, ...]) -> None:
        """Refuse a selector that nobody knows.

        Raises
        ------
        UnknownSelectorError
            With the nearest words.

        """
        names = {record.name for record in self.backends()}
        names |= {spec.backend for specs in self._specs.values() for spec in specs}
        built = {str(name) for name in KernelBackend.names()}
        first, slash, second = word.partition("/")
        platforms = {spec.platform for spec in own if spec.platform}
        if slash:
            known = first in names | {OWN} and second in built | platforms
        else:
            known = word in names | built | {OWN, "native"}
        if not known:
            message = f"unknown selector {word!r}{nearest(word, names | built | {OWN, 'native'})}"
            raise UnknownSelectorError(message)

    def check_force(self, word: str, own: tuple[KernelSpec, ...]) -> None:
        """Refuse a forced selector that nothing in the process offers.

        Raises
        ------
        UnknownSelectorError
            If nobody knows the word.
        NoKernelError
            If it is known and nothing offers it, with the reason.

        """
        self.check_selector(word, own)
        backend = word.partition("/")[0]
        for record in self.backends():
            if record.name == backend and record.status != "active":
                message = f"forced selector {word!r}: backend {backend} is {record.status}: "
                raise NoKernelError(message + record.reason) from record.error
        offered = [*own, *(s for specs in self._specs.values() for s in specs)]
        offered += [k for r in self.backends() for k in r.kernels]
        if not any(spec.matches(word) for spec in offered):
            message = f"forced selector {word!r}: no kernel in this process is offered by it"
            raise NoKernelError(message)


@functools.lru_cache(maxsize=1)
def default_registry() -> KernelRegistry:
    """Give the process's registry; it discovers nothing until something is asked of it."""
    return KernelRegistry(catalogue="opgraft.ops")


__all__ = ["KernelRegistry", "Policy", "default_registry"]
