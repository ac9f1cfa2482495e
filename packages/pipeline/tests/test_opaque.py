"""Modules whose forward looks at values, such as experts, on stages that do not compute them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from colossal_core.errors import CapabilityError
from colossal_pipeline import Pipeline
from colossal_testkit import run_ranks, run_ranks_expecting_errors
from colossal_testkit.engine import engine_of

from . import trials
from .models import Run

WIDTH = 5


class Experts(nn.Module):
    """Two experts with stacked weights, each of which gets some rows."""

    def __init__(self, factor: int) -> None:
        """Make results ``factor`` times as wide as inputs."""
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, WIDTH * factor, WIDTH) * 0.4)

    def forward(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Map ``[n, width]``, with a number of an expert for each row."""
        results = rows.new_zeros(len(rows), self.weights.shape[1])
        for number in chosen.unique().tolist():
            places = (chosen == number).nonzero().flatten()
            results = results.index_add(0, places, rows[places] @ self.weights[number].T)
        return results


class Block(nn.Module):
    """A layer that sends rows to experts by their values."""

    def __init__(self, factor: int = 1) -> None:
        """Make a router and experts."""
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = Experts(factor)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows, with what the experts make of them."""
        scores = self.router(rows).softmax(-1)
        largest, chosen = scores.max(-1)
        found: torch.Tensor = self.experts(rows, chosen) * largest[:, None]
        return rows + torch.tanh(found) if found.shape == rows.shape else found


class Tower(nn.Module):
    """Blocks, and a layer at the end."""

    def __init__(self, factor: int = 1) -> None:
        """Make three blocks, the second of which may be wider."""
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(factor), nn.Linear(WIDTH * factor, WIDTH), Block()])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Run them."""
        for block in self.blocks:
            rows = block(rows)
        return rows


def build(factor: int = 1) -> Run:
    """Return a run of two steps."""
    torch.manual_seed(7)
    model = Tower(factor).double()
    batches = [tuple(torch.randn(7, WIDTH, dtype=torch.float64) for _ in range(2)) for _ in range(2)]
    return Run(model=model, criterion=nn.MSELoss(), batches=batches)


def train(piece: Pipeline) -> tuple[list[float], dict[str, torch.Tensor], dict[str, float]]:
    """Train through a pipeline; returns losses, weights, and the operations of each item."""
    run = build()
    booster, optimizer = trials.boost(run, [piece])
    losses = []
    for batch in run.batches:
        losses.append(float(booster.forward_backward(run.model, batch, run.criterion)))
        optimizer.step()
        optimizer.zero_grad()
    weights = trials.weights_of(booster, run.model)
    executor: Any = engine_of(booster).executor
    form = executor._models[run.model].forms(
        [trials.call_of(batch)], run.criterion, trains=True, wants_outputs=False
    )
    return losses, weights, dict(form[0].flow.flops)


@pytest.mark.parametrize(
    "piece", [Pipeline(degree=2, microbatches=3), Pipeline(degree=3, microbatches=2, schedule="zbh1")]
)
def test_experts_may_be_on_any_stage(piece: Pipeline) -> None:
    """Which expert gets which rows is known where they are computed."""
    expected = trials.train_by_hand(build(), piece.microbatches)

    for losses, weights, flops in run_ranks(train, piece.degree, piece):
        assert losses == pytest.approx(expected.losses, abs=1e-6)
        for name, value in weights.items():
            assert torch.allclose(value, expected.weights[name], rtol=0, atol=1e-10), name
        # A router of two, and one expert for each of seven rows.
        assert flops["blocks.0"] == 2 * 7 * (2 * WIDTH + WIDTH * WIDTH)


def train_widened() -> None:
    """Train where experts return what nobody would guess."""
    run = build(factor=2)
    booster, _ = trials.boost(run, [Pipeline(degree=2, microbatches=2)])
    booster.forward_backward(run.model, run.batches[0], run.criterion)


def test_a_wrong_guess_is_refused() -> None:
    """On every rank, before anything wrong is computed."""
    for error in run_ranks_expecting_errors(train_widened, 2, error=CapabilityError):
        assert "what 'blocks.0.experts', 'blocks.1.experts' return was guessed" in str(error)
