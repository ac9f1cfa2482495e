"""What ranks hold at once is what the tables of schedules say, measured on the tensors that are alive."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from colossal_pipeline import Pipeline
from colossal_testkit import run_ranks
from colossal_testkit.memory import LiveBytes

from . import trials
from .models import Run

DEGREE, MICROBATCHES, BLOCKS, ROWS, WIDTH = 3, 6, 6, 32, 16

BATCH_BYTES = 2 * ROWS * WIDTH * 8
"""Inputs and target of a micro-batch, which the tracker counts as they are used."""


class Perceptron(nn.Module):
    """A residual block, whose products' outputs are saved by what follows them, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, width]`` to the same shape."""
        outputs: torch.Tensor = hidden + self.down(F.gelu(self.up(self.norm(hidden))))
        return outputs


def peak_of(model: nn.Module, piece: Pipeline) -> int:
    """Return the most bytes that are alive in a step beyond those before it, on this rank."""
    torch.manual_seed(0)
    rows = piece.microbatches * ROWS
    batch = (torch.randn(rows, WIDTH).double(), torch.randn(rows, WIDTH).double())
    run = Run(model=model.double(), criterion=nn.MSELoss(), batches=[batch])
    booster, optimizer = trials.boost(run, [piece])
    booster.forward_backward(model, batch, run.criterion)  # finds out what flows
    optimizer.zero_grad()
    with LiveBytes() as live:
        booster.forward_backward(model, batch, run.criterion)
        peak = live.peak().total_bytes
    optimizer.step()
    return int(peak)


def peaks_of_schedule(schedule: str, chunks: int, microbatches: int) -> int:
    """Return the peak of this rank for equal stages."""
    stages = DEGREE * chunks
    piece = Pipeline(
        degree=DEGREE,
        microbatches=microbatches,
        schedule=schedule,
        chunks=chunks,
        balance=(BLOCKS // stages,) * stages,
    )
    return peak_of(nn.Sequential(*(Perceptron() for _ in range(BLOCKS))), piece)


@pytest.mark.timeout(90)  # six runs, each operation of which is looked at
def test_live_activations_are_those_of_the_tables() -> None:
    """In units of a share of a rank for one micro-batch: gpipe m, 1f1b p - s, zbh1 and zbv p; interleaved."""
    p = DEGREE
    few = run_ranks(peaks_of_schedule, p, "gpipe", 1, 3)
    many = run_ranks(peaks_of_schedule, p, "gpipe", 1, MICROBATCHES)
    units = [(more - less) / (MICROBATCHES - 3) - BATCH_BYTES for more, less in zip(many, few, strict=True)]

    expected: dict[tuple[str, int], list[float]] = {
        ("1f1b", 1): [p - s for s in range(p)],
        ("interleaved", 2): [(2 * (p - s - 1) + p + 1) / 2 for s in range(p)],
        ("zbh1", 1): [p] * p,
        ("zbv", 2): [p] * p,
    }
    for (schedule, chunks), table in expected.items():
        found = run_ranks(peaks_of_schedule, p, schedule, chunks, MICROBATCHES)
        held = [
            MICROBATCHES - (most - peak) / unit for most, peak, unit in zip(many, found, units, strict=True)
        ]
        # Beyond the activations there are messages on their way, and what an operation has just computed.
        for rank in range(p):
            assert table[rank] - 0.05 < held[rank] < table[rank] + 0.4, (schedule, rank, held)


class Wide(nn.Module):
    """A block that keeps a narrow input for backward, and returns what is many times as wide."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, out, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, width]`` to ``[batch, out]``."""
        outputs: torch.Tensor = self.inner(hidden)
        return outputs


def peak_of_wide_outputs(microbatches: int) -> int:
    """Return the peak of this rank where a message is nearly all that there is."""
    model = nn.Sequential(Wide(WIDTH, 64 * WIDTH), Wide(64 * WIDTH, WIDTH))
    return peak_of(model, Pipeline(degree=2, microbatches=microbatches, balance=("1",)))


def test_outputs_are_freed_after_sending() -> None:
    """The first rank holds as many as are on their way, however many micro-batches follow."""
    message = ROWS * 64 * WIDTH * 8

    few, many = (run_ranks(peak_of_wide_outputs, 2, number)[0] for number in (4, 12))

    assert many - few < 8 * BATCH_BYTES + message / 2
