"""A layer of a group while a proof runs: all of its weight, or what a rank has of it.

Column layers cut their inputs off from the graph, so that their gradients can be looked at; the row layer
passes the serial sum on in place of its summand. See Note [What a run compares] in :mod:`~.proving`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from attrs import define, field

from colossal_tensor_parallel.draws import WatchDraws
from colossal_tensor_parallel.wires import call_function

__all__ = ["Member", "pick"]


class _Swap(torch.autograd.Function):
    """Another value; the gradient is passed on."""

    @staticmethod
    def forward(_ctx: Any, _value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the other value."""
        return other.clone()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient, as the value's."""
        return gradients[0], None


@define(eq=False)
class Member:
    """A layer of the group inside the copy; ``forward`` of the layer is replaced by its methods.

    Attributes:
        weight: Matrix ``[out, in]`` in whole.
        bias: Bias in whole, or None.
        own: This run's matrix.
        own_bias: This run's bias.
        seen: Inputs cut off from the graph, of columns; summands, of the row.
        given: Serial sums, for the row of a rank.
        watch: What watches random numbers between columns and row.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    own: torch.Tensor
    own_bias: torch.Tensor | None
    seen: list[torch.Tensor] = field(factory=list)
    given: list[torch.Tensor] | None = None
    watch: WatchDraws | None = None

    def take(
        self, outputs: Sequence[tuple[int, int]] | None, inputs: Sequence[tuple[int, int]] | None
    ) -> None:
        """Prepare a run with some of the output or of the input features; all when None."""
        matrix, bias = self.weight, self.bias
        if outputs is not None:
            matrix, bias = pick(matrix, outputs, 0), None if bias is None else pick(bias, outputs, 0)
        if inputs is not None:
            matrix = pick(matrix, inputs, 1)
        self.own = matrix.detach().clone().requires_grad_()
        self.own_bias = None if bias is None else bias.detach().clone().requires_grad_()
        self.seen.clear()

    def column(self, features: torch.Tensor) -> torch.Tensor:
        """Run as a column layer."""
        entered = features.detach().requires_grad_()
        self.seen.append(entered)
        if self.watch is not None:
            self.watch.is_open = True
        return F.linear(entered, self.own, self.own_bias)

    def row(self, features: torch.Tensor) -> torch.Tensor:
        """Run as a row layer."""
        if self.watch is not None:
            self.watch.is_open = False
        summand = F.linear(features, self.own)
        number = len(self.seen)
        self.seen.append(summand)
        total = summand if self.given is None else call_function(_Swap, summand, self.given[number])
        return total if self.own_bias is None else total + self.own_bias


def pick(tensor: torch.Tensor, spans: Sequence[tuple[int, int]], dim: int) -> torch.Tensor:
    """Return some runs of elements along a dim, one behind the other."""
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in spans], dim)
