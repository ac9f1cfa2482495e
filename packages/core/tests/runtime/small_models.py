"""Small models with their optimizers, for several test files."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from colossal_testkit.stories import batch_of


def make(*, seed: int = 0) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Make a small fp32 model and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any, steps: range) -> list[torch.Tensor]:
    """Train a model alone and return its parameters."""
    dtype = next(value.dtype for value in model.parameters() if value.is_floating_point())
    for step in steps:
        model(batch_of(0, step).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


class Layers(nn.Module):
    """Four layers in a row; a step may leave layers out."""

    def __init__(self) -> None:
        """Build it in fp64."""
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.third = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)
        self.double()

    def forward(self, x: torch.Tensor, head: str = "a") -> torch.Tensor:
        """Map ``[n, 5]`` to ``[n, 3]``; a letter of ``head`` leaves out a layer."""
        for letter, layer in (("f", self.first), ("s", self.second), ("t", self.third)):
            if letter not in head:
                x = torch.tanh(layer(x))
        outputs: torch.Tensor = self.last(x)
        return outputs


def adam_over_all(model: nn.Module) -> torch.optim.Optimizer:
    """Hand frozen layers to the optimizer, too."""
    return torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=0.1)
