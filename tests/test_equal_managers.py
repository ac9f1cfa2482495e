"""Memory managers that divide everything train with the same bits, whatever lives where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from colossal_core import Booster
from colossal_gemini import Gemini
from colossal_testkit import run_ranks
from colossal_testkit.models import GPT, TokenLoss

Run = list[torch.Tensor]

IDS = torch.arange(24).view(4, 6)


def train(piece: Any, precision: str) -> Run:
    """Train a tied GPT on other rows on each rank; return losses and weights."""
    torch.manual_seed(5)
    model: Any = GPT(num_blocks=3, is_tied=True)
    booster = Booster(piece, precision=precision)
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    found = []
    for step in range(3):
        ids = (IDS * (7 + step) + booster.data_rank) % 41
        found.append(booster.forward_backward(model, (ids, (ids + 1) % 41), TokenLoss()))
        optimizer.step()
        optimizer.zero_grad()
    with booster.full_parameters(model) as shown:
        found.extend(value.clone() for value in shown.values())
    return found


def compare(precision: str, budgets: list[int], options: dict[str, Any]) -> list[int]:
    """Return with which budgets of the device gemini is not zero3, and -1 where zero3 is not replicated."""
    wanted = train("zero3", precision)
    runs = {budget: train(Gemini(device_budget=budget, **options), precision) for budget in budgets}
    runs[-1] = train("replicated", precision)
    return [
        budget
        for budget, run in runs.items()
        if not all(torch.equal(a, b) for a, b in zip(wanted, run, strict=True))
    ]


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("kind", ["host", "files", "static"])
def test_gemini_trains_with_the_bits_of_zero3(precision: str, kind: str, tmp_path: Path) -> None:
    """On two ranks, from the least budget of the device to all resident, in each tier and placement."""
    ways: dict[str, dict[str, Any]] = {
        "host": {},
        "files": {"disk": str(tmp_path), "host_budget": "256KiB"},
        "static": {"placement": "static"},
    }
    report = Gemini(device_budget=1, **ways[kind]).fit(
        GPT(num_blocks=3, is_tied=True), (IDS, IDS), criterion=TokenLoss(), ranks=2, precision=precision
    )
    least = report.least_budget or 0

    assert run_ranks(compare, 2, precision, [least, 2 * least, 1 << 24], ways[kind]) == [[], []]
