"""Differentiable communication, as somebody who writes a strategy would write it on the public collectives.

Each function is named by what it does to the value; its backward is what that means for the gradient. A
*wire* is all that they need to know: who talks, and under which phase the ledger books it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve, frozen
from torch import nn

from colossal_core.mesh import GroupSpec
from colossal_core.runtime.context import Context
from colossal_core.runtime.mesh import Group

__all__ = [
    "Wire",
    "become",
    "call",
    "enter",
    "gather",
    "keep_own",
    "place_and_sum",
    "scatter_sum",
    "sum_shares",
    "wire_of",
]


@frozen(kw_only=True, eq=False)
class Wire:
    """Who talks about what.

    Attributes:
        context: Of the boosted model.
        group: The ranks.
        phase: For the ledger.
        dim: Dim along which values are cut.
    """

    context: Context
    group: Group
    phase: str
    dim: int = 0

    def along(self, dim: int) -> Wire:
        """Return the same wire for values that are cut along another dim."""
        return evolve(self, dim=dim)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a value over the group."""
        total = value.contiguous().clone()
        self.context.collectives.all_reduce(total, self.group, phase=self.phase).wait()
        return total

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks side by side along ``dim``."""
        local = value.movedim(self.dim, 0).contiguous()
        full = local.new_empty((self.group.size * local.shape[0], *local.shape[1:]))
        self.context.collectives.all_gather(full, local, self.group, phase=self.phase).wait()
        return full.movedim(0, self.dim)

    def scatter_sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece along ``dim`` of the sum over the group."""
        full = value.movedim(self.dim, 0).contiguous()
        local = full.new_empty((full.shape[0] // self.group.size, *full.shape[1:]))
        self.context.collectives.reduce_scatter(local, full, self.group, phase=self.phase).wait()
        return local.movedim(0, self.dim)

    def own(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece along ``dim``."""
        return value.chunk(self.group.size, self.dim)[self.group.index]


def wire_of(context: Context, phase: str, *axes: str, dim: int = 0) -> Wire:
    """Return the wire among the ranks that differ along some axes."""
    return Wire(context=context, group=context.mesh.group(GroupSpec(axes)), phase=phase, dim=dim)


class _Enter(torch.autograd.Function):
    """Identity; the gradient is summed."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, wire: Wire) -> torch.Tensor:
        """Return the value."""
        ctx.wire = wire
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the sum of the ranks' gradients."""
        return ctx.wire.sum(gradients[0]), None


class _SumShares(torch.autograd.Function):
    """Sum; the gradient is everybody's."""

    @staticmethod
    def forward(_: Any, value: torch.Tensor, wire: Wire) -> torch.Tensor:
        """Return the sum over the ranks."""
        return wire.sum(value)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient, which is the same on all ranks."""
        return gradients[0], None


class _KeepOwn(torch.autograd.Function):
    """Own piece; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, wire: Wire) -> torch.Tensor:
        """Return this rank's piece."""
        ctx.wire = wire
        return wire.own(value).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient of the whole."""
        return ctx.wire.gather(gradients[0]), None


class _Gather(torch.autograd.Function):
    """All pieces; of the gradient, which all ranks have, each takes its own."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, wire: Wire) -> torch.Tensor:
        """Return all pieces side by side."""
        ctx.wire = wire
        return wire.gather(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient of this rank's piece."""
        return ctx.wire.own(gradients[0]), None


class _GatherShares(_Gather):
    """All pieces; each rank has only a share of the gradient."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the sum of the ranks' gradients of this rank's piece."""
        return ctx.wire.scatter_sum(gradients[0]), None


class _ScatterSum(torch.autograd.Function):
    """Own piece of the sum; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, wire: Wire) -> torch.Tensor:
        """Return this rank's piece of the sum."""
        ctx.wire = wire
        return wire.scatter_sum(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient of the whole."""
        return ctx.wire.gather(gradients[0]), None


class _PlaceAndSum(torch.autograd.Function):
    """A piece of any size, put in its place of the whole; of the gradient each takes its own."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, wire: Wire, shape: tuple[int, ...], slices: tuple[slice, ...]
    ) -> torch.Tensor:
        """Return the whole."""
        ctx.slices = slices
        whole = value.new_zeros(shape)
        whole[slices] = value
        return wire.sum(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient of this rank's box."""
        return gradients[0][ctx.slices].contiguous(), None, None, None


def call(function: type[torch.autograd.Function], *arguments: object) -> torch.Tensor:
    """Call a differentiable function of one value."""
    apply: Callable[..., torch.Tensor] = function.apply
    return apply(*arguments)


def enter(value: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Return the value, for use by ranks that each compute something else of it."""
    return call(_Enter, value, wire)


def sum_shares(value: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Return the sum of the ranks' shares."""
    return call(_SumShares, value, wire)


def keep_own(value: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Return this rank's piece of a value that all ranks have."""
    return call(_KeepOwn, value, wire)


def gather(value: torch.Tensor, wire: Wire, *, has_shares: bool = False) -> torch.Tensor:
    """Return the pieces of all ranks.

    Args:
        value: This rank's piece, equally large on all ranks.
        wire: The ranks.
        has_shares: Whether each rank goes on with something else, so that it has a share of the gradient.
    """
    return call(_GatherShares if has_shares else _Gather, value, wire)


def scatter_sum(value: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Return this rank's piece of the sum of the ranks' shares."""
    return call(_ScatterSum, value, wire)


def place_and_sum(
    value: torch.Tensor, wire: Wire, shape: tuple[int, ...], slices: tuple[slice, ...]
) -> torch.Tensor:
    """Return the whole of which this rank has one box, boxes of any size."""
    return call(_PlaceAndSum, value, wire, shape, slices)


def become(parent: nn.Module, name: str, kind: type[nn.Module], **attributes: object) -> None:
    """Put a module of a subclass, which shares everything with the old one, in its place.

    Args:
        parent: Module whose child it is.
        name: Name of the child.
        kind: Subclass of the child's class.
        attributes: What the new module has besides.
    """
    old = getattr(parent, name)
    assert issubclass(kind, type(old))
    new = kind.__new__(kind)
    new.__dict__ = {**old.__dict__, **attributes}
    setattr(parent, name, new)
