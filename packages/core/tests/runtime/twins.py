"""A boosted model beside its plain twin, for tests that compare a few steps of both on every rank."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from attrs import define
from torch import nn

from colossal_core import Booster

__all__ = ["Twins", "batch_of", "make_twins"]


@define
class Twins:
    """A boosted model and optimizer, and plain ones with the same values.

    Attributes:
        booster: The Booster.
        model: The boosted model.
        optimizer: The boosted optimizer.
        plain: The plain model.
        reference: The plain optimizer.
    """

    booster: Any
    model: Any
    optimizer: Any
    plain: Any
    reference: Any

    def mine(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of some rows, as equal as can be."""
        place: int = self.booster.data_rank
        return rows.tensor_split(self.booster.data_degree)[place]

    def step(self) -> None:
        """Take a step with both and clear the gradients."""
        for optimizer in (self.optimizer, self.reference):
            optimizer.step()
            optimizer.zero_grad()

    def drift(self) -> float:
        """Return the largest difference of a parameter."""
        pairs = zip(self.model.parameters(), self.plain.parameters(), strict=True)
        return max(float((ours.detach().double() - theirs.detach()).abs().max()) for ours, theirs in pairs)


def make_twins(
    model: nn.Module | None = None, *, pieces: Sequence[Any] = (), precision: str = "fp64", **settings: Any
) -> Twins:
    """Boost a model, a small perceptron by default, with SGD that has momentum and decay."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)) if model is None else model
    ours: Any = copy.deepcopy(plain)
    optimizer: Any = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    plain.double()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    booster = Booster(*pieces, precision=precision, **settings)
    ours, optimizer = booster.boost(ours, optimizer)
    return Twins(booster, ours, optimizer, plain, reference)


def batch_of(step: int, count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs ``[count, 4]`` and targets ``[count, 3]`` of a global batch."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(count, 7, generator=generator, dtype=torch.float64)
    return rows[:, :4], rows[:, 4:]
