"""Hooks of users see what they see in one process, though micro-batches add up without hooks of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from colossal_pipeline import Pipeline
from colossal_testkit import run_ranks

from . import trials
from .models import Run, build_gpt


def clear(parameter: torch.Tensor) -> None:
    """Take a gradient away again, each time that it arrives."""
    parameter.grad = None


def double(_: nn.Module, _args: Any, outputs: torch.Tensor) -> torch.Tensor:
    """Replace what a block returns."""
    return 2 * outputs


def triple(_: nn.Module, given: Any, _outputs: Any) -> Any:
    """Replace what goes back from a block."""
    return tuple(3 * one for one in given)


def build_hooked() -> Run:
    """Build a GPT with hooks of each kind: on modules of both stages, on gradients, behind accumulation."""
    run = build_gpt(num_blocks=4, rows=5)
    blocks = list(run.model.get_submodule("blocks").children())
    blocks[0].register_forward_hook(double)
    blocks[3].register_forward_hook(double)
    blocks[2].register_full_backward_hook(triple)
    first, *others = blocks[1].parameters()
    first.register_post_accumulate_grad_hook(clear)
    others[0].register_hook(lambda gradient: gradient / 2)
    return run


def train(pieces: list[object], *, passes: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with the hooks, with so many passes over each batch before a step."""
    run = build_hooked()
    booster, optimizer = trials.boost(run, pieces)
    norms = []
    for batch in run.batches:
        for _ in range(passes):
            booster.forward_backward(run.model, batch, run.criterion)
        optimizer.step()
        norms.append(float(optimizer.grad_norm) / passes)
        optimizer.zero_grad()
    return norms, trials.weights_of(booster, run.model)


@pytest.mark.parametrize(
    ("nproc", "pieces"),
    [
        (2, [Pipeline(degree=2, microbatches=3)]),
        (2, [Pipeline(degree=2, microbatches=3, schedule="interleaved", chunks=2)]),
        (4, [Pipeline(degree=2, microbatches=3)]),
    ],
    ids=["stages", "chunks", "replicas"],
)
def test_hooks_of_users_count_as_in_one_process(nproc: int, pieces: list[object]) -> None:
    """Also those that take a gradient away in the midst of a step; replicas bring the same batch here."""
    expected = trials.train_by_hand(build_hooked(), 3)

    for norms, weights in run_ranks(train, nproc, pieces):
        assert norms == pytest.approx(expected.norms, rel=0, abs=1e-10)
        for name, value in expected.weights.items():
            assert torch.allclose(weights[name], value, rtol=0, atol=1e-10), name


def test_passes_before_a_step_add_up_under_hooks() -> None:
    """Two passes over a batch give twice its norm; the window opens and closes once in each."""
    expected = trials.train_by_hand(build_hooked(), 3)

    for norms, _ in run_ranks(train, 2, [Pipeline(degree=2, microbatches=3)], passes=2):
        assert norms[0] == pytest.approx(expected.norms[0], rel=0, abs=1e-10)
