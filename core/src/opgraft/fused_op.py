"""The class an op is written as, and what registers it.

One op is one class: ``forward_native`` says what it means, every other ``forward_<name>`` is a
kernel (``name`` a kernel backend) or a platform method (``name`` a platform key).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch import nn

from opgraft.arguments import Arguments
from opgraft.dispatch import Dispatcher
from opgraft.errors import RegistrationError
from opgraft.handle import Handle, OpFunction
from opgraft.hardware import ANY, capability_set
from opgraft.kernel_registry import KernelRegistry, default_registry
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

_PREFIX: Final = "forward_"
_INSTANCE_ONLY: Final = {"_dispatcher", "_compiled_native", "torch_function", "_compile_forward", "is_torch_compile"}


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
    _declared: ClassVar[bool]
    torch_function: Callable[..., Any] | None = None
    _compile_forward: Callable[..., Any] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a declaration that cannot be meant, at its author's line."""
        super().__init_subclass__(**kwargs)
        cls._check_forward()
        if cls.op:
            check_op_id(cls.op)
        cls.priority, cls.differentiable = (
            tuple(map(KernelBackend, one)) for one in (cls.priority, cls.differentiable)
        )
        if not isinstance(cls.capabilities, Mapping):
            why = "capabilities must be a mapping from kernel backends to requirements"
            raise RegistrationError(f"{cls.__name__}: {why}, got {cls.capabilities!r}")
        cls.capabilities = {
            KernelBackend(name): capability_set(declared, f"{cls.__name__}, {name}")
            for name, declared in cls.capabilities.items()
        }
        form = cls.format_signature
        if form is not None and not isinstance(form, FormatSignature):
            raise RegistrationError(f"{cls.__name__}: format_signature must be a FormatSignature, got {form!r}")
        if cls.defines("forward_native"):
            like = {out.removeprefix("like:") for out in form.outputs if out.startswith("like:")} if form else set()
            stated = {*form.by_parameter, *form.shapes, *like} if form else set()
            known = set(cls.signature().parameters)
            cls._check_writes(len(form.outputs) if form else 0)
            unknown = sorted({*stated, *cls.mutates, *(cls.writes.keys() - {"out"})} - known)
            if unknown or "backend" in known:
                why = f"it names {unknown}" if unknown else "'backend' is the keyword by which a caller names kernels"
                raise RegistrationError(f"{cls.__name__}: {why}, its parameters are {sorted(known)}")
        cls._declared = True

    @classmethod
    def _check_forward(cls) -> None:
        if cls.forward is not BaseFusedOp.forward:
            raise RegistrationError(
                f"{cls.__name__} overrides forward, which chooses the kernel; define forward_native and "
                f"forward_<kernel backend> instead"
            )

    @classmethod
    def _check_writes(cls, outputs: int) -> None:
        for name, index in cls.writes.items():
            if type(index) is not int or index < 0 or (outputs and index >= outputs):
                why = f"writes[{name!r}] must be the index of an output{f' below {outputs}' if outputs else ''}"
                raise RegistrationError(f"{cls.__name__}: {why}, got {index!r}")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build the op; nothing is detected, imported or compiled."""
        if not self.defines("forward_native"):
            raise TypeError(f"{type(self).__name__} cannot be instantiated: it has no forward_native")
        super().__init__(*args, **kwargs)

    # What the class declares.

    @classmethod
    def defines(cls, method: str) -> bool:
        """Say whether the class, or any it derives from below this one, defines a method."""
        above = BaseFusedOp.__mro__
        return any(method in vars(one) for one in cls.__mro__ if one not in above)

    @classmethod
    def signature(cls) -> inspect.Signature:
        """Give the op's signature, without ``self``."""
        return inspect.signature(object.__new__(cls).forward_native)

    @classmethod
    def arguments(cls) -> Arguments:
        """Give the op's parameters and what a call's values must be."""
        if "_arguments" not in vars(cls):
            made = Arguments(cls.signature(), cls.op or cls.__name__, cls.format_signature, cls.writes)
            cls._arguments = made  # type: ignore[attr-defined]
        return cast("Arguments", vars(cls)["_arguments"])

    @property
    def label(self) -> str:
        """The op id, or the class name of an op without one."""
        return self.op or type(self).__name__

    @classmethod
    def own_methods(cls) -> tuple[list[KernelBackend], list[str]]:
        """List the kernel backends and the platform keys for which the class has a method."""
        found = {n.removeprefix(_PREFIX) for n in dir(cls) if n.startswith(_PREFIX) and cls.defines(n)}
        known = [KernelBackend(name) for name in KernelBackend.names() if name in found - {KernelBackend.TORCH}]
        return known, sorted(found - {*known, "native", "fake", "torch"})

    @classmethod
    def own_specs(cls, where: str = "") -> tuple[KernelSpec, ...]:
        """Describe the op's own methods as kernels; their target is ``"<where>.forward_..."``."""
        path = where or f"{cls.__module__}:{cls.__qualname__}"
        make = functools.partial(KernelSpec, op=cls.op or cls.__name__, backend=OWN)
        built, platforms = cls.own_methods()
        compiled = KernelBackend.TORCH_COMPILE  # of native, unless the class has its own; needs no declaration
        kernels = [
            make(
                kernel_backend=by,
                target=f"{path}.{_PREFIX}{by if by in built else 'native'}",
                capabilities=cls.capabilities.get(by, {ANY}),
                declared=by in cls.priority and (by in cls.capabilities or by is compiled),
                differentiable=by in cls.differentiable or by not in built,
            )
            for by in dict.fromkeys([*built, compiled])
        ]
        native = make(kernel_backend=KernelBackend.TORCH, target=f"{path}.{_PREFIX}native", differentiable=True)
        by = KernelBackend.PLUGIN
        methods = (make(kernel_backend=by, target=f"{path}.{_PREFIX}{key}", platform=key) for key in platforms)
        return (*kernels, native, *methods)

    def own_kernels(self, platform: str = "") -> tuple[KernelSpec, ...]:
        """Describe the op's own kernels, the out-of-tree forward registered for a platform included."""
        specs = type(self).own_specs()
        function = self.registry.oot(self, platform) if platform else None
        if function is None:
            return specs
        name = getattr(function, "__name__", type(function).__name__)
        by = KernelBackend.PLUGIN
        spec = KernelSpec(op=self.label, backend=OWN, kernel_backend=by, target=function, name=name, platform=platform)
        return (spec, *specs)

    @staticmethod
    def kernels_of_all_classes() -> list[KernelSpec]:
        """Describe the own kernels of every op class of the process."""
        classes: list[type[BaseFusedOp]] = [BaseFusedOp]
        for one in classes:  # a class that was refused is among them until it is collected
            classes += one.__subclasses__()
        return [spec for one in classes if "_declared" in vars(one) for spec in one.own_specs()]

    def method_of(self, spec: KernelSpec) -> str:
        """Name the method that a spec of this op stands for."""
        native = spec.kernel_backend is KernelBackend.TORCH
        return f"{_PREFIX}{'native' if native else spec.platform or spec.kernel_backend}"

    def available_backends(self) -> list[KernelBackend]:
        """List the kernel backends that the op itself defines, whatever the hardware."""
        built = {*self.own_methods()[0], KernelBackend.TORCH, KernelBackend.TORCH_COMPILE}
        return [KernelBackend(name) for name in KernelBackend.names() if name in built]

    def auto_selected_backend(self, device: torch.device | str | None = None) -> KernelBackend | None:
        """Name the kernel backend that capabilities alone would choose; runs and asks nothing.

        Parameters
        ----------
        device
            Default: the device of the op's own tensors, else torch's default device.

        Returns
        -------
        KernelBackend or None
            None where a platform method or native would run.

        """
        place = self.registry.place(torch.device(device) if device else self._home())
        won = self.dispatcher.select_on(*place).winner
        return None if won is None or won.platform or won.selector == "native" else won.kernel_backend

    def _home(self) -> torch.device:
        own = next(iter((*self.parameters(), *self.buffers())), None)
        return torch.get_default_device() if own is None else own.device

    # The call.

    @property
    def registry(self) -> KernelRegistry:
        """The registry that this instance chooses from."""
        return cast("KernelRegistry", self.__dict__.get("_registry") or default_registry())

    def attach(self, registry: KernelRegistry) -> Self:
        """Choose from another registry than the process's own."""
        self.__dict__.pop("_dispatcher", None)
        self.__dict__["_registry"] = registry
        return self

    @property
    def dispatcher(self) -> Dispatcher:
        """The way from a call to a kernel; built at first need."""
        known = self.__dict__.get("_dispatcher")
        return known or cast("Dispatcher", self.__dict__.setdefault("_dispatcher", Dispatcher(self, self.registry)))

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
        if not torch.compiler.is_compiling():
            dispatcher = self.dispatcher
            return dispatcher.call(dispatcher.arguments.bind(*args, **kwargs), backend)
        if self.torch_function is not None:
            return self.torch_function(*args, backend=backend, **kwargs)
        named = "native" if backend in {None, "auto", "torch", "torch_compile"} else str(backend).rpartition("/")[2]
        return getattr(self, _PREFIX + named)(*args, **kwargs)

    def pin(self, selector: str) -> None:
        """Let this instance run a selector's kernel and no other, until :meth:`unpin`."""
        self.pinned = str(selector)
        self.registry.drop_kept()

    def unpin(self) -> None:
        """Take the pin back."""
        self.pinned = None
        self.registry.drop_kept()

    def compiled_native(self, *args: Any, **kwargs: Any) -> Any:
        """Run native under ``torch.compile``, compiled once per instance."""
        if "_compiled_native" not in self.__dict__:
            self.__dict__["_compiled_native"] = torch.compile(self.forward_native)
        return self.__dict__["_compiled_native"](*args, **kwargs)

    # torch.compile.

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
        inlined = self._torch_compile_forward(num_tokens)
        selection = self.dispatcher.select_on(*self.registry.place(self._home()))
        named = selection.decided_by in {"call", "force"}
        if selection.winner is not None and (inlined is None or named):
            inlined = self.dispatcher.runner(selection.winner).kernel
        self._compile_forward = inlined or self.forward_native
        self.is_torch_compile = True
        self.registry.drop_kept()

    def leave_torch_compile(self) -> None:
        """Choose per call again."""
        self._compile_forward = None
        self.is_torch_compile = False
        self.registry.drop_kept()

    # Hooks, copies, pickles.

    def has_hooks(self) -> bool:
        """Say whether a module hook has to see the call."""
        before, after = self._forward_pre_hooks, self._forward_hooks
        return bool(before or after or self._backward_hooks or self._backward_pre_hooks)

    def has_state(self) -> bool:
        """Say whether parameters may have a say in a call, as in a layer."""
        return bool(self._parameters or self._modules)

    def _replicate_for_data_parallel(self) -> Self:
        """Let a replica compute with its own parameters."""
        replica: Self = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        return replica.attach(self.registry)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this very instance: a copy chooses for itself."""
        return {name: value for name, value in self.__dict__.items() if name not in _INSTANCE_ONLY}

    # Registration.

    @classmethod
    def publish(cls, registry: KernelRegistry) -> Handle:
        """Register an instance of this class; plugins' ops come in by this."""
        known = registry.known_handle(cls.op)
        op = known.op if known and type(known.op) is cls else cls()
        return _register(op, registry, cls.own_specs())

    @staticmethod
    def register_oot_forward(op_cls: type[BaseFusedOp] | str, fn: Callable[..., Any], platform_key: str) -> None:
        """Register a forward for an out-of-tree platform key; see the function of this name."""
        default_registry().register_oot(op_cls, fn, platform_key)


