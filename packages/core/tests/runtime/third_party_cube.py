"""A strategy along three parts of ``tensor``: linear layers in three dimensions.

Source: Agarwal et al., *A three-dimensional approach to parallel matrix multiplication*, 1995; Bian et al.,
*Maximizing Parallelism in Distributed Training for Huge Neural Networks*, 2021.

Shape legend: M rows of activations, H, N and O features before, between and behind two layers, q ranks along
each axis. Activations that enter have their rows cut over ``rows`` and, finer, over ``depth``, and their
features over ``columns``; those between the layers have ``rows`` and ``columns`` exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from colossal_core.interfaces import AbstractBorder, AbstractStrategy, Proposal
from colossal_core.mesh import GroupSpec, MeshLayout
from colossal_core.plugins import AxisSpec, StrategySpec
from colossal_core.runtime.context import Context
from colossal_core.runtime.table import Key, Part
from colossal_testkit.registry import target_of

from .third_party_cuts import apply_cuts, slab
from .third_party_regions import Wire, become, gather, place_and_sum, scatter_sum, wire_of

if TYPE_CHECKING:
    from colossal_core.plan import Plan

__all__ = ["CUBE", "Cube", "TwoLayers"]

AXES = ("rows", "columns", "depth")


@attrs.frozen(kw_only=True)
class Cube:
    """Options: ranks along each of the three axes."""

    side: int = 2


class TwoLayers(nn.Module):
    """Two linear layers."""

    def __init__(self, num_inputs: int, hidden: int, num_outputs: int) -> None:
        super().__init__()
        self.up = nn.Linear(num_inputs, hidden)
        self.down = nn.Linear(hidden, num_outputs)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Map ``[M, H]`` to ``[M, O]``."""
        outputs: torch.Tensor = self.down(F.gelu(self.up(samples)))
        return outputs


class _CubeLinear(nn.Linear):
    """A linear layer whose weight is cut in two or three directions.

    Attributes:
        before: Along it the input features differ between layers of this kind; inputs are gathered over it.
        behind: Outputs are summed and scattered over it.
        depth: The weight is gathered over it, or whole along it when this is None.
    """

    before: Wire
    behind: Wire
    depth: Wire | None

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map ``[M / q^2, H / q]`` to ``[M / q^2, N / q]``."""
        rows = gather(features, self.before, has_shares=True)
        weight = self.weight if self.depth is None else gather(self.weight, self.depth, has_shares=True)
        return scatter_sum(F.linear(rows, weight), self.behind) + self.bias


class _CubeBorder(AbstractBorder):
    """Cuts inputs to this rank's block and puts the blocks of outputs together."""

    def __init__(self, place: Mapping[str, int], side: int, wire: Wire, num_outputs: int) -> None:
        self._place, self._side, self._wire, self._num_outputs = place, side, wire, num_outputs

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Keep a block of the first argument."""
        samples, *others = args
        return (samples[self._rows(samples.shape[0]), self._columns(samples.shape[1])], *others), kwargs

    def exit(self, outputs: Any) -> Any:
        """Return the outputs of all ranks."""
        shape = (outputs.shape[0] * self._side**2, self._num_outputs)
        return place_and_sum(outputs, self._wire, shape, (self._rows(shape[0]), self._columns(shape[1])))

    def _rows(self, count: int) -> slice:
        """Return the rows of this rank: coarse over ``rows``, fine over ``depth``."""
        each = count // self._side**2
        first = (self._place["rows"] * self._side + self._place["depth"]) * each
        return slice(first, first + each)

    def _columns(self, count: int) -> slice:
        """Return the features of this rank."""
        each = count // self._side
        return slice(self._place["columns"] * each, (self._place["columns"] + 1) * each)


class CubeStrategy(AbstractStrategy):
    """Cuts the two layers of every `TwoLayers`: the first weight over three axes, the second over two."""

    def __init__(self, options: Cube) -> None:
        self.options = options

    def propose(self, models: Mapping[str, nn.Module], plan: Plan, layout: MeshLayout, rank: int) -> Proposal:
        """Cut weights and biases; what is whole along an axis has only a share of its gradient there."""
        q, place = self.options.side, layout.coordinates(rank)
        cuts: dict[Key, tuple[Part, ...]] = {}
        for model, module in models.items():
            for name, outside, inside, depth in (
                ("up", "rows", "columns", True),
                ("down", "columns", "rows", False),
            ):
                layer = module.get_submodule(name)
                weight, bias = layer.get_parameter("weight").shape, layer.get_parameter("bias").shape
                features = _span(weight[0], q, place[outside])
                inputs = _span(weight[1], q, place[inside])
                if depth:
                    inputs = _span(weight[1], q * q, place[inside] * q + place["depth"])
                whole = GroupSpec() if depth else GroupSpec(("depth",))
                fixed = AXES if depth else ("rows", "columns")
                cuts[model, f"{name}.weight"] = (
                    slab(weight, {0: features, 1: inputs}, layout.without(*fixed), whole),
                )
                shares = GroupSpec((inside, "depth"))
                cuts[model, f"{name}.bias"] = (slab(bias, {0: features}, layout.without(outside), shares),)
        # In every group of axes that a layer or the border uses, in one order.
        return Proposal(cuts=cuts, groups=(*(GroupSpec((axis,)) for axis in AXES), GroupSpec(("tensor",))))

    def apply(self, models: Mapping[str, nn.Module], proposal: Proposal, context: Context) -> None:
        """Cut the tensors and replace the layers."""
        apply_cuts(proposal, context)
        rows, columns = (wire_of(context, "cube", axis) for axis in ("rows", "columns"))
        depth = wire_of(context, "cube", "depth", dim=1)
        for module in models.values():
            become(module, "up", _CubeLinear, before=rows, behind=columns, depth=depth)
            become(module, "down", _CubeLinear, before=columns, behind=rows, depth=None)

    def borders(self, models: Mapping[str, nn.Module], context: Context) -> Mapping[str, AbstractBorder]:
        """Cut what enters and gather what leaves."""
        place = context.mesh.layout.coordinates(context.mesh.rank)
        wire = wire_of(context, "border", "tensor")
        return {
            model: _CubeBorder(place, self.options.side, wire, context.table[model, "down.bias"].numel)
            for model in models
        }


def _span(count: int, degree: int, index: int) -> tuple[int, int]:
    """Return the range of one of ``degree`` equal pieces."""
    each = count // degree
    return index * each, (index + 1) * each


CUBE = StrategySpec(
    name="cube",
    summary="A strategy of the tests.",
    options=target_of(Cube),
    target=target_of(CubeStrategy),
    axes=tuple(AxisSpec(name=name, part_of="tensor", degree="side") for name in AXES),
    phase="shard",
)
