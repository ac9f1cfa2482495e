"""Differentiable communication: what a collective does to a value, and what that means for its gradient.

The one idea: a tensor that all tensor ranks have is *common*, one of which each has a piece or a summand is
*local*. Code changes from one to the other by :func:`enter` (forward nothing; backward sum) and by its
counterparts :func:`add_up` (forward sum; backward nothing) and :func:`join_pieces` (forward gather; backward
own piece).

Source: Shoeybi et al., *Megatron-LM*, 2019, section 3 (the operators f and g).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
from attrs import frozen

from colossal_tensor_parallel.spans import split_evenly

if TYPE_CHECKING:
    from collections.abc import Callable

    from colossal_core.runtime.collectives import Collectives, Pending
    from colossal_core.runtime.mesh import Group

__all__ = ["PHASE", "Entrance", "Wire", "add_up", "call_function", "enter", "join_pieces"]

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
        spans = split_evenly(size, self.group.size)
        largest = max(stop - start for start, stop in spans)
        local = piece.movedim(dim, 0)
        lacking = largest - local.shape[0]
        if lacking:
            local = torch.cat([local, local.new_zeros((lacking, *local.shape[1:]))])
        local = local.contiguous()
        full = local.new_empty((self.group.size * largest, *local.shape[1:]))
        self.collectives.all_gather(full, local, self.group, phase=self.phase).wait()
        if size != len(full):
            rows = full.unflatten(0, (self.group.size, largest))
            full = torch.cat([rows[index, : stop - start] for index, (start, stop) in enumerate(spans)])
        moved = full.movedim(0, dim)
        return full if moved.shape == full.shape and moved.is_contiguous() else moved.contiguous()

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


@final
class Entrance:
    """Where the layers of one model enter common values; one value that several layers read enters once.

    Queries, keys and values read the same tensor: its gradients are then summed on this rank first, and
    travel in one message.
    """

    def __init__(self, wire: Wire) -> None:
        """Hold the wire."""
        self.wire = wire
        self._last: tuple[torch.Tensor, int, torch.Tensor] | None = None

    def enter(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value for use by a cut layer."""
        if not (value.requires_grad and torch.is_grad_enabled()):
            return value
        if self._last is not None:
            seen, version, entered = self._last
            if seen is value and version == value._version:
                return entered
        entered = enter(value, self.wire)
        self._last = (value, value._version, entered)
        return entered

    def clear(self) -> None:
        """Forget the last value, which would keep its graph alive."""
        self._last = None
