"""Memory managers that divide everything train with the same bits, whatever lives where."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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


def end_of_steps(piece: Any, accumulate: int, fused: bool) -> Run:  # noqa: FBT001 - told by position
    """Train layers whose parameters fill whole vectors; return its weights and the states of AdamW."""
    torch.manual_seed(5)
    widths = (16, 48, 64, 32, 16)
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.GELU())]
    model: Any = nn.Sequential(*layers)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    booster = Booster(piece, accumulate=accumulate)
    model, optimizer = booster.boost(model, optimizer)
    for _ in range(4 * accumulate):
        rows = torch.randn(6, 16) + booster.data_rank
        booster.forward_backward(model, (rows, rows.flip(1)), nn.MSELoss())
        optimizer.step()
        optimizer.zero_grad()
    found = [
        value for _, state in sorted(optimizer.state_dict()["state"].items()) for value in state.values()
    ]
    with booster.full_parameters(model) as shown:
        return [*found, *(value.clone() for value in shown.values())]


def compare_chunks() -> list[list[str]]:
    """Return which chunks of gemini, or which other manager, end unlike zero3: fused, and with two passes."""
    pieces: dict[str, Any] = {f"{size} bytes": Gemini(chunk_bytes=size) for size in (4096, 7000, 1 << 20)}
    pieces["replicated"] = "replicated"
    found = []
    for accumulate, fused in ((1, True), (2, False)):
        wanted = end_of_steps("zero3", accumulate, fused)
        runs = {name: end_of_steps(piece, accumulate, fused) for name, piece in pieces.items()}
        found.append([name for name, run in runs.items() if not all(map(torch.equal, wanted, run))])
    return found


def test_sizes_of_chunks_change_no_bits() -> None:
    """Not of fused updates, since borders of shards fall between vectors; nor of sums of several passes.

    Those are (a + b) + (c + d) where every backward is reduced, and (a + c) + (b + d) where the last one is.
    """
    assert run_ranks(compare_chunks, 2) == [[[], ["replicated"]]] * 2
