"""A later ``boost`` call: schedulers over the boosted optimizer, and loaders; and what it refuses."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from colossal_core import Booster
from colossal_core.errors import UsageError
from colossal_testkit import run_ranks

from .small_models import make

Make = Callable[[torch.optim.Optimizer], Any]


def by_lambda(optimizer: torch.optim.Optimizer) -> Any:
    """Make a schedule from a function."""
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def in_sequence(optimizer: torch.optim.Optimizer) -> Any:
    """Make a warm-up that gives way to a decay."""
    first = lr_scheduler.LinearLR(optimizer, 0.25, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.ExponentialLR(optimizer, 0.5)], [2])


def on_plateau(optimizer: torch.optim.Optimizer) -> Any:
    """Make a schedule that watches a metric, here one that never improves."""
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def chained(optimizer: torch.optim.Optimizer) -> Any:
    """Chain two schedules."""
    return lr_scheduler.ChainedScheduler([by_lambda(optimizer), lr_scheduler.StepLR(optimizer, 2)])


SCHEDULES: list[Make] = [by_lambda, in_sequence, on_plateau, chained]


def advance(scheduler: Any) -> None:
    """Advance a scheduler as its kind wants it."""
    scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


def follow_later(number: int, settings: dict[str, Any]) -> list[tuple[bool, float]]:
    """Train with a scheduler that is made over the boosted optimizer and boosted afterwards."""
    model, optimizer = make()
    booster = Booster(**settings)
    boosted: Any
    model, boosted = booster.boost(model, optimizer)
    scheduler = booster.boost(SCHEDULES[number](boosted))
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(8):
            spoils = settings.get("accumulate", 1) == 1 and step in {1, 2, 4}
            (model(torch.ones(1, 5)).square().mean() * (math.inf if spoils else 0.01)).backward()
            boosted.step()
            advance(scheduler)
            boosted.zero_grad()
            seen.append((boosted.stepped, boosted.param_groups[0]["lr"]))
    return seen


@pytest.mark.parametrize("number", range(len(SCHEDULES)), ids=[schedule.__name__ for schedule in SCHEDULES])
@pytest.mark.parametrize(
    "settings",
    [{"precision": "fp16"}, {"nonfinite": "skip"}, {"accumulate": 3}],
    ids=["fp16", "skip", "accumulate"],
)
def test_scheduler_over_the_boosted_optimizer_follows_real_steps(
    number: int, settings: dict[str, Any]
) -> None:
    """Rates change with real steps only, as those of a plain optimizer that takes just these."""
    results = run_ranks(follow_later, 2, number, settings)

    _, plain = make()
    scheduler = SCHEDULES[number](plain)
    accumulates = "accumulate" in settings
    real = [step % 3 == 2 if accumulates else step not in {1, 2, 4} for step in range(8)]
    wanted = []
    for is_real in real:
        if is_real:
            plain.step()
            advance(scheduler)
        wanted.append((is_real, plain.param_groups[0]["lr"]))
    for seen in results:
        assert seen == wanted


def test_scheduler_that_was_not_given_stays_the_users() -> None:
    """It advances whenever it is told to."""
    model, optimizer = make()
    booster = Booster(accumulate=2)
    model, optimizer = booster.boost(model, optimizer)
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    for _ in range(2):
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        scheduler.step()

    assert scheduler.last_epoch == 2


def read_later() -> tuple[list[int], list[list[float]]]:
    """Boost a loader for evaluation after training has begun; return the rows of each share and all rows."""
    model, optimizer = make()
    booster = Booster()
    training = DataLoader(TensorDataset(torch.randn(8, 5)), batch_size=4)
    model, optimizer, training = booster.boost(model, optimizer, training)
    for (rows,) in training:
        model(rows).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    loader, criterion = booster.boost(
        DataLoader(TensorDataset(torch.arange(5.0)[:, None]), batch_size=4), nn.MSELoss()
    )
    assert isinstance(criterion, nn.MSELoss)
    counts, seen = [], []
    for (rows,) in loader:
        counts.append(booster.rows)
        seen.append(booster.gather(rows).flatten().tolist())
    return counts, seen


def test_loader_may_come_in_a_later_call() -> None:
    """It gives shares as one of the first call does."""
    (first, seen), (second, same) = run_ranks(read_later, 2)

    assert seen == same == [[0.0, 1.0, 2.0, 3.0], [4.0]]
    assert (first, second) == ([2, 1], [2, 0])


def test_later_call_takes_no_models_and_optimizers() -> None:
    """The message says how to boost several models, and what a later call is for."""
    model, optimizer = make()
    booster = Booster()
    booster.boost(model, optimizer)

    for thing in make():
        with pytest.raises(
            UsageError, match=r"boosted already\n  next: pass everything to one boost\(\) call"
        ):
            booster.boost(thing)


def test_schedulers_and_loaders_are_boosted_once() -> None:
    """Given again, they are refused."""
    model, optimizer = make()
    booster = Booster()
    loader: Any = DataLoader(TensorDataset(torch.ones(4, 5)))
    found = booster.boost(model, optimizer, by_lambda(optimizer), loader)

    with pytest.raises(UsageError, match="this LambdaLR is boosted already"):
        booster.boost(found[2])
    with pytest.raises(UsageError, match="this loader has been boosted already"):
        booster.boost(found[3])


# --- models without an optimizer ----------------------------------------------------------------------------


def boost_again(what: str) -> str:
    """Boost something of a boosted model that has no optimizer, on every rank; return the message."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)))
    booster = Booster()
    booster.boost(model)
    again: Any = {"whole": model, "part": model[1], "around": nn.Sequential(model, nn.Tanh())}[what]
    try:
        Booster().boost(again)
    except UsageError as error:
        booster.release(model)
        booster.boost(model)
        return str(error)
    return "went through"


@pytest.mark.parametrize("what", ["whole", "part", "around"])
def test_models_without_an_optimizer_are_boosted_once(what: str) -> None:
    """Also a part of one, and a model around one, until it is released."""
    for message in run_ranks(boost_again, 2, what):
        assert "boosted already" in message
        assert "release() it" in message
