"""Synchronised BatchNorm: what a plain process computes on the global batch, ranks compute on shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from colossal_core import Booster, Recompute
from colossal_testkit import run_ranks

from .norms import (
    TOLERANCE,
    Run,
    Volumes,
    affine,
    batch_of,
    build,
    channels_last,
    check,
    cumulative,
    frozen_weights,
    not_affine,
    only_bias,
    rewritten_norm,
    sgd,
    shared_norm,
    untracked,
    user_norm,
)


@pytest.mark.parametrize(
    "make",
    [
        affine,
        not_affine,
        cumulative,
        untracked,
        frozen_weights,
        only_bias,
        user_norm,
        rewritten_norm,
        shared_norm,
        channels_last,
        Volumes,
    ],
    ids=lambda make: make.__name__,
)
@pytest.mark.parametrize("shares", [(4, 2), (1, 5, 3), (3, 2, 2, 1)], ids=["2", "3", "4"])
def test_statistics_are_those_of_the_global_batch(
    make: Callable[[], nn.Module], shares: Sequence[int]
) -> None:
    """Losses, weights, running statistics and outputs equal one process, whatever the shares."""
    check(Run(build=make, shares=[shares, shares, shares[::-1]]))


def test_norms_in_evaluation_use_their_running_statistics() -> None:
    """A step with frozen statistics communicates nothing for them, and equals one process."""
    check(Run(build=affine, shares=[(3, 3), (2, 4), (3, 3)], last_is_frozen=True))


@pytest.mark.parametrize("make", [affine, cumulative, untracked], ids=lambda make: make.__name__)
def test_the_sample_of_an_empty_share_does_not_count(make: Callable[[], nn.Module]) -> None:
    """A rank with one sample of weight 0 takes part, and leaves no trace in the statistics."""
    check(Run(build=make, shares=[(2, 3, 0), (0, 4, 1), (0, 0, 3)]))


# --- the plain loop -------------------------------------------------------------------------------------


def weigh_by_rows(model: Any, booster: Booster, shares: Sequence[int]) -> torch.Tensor:
    """Run a backward of the plain loop as after a boosted loader, and return the gradient of the inputs."""
    inputs, target = batch_of(0, sum(shares))
    start, count = sum(shares[: booster.data_rank]), shares[booster.data_rank]
    stop = start + max(count, 1)
    context = booster._built("test").context
    context.arrivals.weight = count * len(shares) / sum(shares)
    context.row_weights.value = None if count else 0.0
    rows = inputs[start:stop].clone().requires_grad_()
    F.mse_loss(model(rows), target[start:stop]).backward()
    assert rows.grad is not None
    return rows.grad * (context.arrivals.weight / len(shares))


def on_plain_loop(make: Callable[[], nn.Module], shares: Sequence[int]) -> dict[str, torch.Tensor]:
    """Take one step of the plain loop on uneven shares; return the state and the gradients of the inputs."""
    model = build(make)
    booster = Booster(precision="fp64")
    model, optimizer = booster.boost(model, sgd(model))
    gradient = weigh_by_rows(model, booster, shares)
    optimizer.step()
    return {**model.state_dict(), "inputs": gradient}


@pytest.mark.parametrize("shares", [(4, 1), (2, 0, 3)], ids=str)
def test_losses_that_are_weighed_after_backward_are_weighed_between_ranks(shares: Sequence[int]) -> None:
    """What ranks exchange inside backward is in terms of the weighed loss, before gradients are."""
    model = build(affine)
    optimizer = sgd(model)
    inputs, target = batch_of(0, sum(shares))
    inputs.requires_grad_()
    F.mse_loss(model(inputs), target).backward()
    optimizer.step()

    results = run_ranks(on_plain_loop, len(shares), affine, shares)

    for name, value in model.state_dict().items():
        torch.testing.assert_close(results[0][name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    gradients = [result["inputs"] for result, count in zip(results, shares, strict=True) if count]
    torch.testing.assert_close(torch.cat(gradients), inputs.grad, rtol=TOLERANCE, atol=TOLERANCE)


def penalise(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Return a loss with a gradient penalty through the norms."""
    inputs = inputs.clone().requires_grad_()
    outputs = model(inputs)
    (gradient,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
    loss: torch.Tensor = outputs.mean() + gradient.square().sum((1, 2, 3)).sqrt().mean()
    return loss


def on_penalty() -> dict[str, torch.Tensor]:
    """Take two steps with the penalty."""
    model = build(affine)
    booster = Booster(precision="fp64")
    model, optimizer = booster.boost(model, sgd(model))
    for step in range(2):
        penalise(model, batch_of(step, 6)[0].tensor_split(booster.data_degree)[booster.data_rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gradient_penalties_go_through_the_statistics(num_ranks: int) -> None:
    """The second derivative knows that statistics depend on all rows of all ranks."""
    model = build(affine)
    optimizer = sgd(model)
    for step in range(2):
        penalise(model, batch_of(step, 6)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()

    states = run_ranks(on_penalty, num_ranks)

    for name, value in model.state_dict().items():
        torch.testing.assert_close(states[0][name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


# --- boosted loaders ----------------------------------------------------------------------------------------


def dataset() -> TensorDataset:
    """Return eight samples: batches of three leave two, an empty share for one of three ranks."""
    return TensorDataset(*batch_of(5, 8))


def on_loader(loop: str, pieces: Sequence[object]) -> dict[str, torch.Tensor]:
    """Train for two epochs on what a boosted loader gives."""
    model = build(affine)
    booster = Booster(*pieces, precision="fp64")
    model, optimizer, loader = booster.boost(model, sgd(model), DataLoader(dataset(), batch_size=3))
    for _ in range(2):
        for inputs, target in loader:
            if loop == "plain":
                F.mse_loss(model(inputs), target).backward()
            else:
                booster.forward_backward(model, (inputs, target), nn.MSELoss())
            optimizer.step()
            optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize("loop", ["plain", "forward_backward"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_shares_of_boosted_loaders_count_as_they_are(loop: str, num_ranks: int) -> None:
    """Uneven and empty shares give the weights and statistics of one process, recomputed or not."""
    model = build(affine)
    optimizer = sgd(model)
    for _ in range(2):
        for inputs, target in DataLoader(dataset(), batch_size=3):
            F.mse_loss(model(inputs), target).backward()
            optimizer.step()
            optimizer.zero_grad()

    for pieces in ((), (Recompute(blocks=("[01]", "6")),)):
        for state in run_ranks(on_loader, num_ranks, loop, pieces):
            for name, value in model.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
