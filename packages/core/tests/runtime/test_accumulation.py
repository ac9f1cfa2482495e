"""``accumulate=k``: k micro-batches are one step over their true mean, and the loop stays as it is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from colossal_core import Booster
from colossal_core.errors import ColossalError, UsageError
from colossal_testkit import run_ranks
from colossal_testkit.stories import assert_close, tiny_buffers

MICRO = 7
"""Micro-batches of a run: two windows of three, and one that stays open."""


class Tagger(nn.Module):
    """Classifies every token."""

    def __init__(self) -> None:
        """Build it in fp64."""
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 4)
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens ``[t]`` to logits ``[t, 4]``."""
        logits: torch.Tensor = self.head(self.embed(tokens))
        return logits


def micro_batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return between one and ten tokens, with as many targets that count."""
    count = 1 + (3 * number + 5 * rank) % 10
    generator = torch.Generator().manual_seed(10 * number + rank)
    tokens = torch.randint(11, (10,), generator=generator)
    target = torch.randint(4, (10,), generator=generator)
    target[count:] = -100
    return tokens, target


def make() -> tuple[Any, Any, Any]:
    """Make a model, an optimizer with a bound, and a schedule."""
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    return model, optimizer, lr_scheduler.StepLR(optimizer, 1, 0.5)


def train(loop: str) -> dict[str, Any]:
    """Train on seven micro-batches, three to a step, and flush the last one."""
    model, optimizer, scheduler = make()
    booster = Booster(precision="fp64", accumulate=3, max_grad_norm=0.3)
    with tiny_buffers(200, 60):
        model, optimizer, scheduler = booster.boost(model, optimizer, scheduler)
    found: dict[str, Any] = {"stepped": [], "norms": [], "rates": [], "steps": []}
    for number in range(MICRO):
        tokens, target = micro_batch(dist.get_rank(), number)
        if loop == "forward_backward":
            booster.forward_backward(model, (tokens, target), nn.CrossEntropyLoss())
        elif loop == "backward":
            loss = F.cross_entropy(model(tokens), target)
            booster.backward(loss, weight=float((target != -100).sum()))
        else:
            F.cross_entropy(model(tokens), target).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found["stepped"].append(optimizer.stepped)
        found["norms"].append(float(optimizer.grad_norm))
        found["rates"].append(scheduler.get_last_lr()[0])
        found["steps"].append(booster.step)
    optimizer.flush()
    optimizer.flush()
    found["norms"].append(float(optimizer.grad_norm))
    found["weights"] = [parameter.detach().clone() for parameter in model.parameters()]
    return found


def expect(loop: str, world_size: int = 2) -> tuple[list[torch.Tensor], list[float]]:
    """Train in one process on whole windows."""
    model, optimizer, scheduler = make()
    norms = []
    for window in ([0, 1, 2], [3, 4, 5], [6]):
        losses, counts = [], []
        for number in window:
            for rank in range(world_size):
                tokens, target = micro_batch(rank, number)
                losses.append(F.cross_entropy(model(tokens), target))
                counts.append(float((target != -100).sum()) if loop != "plain" else 1.0)
        total = sum(counts)
        torch.stack(
            [loss * (count / total) for loss, count in zip(losses, counts, strict=True)]
        ).sum().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()], norms


@pytest.mark.parametrize("loop", ["forward_backward", "backward", "plain"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_windows_are_the_mean_over_what_counts(loop: str, world_size: int) -> None:
    """Token counts from 1 to 10, and a last window of one: equal to one process over each window."""
    results = run_ranks(train, world_size, loop)

    weights, norms = expect(loop, world_size)
    for result in results:
        assert result["stepped"] == [False, False, True] * 2 + [False]
        assert result["rates"] == [0.05, 0.05, 0.025, 0.025, 0.025, 0.0125, 0.0125]
        assert result["steps"] == [0, 0, 1, 1, 1, 2, 2]
        assert [result["norms"][2], result["norms"][5], result["norms"][7]] == pytest.approx(norms, rel=1e-10)
        for value, wanted in zip(result["weights"], weights, strict=True):
            assert_close(value, wanted, "weight")


def clip_by_hand() -> dict[str, Any]:
    """Clip before each call of ``step``."""
    model, optimizer, _ = make()
    booster = Booster(precision="fp64", accumulate=3)
    with tiny_buffers(200, 60):
        model, optimizer = booster.boost(model, optimizer)
    norms = []
    for number in range(6):
        booster.forward_backward(model, micro_batch(dist.get_rank(), number), nn.CrossEntropyLoss())
        norms.append(float(optimizer.clip_grad_norm_(0.3)))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "weights": [parameter.detach().clone() for parameter in model.parameters()]}


def test_clipping_by_hand_clips_whole_windows() -> None:
    """Inside a window there is nothing to clip yet; at its end the norm is that of the mean."""
    results = run_ranks(clip_by_hand, 2)

    _, norms = expect("forward_backward")
    for result in results:
        assert [math.isnan(norm) for norm in result["norms"]] == [True, True, False] * 2
        assert result["norms"][2] == pytest.approx(norms[0], rel=1e-10)


def recover(wrong: int) -> list[torch.Tensor]:
    """Meet a batch that one rank cannot read as the first of the run, and go on without it."""
    model, optimizer, scheduler = make()
    booster = Booster(precision="fp64", accumulate=3, max_grad_norm=0.3)
    model, optimizer, scheduler = booster.boost(model, optimizer, scheduler)
    batch: Any = micro_batch(dist.get_rank(), 8)
    given = (*batch, None) if dist.get_rank() == wrong else batch
    with pytest.raises(ColossalError):
        booster.forward_backward(model, given, nn.CrossEntropyLoss())
    optimizer.zero_grad()
    for number in range(3):
        booster.forward_backward(model, micro_batch(dist.get_rank(), number), nn.CrossEntropyLoss())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [float(optimizer.grad_norm)]  # type: ignore[list-item]


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_batch_that_failed_weighs_nothing_afterwards(wrong: int) -> None:
    """The window counts the micro-batches that came to something, with their own weights."""
    results = run_ranks(recover, 2, wrong)

    _, norms = expect("forward_backward")
    for result in results:
        assert result == pytest.approx(norms[:1], rel=1e-10)


def test_accumulation_below_one_is_refused() -> None:
    """A window holds at least one micro-batch."""
    with pytest.raises(UsageError, match="accumulate"):
        Booster(accumulate=0)
