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


class Penalised(nn.Module):
    """Reads its weights after a backward that its forward waits for, in its own only those of the head."""

    def __init__(self) -> None:
        """Build embedding, blocks and head, each a chunk."""
        super().__init__()
        self.token = nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(32, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits ``[batch, sequence, 16]``, pulled by a gradient."""
        first = hidden = self.token(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        if torch.is_grad_enabled():
            (slope,) = torch.autograd.grad(hidden.square().sum(), first, retain_graph=True)
            hidden = hidden + slope
        return F.linear(hidden, self.head.weight, self.head.bias) + self.token.weight.mean()


def train_penalised(options: dict[str, Any] | None) -> list[float]:
    """Return the losses of three steps."""
    launch(seed=3)
    piece = "replicated" if options is None else Gemini(**options)
    booster, model = Booster(piece), Penalised()
    boosted, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = []
    for number in range(3):
        ids = torch.arange(12).view(2, 6) + number
        loss = F.cross_entropy(boosted(ids % 16).flatten(0, 1), ids.flatten() % 16)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_the_root_stays_for_a_forward_and_not_for_a_backward() -> None:
    """A gradient that a forward takes leaves it there; later nothing needs the embedding any more."""
    ids = torch.zeros(2, 6, dtype=torch.long)
    options: dict[str, Any] = {"chunk_bytes": 4096, "device_budget": "1MiB"}
    report = Gemini(**options).fit(
        Penalised(), (ids, ids), criterion=lambda out, ids: F.cross_entropy(out.flatten(0, 1), ids.flatten())
    )
    trace = report.trace
    root = {chunk.index for chunk in trace.chunks if chunk.is_pinned}
    later = [moment for moment in trace.moments if moment.phase == "backward"]

    assert len(root) == 2
    assert len(root & set().union(*(moment.needs for moment in later))) == 1
    assert all(
        set(m.needs) | root == trace.needs_at(i) for i, m in enumerate(trace.moments[: -len(later) - 1])
    )
    tight = {**options, "device_budget": report.least_budget}
    assert run_ranks(train_penalised, 1, tight) == run_ranks(train_penalised, 1, None)
