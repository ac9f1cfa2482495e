"""Runs go on under another number of ranks, exports are serial, and released models are plain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from colossal_tensor_parallel import TensorParallel
from colossal_testkit.models import build_workload
from colossal_testkit.parity import Recipe, boost_workload, share_of, train_serial
from colossal_testkit.ranks import run_ranks

from .registries import make_registry

RECIPE = Recipe(builder=build_workload, arguments={"name": "gpt-tied", "num_steps": 4}, max_grad_norm=0.5)


def boost(degree: int) -> tuple[Any, Any]:
    """Return Booster and workload."""
    pieces = [TensorParallel(degree=degree)] if degree > 1 else []
    return boost_workload(RECIPE, pieces, {}, make_registry)


def take_steps(booster: Any, work: Any, steps: range) -> None:
    """Take some steps."""
    for step in steps:
        inputs, target = share_of(work.batches[step], booster.data_rank, booster.data_degree, equal=True)
        work.criterion(work.model(inputs), target).backward()
        work.optimizer.step()
        work.optimizer.zero_grad()


def train_first_half(degree: int, root: str) -> None:
    """Take two steps, save, and export."""
    booster, work = boost(degree)
    take_steps(booster, work, range(2))
    booster.save(root)
    booster.export(work.model, f"{root}/plain")


def train_second_half(degree: int, root: str) -> dict[str, torch.Tensor]:
    """Load, take two more steps, release, and return the weights."""
    booster, work = boost(degree)
    booster.load(root)
    take_steps(booster, work, range(2, 4))
    booster.release(work.model)
    return {name: parameter.detach().clone() for name, parameter in work.model.named_parameters()}


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (3, 2)])
def test_runs_go_on_under_another_degree(before: int, after: int, tmp_path: Path) -> None:
    """Weights after two steps, a save, a load and two steps are those of four steps in one process."""
    expected = {name: slab.values for name, (slab,) in train_serial(RECIPE).slabs.items()}

    run_ranks(train_first_half, before, before, str(tmp_path))
    ranks = run_ranks(train_second_half, after, after, str(tmp_path))

    for found in ranks:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-11), name
    exported = load_file(tmp_path / "plain" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in exported.items()} == {
        name: tuple(value.shape) for name, value in expected.items()
    }


def evaluate_and_call(degree: int) -> tuple[float, torch.Tensor, torch.Tensor, dict[str, float]]:
    """Return the loss and outputs of `evaluate`, those of a plain call, and what evaluation moved."""
    booster, work = boost(degree)
    inputs, target = share_of(work.batches[0], booster.data_rank, booster.data_degree)
    loss, outputs = booster.evaluate(work.model, (inputs, target), work.criterion, return_outputs=True)
    booster.evaluate(work.model, (inputs, target), work.criterion)
    with torch.no_grad():
        plain = work.model.eval()(inputs)
    return float(loss), outputs, plain, booster.report()["traffic"]


def test_evaluation_returns_whole_logits() -> None:
    """The width that a user sees is the vocabulary, 41, which two ranks do not divide."""
    (loss, outputs, plain, _), _ = run_ranks(evaluate_and_call, 2, 2)
    expected, whole, _, _ = run_ranks(evaluate_and_call, 1, 1)[0]

    assert type(outputs) is torch.Tensor
    assert outputs.shape == plain.shape == (12, 6, 41)
    assert torch.allclose(outputs, whole)
    assert torch.allclose(plain, whole)
    assert loss == pytest.approx(expected, rel=1e-6)
