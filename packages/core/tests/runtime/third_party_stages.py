"""A strategy along ``pipeline``: modules in a row are dealt to stages, and an embedding is tied to the head.

It emulates a pipeline without an executor: every rank runs the whole forward, but a module computes on its
stage only, and what it returns is broadcast. The tied weight is on the first and on the last stage, each of
which computes a share of its gradient; stages between them hold nothing of it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from colossal_core.interfaces import AbstractBorder, AbstractStrategy, Proposal
from colossal_core.mesh import GroupSpec, MeshLayout
from colossal_core.plugins import AxisSpec, StrategySpec
from colossal_core.runtime.context import Context
from colossal_core.runtime.table import Key, Part
from colossal_testkit.registry import target_of

from .third_party_cuts import apply_cuts, slab
from .third_party_regions import Wire, become, call, wire_of

if TYPE_CHECKING:
    from colossal_core.plan import Plan

__all__ = ["STAGES", "Stages", "TiedChain"]


@attrs.frozen(kw_only=True)
class Stages:
    """Options: how many stages."""

    degree: int = 2


class TiedChain(nn.Module):
    """An embedding, some layers, and a head that shares the embedding's weight."""

    def __init__(self, vocabulary: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map token numbers ``[batch, time]`` to logits ``[batch, time, vocabulary]``."""
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        outputs: torch.Tensor = self.head(hidden)
        return outputs


class _Broadcast(torch.autograd.Function):
    """The value of one stage on all; the gradient is that of whichever stage goes on with it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, wire: Wire, stage: int) -> torch.Tensor:
        """Return the value of the stage."""
        ctx.wire = wire
        result = value.contiguous().clone()
        wire.context.collectives.broadcast(result, wire.group, source=stage, phase=wire.phase).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient of the stage that has one."""
        return ctx.wire.sum(gradients[0]), None, None


class _Absent(torch.autograd.Function):
    """Stands for a computation on another stage: it has the shape, and no gradient flows through it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return zeros."""
        ctx.shape = anchor.shape
        return anchor.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return no gradient, in the shape of one."""
        return gradients[0].new_zeros(ctx.shape), None


class _AbsentLinear(nn.Linear):
    """A linear layer of another stage."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return something of the right shape."""
        return call(_Absent, features, (*features.shape[:-1], self.out_features))


class _AbsentEmbedding(nn.Embedding):
    """An embedding of another stage."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return something of the right shape that takes part in backward."""
        shape = (*ids.shape, self.embedding_dim)
        return torch.zeros(shape, dtype=self.weight.dtype, requires_grad=True)


class _Once(torch.autograd.Function):
    """Identity; the gradient is multiplied by 1 on one stage, and by 0 on the others."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the value."""
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient on one stage, zeros on the others."""
        return gradients[0] * ctx.factor, None


class _LastStageBorder(AbstractBorder):
    """All stages see the outputs and compute the loss; the gradient enters on the last one."""

    def __init__(self, *, is_last: bool) -> None:
        self._is_last = is_last

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs unchanged."""
        return args, kwargs

    def exit(self, outputs: Any) -> Any:
        """Return the outputs unchanged."""
        return call(_Once, outputs, float(self._is_last))


class StagesStrategy(AbstractStrategy):
    """Deals the modules of every `TiedChain` to stages, layers in equal numbers."""

    def __init__(self, options: Stages) -> None:
        self.options = options

    def propose(self, models: Mapping[str, nn.Module], plan: Plan, layout: MeshLayout, rank: int) -> Proposal:
        """Keep what belongs to this stage, and the tied weight on both ends."""
        stage, last = layout.coordinates(rank)["pipeline"], self.options.degree - 1
        ends = GroupSpec(("pipeline",), (((0,), (last,)),))
        cuts: dict[Key, tuple[Part, ...]] = {}
        for model, module in models.items():
            for child, home in _homes(module, self.options.degree).items():
                for name, parameter in module.get_submodule(child).named_parameters():
                    part = slab(parameter.shape, {}, layout.without("pipeline"))
                    cuts[model, f"{child}.{name}"] = (part,) if home == stage else ()
            tied = module.get_submodule("embedding").get_parameter("weight")
            holders = layout.product([layout.without("pipeline"), ends])
            cuts.pop((model, "head.weight"))
            cuts[model, "embedding.weight"] = (
                (slab(tied.shape, {}, holders, ends),) if stage in (0, last) else ()
            )
        return Proposal(cuts=cuts, groups=(GroupSpec(("pipeline",)),))

    def apply(self, models: Mapping[str, nn.Module], proposal: Proposal, context: Context) -> None:
        """Empty the parameters of other stages, and let modules compute where they live."""
        apply_cuts(proposal, context)
        wire = wire_of(context, "stages", "pipeline")
        for module in models.values():
            for child, home in _homes(module, self.options.degree).items():
                parent, _, name = child.rpartition(".")
                if home != wire.group.index:
                    absent = _AbsentEmbedding if name == "embedding" else _AbsentLinear
                    become(module.get_submodule(parent), name, absent)
                spread = functools.partial(_spread, wire, home)
                module.get_submodule(child).register_forward_hook(spread)

    def borders(self, models: Mapping[str, nn.Module], context: Context) -> Mapping[str, AbstractBorder]:
        """Let the gradient in on the last stage only."""
        is_last = context.mesh.layout.coordinates(context.mesh.rank)["pipeline"] == self.options.degree - 1
        return {model: _LastStageBorder(is_last=is_last) for model in models}


def _spread(wire: Wire, home: int, _: nn.Module, _args: object, outputs: torch.Tensor) -> torch.Tensor:
    """Return on all stages what one of them computed; a forward hook once the first two are given."""
    return call(_Broadcast, outputs, wire, home)


def _homes(module: nn.Module, degree: int) -> dict[str, int]:
    """Return the stage of each module that has parameters."""
    layers = [name for name, _ in module.get_submodule("layers").named_children()]
    homes = {f"layers.{name}": number * degree // len(layers) for number, name in enumerate(layers)}
    return {"embedding": 0, **homes, "head": degree - 1}


STAGES = StrategySpec(
    name="stages",
    summary="A strategy of the tests.",
    options=target_of(Stages),
    target=target_of(StagesStrategy),
    axes=(AxisSpec(name="pipeline"),),
    phase="partition",
)
