"""State in stages: models from the meta device, and plain weights out of one pipeline and into another."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from colossal_core.runtime.booster import Booster
from colossal_pipeline import Pipeline
from colossal_testkit import run_ranks
from colossal_testkit.memory import LiveBytes

from . import trials
from .models import BUILDERS

WIDTH, BLOCKS = 32, 12

BLOCK_BYTES = (WIDTH * WIDTH + WIDTH) * 8


def build_without_memory() -> tuple[int, int]:
    """Boost a model of the meta device; returns the bytes at most and at the end."""
    with torch.device("meta"):
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
        model = nn.Sequential(*blocks).double()
    booster = Booster(Pipeline(degree=3, microbatches=2), precision="fp64", registry=trials.make_registry())
    ones = torch.ones(2, WIDTH, dtype=torch.float64)
    with LiveBytes() as live:
        model, _ = booster.boost(model, torch.optim.AdamW(model.parameters()))
        booster.forward_backward(model, (ones, ones), nn.MSELoss())
        peak = live.peak().total_bytes
    return peak, sum(parameter.nbytes for parameter in model.parameters())


def test_a_rank_allocates_its_stages_only() -> None:
    """Values and gradients of a third of the model, and one module for a moment, from boost to backward."""
    for peak, held in run_ranks(build_without_memory, 3):
        assert held == BLOCKS // 3 * BLOCK_BYTES
        assert peak < (2 * BLOCKS // 3 + 2) * BLOCK_BYTES


def export_weights(folder: str) -> dict[str, torch.Tensor]:
    """Train a step in a V of two ranks, and write plain weights; returns them."""
    run = BUILDERS["gpt-tied"]()
    piece = Pipeline(degree=2, microbatches=2, schedule="zbv", chunks=2)
    booster, optimizer = trials.boost(run, [piece])
    booster.forward_backward(run.model, run.batches[0], run.criterion)
    optimizer.step()
    booster.export(run.model, folder)
    with booster.full_parameters(run.model) as found:
        return {name: value.detach().clone() for name, value in found.items()}


def import_weights(folder: str) -> dict[str, torch.Tensor]:
    """Read plain weights into three stages; returns them."""
    run = BUILDERS["gpt-tied"]()
    booster, _ = trials.boost(run, [Pipeline(degree=3, microbatches=2)])
    booster.import_weights(run.model, folder)
    with booster.full_parameters(run.model) as found:
        return {name: value.detach().clone() for name, value in found.items()}


def test_plain_weights_go_from_one_cut_to_another(tmp_path: Path) -> None:
    """Under the names of the serial model, tied weights once."""
    written = run_ranks(export_weights, 2, str(tmp_path / "weights"))[0]

    for found in run_ranks(import_weights, 3, str(tmp_path / "weights")):
        assert found.keys() == written.keys()
        assert all(torch.equal(value, written[name]) for name, value in found.items())