def _dropping(register: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(register)
    def wrapper(self: BaseFusedOp, *args: Any, **kwargs: Any) -> Any:
        removable = register(self, *args, **kwargs)
        self.registry.drop_kept()
        return removable

    return wrapper


for _kind in ("forward", "forward_pre", "backward", "full_backward", "full_backward_pre"):
    _name = f"register_{_kind}_hook"
    setattr(BaseFusedOp, _name, _dropping(getattr(nn.Module, _name)))


def _register(op: BaseFusedOp, registry: KernelRegistry, specs: tuple[KernelSpec, ...]) -> Handle:
    handle = registry.known_handle(op.op) or Handle(op, registry)
    registry.add(handle, specs)
    handle.bind(op.attach(registry))
    registry.define(handle)
    return handle


def publish(op_class: type[BaseFusedOp]) -> OpFunction:
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
        raise RegistrationError(f"{type(op).__name__} has no op id; set op = 'group.name' to register it")
    _register(op, op.registry, type(op).own_specs(f"{module}:{attr}"))
    return op


def register_oot_forward(op_or_class: str | type[BaseFusedOp], fn: Callable[..., Any], platform_key: str) -> None:
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
    ops = [one for one in module.modules() if isinstance(one, BaseFusedOp) and not one.is_torch_compile]
    try:
        for one in ops:
            one.enter_torch_compile(num_tokens)
        yield module
    finally:
        for one in ops:
            one.leave_torch_compile()
