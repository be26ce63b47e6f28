"""Rules on what a kernel declares; none needs its hardware."""

from __future__ import annotations

from collections.abc import Mapping

from opgraft.errors import OpgraftError
from opgraft.hardware import arch_key
from opgraft.spec import dtypes_of
from opgraft.testing.calls import Material
from opgraft.testing.faults import NotApplicable, Violation
from opgraft.testing.rule import Offered, Scope, rule


@rule(scope=Scope.KERNEL)
def capabilities_are_the_backends(offered: Offered) -> None:
    """A kernel runs on platforms that its backend names, or on any device."""
    mine = set(offered.record.platforms)
    others = {one.platform for one in offered.kernel.capabilities} - mine - {"*"}
    if others:
        names = ", ".join(sorted(others))
        raise Violation(f"the kernel declares {names}, the backend only {', '.join(sorted(mine))}")


@rule(scope=Scope.KERNEL)
def arch_windows_are_closed(offered: Offered) -> None:
    """A kernel that needs a smallest arch also names the largest that it was made for."""
    for one in offered.kernel.capabilities:
        if one.min_arch and not one.max_arch:
            raise Violation(f"{one} has no upper end: it also claims every arch to come")


@rule(scope=Scope.KERNEL)
def dtypes_are_the_ops(offered: Offered) -> None:
    """A kernel declares dtypes that its op has, of parameters that its op has."""
    rule = offered.kernel.dtypes
    if rule is None:
        raise NotApplicable("the kernel takes the op's own dtypes")
    material = Material(offered.op)
    names = (*material.inputs, *material.writes)
    if isinstance(rule, Mapping):
        unknown = sorted(set(rule) - set(names))
        if unknown:
            raise Violation(f"dtypes are declared for {', '.join(unknown)}, which is no tensor")
    for name in material.inputs:
        wanted = dtypes_of(rule, name) or ()
        extra = [word for word in wanted if word not in material.declared(name)]
        if extra and (isinstance(rule, Mapping) or not set(wanted) & set(material.declared(name))):
            supported = ", ".join(material.declared(name))
            raise Violation(f"{name}: {', '.join(extra)} is declared, the op has only {supported}")
    if not isinstance(rule, Mapping):
        every = {word for name in names for word in material.declared(name)}
        extra = [word for word in rule if word not in every]
        if extra:
            raise Violation(f"{', '.join(extra)} is declared, no parameter of the op has it")


@rule(scope=Scope.KERNEL)
def declared_archs_are_honoured(offered: Offered) -> None:
    """The kernel is a candidate within its declared arch window and not outside."""
    from opgraft import explain_for

    kernel = offered.kernel
    bounded = [one for one in kernel.capabilities if one.min_arch or one.max_arch or one.archs]
    if not bounded:
        raise NotApplicable("no arch is declared")
    for one in bounded:
        outside = "gfx000" if one.archs else "0.1" if one.min_arch else "999.0"
        known = arch_key(outside)
        if known is None and not one.archs:
            continue
        try:
            selection = explain_for(kernel.op, device=one.platform, arch=outside)
        except OpgraftError as error:
            raise Violation(f"explain_for on arch {outside} fails: {error}") from error
        taken = [c for c in selection.candidates if c.accepted and c.kernel == kernel]
        if taken:
            raise Violation(f"the kernel is taken on {one.platform} {outside}, declared is {one}")
