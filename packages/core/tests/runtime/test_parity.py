"""Parity: whole runs under ``Replicated`` equal plain torch in one process, to 1e-10 in fp64."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_core import Booster
from colossal_testkit import run_ranks
from colossal_testkit.models import MODELS, build_workload
from colossal_testkit.parity import FP32, Recipe, check_parity
from colossal_testkit.stories import batch_of, tiny_buffers


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_plain_loops_equal_one_process(name: str, world_size: int) -> None:
    """Five AdamW steps in two groups with clipping: frozen, unused and tied weights, branches, an LSTM."""
    recipe = Recipe(builder=build_workload, arguments={"name": name}, max_grad_norm=0.5)

    check_parity(recipe, nproc=world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_forward_backward_equals_one_process(name: str, world_size: int) -> None:
    """Shares that differ by a sample, and targets that do not count, make the mean of the whole batch."""
    ignores_some = name.startswith("gpt")
    arguments = {"name": name, "num_samples": 11, "ignores_some": ignores_some}
    recipe = Recipe(builder=build_workload, arguments=arguments, max_grad_norm=0.5, loop="forward_backward")

    check_parity(recipe, nproc=world_size)


@pytest.mark.parametrize("loop", ["plain", "held"])
@pytest.mark.parametrize(("optimizer", "name"), [("sgd", "gpt-tied"), ("adafactor", "mlp")])
def test_other_optimizers_equal_one_process(
    optimizer: str, name: str, loop: Literal["plain", "held"]
) -> None:
    """Momentum by group, and an optimizer that sees whole parameters, with two passes a step."""
    # Adafactor would divide the rounding of key biases, whose gradient is truly zero, by its own size.
    arguments = {"name": name, "optimizer": optimizer}

    check_parity(Recipe(builder=build_workload, arguments=arguments, loop=loop), nproc=2)


def test_fp32_is_as_near_as_the_order_of_sums_allows() -> None:
    """With SGD: Adam would amplify rounding where a gradient is truly zero."""
    arguments = {"name": "gpt", "dtype": "float32", "optimizer": "sgd"}

    check_parity(Recipe(builder=build_workload, arguments=arguments), nproc=3, tolerance=FP32)


def train_in_fp32(buffer_bytes: int, *, boosts: bool) -> list[torch.Tensor]:
    """Train in fp32 on this rank, or in one process on the gradients of both, added in rank order."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 3))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    if boosts:
        with tiny_buffers(buffer_bytes, buffer_bytes // 4):
            model, optimizer = Booster().boost(model, optimizer)
    for step in range(4):
        for rank in [dist.get_rank()] if boosts else range(2):
            loss = model(batch_of(rank, step).float()).square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if not boosts:
            for parameter in model.parameters():
                parameter.grad *= 0.5
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("buffer_bytes", [40, 8 << 20])
def test_two_ranks_equal_the_definition_bit_for_bit_in_fp32(buffer_bytes: int) -> None:
    """A sum of two numbers has one result, and the update is torch's own arithmetic."""
    results = run_ranks(train_in_fp32, 2, buffer_bytes, boosts=True)

    wanted = train_in_fp32(buffer_bytes, boosts=False)
    for result in results:
        for name, (value, reference) in enumerate(zip(result, wanted, strict=True)):
            assert torch.equal(value, reference), name
