"""The class an op is written as, and what registers it.

One op is one class: ``forward_native`` says what it means, every other ``forward_<name>`` is a
kernel (``name`` a kernel backend) or a platform method (``name`` a platform key).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from opgraft.arguments import ArgumentCheck, Parameters
from opgraft.dispatch import Dispatcher, Handle
from opgraft.errors import RegistrationError
from opgraft.hardware import ANY, Capabilities, capability_set
from opgraft.kernel_registry import KernelRegistry, default_registry
from opgraft.selection import CallFacts
from opgraft.spec import (
    DEFAULT_PRIORITY,
    EXACT,
    OWN,
    FormatSignature,
    KernelBackend,
    KernelSpec,
    Tolerance,
    check_op_id,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_PREFIX = "forward_"
_NOT_KERNELS = frozenset({"fake"})


class BaseFusedOp(nn.Module):
    """One op: its native, its own kernels, and the way from a call to the best kernel of all.

    A subclass defines ``forward_native`` with the op's parameters, and may define
    ``forward_<kernel backend>`` (chosen if ``capabilities`` declares it), ``forward_<platform>``,
    ``rejects(self, kernel_backend, <parameters>) -> str | None`` (why this call cannot run on that
    kernel, from metadata only), ``validate(self, <parameters>)`` (host-visible misuse that the
    format signature cannot say) and ``forward_fake`` (only where a size is read from values).

    Attributes
    ----------
    op
        ``"group.name"``; empty for an op that is not registered.
    priority
        The op's order of kernel backends, the best first.
    capabilities
        Where each of the op's own kernels may run; one that is not declared runs only when named.
    format_signature
        Dtypes and shapes of the parameters and outputs.
    native_supported
        False where native is absent on purpose.
    differentiable
        The op's own kernel backends through which gradients may flow; native always.
    writes
        Caller-buffer parameters, each with the index of the output it receives.
    mutates
        Parameters changed in place.
    tolerance, deterministic, sample_sizes
        What the conformance suite holds kernels against.

    Raises
    ------
    RegistrationError
        When a subclass is declared that cannot be meant.

    """

    call_super_init = True

    op: ClassVar[str] = ""
    priority: ClassVar[tuple[KernelBackend, ...]] = DEFAULT_PRIORITY
    capabilities: ClassVar[Mapping[KernelBackend, Any]] = {}
    format_signature: ClassVar[FormatSignature | None] = None
    native_supported: ClassVar[bool] = True
    differentiable: ClassVar[tuple[KernelBackend, ...]] = ()
    writes: ClassVar[Mapping[str, int]] = {"out": 0}
    mutates: ClassVar[tuple[str, ...]] = ()
    tolerance: ClassVar[Tolerance] = EXACT
    deterministic: ClassVar[bool] = True
    sample_sizes: ClassVar[tuple[int, ...]] = ()

    forward_native: Callable[..., Any]
    is_torch_compile: bool = False
    pinned: str | None = None
    torch_function: Callable[..., Any] | None = None
    _compile_forward: Callable[..., Any] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a declaration that cannot be meant, at its author's line."""
        super().__init_subclass__(**kwargs)
        cls._check_forward()
        if cls.op:
            check_op_id(cls.op)
        priority = cls.priority
        if not isinstance(priority, tuple):
            message = f"{cls.__name__}: priority must be a tuple of kernel backends"
            raise RegistrationError(message)
        cls.priority = tuple(KernelBackend(name) for name in priority)
        declared = {}
        for name, capabilities in cls.capabilities.items():
            whose = f"{cls.__name__}, {name}"
            declared[KernelBackend(name)] = capability_set(capabilities, whose)
        cls.capabilities = declared
        form = cls.format_signature
        if form is not None and not isinstance(form, FormatSignature):
            message = f"{cls.__name__}: format_signature must be a FormatSignature, got {form!r}"
            raise RegistrationError(message)
        if form is not None and cls._defines("forward_native"):
            names = set(cls._native_signature().parameters)
            per = set(form.supported_dtypes) if isinstance(form.supported_dtypes, Mapping) else set()
            like = {o.removeprefix("like:") for o in form.outputs if o.startswith("like:")}
            unknown = (per | set(form.shapes) | like) - names
            if unknown:
                message = (
                    f"{cls.__name__}: format_signature names {sorted(unknown)}, "
                    f"parameters are {sorted(names)}"
                )
                raise RegistrationError(message)

    @classmethod
    def _check_forward(cls) -> None:
        if "forward" in vars(cls):
            message = (
                f"{cls.__name__} overrides forward, which chooses the kernel; define "
                f"forward_native and forward_<kernel backend> instead"
            )
            raise RegistrationError(message)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build the op; nothing is detected, imported or compiled."""
        if not self._defines("forward_native"):
            message = f"{type(self).__name__} cannot be instantiated: it has no forward_native"
            raise TypeError(message)
        super().__init__(*args, **kwargs)

    # -- what the class declares -------------------------------------------------------------

    @classmethod
    def _defines(cls, method: str) -> bool:
        stubs = (BaseFusedOp, nn.Module, object)
        return any(
            method in vars(klass)
            for klass in cls.__mro__
            if klass not in stubs and not vars(klass).get("_only_stubs", False)
        )

    @classmethod
    def _native_signature(cls) -> inspect.Signature:
        full = inspect.signature(cls.forward_native)
        if isinstance(inspect.getattr_static(cls, "forward_native"), staticmethod):
            return full
        return full.replace(parameters=list(full.parameters.values())[1:])

    @classmethod
    def call_parameters(cls) -> Parameters:
        """Give the op's parameters, without ``self``."""
        known = vars(cls).get("_call_parameters")
        if known is None:
            known = Parameters(cls._native_signature(), cls.op or cls.__name__)
            cls._call_parameters = known  # type: ignore[attr-defined]
        return cast("Parameters", known)

    @classmethod
    def argument_check(cls) -> ArgumentCheck:
        """Give what holds a call's arguments against the format signature."""
        known = vars(cls).get("_argument_check")
        if known is None:
            known = ArgumentCheck(cls.call_parameters(), cls.format_signature, cls.writes)
            cls._argument_check = known  # type: ignore[attr-defined]
        return cast("ArgumentCheck", known)

    @classmethod
    def signature(cls) -> inspect.Signature:
        """Give the op's signature, without ``self``."""
        return cls.call_parameters().signature

    @property
    def label(self) -> str:
        """The op id, or the class name of an op without one."""
        return self.op or type(self).__name__

    @classmethod
    def own_methods(cls) -> tuple[list[KernelBackend], list[str]]:
        """List the kernel backends and the platform keys for which the class has a method."""
        names = {
            name.removeprefix(_PREFIX)
            for name in dir(cls)
            if name.startswith(_PREFIX) and cls._defines(name)
        }
        built = [KernelBackend(n) for n in KernelBackend.names() if n in names]
        native = [] if "native" not in names else [KernelBackend.TORCH]
        others = names - set(built) - {"native"} - _NOT_KERNELS
        return [*native, *(b for b in built if b is not KernelBackend.TORCH)], sorted(others)

    @classmethod
    def own_specs(cls, module: str = "", attr: str = "") -> tuple[KernelSpec, ...]:
        """Describe the op's own methods as kernels."""
        where = f"{module}:{attr}" if module else f"{cls.__module__}:{cls.__qualname__}"
        where = where.replace("<", "").replace(">", "")
        built, platforms = cls.own_methods()
        specs = []
        for by in (*built, KernelBackend.TORCH_COMPILE):
            if by is KernelBackend.TORCH_COMPILE and by in built:
                continue
            name = "native" if by in {KernelBackend.TORCH, KernelBackend.TORCH_COMPILE} else by
            implicit = by is KernelBackend.TORCH_COMPILE
            specs.append(
                KernelSpec(
                    op=cls.op or cls.__name__,
                    backend=OWN,
                    kernel_backend=by,
                    target=f"{where}.{_PREFIX}{name}",
                    capabilities=cast("Capabilities", cls.capabilities.get(by, {ANY})),
                    declared=by in cls.priority and (implicit or by in cls.capabilities),
                    differentiable=by in cls.differentiable or implicit,
                )
            )
        specs += [
            KernelSpec(
                op=cls.op or cls.__name__,
                backend=OWN,
                kernel_backend=KernelBackend.PLUGIN,
                target=f"{where}.{_PREFIX}{key}",
                platform=key,
            )
            for key in platforms
        ]
        return tuple(specs)

    def own_kernels(self, platform: str = "") -> tuple[KernelSpec, ...]:
        """Describe the op's own kernels, a registered out-of-tree forward included."""
        specs = type(self).own_specs()
        function = self.registry.oot(self, platform) if platform else None
        if function is None:
            return specs
        name = getattr(function, "__name__", type(function).__name__)
        spec = KernelSpec(
            op=self.label,
            backend=OWN,
            kernel_backend=KernelBackend.PLUGIN,
            target=function,
            name=name,
            platform=platform,
        )
        return (spec, *specs)

    @staticmethod
    def kernels_of_other_classes() -> tuple[KernelSpec, ...]:
        """Describe the own kernels of every op class of the process."""
        classes, found = [BaseFusedOp], []
        while classes:
            one = classes.pop()
            found += one.own_specs() if one._defines("forward_native") else ()
            classes += one.__subclasses__()
        return tuple(found)

    def method_of(self, spec: KernelSpec) -> str:
        """Name the method that a spec of this op stands for."""
        if spec.kernel_backend is KernelBackend.TORCH:
            return f"{_PREFIX}native"
        return _PREFIX + (spec.platform or spec.kernel_backend)

    def available_backends(self) -> list[KernelBackend]:
        """List the kernel backends that the op itself defines, whatever the hardware."""
        built = {*self.own_methods()[0], KernelBackend.TORCH, KernelBackend.TORCH_COMPILE}
        return [KernelBackend(n) for n in KernelBackend.names() if KernelBackend(n) in built]

    def auto_selected_backend(self, device: torch.device | str | None = None) -> str | None:
        """Name the kernel backend that capabilities alone would choose; runs and asks nothing.

        Parameters
        ----------
        device
            Default: the device of the op's own tensors, else torch's default device.

        Returns
        -------
        str or None
            None where a platform method or native would run.

        """
        platform, arch = self.registry.place(torch.device(device) if device else self._home())
        facts = CallFacts(platform=platform, arch=arch)
        policy = self.registry.policy.current()
        selection = self.dispatcher.select(facts, f"a call on {platform}", self.pinned, policy)
        won = selection.winner
        if won is None or won.platform or won.selector == "native":
            return None
        return won.kernel_backend

    def _home(self) -> torch.device:
        own = next(iter((*self.parameters(), *self.buffers())), None)
        return torch.get_default_device() if own is None else own.device

    # -- the call ----------------------------------------------------------------------------

    @property
    def registry(self) -> KernelRegistry:
        """The registry that this instance chooses from."""
        attached = self.__dict__.get("_registry")
        return default_registry() if attached is None else cast("KernelRegistry", attached)

    def attach(self, registry: KernelRegistry) -> Self:
        """Choose from another registry than the process's own."""
        self.__dict__.pop("_dispatcher", None)
        self.__dict__["_registry"] = registry
        return self

    @property
    def dispatcher(self) -> Dispatcher:
        """The way from a call to a kernel; built at first need."""
        known = self.__dict__.get("_dispatcher")
        if known is None:
            known = self.__dict__.setdefault("_dispatcher", Dispatcher(self, self.registry))
        return cast("Dispatcher", known)

    def forward(self, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        """Run the best kernel for these arguments.

        Parameters
        ----------
        *args, **kwargs
            The op's parameters.
        backend
            A selector or a kernel backend: that one or an error.

        """
        if backend is None and self._compile_forward is not None:
            return self._compile_forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            if self.torch_function is not None:
                return self.torch_function(*args, backend=backend, **kwargs)
            named = None if backend in {None, "native", "torch"} else backend
            method = self.forward_native if named is None else getattr(self, _PREFIX + named)
            return method(*args, **kwargs)
        return self.dispatcher.call(self.call_parameters().bind(*args, **kwargs), backend)

    def pin(self, selector: str) -> None:
        """Let this instance run a selector's kernel and no other, until :meth:`unpin`."""
        self._drop_kept()
        self.pinned = str(selector)

    def unpin(self) -> None:
        """Take the pin back."""
        self._drop_kept()
        self.pinned = None

    def compiled_native(self) -> Callable[..., Any]:
        """Give native under ``torch.compile``; compiled once per instance."""
        known = self.__dict__.get("_compiled_native")
        if known is None:
            known = self.__dict__["_compiled_native"] = torch.compile(self.forward_native)
        return cast("Callable[..., Any]", known)

    # -- torch.compile -----------------------------------------------------------------------

    def _torch_compile_forward(self, num_tokens: int) -> Callable[..., Any] | None:
        """Say what to inline in compile mode; None keeps the kernel that was chosen.

        Parameters
        ----------
        num_tokens
            How many tokens the graph is compiled for.

        """
        del num_tokens
        return self.forward_native

    def enter_torch_compile(self, num_tokens: int) -> None:
        """Inline native, or what the op's hook says, until :meth:`leave_torch_compile`."""
        if self.is_torch_compile:
            return
        self._drop_kept()
        forced = self.registry.policy.current().force
        chosen = self._torch_compile_forward(num_tokens)
        if chosen is None or forced is not None or self.pinned is not None:
            platform, arch = self.registry.place(self._home())
            facts = CallFacts(platform=platform, arch=arch)
            kept = self.dispatcher.resolved(facts, strict=chosen is not None)
            chosen = kept or chosen or self.forward_native
        self._compile_forward = chosen
        self.is_torch_compile = True

    def leave_torch_compile(self) -> None:
        """Choose per call again."""
        self._drop_kept()
        self._compile_forward = None
        self.is_torch_compile = False

    # -- hooks, copies, pickles --------------------------------------------------------------

    def has_hooks(self) -> bool:
        """Say whether a module hook has to see the call."""
        return bool(
            self._forward_hooks
            or self._forward_pre_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
        )

    def _drop_kept(self) -> None:
        self.registry.drop_kept()

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register as any module does; the handle honours it from the next call on."""
        self._drop_kept()
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register as any module does; the handle honours it from the next call on."""
        self._drop_kept()
        return super().register_forward_pre_hook(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register as any module does; the handle honours it from the next call on."""
        self._drop_kept()
        return super().register_full_backward_hook(*args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register as any module does; the handle honours it from the next call on."""
        self._drop_kept()
        return super().register_full_backward_pre_hook(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this very instance: a copy chooses for itself."""
        own = {"_dispatcher", "_compiled_native", "torch_function"}
        return {name: value for name, value in self.__dict__.items() if name not in own}

    # -- registration ------------------------------------------------------------------------

    @classmethod
    def publish(cls, registry: KernelRegistry) -> Handle:
        """Register an instance of this class; plugins' ops come in by this."""
        return _register(cls(), registry, cls.own_specs())

    @staticmethod
    def register_oot_forward(
        op_cls: type[BaseFusedOp], fn: Callable[..., Any], platform_key: str
    ) -> None:
        """Register a forward for an out-of-tree platform key; see the function of this name."""
        default_registry().register_oot(op_cls, fn, platform_key)


def _register(
    op: BaseFusedOp, registry: KernelRegistry, specs: tuple[KernelSpec, ...]
) -> Handle:
    from opgraft.torch_ops import define

    known = registry.known_handle(op.op)
    handle = known or Handle(op, registry)
    if registry is not default_registry():
        op.attach(registry)
    registry.add(op, handle, specs)
    handle.bind(op)
    if registry is default_registry():
        define(op, handle)
    return handle


def publish(op_class: type[BaseFusedOp]) -> Callable[..., Any]:
    """Add an op of the catalogue; gives the function that callers call.

    Parameters
    ----------
    op_class
        A class with an ``op`` id.

    Returns
    -------
    callable
        ``opgraft.ops.<group>.<name>``: the op's parameters, and ``backend=None``.

    """
    return op_class.publish(default_registry()).function


def register_fused_op(op: BaseFusedOp, module: str, attr: str) -> BaseFusedOp:
    """Register an op, one kernel spec for each of its methods.

    Parameters
    ----------
    op
        The op; it needs an id.
    module, attr
        Where it can be found: the specs' target is ``"module:attr.forward_..."``.

    Returns
    -------
    BaseFusedOp
        The op.

    Raises
    ------
    RegistrationError
        If the op has no id, or the same kernel is registered with another target; the registry
        is unchanged then.

    """
    if not op.op:
        message = f"{type(op).__name__} has no op id; set op = 'group.name' to register it"
        raise RegistrationError(message)
    _register(op, op.registry, type(op).own_specs(module, attr))
    return op


def register_oot_forward(
    op_or_class: str | type[BaseFusedOp], fn: Callable[..., Any], platform_key: str
) -> None:
    """Register a forward for a platform key that is not in-tree.

    Parameters
    ----------
    op_or_class
        Op id, which need not exist yet, or the exact class, which rules over the id.
    fn
        ``fn(op, <the op's parameters>)``; it gets the instance first.
    platform_key
        The out-of-tree device's type; on an in-tree platform the registration is ignored.

    Raises
    ------
    RegistrationError
        If ``fn`` is not callable, or the op is neither an id nor a class.

    Warns
    -----
    UserWarning
        If another function is registered already; it is replaced, and both are named.

    """
    default_registry().register_oot(op_or_class, fn, platform_key)


@contextlib.contextmanager
def torch_compile_mode(module: nn.Module, num_tokens: int) -> Iterator[nn.Module]:
    """Put every op of a module tree into compile mode, once each, shared ones included.

    Parameters
    ----------
    module
        Any module.
    num_tokens
        How many tokens the graph is compiled for.

    """
    ops = [one for one in module.modules() if isinstance(one, BaseFusedOp)]
    entered = [one for one in ops if not one.is_torch_compile]
    for one in entered:
        one.enter_torch_compile(num_tokens)
    try:
        yield module
    finally:
        for one in entered:
            one.leave_torch_compile()
