"""Training as on accelerators: memory of the device is that of an allocator, whose views need it there."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from colossal_core import Booster, Recompute
from colossal_gemini import Gemini, budgeting
from colossal_gemini.contents import Tiers
from colossal_testkit import run_ranks
from colossal_testkit.models import GPT, TokenLoss

IDS = torch.arange(24).view(4, 6)


def make_tiers(options: Gemini, device: torch.device) -> Tiers:
    """Return tiers whose device is no mapping, as none is on an accelerator."""
    tiers = budgeting.make_tiers(options, device)
    setattr(tiers.device, "is_mapped", False)  # noqa: B010 - of this one only
    tiers.disk_reaches_device = False
    return tiers


def train(piece: Any, device: str = "cpu", **settings: Any) -> list[torch.Tensor]:
    """Return losses and weights of four steps."""
    torch.manual_seed(5)
    model: Any = GPT(num_blocks=3).to(device)
    booster = Booster(piece, Recompute(), **settings)
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    found = []
    for step in range(4):
        ids = ((IDS * (7 + step) + booster.data_rank) % 41).to(device)
        found.append(booster.forward_backward(model, (ids, (ids + 1) % 41), TokenLoss()))
        optimizer.step()
        optimizer.zero_grad()
    with booster.full_parameters(model) as shown:
        found.extend(value.clone().cpu() for value in shown.values())
    booster.release(model)
    return found


def compare(options: list[dict[str, Any]], settings: dict[str, Any]) -> list[bool]:
    """Return whether runs within budgets are those without."""
    wanted = train("replicated", **settings)
    equal = []
    for row in options:
        with mock.patch("colossal_gemini.manager.make_tiers", make_tiers):
            run = train(Gemini(**row), **settings)
        # Passes that add up do so in another order.
        same = torch.allclose if "accumulate" in settings else torch.equal
        equal.append(all(same(a, b) for a, b in zip(wanted, run, strict=True)))
    return equal


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "settings", [{}, {"precision": "bf16"}, {"accumulate": 2, "precision": "fp64"}], ids=str
)
def test_memory_from_an_allocator_trains_with_the_same_bits(
    ranks: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """From little of the device to all resident, and with files, which do not reach it."""
    files = {"disk": str(tmp_path), "host_budget": "640KiB"}
    little = 400_000 if "accumulate" in settings else 250_000
    options = [{"device_budget": budget, **more} for budget in (little, 1 << 24) for more in ({}, files)]

    assert run_ranks(compare, ranks, options, settings) == [[True] * len(options)] * ranks


@pytest.mark.gpu
def test_an_accelerator_trains_with_the_bits_of_replicated() -> None:
    """Values and state in pinned host memory, and copies on a stream beside what computes."""
    wanted = train("replicated", "cuda")

    for budget in ("64MiB", "1GiB"):
        found = train(Gemini(device_budget=budget), "cuda")
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(wanted, found, strict=True))
