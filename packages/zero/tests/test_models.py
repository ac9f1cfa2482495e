"""Every stage trains every kind of model as one process does, to the digits of fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from colossal_core import Booster, Recompute
from colossal_testkit import run_ranks
from colossal_testkit.stories import assert_close
from colossal_zero import Zero

from .models import MODELS, Stage, build, loss_of, sgd

STEPS = 3
Weights = dict[str, torch.Tensor]


def train(
    name: str, pieces: tuple[object, ...], optimizer: str = "sgd", *, compiles: str = ""
) -> tuple[list[float], Weights]:
    """Train on this rank, with an evaluation and a second forward in between; return norms and weights."""
    model: Any = build(name)
    booster = Booster(*pieces, precision="fp64", max_grad_norm=0.5)
    if compiles:
        torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager") if compiles == "before" else None
    model, stepper = booster.boost(model, make(optimizer, model))
    if compiles:
        model = torch.compile(model, backend="aot_eager") if compiled is None else compiled
    norms = []
    for step in range(STEPS):
        loss = loss_of(model, dist.get_rank(), step)
        with torch.no_grad():
            loss_of(model.eval(), dist.get_rank(), step)
        model.train()
        loss_of(model, dist.get_rank(), step)
        loss.backward()
        stepper.step()
        norms.append(float(stepper.grad_norm))
        stepper.zero_grad()
    with booster.full_parameters(model) as full:
        return norms, {key: value.clone() for key, value in full.items()}


def make(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer; Muon takes matrices only, and Adafactor whole parameters of any shape."""
    if name == "sgd":
        return sgd(model)
    if name == "muon":
        return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.05)
    return torch.optim.Adafactor(model.parameters(), lr=0.05)


def train_alone(name: str, num_ranks: int, optimizer: str = "sgd") -> tuple[list[float], Weights]:
    """Train in one process on the batches of all ranks."""
    model = build(name)
    stepper = make(optimizer, model)
    chosen = [parameter for group in stepper.param_groups for parameter in group["params"]]
    norms = []
    for step in range(STEPS):
        losses = [loss_of(model, rank, step) for rank in range(num_ranks)]
        (torch.stack(losses).sum() / num_ranks).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(chosen, 0.5)))
        stepper.step()
        model.zero_grad()
    return norms, {key: value.detach().clone() for key, value in model.named_parameters()}


def compare(found: list[tuple[list[float], Weights]], wanted: tuple[list[float], Weights]) -> None:
    """Compare norms and weights of all ranks with those of one process."""
    for norms, weights in found:
        assert norms == pytest.approx(wanted[0], rel=1e-10)
        for key, value in weights.items():
            assert_close(value, wanted[1][key], key)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_that_read_parameters_in_unusual_ways_are_exact(name: str, stage: Stage) -> None:
    """Tied, repeated, recomputed, frozen, read by a parent, fewer elements than ranks: on three ranks."""
    found = run_ranks(train, 3, name, (Zero(stage=stage),))

    compare(found, train_alone(name, 3))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["tower", "tied"])
def test_recomputed_blocks_are_exact(name: str, stage: Stage) -> None:
    """The second run of a block goes past its hooks, and still finds its parameters."""
    found = run_ranks(train, 2, name, (Zero(stage=stage), Recompute()))

    compare(found, train_alone(name, 2))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["tower", "short"])
def test_copies_are_exact(name: str, stage: Stage) -> None:
    """Two copies on four ranks: sums inside a copy, then of shards between copies."""
    found = run_ranks(train, 4, name, (Zero(stage=stage, replicas=2),))

    compare(found, train_alone(name, 4))


@pytest.mark.parametrize(("stage", "compiles"), [(1, "before"), (1, "after"), (2, "after")])
def test_compiled_models_are_exact(stage: Stage, compiles: str) -> None:
    """Gradients of a compiled graph go where others go."""
    found = run_ranks(train, 2, "tower", (Zero(stage=stage),), compiles=compiles)

    compare(found, train_alone("tower", 2))


@pytest.mark.parametrize(("name", "stage"), [("tied", 1), ("attending", 2), ("repeated", 2), ("adapted", 1)])
def test_values_that_are_waited_for_in_forward_are_exact(name: str, stage: Stage) -> None:
    """Also where a parent reads the weights of children that it does not call."""
    found = run_ranks(train, 3, name, (Zero(stage=stage, gather="forward"),))

    compare(found, train_alone(name, 3))


@pytest.mark.parametrize(("stage", "num_ranks"), [(1, 1), (1, 2), (2, 2), (3, 3)])
def test_updates_on_the_host_are_exact(stage: Stage, num_ranks: int) -> None:
    """Masters, gradients of the shard and states are elsewhere; the numbers are the same."""
    found = run_ranks(train, num_ranks, "adapted", (Zero(stage=stage, offload="optimizer"),))

    compare(found, train_alone("adapted", num_ranks))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_optimizers_that_need_shapes_are_exact(optimizer: str, stage: Stage) -> None:
    """They get whole parameters, dealt to ranks; what they do not train stays as it is."""
    found = run_ranks(train, 3, "tower", (Zero(stage=stage),), optimizer)

    compare(found, train_alone("tower", 3, optimizer))
