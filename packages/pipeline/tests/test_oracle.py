"""Torch's own pipelines as a second opinion: the same stages and schedule, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from colossal_pipeline import Pipeline
from colossal_testkit import run_ranks
from colossal_testkit.models import randomise

from . import trials
from .models import Run

DEGREE, MICROBATCHES, WIDTH = 2, 4, 6

Numbers = tuple[float, dict[str, torch.Tensor]]


def build(num_blocks: int) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """Return a plain model, inputs and targets, equal on all ranks."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_blocks)))
    randomise(model.double(), seed=2)
    source = torch.Generator().manual_seed(4)
    inputs, target = torch.randn(2, 2 * MICROBATCHES, WIDTH, generator=source, dtype=torch.float64)
    return model, inputs, target


def run_ours(schedule: str, chunks: int) -> Numbers:
    """Return the loss and the gradients of one step."""
    stages = DEGREE * chunks
    model, inputs, target = build(2 * stages)
    piece = Pipeline(
        degree=DEGREE, microbatches=MICROBATCHES, schedule=schedule, chunks=chunks, balance=(2,) * stages
    )
    run = Run(model=model, criterion=nn.MSELoss(), batches=[])
    booster, _ = trials.boost(run, [piece], max_grad_norm=None)
    loss = float(booster.forward_backward(model, (inputs, target), nn.MSELoss()))
    with booster.full_gradients(model) as found:
        return loss, {name: value.detach().clone() for name, value in found.items()}


def run_theirs(schedule: str, chunks: int) -> Numbers:
    """Return the mean loss where the last stage is, and the gradients of this rank's stages."""
    rank, stages = dist.get_rank(), DEGREE * chunks
    model, inputs, target = build(2 * stages)
    ids = range(rank, stages, DEGREE) if schedule != "zbv" else (rank, stages - 1 - rank)
    parts = {
        number: pipelining.PipelineStage(
            model[2 * number : 2 * number + 2], number, stages, torch.device("cpu")
        )
        for number in ids
    }
    kinds: dict[str, Any] = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zbv": pipelining.ScheduleZBVZeroBubble,
    }
    mine = list(parts.values())
    runs = kinds[schedule](mine if chunks > 1 else mine[0], MICROBATCHES, loss_fn=nn.MSELoss())
    losses: list[torch.Tensor] = []
    has_last = stages - 1 in parts
    runs.step(*((inputs,) if 0 in parts else ()), target=target if has_last else None, losses=losses)
    gradients = {}
    for number in parts:
        for block in (2 * number, 2 * number + 1):
            for name, parameter in model[block].named_parameters():
                assert parameter.grad is not None
                gradients[f"{block}.{name}"] = parameter.grad.clone()
    return float(torch.stack(losses).mean()) if has_last else -1.0, gradients


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_numbers_are_those_of_torch(schedule: str, chunks: int) -> None:
    """The loss, and the gradient of every weight."""
    theirs = run_ranks(run_theirs, DEGREE, schedule, chunks)
    expected = {name: value for _, gradients in theirs for name, value in gradients.items()}

    for loss, gradients in run_ranks(run_ours, DEGREE, schedule, chunks):
        assert loss == pytest.approx(max(loss for loss, _ in theirs), abs=1e-6)
        assert gradients.keys() == expected.keys()
        for name, value in gradients.items():
            assert torch.allclose(value, expected[name], rtol=0, atol=1e-12), name
