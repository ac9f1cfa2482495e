"""Models that make, or ask, autograd's graph themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from colossal_core import Booster
from colossal_core.errors import CapabilityError
from colossal_pipeline import Pipeline
from colossal_testkit import run_ranks, run_ranks_expecting_errors

WIDTH = 4


class Tower(nn.Module):
    """Blocks with residuals, all but one of which are recomputed in the reentrant way."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)) for _ in range(4))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 4]`` to the same shape."""
        x = x + self.blocks[0](x)
        for block in list(self.blocks)[1:]:
            x = x + torch.tanh(checkpoint(block, x, use_reentrant=True))
        return x


class Forces(nn.Module):
    """Returns the derivative of an energy by its inputs."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 4]`` to the same shape."""
        x = x.detach().requires_grad_()
        (forces,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return forces


def train(kind: type[nn.Module], schedule: str | None) -> list[float]:
    """Return the losses of a few steps."""
    torch.manual_seed(0)
    pieces = [] if schedule is None else [Pipeline(degree=2, microbatches=3, schedule=schedule)]
    booster = Booster(*pieces, precision="fp64")
    model = kind()
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), 0.1))
    rows = torch.sin(torch.arange(7.0 * WIDTH)).double().view(7, WIDTH)
    losses = []
    for _ in range(3):
        losses.append(float(booster.forward_backward(model, (rows, rows), nn.functional.mse_loss)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("schedule", ["1f1b", "zbh1"])
def test_reentrant_checkpoints_are_exact(schedule: str) -> None:
    """Their graph is made in backward, where nothing that was received could get a gradient."""
    alone = train(Tower, None)

    for losses in run_ranks(train, 2, Tower, schedule):
        assert losses == pytest.approx(alone, rel=1e-6)  # losses come in fp32


def test_derivatives_through_stages_are_refused_before_the_step() -> None:
    """Each rank says so, instead of what autograd finds missing."""
    for error in run_ranks_expecting_errors(train, 2, Forces, "1f1b", error=CapabilityError):
        assert "forward differentiates what modules computed" in str(error)
