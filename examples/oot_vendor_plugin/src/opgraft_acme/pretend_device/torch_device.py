"""What a vendor's torch extension does: a PrivateUse1 device, with torch's own Python support.

torch keeps one place, called PrivateUse1, for a device that it does not know. Tensors on it are
plain :class:`torch.Tensor` objects whose storage has an address in the card's memory. The card
itself runs opgraft kernels only. Every other operator of torch is carried out by the host on
copies (:func:`_on_host`), as the CPU fallback of a young backend does it: slow and right.

Not covered, since torch's Python support has no allocator for such a device: making a bare
storage on it, which :func:`copy.deepcopy`, pickling and pinned memory need. Clone tensors instead.
"""

# ruff: noqa: SLF001 - torch's support for devices written in Python has no public names

from __future__ import annotations

import math
import weakref
from numbers import Number
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from opgraft_acme.pretend_device import torch_module
from opgraft_acme.pretend_device.memory import memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NAME: Final = "acme"
_UNNAMED: Final = "privateuseone"
# torch's Python support for devices is experimental, private and untyped.
_C: Final[Any] = torch._C
_Library: Final[Any] = torch.library.Library
_CPU_KEYS: Final = _C.DispatchKeySet(_C.DispatchKey.CPU)
_libraries: list[object] = []


def register() -> None:
    """Rename PrivateUse1 to ``acme`` and implement it; once a process, further calls do nothing.

    Raises
    ------
    RuntimeError
        If another extension has already named PrivateUse1.

    """
    if _libraries:
        return
    taken = _C._get_privateuse1_backend_name()
    if taken != _UNNAMED:
        raise RuntimeError(f"torch's place for out-of-tree devices is taken by {taken!r}")
    backend_registration._setup_privateuseone_for_python_backend(NAME, torch_module)
    operators = _Library("aten", "IMPL")
    for name, function in _OPERATORS.items():
        operators.impl(name, function, "PrivateUse1")
    for name in _METADATA_ONLY:
        operators.impl(name, _metadata_only(name), "PrivateUse1")
    others = _Library("_", "IMPL")
    others.fallback(_on_host, "PrivateUse1")
    _libraries.extend((operators, others))


# ------------------------------------------------------------------------------ storage, views

# torch's CPU kernels of these look at sizes, strides and storages, at no element.
_METADATA_ONLY: Final = (
    "_reshape_alias",
    "as_strided",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "unfold",
    "view",
    "view_as_complex",
    "view_as_real",
)


def _metadata_only(name: str) -> Callable[..., Tensor]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def call(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = operator.redispatch(_CPU_KEYS, *args, **kwargs)
        return result

    return call


def _storage(nbytes: int) -> torch.UntypedStorage:
    address = memory.allocate(nbytes)
    storage: torch.UntypedStorage = _C._construct_storage_from_data_pointer(address, torch.device(NAME, 0), nbytes)
    # torch keeps the Python object of a storage for as long as the storage lives.
    weakref.finalize(storage, memory.free, address).atexit = False
    return storage


def _extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Count the elements from the first to the last that a layout reaches."""
    if 0 in size:
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def _strides(size: Sequence[int], memory_format: torch.memory_format | None) -> Sequence[int]:
    return torch.empty(size, device="meta", memory_format=memory_format).stride()


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    torch_module.check_device(device)
    if layout not in {None, torch.strided} or pin_memory:
        raise NotImplementedError("acme: tensors are strided and never pinned")
    dtype = dtype or torch.get_default_dtype()
    tensor: Tensor = _C._acc.create_empty_tensor([0], dtype)
    return tensor.set_(_storage(_extent(size, stride) * dtype.itemsize), 0, size, stride)


def _empty(size: Sequence[int], *, memory_format: torch.memory_format | None = None, **options: Any) -> Tensor:
    return _empty_strided(size, _strides(size, memory_format), **options)


def _resize(tensor: Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Tensor:
    storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
    kept, needed = storage.nbytes(), (offset + math.prod(size)) * tensor.element_size()
    if needed > kept:
        grown = _storage(needed)
        memory.window(grown.data_ptr(), 0, kept)[:] = memory.window(storage.data_ptr(), 0, kept)
        storage = grown
    return tensor.set_(storage, offset, size, _strides(size, memory_format))


# ------------------------------------------------------------------------------ copies


class _Copy:
    """The bytes of a card's tensor in host memory, and the way back."""

    def __init__(self, tensor: Tensor) -> None:
        width, size, stride = tensor.element_size(), tensor.size(), tensor.stride()
        span = _extent(size, stride) * width
        first = int(tensor.storage_offset()) * width
        self._window = memory.window(tensor.untyped_storage().data_ptr(), first, span)
        self._bytes = bytearray(self._window)
        flat = torch.empty(0, dtype=tensor.dtype)
        if span:
            flat = torch.frombuffer(self._bytes, dtype=tensor.dtype)
        self.host = flat.as_strided(size, stride)

    def write_back(self) -> None:
        self._window[:] = self._bytes


def _on_card(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:  # noqa: FBT001, FBT002, ARG001 - the signature of aten's operator
    values = _Copy(source).host if _on_card(source) else source
    if not _on_card(target):
        return target.copy_(values)
    copy = _Copy(target)
    copy.host.copy_(values)
    copy.write_back()
    return target


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - as above
    return _copy(target, source, non_blocking)


# ------------------------------------------------------------------------------ all the rest


def _on_host(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Carry an operator out on the host: copy its tensors there, and what it wrote back."""
    schema = operator._schema
    if any(result.alias_info and not result.alias_info.is_write for result in schema.returns):
        raise NotImplementedError(f"acme: {operator} makes a view, which this device does not know")
    copies: dict[int, tuple[Tensor, _Copy]] = {}

    def to_host(value: Any) -> Any:
        if _on_card(value):
            return copies.setdefault(id(value), (value, _Copy(value)))[1].host
        on_card = isinstance(value, torch.device) and value.type == NAME
        return torch.device("cpu") if on_card else value

    def to_card(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        written = [tensor for tensor, copy in copies.values() if copy.host is value]
        if written:
            return written[0]
        return _copy(_empty_strided(value.size(), value.stride(), dtype=value.dtype), value)

    names = (argument.name for argument in schema.arguments)
    given = dict(zip(names, args, strict=False)) | kwargs
    # torch hands a number that it had made a tensor (`t % 2`) over as a number again; the
    # overload for tensors refuses it, another overload of the same operator takes it.
    numbers = any(
        isinstance(argument.type, torch.TensorType) and isinstance(given.get(argument.name), Number)
        for argument in schema.arguments
    )
    call = operator.overloadpacket if numbers else operator
    results = call(*pytree.tree_map(to_host, args), **pytree.tree_map(to_host, kwargs))
    for argument in schema.arguments:
        if argument.alias_info and argument.alias_info.is_write:
            for tensor in filter(_on_card, pytree.tree_leaves(given.get(argument.name))):
                _write_back(*copies[id(tensor)])
    return pytree.tree_map(to_card, results)


def _write_back(tensor: Tensor, copy: _Copy) -> None:
    if copy.host.size() == tensor.size():
        copy.write_back()
    else:
        # The operator has given an `out` of another size the right one.
        _copy(_resize(tensor, copy.host.size()), copy.host)


_OPERATORS: Final = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "resize_": _resize,
    "copy_": _copy,
    "_copy_from": _copy_from,
}
