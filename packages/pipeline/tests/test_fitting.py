"""Cuts by measured times: what is measured, that nothing of the model changes, and what it is good for."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import nn

from colossal_core.errors import UsageError
from colossal_pipeline import Pipeline
from colossal_pipeline.fitting import Fit
from colossal_pipeline.measuring import Measured, measure_items
from colossal_pipeline.probing import look_at
from colossal_testkit import run_ranks
from colossal_testkit.models import GPT, TokenLoss, randomise

from . import trials
from .models import BUILDERS, build_gpt


@pytest.mark.parametrize("name", list(BUILDERS))
def test_measuring_leaves_the_model_as_it_was(name: str) -> None:
    """Parameters, gradients, buffers and random numbers; items that forward calls take some time."""
    run = BUILDERS[name]()
    before = {key: value.clone() for key, value in run.model.state_dict().items()}
    drawn = torch.get_rng_state()
    items = look_at(run.model).items

    found = measure_items(run.model, items, run.batches[0], run.criterion)

    assert [one.name for one in found] == [item.name for item in items]
    assert all(one.seconds > 0 for one in found if one.name not in {"unused", "positions"})
    assert all(torch.equal(value, before[key]) for key, value in run.model.state_dict().items())
    assert all(parameter.grad is None for parameter in run.model.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_kept_bytes_are_what_forward_saves() -> None:
    """Two products and one activation between them keep three tensors; the loss keeps two."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(3)))

    found = measure_items(model, look_at(model).items, (torch.zeros(5, 4), torch.zeros(5, 4)), nn.MSELoss())

    tensor = 5 * 4 * 4
    middle: Measured = found[1]
    assert sum(one.kept_bytes for one in found) == 3 * 3 * tensor + 2 * tensor
    assert middle.name in {"1", "0.2"}


def test_models_without_values_are_refused() -> None:
    """They cannot run."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    with pytest.raises(UsageError, match="on the meta device"):
        Pipeline(degree=2, microbatches=2).fit(model, (torch.zeros(2, 2), torch.zeros(2, 2)), nn.MSELoss())


def fit_and_train() -> tuple[Fit, float]:
    """Fit on this rank, and train with the outcome."""
    run = build_gpt(num_blocks=4)
    piece = Pipeline(degree=2, microbatches=2)
    fit = piece.fit(run.model, run.batches[0], run.criterion, limit_bytes=10**6)
    booster, _ = trials.boost(run, [fit.piece])
    return fit, float(booster.forward_backward(run.model, run.batches[0], run.criterion))


def test_all_ranks_cut_alike_though_they_measure_apart() -> None:
    """The outcome goes to the Booster as it is."""
    (first, loss), (second, other) = run_ranks(fit_and_train, 2)

    assert first == second
    assert len(first.piece.balance) == 1
    assert loss == other
    assert str(first).count("\n") == 3


def time_of_stages(model: nn.Module, starts: list[str], ids: torch.Tensor) -> float:
    """Return the processor time of the slowest stage for one micro-batch, run as one piece."""
    items = look_at(model).items
    names = [item.name for item in items]
    begins = [0, *(names.index(name) for name in starts), len(items)]
    criterion, target = TokenLoss(), ids.roll(-1, 1)
    slowest = 0.0
    for start, stop in itertools.pairwise(begins):
        best = float("inf")
        for _ in range(5):
            clock = time.process_time()
            hidden = torch.zeros(*ids.shape, 64, requires_grad=True)
            for item in items[start:stop]:
                if item.name == "positions":
                    continue
                hidden = item.module(ids if item.name == "tokens" else hidden)
            loss = criterion(hidden, target) if stop == len(items) else hidden.sum()
            loss.backward()
            best = min(best, time.process_time() - clock)
        slowest = max(slowest, best)
    return slowest


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_large_vocabulary_makes_measured_cuts_faster() -> None:
    """The slowest stage takes at least 15% less time than with equal numbers of blocks, measured."""
    torch.set_num_threads(1)
    model = GPT(is_tied=False, num_blocks=8, width=64, heads=4, vocabulary=16384)
    randomise(model, seed=1)
    ids = torch.randint(0, 16384, (4, 6))
    fit = Pipeline(degree=4, microbatches=8).fit(model, (ids, ids.roll(-1, 1)), TokenLoss())

    fitted = time_of_stages(model, [str(name) for name in fit.piece.balance], ids)
    equal = time_of_stages(model, ["blocks.2", "blocks.4", "blocks.6"], ids)

    assert fitted < 0.85 * equal, (fit, fitted, equal)
