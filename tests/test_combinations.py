"""Pieces of different members in one plan: the numbers stay those of one process."""

from __future__ import annotations

from typing import Literal

import pytest

from colossal_core import Recompute
from colossal_gemini import Gemini
from colossal_tensor_parallel import TensorParallel
from colossal_testkit.models import build_workload
from colossal_testkit.parity import Recipe, check_parity
from colossal_zero import Zero


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["gpt", "gpt-tied"])
def test_cut_layers_with_divided_memory_are_exact(name: str, stage: Literal[1, 2, 3]) -> None:
    """Two tensor ranks by two data ranks, with clipping."""
    recipe = Recipe(
        builder=build_workload, arguments={"name": name}, loop="forward_backward", max_grad_norm=0.5
    )

    check_parity(recipe, nproc=4, pieces=[TensorParallel(degree=2), Zero(stage=stage)])


@pytest.mark.parametrize("sequence", [False, True])
def test_cut_layers_that_are_divided_and_recomputed_are_exact(*, sequence: bool) -> None:
    """The second run of a block gathers its parameters, and sums over tensor ranks again."""
    recipe = Recipe(builder=build_workload, arguments={"name": "gpt"}, max_grad_norm=0.5)

    check_parity(
        recipe, nproc=4, pieces=[TensorParallel(degree=2, sequence=sequence), Zero(stage=3), Recompute()]
    )


@pytest.mark.parametrize("sequence", [False, True])
def test_cut_layers_whose_chunks_come_and_go_are_exact(*, sequence: bool) -> None:
    """Chunks of cut layers are divided among data ranks, live in tiers, and are read again in backward."""
    recipe = Recipe(builder=build_workload, arguments={"name": "gpt-tied"}, max_grad_norm=0.5)
    pieces = [TensorParallel(degree=2, sequence=sequence), Gemini(device_budget="64MiB"), Recompute()]

    check_parity(recipe, nproc=4, pieces=pieces)
