"""Differentiable communication: what a collective does to a value, and what that means for its gradient.

The one idea: a tensor that all tensor ranks have is *common*, one of which each has a piece or a summand is
*local*. The gradient of a common value is common, that of a local one local. Code changes from one to the
other by these operators:

=====================  ================  ===================
operator               forward           backward
=====================  ================  ===================
:func:`enter`          nothing           sum
:func:`add_up`         sum               nothing
:func:`divide`         own piece         gather
:func:`join_pieces`    gather            own piece
:func:`sum_pieces`     reduce-scatter    gather
=====================  ================  ===================

Source: Shoeybi et al., *Megatron-LM*, 2019, section 3 (the operators f and g); Korthikanti et al.,
*Reducing Activation Recomputation*, 2022, section 4.2.2 (those that divide the sequence).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch
from attrs import frozen

from colossal_tensor_parallel.spans import split_evenly

if TYPE_CHECKING:
    from colossal_core.runtime.collectives import Collectives, Pending
    from colossal_core.runtime.mesh import Group

__all__ = [
    "PHASE",
    "Wire",
    "add_up",
    "call_function",
    "divide",
    "enter",
    "join_pieces",
    "on_first",
    "sum_pieces",
]

PHASE = "tensor"
"""Under which the ledger books activations and their gradients."""


@final
@frozen(kw_only=True, eq=False)
class Wire:
    """Who talks, and how it is booked.

    Attributes:
        collectives: Of the boosted model.
        group: The ranks along the axis ``tensor``.
        phase: For the ledger.
    """

    collectives: Collectives
    group: Group
    phase: str = PHASE

    def start_sum(self, value: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        """Start the sum of a value over the ranks; return where it will be, and what to wait for."""
        total = value.clone(memory_format=torch.contiguous_format)
        return total, self.collectives.all_reduce(total, self.group, phase=self.phase)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a value over the ranks, the same bits on each of them."""
        total, pending = self.start_sum(value)
        pending.wait()
        return total

    def largest(self, value: torch.Tensor) -> torch.Tensor:
        """Return the largest value among the ranks, element by element."""
        most = value.clone(memory_format=torch.contiguous_format)
        self.collectives.all_reduce(most, self.group, phase=self.phase, op="max").wait()
        return most

    def join(self, piece: torch.Tensor, size: int, dim: int) -> torch.Tensor:
        """Return the pieces of all ranks side by side along ``dim``, where they are ``size`` together.

        Pieces as :func:`~.spans.split_evenly` makes them; they travel in the size of the largest. The result
        owns its memory, since autograd lets nobody write into a view that a function returns.
        """
        return self.start_join(piece, size, dim)()

    def start_join(self, piece: torch.Tensor, size: int, dim: int) -> Callable[[], torch.Tensor]:
        """Start what :meth:`join` does; return what waits for it and returns its result."""
        spans = split_evenly(size, self.group.size)
        largest = max(stop - start for start, stop in spans)
        local = piece.movedim(dim, 0)
        lacking = largest - local.shape[0]
        if lacking:
            local = torch.cat([local, local.new_zeros((lacking, *local.shape[1:]))])
        local = local.contiguous()
        full = local.new_empty((self.group.size * largest, *local.shape[1:]))
        pending = self.collectives.all_gather(full, local, self.group, phase=self.phase)

        def finish() -> torch.Tensor:
            """Wait, and put the pieces side by side."""
            pending.wait()
            joined = full
            if size != len(full):
                rows = full.unflatten(0, (self.group.size, largest))
                joined = torch.cat([rows[index, : stop - start] for index, (start, stop) in enumerate(spans)])
            moved = joined.movedim(0, dim)
            return joined if moved.shape == joined.shape and moved.is_contiguous() else moved.contiguous()

        return finish

    def start_scatter(self, value: torch.Tensor, dim: int) -> Callable[[], torch.Tensor]:
        """Start the sum over the ranks of which this rank keeps its piece along ``dim``.

        Pieces travel in the size of the largest. Returns what waits for it and returns the piece.
        """
        spans = split_evenly(value.shape[dim], self.group.size)
        largest = max(stop - start for start, stop in spans)
        moved = value.movedim(dim, 0)
        if len(moved) == largest * self.group.size:
            full = moved.contiguous()
        else:
            full = moved.new_zeros((largest * self.group.size, *moved.shape[1:]))
            for index, (start, stop) in enumerate(spans):
                full[index * largest : index * largest + stop - start] = moved[start:stop]
        own = full.new_empty((largest, *full.shape[1:]))
        pending = self.collectives.reduce_scatter(own, full, self.group, phase=self.phase)

        def finish() -> torch.Tensor:
            """Wait, and return the piece."""
            pending.wait()
            start, stop = spans[self.group.index]
            return own[: stop - start].movedim(0, dim).contiguous()

        return finish

    def own(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's piece along ``dim``, as a view."""
        start, stop = split_evenly(value.shape[dim], self.group.size)[self.group.index]
        return value.narrow(dim, start, stop - start)


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


class _AddUp(torch.autograd.Function):
    """Sum; the gradient is common."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, wire: Wire) -> torch.Tensor:
        """Return the sum over the ranks, in the memory of the summand."""
        if not value.is_contiguous():
            return wire.sum(value)
        ctx.mark_dirty(value)
        wire.collectives.all_reduce(value, wire.group, phase=wire.phase).wait()
        return value

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient, which is the same on all ranks."""
        return gradients[0], None


class _JoinPieces(torch.autograd.Function):
    """All pieces; of the gradient, which is common, each rank takes its own."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, wire: Wire, size: int, dim: int) -> torch.Tensor:
        """Return all pieces side by side."""
        ctx.wire, ctx.dim = wire, dim
        return wire.join(value, size, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient of this rank's piece."""
        return ctx.wire.own(gradients[0], ctx.dim).contiguous(), None, None, None


class _Divide(torch.autograd.Function):
    """This rank's piece; the gradients of all pieces are gathered."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, wire: Wire, dim: int) -> torch.Tensor:
        """Return the piece."""
        ctx.wire, ctx.dim, ctx.size = wire, dim, value.shape[dim]
        return wire.own(value, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradients of all pieces side by side."""
        return ctx.wire.join(gradients[0], ctx.size, ctx.dim), None, None


class _SumPieces(torch.autograd.Function):
    """This rank's piece of the sum; the gradients of all pieces are gathered."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, wire: Wire, dim: int) -> torch.Tensor:
        """Return the piece of the sum."""
        ctx.wire, ctx.dim, ctx.size = wire, dim, value.shape[dim]
        return wire.start_scatter(value, dim)()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradients of all pieces side by side."""
        return ctx.wire.join(gradients[0], ctx.size, ctx.dim), None, None


class _OnFirst(torch.autograd.Function):
    """Identity; only the first rank has a gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, wire: Wire) -> torch.Tensor:
        """Return the value."""
        ctx.is_first = wire.group.index == 0
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient, or zeros."""
        return gradients[0] if ctx.is_first else torch.zeros_like(gradients[0]), None


def call_function(function: type[torch.autograd.Function], *arguments: object) -> torch.Tensor:
    """Call a differentiable function of one value; torch does not say what it returns."""
    apply: Callable[..., torch.Tensor] = function.apply
    return apply(*arguments)


def enter(value: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Return a common value, of which each rank is going to compute something else."""
    return call_function(_Enter, value, wire)


def add_up(value: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Return the sum of the ranks' summands, as a common value.

    Args:
        value: This rank's summand, which nobody else needs: its memory takes the sum.
        wire: The ranks.
    """
    return call_function(_AddUp, value, wire)


def join_pieces(value: torch.Tensor, wire: Wire, size: int, dim: int) -> torch.Tensor:
    """Return the common value of which each rank has a piece along ``dim``, ``size`` elements together."""
    return call_function(_JoinPieces, value, wire, size, dim)


def divide(value: torch.Tensor, wire: Wire, dim: int) -> torch.Tensor:
    """Return this rank's piece of a common value along ``dim``."""
    return call_function(_Divide, value, wire, dim)


def sum_pieces(value: torch.Tensor, wire: Wire, dim: int) -> torch.Tensor:
    """Return this rank's piece along ``dim`` of the sum of the ranks' summands."""
    return call_function(_SumPieces, value, wire, dim)


def on_first(value: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Return a common parameter whose gradient, common here, will be summed over the ranks."""
    return call_function(_OnFirst, value, wire)
