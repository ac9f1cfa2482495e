"""A strategy along ``tensor`` that composes with others: rows of embeddings, and of heads tied to them.

It cuts what an earlier strategy left, so a weight that a pipeline put on its first and its last stage ends up
on some ranks of each, with two reasons for a group at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from colossal_core.interfaces import AbstractStrategy, Proposal
from colossal_core.mesh import GroupSpec, MeshLayout
from colossal_core.plugins import AxisSpec, StrategySpec
from colossal_core.runtime.context import Context
from colossal_core.runtime.table import Key, Part
from colossal_testkit.registry import target_of

from .third_party_cuts import cut_further, slab
from .third_party_regions import Wire, become, enter, gather, sum_shares, wire_of
from .third_party_tensor import Degree

if TYPE_CHECKING:
    from colossal_core.plan import Plan

__all__ = ["VOCABULARY"]


class _VocabularyEmbedding(nn.Embedding):
    """An embedding that has some of its rows; the others are zero here and come from other ranks."""

    wire: Wire
    first: int

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up the rows that are here, and sum over the ranks."""
        local = ids - self.first
        outside = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(outside, 0), self.weight)
        return sum_shares(rows.masked_fill(outside.unsqueeze(-1), 0.0), self.wire)


class _VocabularyHead(nn.Linear):
    """A head that computes some of the logits, and returns all."""

    wire: Wire

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits that are here, and gather the others."""
        logits = F.linear(enter(hidden, self.wire), self.weight, self.bias)
        return gather(logits, self.wire)


class VocabularyStrategy(AbstractStrategy):
    """Divides the rows of every embedding, and of heads tied to one, whatever model they are of."""

    def __init__(self, options: Degree) -> None:
        self.options = options

    def propose(self, models: Mapping[str, nn.Module], plan: Plan, layout: MeshLayout, rank: int) -> Proposal:
        """Cut the rows; of several names of a weight, the last one stands here, which is an alias."""
        index, holders = layout.coordinates(rank)["tensor"], layout.without("tensor")
        cuts: dict[torch.Tensor, tuple[Key, tuple[Part, ...]]] = {}
        for model, name, module in _layers(models):
            for kind, parameter in module.named_parameters():
                part = slab(parameter.shape, {0: self._rows(parameter.shape[0], index)}, holders)
                cuts[parameter] = (model, f"{name}.{kind}"), (part,)
        return Proposal(cuts=dict(cuts.values()), groups=(GroupSpec(("tensor",)),))

    def apply(self, models: Mapping[str, nn.Module], proposal: Proposal, context: Context) -> None:
        """Cut what is on this rank, and replace the layers that have something of it."""
        wire = wire_of(context, "vocabulary", "tensor")
        layers = list(_layers(models))
        for key in proposal.cuts:
            cut_further(key, self._rows(context.table[key].shape[0], wire.group.index), "tensor", context)
        for model, name, module in layers:
            parts = context.table[model, f"{name}.weight"].parts
            parent, _, child = name.rpartition(".")
            home = models[model].get_submodule(parent)
            if parts and type(module) is nn.Embedding:
                become(home, child, _VocabularyEmbedding, wire=wire, first=parts[0].box.offset[0])
            elif parts and type(module) is nn.Linear:
                become(home, child, _VocabularyHead, wire=wire.along(-1))

    def _rows(self, count: int, index: int) -> tuple[int, int]:
        """Return the rows of a rank."""
        each = count // self.options.degree
        return index * each, (index + 1) * each


def _layers(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield embeddings and heads tied to one, with the names of their model and of themselves."""
    modules = [
        (model, name, inner) for model, module in models.items() for name, inner in module.named_modules()
    ]
    weights = {inner.weight for _, _, inner in modules if isinstance(inner, nn.Embedding)}
    for model, name, inner in modules:
        if isinstance(inner, nn.Embedding | nn.Linear) and inner.weight in weights:
            yield model, name, inner


VOCABULARY = StrategySpec(
    name="vocabulary",
    summary="A strategy of the tests.",
    options=target_of(Degree),
    target=target_of(VocabularyStrategy),
    axes=(AxisSpec(name="tensor"),),
    phase="shard",
)
