"""What ranks hold at once is what schedules say, measured on the tensors that are alive."""

from __future__ import annotations

import torch
from torch import nn

from colossal_pipeline import Pipeline
from colossal_testkit import run_ranks
from colossal_testkit.memory import LiveBytes

from . import trials
from .models import Run

ROWS, WIDTH = 8, 32


class Square(nn.Module):
    """A layer that keeps its input and one more tensor for backward, and is worth cutting before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, width]`` to the same shape."""
        return torch.tanh(self.inner(hidden))


def peak_of(schedule: str, chunks: int, microbatches: int) -> int:
    """Return the most bytes that are alive in a step beyond those before it, on this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Square() for _ in range(12))).double()
    batch = (
        torch.randn(microbatches * ROWS, WIDTH).double(),
        torch.randn(microbatches * ROWS, WIDTH).double(),
    )
    run = Run(model=model, criterion=nn.MSELoss(), batches=[batch])
    piece = Pipeline(degree=3, microbatches=microbatches, schedule=schedule, chunks=chunks)
    booster, optimizer = trials.boost(run, [piece])
    for _ in range(2):
        booster.forward_backward(model, batch, run.criterion)
        optimizer.step()
        optimizer.zero_grad()
    with LiveBytes() as live:
        booster.forward_backward(model, batch, run.criterion)
        peak = live.peak().total_bytes
    optimizer.step()
    return int(peak)


def test_live_activations_are_those_of_the_schedule() -> None:
    """gpipe holds m micro-batches, 1f1b m or p - s, zbh1 p and what its weight gradients wait for."""
    peaks = {
        (schedule, m): run_ranks(peak_of, 3, schedule, 1, m)
        for schedule, m in (("gpipe", 6), ("gpipe", 12), ("1f1b", 12), ("zbh1", 12))
    }
    batch_bytes = 2 * ROWS * WIDTH * 8  # the batch is counted as well, as it is used
    for rank in range(3):
        most = peaks["gpipe", 12][rank]
        one = (most - peaks["gpipe", 6][rank]) / 6 - batch_bytes

        assert (most - peaks["1f1b", 12][rank]) / one > 12 - (3 - rank) - 0.75, rank
        assert (most - peaks["zbh1", 12][rank]) / one > 12 - 3 - 3.0, rank
