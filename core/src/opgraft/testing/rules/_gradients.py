"""Rules on gradients."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from opgraft.spec import Tolerance
from opgraft.testing import judges
from opgraft.testing.calls import Call
from opgraft.testing.faults import Declined, NotApplicable, Violation
from opgraft.testing.groups import sizes
from opgraft.testing.rule import rule
from opgraft.testing.subject import DIRECT, Subject

_LOOSE: Final = Tolerance(rtol=1e-3, atol=1e-5, reason="a derivative amplifies rounding")


@rule()
def gradients_are_natives(subject: Subject) -> None:
    """A kernel declared differentiable gives native's gradients."""
    if not subject.kernel.differentiable:
        raise NotApplicable("the kernel is not declared differentiable")
    tried = False
    for call in sizes(subject, (1, 5, 33)):
        tried |= _compare(subject, call)
    if not tried:
        raise NotApplicable("the op has no input of floating point")


def _compare(subject: Subject, call: Call) -> bool:
    mine, _ = subject.prepare(call)
    theirs, _ = subject.prepare(call, torch.device("cpu"))
    names = [name for name, value in theirs.items() if isinstance(value, Tensor) and value.dtype.is_floating_point]
    if not names:
        return False
    for name in names:
        mine[name] = mine[name].detach().requires_grad_()
        theirs[name] = theirs[name].detach().requires_grad_()
    args, kwargs = subject.split(theirs)
    native = _tensors(subject.op.forward_native(*args, **kwargs))
    try:
        result = _tensors(subject.invoke(DIRECT, call, mine))
    except Declined:
        return False
    if not any(one.requires_grad for one in native):
        return False
    if not all(a.requires_grad == b.requires_grad for a, b in zip(result, native, strict=False)):
        raise Violation("the result records no gradient", call, DIRECT)
    _backward(result, subject.device)
    _backward(native, torch.device("cpu"))
    for name in names:
        got, expected = mine[name].grad, theirs[name].grad
        if (got is None) != (expected is None):
            raise Violation(f"{name} gets gradient {got}", call, DIRECT)
        fault = got is not None and judges.difference(got, expected, _LOOSE)
        if fault:
            raise Violation(f"gradient of {name}: {fault}", call, DIRECT)
    return True


def _tensors(result: Any) -> list[Tensor]:
    results = result if isinstance(result, tuple) else (result,)
    return [one for one in results if isinstance(one, Tensor)]


def _backward(results: list[Tensor], device: torch.device) -> None:
    wanted = [one for one in results if one.requires_grad]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.rand(one.shape, generator=generator).to(one.dtype).to(device) for one in wanted]
    torch.autograd.backward(wanted, weights)
