"""What is in memory while a model runs, and models that begin without any."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from colossal_core import Booster, launch
from colossal_gemini import Gemini
from colossal_testkit import run_ranks
from colossal_testkit.models import GPT


def begin(options: dict[str, Any] | None, precision: str) -> list[float]:
    """Boost a model that was built on the meta device, and return two losses."""
    launch(seed=3)
    with torch.device("meta"):
        model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    piece = "replicated" if options is None else Gemini(**options)
    booster = Booster(piece, precision=precision)
    model, optimizer = booster.boost(model, optimizer)
    losses = []
    for number in range(2):
        ids = torch.randint(0, 5, (2, 4), generator=torch.Generator().manual_seed(number))
        loss = F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, {"device_budget": "8MiB"}], ids=["host", "device"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_models_without_memory_begin_as_under_replicated(
    options: dict[str, Any], precision: str, ranks: int
) -> None:
    """Their first values are written to wherever they live, also when that is not there."""
    expected = run_ranks(begin, ranks, None, precision)[0]

    assert run_ranks(begin, ranks, options, precision)[0] == expected


def peaks_of_modules(device_budget: str | None) -> tuple[int, int]:
    """Return the most bytes of chunks on the device in a first forward, and those of all values."""
    launch()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    with tempfile.TemporaryDirectory() as folder:
        booster = Booster(Gemini(device_budget=device_budget, disk=folder))
        model, _ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        engine: Any = booster._engine
        device = engine.manager.tiers.device
        device.reset_peak()
        model(torch.ones(1, 64))
        return device.peak, 6 * 4 * 65 * 64


@pytest.mark.parametrize("device_budget", [None, "8MiB"])
def test_a_first_forward_keeps_no_more_than_what_runs(device_budget: str | None) -> None:
    """Values leave after their module, where the device is host memory, too."""
    peak, total = run_ranks(peaks_of_modules, 1, device_budget)[0]

    assert peak <= total / 2
