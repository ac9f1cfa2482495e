"""Borders may put work off while only a loss sees the outputs; whoever else sees them gets it done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import nn

from colossal_core.interfaces import AbstractBorder, AbstractStrategy, Proposal
from colossal_core.mesh import MeshLayout
from colossal_core.plan import Plan
from colossal_core.plugins import StrategySpec
from colossal_core.runtime.booster import Booster
from colossal_core.runtime.context import Context
from colossal_testkit.registry import isolated_registry, target_of


@attrs.frozen
class Late:
    """Options of a strategy that puts off what its border does."""


class LateBorder(AbstractBorder):
    """Adds a hundred to outputs, unless they go into a loss."""

    def __init__(self, context: Context) -> None:
        self._crossing = context.crossing
        self._crossing.completions.append(lambda outputs: outputs + 100)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Leave arguments alone."""
        return args, kwargs

    def exit(self, outputs: Any) -> Any:
        """Add, or leave it to the completion."""
        return outputs if self._crossing.goes_to_loss else outputs + 100


class LateStrategy(AbstractStrategy):
    """Brings the border."""

    def __init__(self, options: Late) -> None:
        self.options = options

    def propose(self, models: Mapping[str, nn.Module], plan: Plan, layout: MeshLayout, rank: int) -> Proposal:
        """Cut nothing."""
        return Proposal()

    def apply(self, models: Mapping[str, nn.Module], proposal: Proposal, context: Context) -> None:
        """Compare something with the other ranks, of which there are none here."""
        context.agreement.share("nothing", "equal")

    def borders(self, models: Mapping[str, nn.Module], context: Context) -> Mapping[str, AbstractBorder]:
        """Give the border to every model."""
        return {name: LateBorder(context) for name in models}


LATE = StrategySpec(
    name="late",
    summary="A strategy of the tests.",
    options=target_of(Late),
    target=target_of(LateStrategy),
    phase="transform",
)


def test_only_outputs_that_leave_for_the_user_are_completed() -> None:
    """Losses see what is put off; the user's own call and returned outputs of `evaluate` do not."""
    booster = Booster(Late(), registry=isolated_registry(LATE))
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = (torch.ones(3, 2), torch.zeros(3, 1))
    seen: list[float] = []

    def criterion(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Remember what a loss gets."""
        seen.append(float(outputs.detach().max()))
        return (outputs - target).square().mean()

    mine = model(batch[0])
    loss = booster.forward_backward(model, batch, criterion)
    evaluated, outputs = booster.evaluate(model, batch, criterion, return_outputs=True)
    optimizer.step()

    assert seen == [0.0, 0.0]
    assert float(loss) == float(evaluated) == 0.0
    assert mine.tolist() == outputs.tolist() == [[100.0]] * 3
