"""The ops, the kernels and the backends of a process, and a number that grows as they change.

A registry is passed as an argument; the default one is built on first need. Discovery runs at
first need too, never at import and never inside itself.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from opgraft.discovery import Discovery, discover, scan
from opgraft.errors import NoKernelError, PluginError, RegistrationError, UnknownOpError, UnknownSelectorError, nearest
from opgraft.hardware import IN_TREE, Detector
from opgraft.lockfile import Lock
from opgraft.policy import Policy, PolicyStore
from opgraft.spec import OWN, BackendRecord, KernelBackend, KernelSpec, check_op_id
from opgraft.tracing import Trace

if TYPE_CHECKING:
    import torch

    from opgraft.fused_op import BaseFusedOp
    from opgraft.handle import Handle

LOGGER: Final = logging.getLogger("opgraft")
_PATIENCE: Final = 120.0  # seconds that another thread waits for a discovery under way


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
    operators
        Module whose ``define`` shows each op to torch.
    path
        Where plugins' metadata is looked for; None is ``sys.path``.

    """

    def __init__(
        self,
        *,
        detector: Detector | None = None,
        policy: PolicyStore | None = None,
        catalogue: str = "",
        operators: str = "",
        path: Sequence[str] | None = None,
    ) -> None:
        self.detector = detector or Detector()
        self.policy = policy or PolicyStore()
        self.generation = 0
        self.turn = 0
        self.traces: tuple[Trace, ...] = ()
        self.process_trace = Trace()
        self._lock = threading.RLock()
        self._catalogue, self._operators, self._path = catalogue, operators, path
        self._handles: dict[str, Handle] = {}
        self._former: dict[str, Handle] = {}
        self._kept: set[Handle] = set()
        self._specs: dict[str, list[KernelSpec]] = {}
        self._oot: dict[tuple[str | type, str], Callable[..., Any]] = {}
        self._extra: list[object] = []
        self._facts: dict[torch.device, tuple[str, str]] = {}
        self._found: Discovery | None = None
        self._agreed: Discovery | None = None
        self._judged_by: tuple[object, ...] = ()
        self._discovering: int | None = None
        self._plugin_ops: frozenset[str] = frozenset()
        self._told: set[tuple[str, ...]] = set()
        self.policy.subscribe(self._policy_changed)

    def __reduce__(self) -> tuple[Callable[[], KernelRegistry], tuple[()]]:
        """Pickle as the default registry of the process."""
        return default_registry, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> KernelRegistry:
        """Stay the registry of what is copied."""
        return self

    # What the call path keeps.

    def drop_kept(self) -> None:
        """Take back every kept choice; none that was made before this moment is kept again."""
        with self._lock:
            self.turn += 1
            for handle in self._kept:
                handle.drop()
            self._kept.clear()

    def keeps(self, policy: Policy) -> bool:
        """Say whether choices may be kept at all: while nobody looks at each call, and no scope is alive."""
        return not (policy.trace or policy.check or self.traces or self.policy.any_scope())

    def keep(self, handle: Handle, turn: int, pattern: int, choice: tuple[Any, Any]) -> None:
        """Keep a handle's choice, unless something changed since ``turn`` was read."""
        with self._lock:
            if turn == self.turn:
                handle.keep(pattern, choice)
                self._kept.add(handle)

    def changed(self) -> None:
        """Note that ops, kernels, backends or devices changed."""
        with self._lock:
            self.generation += 1
            self.drop_kept()

    def _policy_changed(self) -> None:
        with self._lock:
            if self._found is not None and self._judgement() != self._judged_by:
                self._found = None
                self.generation += 1
            self.drop_kept()

    def _judgement(self) -> tuple[object, ...]:
        policy = self.policy.process()
        return policy.deny, policy.plugins, policy.lock

    @contextlib.contextmanager
    def tracing(self, trace: Trace) -> Iterator[Trace]:
        """Record calls, of every thread, in ``trace`` while the context lasts."""
        with self._lock:
            self.traces = (*self.traces, trace)
            self.drop_kept()
        try:
            yield trace
        finally:
            with self._lock:
                self.traces = tuple(one for one in self.traces if one is not trace)
                self.drop_kept()

    # Ops.

    def add(self, handle: Handle, own: Iterable[KernelSpec]) -> None:
        """Add an op by its handle, with the specs of its own methods; the same again changes nothing.

        Raises
        ------
        RegistrationError
            If the id is taken by an op whose methods are others; the registry is unchanged.

        """
        op_id, specs = handle.op_id, list(own)
        with self._lock:
            for spec in specs:
                self._refuse_conflict(spec)
            self._specs[op_id] = specs + [spec for spec in self._specs.get(op_id, ()) if spec.backend != OWN]
            self._handles[op_id] = handle
            self.changed()

    def define(self, handle: Handle) -> None:
        """Show an op to torch as an operator."""
        if self._operators:
            importlib.import_module(self._operators).define(handle.op, handle)

    def handle(self, op_id: str) -> Handle:
        """Give an op's handle.

        Raises
        ------
        UnknownOpError
            If there is no such op, with the nearest names.

        """
        for look in (self.load_catalogue, self.backends):
            if op_id not in self._handles:
                look()
        if op_id not in self._handles:
            raise UnknownOpError(f"unknown op {op_id!r}{nearest(str(op_id), self._handles)}")
        return self._handles[op_id]

    def known_handle(self, op_id: str) -> Handle | None:
        """Give the handle of an id that is in use, or was: callers may hold it still."""
        return self._handles.get(op_id) or self._former.get(op_id)

    def load_catalogue(self) -> None:
        """Import the ops that ship with the core."""
        if self._catalogue:
            importlib.import_module(self._catalogue)

    def ops(self) -> list[str]:
        """List the ids of all ops, sorted."""
        self.backends()
        return sorted(self._handles)

    # Kernels.

    def register(self, spec: KernelSpec) -> KernelSpec:
        """Add a kernel; the same spec again changes nothing.

        Raises
        ------
        RegistrationError
            If the same kernel is registered with another target; the registry is unchanged.

        """
        with self._lock:
            specs = self._specs.setdefault(check_op_id(spec.op), [])
            self._refuse_conflict(spec)
            if spec not in specs:
                specs.append(spec)
                self.changed()
        return spec

    def _refuse_conflict(self, spec: KernelSpec) -> None:
        for known in self._specs.get(spec.op, ()):
            if known.identity == spec.identity and known.target != spec.target:
                raise RegistrationError(
                    f"Conflicting kernel registration for op {spec.op!r}, {spec.selector}: {spec.target!r} "
                    f"against {known.target!r}, which stays"
                )

    def get(self, op_id: str) -> list[KernelSpec]:
        """List the kernels offered for an op, its own and the backends'; empty if unknown."""
        return [*self._specs.get(op_id, ()), *(k for r in self.backends() for k in r.kernels if k.op == op_id)]

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
        specs = {str(spec.kernel_backend): spec for spec in reversed(self.get(op_id)) if not spec.platform}
        if kernel_backend not in specs:
            message = f"op {op_id!r} has no kernel of kernel backend {kernel_backend!r}"
            raise UnknownOpError(message + nearest(str(kernel_backend), specs))
        return specs[kernel_backend]

    def candidates(self, op_id: str, *, hardware: bool = True) -> list[KernelSpec]:
        """List the kernels that backends offer; inactive ones too where hardware is no matter."""
        wanted = {"active"} if hardware else {"active", "inactive"}
        records = [record for record in self.backends() if record.status in wanted]
        named = [spec for spec in self._specs.get(op_id, ()) if spec.backend != OWN]
        return named + [k for record in records for k in record.kernels if k.op == op_id]

    def register_oot(self, op_or_class: str | type, function: Callable[..., Any], platform: str) -> None:
        """Register a forward for a platform key; see :func:`opgraft.register_oot_forward`."""
        target = check_op_id(op_or_class) if isinstance(op_or_class, str) else op_or_class
        if not callable(function) or not isinstance(target, (str, type)) or not isinstance(platform, str):
            raise RegistrationError(
                f"register_oot_forward takes an op id or a class, and a function, got {target!r}, {function!r}"
            )
        former = self._oot.get((target, platform), function)
        self._oot[target, platform] = function
        self.changed()
        if self._found is not None:
            self._tell_orphans()
        if former is not function:
            name = target if isinstance(target, str) else target.__name__
            message = f"out-of-tree forward of {name} on {platform}: {function} replaces {former}"
            warnings.warn(message, stacklevel=3)

    def oot(self, op: BaseFusedOp, platform: str) -> Callable[..., Any] | None:
        """Give the forward registered for the exact class, or else for the id."""
        if platform in IN_TREE:
            return None
        return self._oot.get((type(op), platform)) or self._oot.get((op.op, platform))

    # Devices.

    def place(self, device: torch.device) -> tuple[str, str]:
        """Give platform key and arch of a device, read when it is first seen."""
        known = self._facts.get(device)
        if known is None:
            known = self._facts[device] = (self.detector.platform_key(device), self.detector.facts(device).arch)
        return known

    # Backends.

    def backends(self) -> tuple[BackendRecord, ...]:
        """Give a record of every backend that is advertised."""
        return self.discovery().records

    def discovery(self) -> Discovery:
        """Give all that discovery found; it runs at first need."""
        found = self._found
        if found is not None:
            return found
        self._refuse_reentry()
        if not self._lock.acquire(timeout=_PATIENCE):
            raise PluginError(f"another thread has been loading plugins for {_PATIENCE:.0f} s")
        collects = gc.isenabled()
        try:
            if self._found is None:
                self._discovering = threading.get_ident()
                gc.disable()  # what is made here stays, and one walk over torch's heap takes 0.1 s
                self._found = self._discover()
            return self._found
        finally:
            self._discovering = None
            if collects:
                gc.enable()
            self._lock.release()

    def _refuse_reentry(self) -> None:
        if self._discovering == threading.get_ident():
            raise PluginError(
                "discovery was re-entered: a plugin calls an op, or asks for the backends, while it is being "
                "loaded; do that on first use instead"
            )
        self.load_catalogue()  # before the lock: a thread that is importing the catalogue needs it to add ops

    def hold_while_forking(self) -> None:
        """Let a fork wait for a discovery of another thread, which the child could not finish."""
        release = self._lock.release
        os.register_at_fork(before=self._lock.acquire, after_in_parent=release, after_in_child=release)

    def _discover(self) -> Discovery:
        self._judged_by = self._judgement()
        own = {op_id: one.op for op_id, one in self._handles.items() if op_id not in self._plugin_ops}
        catalogue = {op_id: op.arguments().signature for op_id, op in own.items()}
        policy, installation = self.policy.process(), scan(self._path)
        if policy.lock is not None:
            policy = Lock(policy.lock).admitted(policy, installation)
        found = discover(installation, policy, catalogue, self.detector, tuple(self._extra))
        for record in found.records:
            for fault in record.faults:
                if self.tell_once(record.name, fault):
                    LOGGER.warning("backend %r (%s) %s", record.name, record.owner or record.entry_point, fault)
        offered = {op_class.op: op_class for op_class in found.ops}
        for op_id in self._plugin_ops:
            if type(self._handles[op_id].op) is not offered.get(op_id):
                self._specs[op_id] = [spec for spec in self._specs[op_id] if spec.backend != OWN]
                self._former[op_id] = self._handles.pop(op_id)
        for op_class in found.ops:
            op_class.publish(self)
        self._plugin_ops = frozenset(offered)
        self._tell_orphans()
        return found

    def _tell_orphans(self) -> None:
        for op_id in sorted({str(one) for one, _ in self._oot if one not in self._handles and isinstance(one, str)}):
            if self.tell_once("orphan", op_id):
                LOGGER.warning("out-of-tree forward for an unknown op %r%s", op_id, nearest(op_id, self._handles))

    def tell_once(self, *key: str) -> bool:
        """Say whether this is the first time that ``key`` is told."""
        fresh = key not in self._told
        self._told.add(key)
        return fresh

    def usable(self) -> None:
        """Discover, and refuse to go on where the policy is stricter than what was found.

        Raises
        ------
        PluginError
            If a required backend is not active, or, under ``strict``, anything is quarantined, in
            conflict or refused, or if this process would choose otherwise than its lock says.

        """
        records = {record.name: record for record in self.backends()}
        policy = self.policy.process()
        if policy.lock is not None and self._agreed is not self._found:
            Lock(policy.lock).agree(self)
            self._agreed = self._found
        for name in policy.require:
            if name not in records:
                raise PluginError(f"backend {name!r} is required and not installed{nearest(name, records)}")
            if records[name].status != "active":
                raise PluginError(f"{records[name].described}, and it is required") from records[name].error
        faulty = [record for record in records.values() if record.faults]
        if faulty and self.policy.current().strict:
            first = faulty[0]
            faults = f"backend {first.name!r} ({first.owner}) {'; '.join(first.faults)}"
            raise PluginError(f"strict: {faults}") from first.error

    def register_backend(self, plugin: object) -> BackendRecord:
        """Add a backend that has no metadata: a module or an object with the hooks.

        Raises
        ------
        PluginError
            If it is quarantined or its name is taken; it is not kept then.

        """
        self.load_catalogue()
        self._refuse_reentry()
        with self._lock:
            new = all(one is not plugin for one in self._extra)
            self._extra += [plugin] if new else []
            self._found = None
            self.changed()
            record = next(one for one in self.backends() if one.plugin is plugin)
            if new and record.status in {"quarantined", "conflict"}:
                self._extra.remove(plugin)
                self._found = None
                self.changed()
                raise PluginError(f"{record.described}, so it is not registered") from record.error
        return record

    def refresh(self) -> None:
        """Look again at installation, devices, environment and file; what API set stays."""
        with self._lock:
            importlib.invalidate_caches()
            self._found = None
            self._facts.clear()
            self._told.clear()
            self.policy.reload()
            self.changed()

    # Selectors.

    def unknown_selector(self, word: str, own: Iterable[KernelSpec]) -> str:
        """Say what is wrong with a selector that nobody knows; empty where somebody does."""
        names = {record.name for record in self.backends()} | {OWN, "native"}
        names |= {spec.backend for specs in self._specs.values() for spec in specs}
        built = set(KernelBackend.names())
        first, _, second = str(word).partition("/")
        if word in names | built or (second and first in names and second in built | {spec.platform for spec in own}):
            return ""
        return f"unknown selector {word!r}{nearest(str(word), names | built)}"

    def check_force(self, word: str, own: Iterable[KernelSpec]) -> None:
        """Refuse a forced selector that nothing in the process offers.

        Raises
        ------
        UnknownSelectorError
            If nobody knows the word.
        NoKernelError
            If it is known and nothing offers it, with the reason.

        """
        if unknown := self.unknown_selector(word, own):
            raise UnknownSelectorError(unknown)
        for record in self.backends():
            if record.name == word.partition("/")[0] and record.status != "active":
                raise NoKernelError(f"{record.described}, and it is forced") from record.error
        offered = [k for record in self.backends() for k in record.kernels]
        offered += [*own, *(spec for specs in self._specs.values() for spec in specs)]
        if not any(spec.matches(word) for spec in offered):
            raise NoKernelError(f"forced selector {word!r}: no kernel in this process is offered by it")


@functools.lru_cache(maxsize=1)
def default_registry() -> KernelRegistry:
    """Give the process's registry; it discovers nothing until something is asked of it."""
    registry = KernelRegistry(catalogue="opgraft.ops", operators="opgraft.torch_ops")
    registry.hold_while_forking()
    return registry
