"""A small strategy for tests: the output features of linear layers are divided among the ranks of ``tensor``.

It is what a stranger could write: options, a record, a class. The features rarely divide, so the last ranks
hold padding, and a layer whose weight is tied to another one stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from colossal_core.boxes import Box
from colossal_core.errors import UsageError
from colossal_core.interfaces import AbstractStrategy, Proposal
from colossal_core.mesh import GroupSpec, MeshLayout
from colossal_core.plugins import AxisSpec, Registry, StrategySpec
from colossal_core.runtime.table import Key, Part
from colossal_testkit.registry import isolated_registry, target_of

if TYPE_CHECKING:
    from colossal_core.plan import Plan
    from colossal_core.runtime.collectives import Collectives
    from colossal_core.runtime.context import Context
    from colossal_core.runtime.mesh import Group


@attrs.frozen(kw_only=True)
class Columns:
    """Divide the output features of linear layers.

    Attributes:
        degree: Number of ranks that share a layer.
        fault: Which promise the strategy breaks, for tests of the contract itself: ``"impure"``,
            ``"foreign"`` modules, ``"gap"`` or ``"silent"`` in the table, ``"no sum"`` in backward.
    """

    degree: int = 2
    fault: str = ""


class ColumnLinear(nn.Linear):
    """A linear layer that holds some of its features, and returns all of them."""

    collectives: Collectives
    group: Group
    num_features: int
    loses_gradients: bool = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that torch uses
        """Compute the local features and gather the others."""
        enter: Callable[..., torch.Tensor] = _Enter.apply
        leave: Callable[..., torch.Tensor] = _Leave.apply
        local = nn.functional.linear(enter(input, self), self.weight, self.bias)
        return leave(local, self)[..., : self.num_features]


class Foreign(nn.Module):
    """A layer that is no linear layer any more: what a careless wrapper leaves behind."""

    def __init__(self, layer: ColumnLinear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        vars(self)["layer"] = layer

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Do as the layer does."""
        layer: ColumnLinear = vars(self)["layer"]
        return layer.forward(samples)


class _Enter(torch.autograd.Function):
    """Identity whose backward sums what each rank's features ask of the input."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, layer: ColumnLinear) -> torch.Tensor:
        """Return the input."""
        context.layer = layer
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        """Sum over the group."""
        total = gradients[0].contiguous().clone()
        layer: ColumnLinear = context.layer
        if not layer.loses_gradients:
            layer.collectives.all_reduce(total, layer.group, phase="columns").wait()
        return total, None


class _Leave(torch.autograd.Function):
    """Gathers features along the last dim; backward takes this rank's own."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, layer: ColumnLinear) -> torch.Tensor:
        """Return the features of all ranks, padding included, features first."""
        context.layer = layer
        local = value.movedim(-1, 0).contiguous()
        full = local.new_empty((layer.group.size * local.shape[0], *local.shape[1:]))
        layer.collectives.all_gather(full, local, layer.group, phase="columns").wait()
        return full.movedim(0, -1)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient of this rank's features."""
        layer: ColumnLinear = context.layer
        size = gradients[0].shape[-1] // layer.group.size
        return gradients[0].narrow(-1, layer.group.index * size, size), None


class ColumnStrategy(AbstractStrategy):
    """Cuts every linear layer whose parameters are its own."""

    def __init__(self, options: Columns) -> None:
        """Remember the options."""
        self.options = options

    def propose(self, models: Mapping[str, nn.Module], plan: Plan, layout: MeshLayout, rank: int) -> Proposal:
        """Decide which rows of which weights this rank holds."""
        holders = GroupSpec(tuple(axis.name for axis in layout.axes if axis.name != "tensor"))
        degree, index = layout.degree("tensor"), layout.coordinates(rank).get("tensor", 0)
        cuts: dict[Key, tuple[Part, ...]] = {}
        for model, module in models.items():
            if any(isinstance(inner, nn.LSTM) for inner in module.modules()):
                raise UsageError("columns cannot cut recurrent layers", hint="leave the strategy out")
            for name, layer in _layers(module):
                for kind, parameter in layer.named_parameters():
                    cuts[model, f"{name}.{kind}"] = _parts(tuple(parameter.shape), degree, index, holders)
            if self.options.fault == "impure":
                next(module.parameters()).data.mul_(1 + 1e-15)
        return Proposal(cuts=cuts, groups=(GroupSpec(("tensor",)),))

    def apply(self, models: Mapping[str, nn.Module], proposal: Proposal, context: Context) -> None:
        """Cut the parameters in place and put the gathering layers where the plain ones were."""
        group = context.mesh.group(GroupSpec(("tensor",)))
        for model, module in models.items():
            for name, layer in list(_layers(module)):
                cut = _make_layer(layer, context.collectives, group)
                cut.loses_gradients = self.options.fault == "no sum"
                for kind, parameter in layer.named_parameters():
                    parts = proposal.cuts[model, f"{name}.{kind}"]
                    parameter.data = _cut(parameter.detach(), parts, cut.out_features)
                    if self.options.fault != "silent":
                        whose = parts if self.options.fault != "gap" else parts[:0]
                        context.table.cut((model, f"{name}.{kind}"), parts=whose, tensor=parameter)
                parent, _, child = name.rpartition(".")
                replacement = Foreign(cut) if self.options.fault == "foreign" else cut
                setattr(module.get_submodule(parent), child, replacement)


def _layers(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Return the linear layers below the root whose weight nobody else has, by name."""
    uses: dict[torch.Tensor, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        uses[parameter] = uses.get(parameter, 0) + 1
    return [
        (name, layer)
        for name, layer in module.named_modules()
        if name and type(layer) is nn.Linear and uses[layer.weight] == 1
    ]


def _parts(shape: tuple[int, ...], degree: int, index: int, holders: GroupSpec) -> tuple[Part, ...]:
    """Return the rows of a weight or bias that a rank holds; none where only padding is left."""
    size = -(-shape[0] // degree)
    start, stop = min(index * size, shape[0]), min((index + 1) * size, shape[0])
    if start == stop:
        return ()
    rest = (0,) * (len(shape) - 1)
    box = Box((start, *rest), (stop - start, *shape[1:]))
    return (Part(box=box, local=(0, *rest), holders=holders),)


def _cut(full: torch.Tensor, parts: tuple[Part, ...], num_rows: int) -> torch.Tensor:
    """Return the local rows of a parameter, padded with zeros."""
    local = full.new_zeros((num_rows, *full.shape[1:]))
    for part in parts:
        local[: part.box.size[0]] = full[part.box.slices]
    return local


def _make_layer(layer: nn.Linear, collectives: Collectives, group: Group) -> ColumnLinear:
    """Return the gathering layer over the parameters of a plain one."""
    cut = ColumnLinear(layer.in_features, 1, bias=layer.bias is not None, device="meta")
    cut.weight, cut.bias = layer.weight, layer.bias
    cut.num_features = layer.out_features
    cut.out_features = -(-layer.out_features // group.size)
    cut.collectives, cut.group = collectives, group
    cut.train(layer.training)
    return cut


def make_registry() -> Registry:
    """Return a registry that knows the strategy."""
    return isolated_registry(
        StrategySpec(
            name="columns",
            summary="Divide the output features of linear layers.",
            options=target_of(Columns),
            target=target_of(ColumnStrategy),
            axes=(AxisSpec(name="tensor"),),
            phase="shard",
        )
    )
