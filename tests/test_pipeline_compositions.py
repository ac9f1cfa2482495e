"""Pipelines with what other members bring: state divided among data ranks, frozen stages, fp16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from colossal_core.runtime.booster import Booster
from colossal_pipeline import Pipeline
from colossal_testkit.models import Workload, build_workload
from colossal_testkit.parity import Recipe, check_parity
from colossal_testkit.ranks import run_ranks, run_ranks_expecting_errors
from colossal_zero import Zero


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_divided_state_has_the_numbers_of_one_process(stage: Any, schedule: str) -> None:
    """Two stages of two data ranks each, with shares of different sizes and weights, and a tied weight."""
    recipe = Recipe(
        builder=build_workload,
        arguments={"name": "gpt-tied", "num_samples": 13, "ignores_some": True, "num_steps": 3},
        loop="forward_backward",
        max_grad_norm=0.5,
    )
    piece = Pipeline(degree=2, microbatches=3, schedule=schedule, chunks=2 if schedule == "zbv" else 1)

    check_parity(recipe, nproc=4, pieces=[piece, Zero(stage=stage)], settings={"precision": "fp64"})


def build_frozen() -> Workload:
    """Return a run in which only the first stage has anything to train."""
    work = build_workload("gpt", num_steps=3)
    for name, parameter in work.model.named_parameters():
        parameter.requires_grad_(name.startswith("tokens"))
    return work


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_without_trainable_weights_agree_with_the_others(stage: Any) -> None:
    """Norm, clipping and steps are those of one process; nobody waits."""
    recipe = Recipe(builder=build_frozen, loop="forward_backward", max_grad_norm=0.01)

    check_parity(
        recipe,
        nproc=4,
        pieces=[Pipeline(degree=2, microbatches=3), Zero(stage=stage)],
        settings={"precision": "fp64"},
    )


class Scaled(torch.nn.Module):
    """A loss, multiplied."""

    reduction = "mean"

    def __init__(self, inner: Any, factor: float) -> None:
        super().__init__()
        self.inner = inner
        self.factor = factor

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return it."""
        loss: torch.Tensor = self.inner(outputs, target) * self.factor
        return loss


def overflow(stage: Any) -> tuple[int, float]:
    """Let the last stage overflow once; returns the steps that were skipped, and the loss scale."""
    work = build_workload("gpt", dtype="float32", num_steps=3)
    booster = Booster(Pipeline(degree=2, microbatches=2), Zero(stage=stage), precision="fp16")
    model, optimizer = booster.boost(work.model, work.optimizer)
    for number, (ids, target) in enumerate(work.batches):
        criterion = Scaled(work.criterion, 1e9 if number == 1 else 1.0)
        booster.forward_backward(model, (ids, target), criterion)
        optimizer.step()
        optimizer.zero_grad()
    return int(optimizer.skipped_steps), float(optimizer.loss_scale)


@pytest.mark.parametrize("stage", [1, 2])
def test_an_overflow_on_one_stage_skips_the_step_on_all(stage: Any) -> None:
    """All ranks agree, also those whose own gradients are finite."""
    found = run_ranks(overflow, 4, stage)

    assert {skipped for skipped, _ in found} == {1}
    assert len({scale for _, scale in found}) == 1


def boost_with_divided_parameters() -> None:
    """Ask for what does not go together yet."""
    work = build_workload("gpt")
    Booster(Pipeline(degree=2, microbatches=2), Zero(stage=3)).boost(work.model, work.optimizer)


def test_divided_parameters_are_refused() -> None:
    """By the plan, on every rank."""
    for error in run_ranks_expecting_errors(boost_with_divided_parameters, 2):
        assert "zero3" in str(error)


def test_weights_are_those_of_the_model_in_full() -> None:
    """What `full_parameters` shows is the serial model, before any step."""
    work = build_workload("gpt-tied")

    for found in run_ranks(show_weights, 4):
        for name, value in work.model.named_parameters():
            assert torch.equal(found[name], value.detach()), name


def show_weights() -> dict[str, torch.Tensor]:
    """Return all weights right after boost."""
    work = build_workload("gpt-tied")
    booster = Booster(Pipeline(degree=2, microbatches=2), Zero(stage=1), precision="fp64")
    model, _ = booster.boost(work.model, work.optimizer)
    with booster.full_parameters(model) as found:
        return {name: value.detach().clone() for name, value in found.items()}
