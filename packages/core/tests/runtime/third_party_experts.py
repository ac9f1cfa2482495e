"""A strategy along a part of ``data``: experts are divided over some ranks and averaged over the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from colossal_core.interfaces import AbstractStrategy, Proposal
from colossal_core.mesh import GroupSpec, MeshLayout
from colossal_core.plugins import AxisSpec, StrategySpec
from colossal_core.runtime.context import Context
from colossal_core.runtime.table import Key, Part
from colossal_testkit.registry import target_of

from .third_party_cuts import apply_cuts, slab
from .third_party_regions import gather, scatter_sum, wire_of

if TYPE_CHECKING:
    from colossal_core.plan import Plan

__all__ = ["EXPERTS", "ExpertDegree", "Mixture"]


@attrs.frozen(kw_only=True)
class ExpertDegree:
    """Options: over how many data ranks the experts are divided."""

    degree: int = 2


class Experts(nn.Module):
    """Two-layer experts, all weights of a kind in one parameter: ``[expert, ...]``."""

    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.first = 0
        self.up = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width))

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Map ``[token, width]`` to the same shape; zero for tokens whose chosen expert is not here."""
        outputs = torch.zeros_like(tokens)
        for number in range(self.up.shape[0]):
            # Computed for all tokens, so that an expert without any has a gradient of zero, as its slice in a
            # serial run has.
            value = torch.tanh(tokens @ self.up[number]) @ self.down[number]
            outputs = outputs + value * (chosen == self.first + number).unsqueeze(-1)
        return outputs


class Mixture(nn.Module):
    """A gate that chooses one expert for each token, between two layers."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.enter = nn.Linear(5, width)
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = Experts(num_experts, width, 6)
        self.leave = nn.Linear(width, 3)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 5]`` to ``[batch, 3]``."""
        hidden = torch.tanh(self.enter(samples))
        scores = F.softmax(self.gate(hidden), dim=-1)
        weight, chosen = scores.max(dim=-1)
        outputs: torch.Tensor = self.leave(hidden + weight.unsqueeze(-1) * self.experts(hidden, chosen))
        return outputs


class ExpertsStrategy(AbstractStrategy):
    """Divides the experts, which then see the tokens of all ranks along ``expert``."""

    def __init__(self, options: ExpertDegree) -> None:
        self.options = options

    def propose(self, models: Mapping[str, nn.Module], plan: Plan, layout: MeshLayout, rank: int) -> Proposal:
        """Cut dim 0 of the experts."""
        index, degree = layout.coordinates(rank)["expert"], layout.degree("expert")
        cuts: dict[Key, tuple[Part, ...]] = {}
        for model, name, experts in _experts(models):
            for kind, parameter in experts.named_parameters():
                each = parameter.shape[0] // degree
                span = {0: (index * each, (index + 1) * each)}
                cuts[model, f"{name}.{kind}"] = (slab(parameter.shape, span, layout.without("expert")),)
        return Proposal(cuts=cuts, groups=(GroupSpec(("expert",)),))

    def apply(self, models: Mapping[str, nn.Module], proposal: Proposal, context: Context) -> None:
        """Bring the tokens to the experts and their outputs back; average over ``expert_data`` only.

        The divisor stays that of all data ranks: a loss is the mean over all of them.
        """
        apply_cuts(proposal, context, reduce=GroupSpec(("expert_data",)))
        wire = wire_of(context, "experts", "expert")
        for _, _, experts in _experts(models):
            experts.first = wire.group.index * experts.up.shape[0]
            experts.register_forward_pre_hook(
                lambda _, args: (gather(args[0], wire, has_shares=True), wire.gather(args[1]))
            )
            experts.register_forward_hook(lambda _, _args, outputs: scatter_sum(outputs, wire))


def _experts(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, Experts]]:
    """Yield all experts with the names of their model and of themselves."""
    for model, module in models.items():
        for name, inner in module.named_modules():
            if isinstance(inner, Experts):
                yield model, name, inner


EXPERTS = StrategySpec(
    name="experts",
    summary="A strategy of the tests.",
    options=target_of(ExpertDegree),
    target=target_of(ExpertsStrategy),
    axes=(
        AxisSpec(
            name="expert_data", part_of="data", takes_rest=True, divides_batch=True, gradients="average"
        ),
        AxisSpec(name="expert", part_of="data", divides_batch=True, gradients="average"),
    ),
    phase="shard",
)
