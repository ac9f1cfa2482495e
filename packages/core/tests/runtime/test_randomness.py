"""Random state after boost: apart where samples differ, together elsewhere, and the same in every run."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from colossal_core import Booster, Recompute, launch
from colossal_core.mesh import MeshLayout
from colossal_core.mesh.layout import Axis
from colossal_core.runtime.agreement import Agreement
from colossal_core.runtime.draws import seed_process
from colossal_core.runtime.launch import rendezvous_store
from colossal_core.runtime.randomness import settle_randomness
from colossal_testkit import run_ranks

Draws = tuple[list[float], list[float], float, float | None]
"""A dropout mask, numbers of torch, of Python, and of numpy where it is there."""


def draw() -> Draws:
    """Draw from every generator that user code draws from."""
    mask = nn.functional.dropout(torch.ones(40), 0.5).tolist()
    numpy = sys.modules.get("numpy")
    return (
        mask,
        torch.rand(3).tolist(),
        random.random(),  # noqa: S311 - not for secrets
        None if numpy is None else float(numpy.random.rand()),
    )


def on_boost(seed: int | None, imports_numpy: bool) -> Draws:  # noqa: FBT001 - travels to ranks
    """Boost a model and draw."""
    if imports_numpy:
        pytest.importorskip("numpy")
    if seed is not None:
        torch.manual_seed(seed)
    Booster().boost(nn.Linear(2, 2), None)
    return draw()


@pytest.mark.parametrize("imports_numpy", [False, True])
def test_data_ranks_draw_apart_and_repeat_themselves(imports_numpy: bool) -> None:  # noqa: FBT001
    """No two ranks share a mask or a number; the same seed gives the same ones, another seed gives others."""
    first = run_ranks(on_boost, 3, 5, imports_numpy)
    again = run_ranks(on_boost, 3, 5, imports_numpy)
    other = run_ranks(on_boost, 3, 6, imports_numpy)

    assert first == again
    for index in range(3 + imports_numpy):
        drawn = [repr(draws[index]) for draws in [*first, *other]]
        assert len(set(drawn)) == len(drawn)


def test_the_seed_of_launch_counts() -> None:
    """Without a seed of the user's it is that of launch, which the pool sets to its default."""
    assert run_ranks(on_boost, 2, None, False) == run_ranks(on_boost, 2, 1024, False)


def on_layout(axes: Sequence[Axis], disturbs: bool) -> Draws:  # noqa: FBT001 - travels to ranks
    """Settle the generators of a layout, after this rank drew as often as its number says."""
    launch()
    rank = torch.distributed.get_rank()
    if disturbs:
        torch.rand(rank)
        random.seed(rank)
        torch.manual_seed(7 + rank)
    layout = MeshLayout(tuple(axes))
    settle_randomness(layout, rank, Agreement(rendezvous_store(), rank, layout.world_size))
    return draw()


DATA = Axis(name="data", degree=2, divides_batch=True, gradients="average")
TENSOR = Axis(name="tensor", degree=2)


def test_ranks_of_one_data_coordinate_draw_alike() -> None:
    """Along tensor, sequence and pipeline masks agree, also if ranks were seeded or had drawn differently."""
    outer_data = run_ranks(on_layout, 4, (DATA, TENSOR), True)
    inner_data = run_ranks(on_layout, 4, (TENSOR, DATA), True)

    assert outer_data[0] == outer_data[1] != outer_data[2] == outer_data[3]
    assert inner_data[0] == inner_data[2] != inner_data[1] == inner_data[3]
    assert outer_data[0] == inner_data[0]


@pytest.mark.parametrize("disturbs", [False, True])
def test_one_data_rank_goes_on_where_it_is(disturbs: bool) -> None:  # noqa: FBT001 - a parameter
    """With tensor ranks only, all draw what a plain process would draw; the state of rank 0 decides."""
    alone = run_ranks(on_layout, 1, (), disturbs)

    drawn = run_ranks(on_layout, 2, (TENSOR,), disturbs)

    assert drawn == [alone[0], alone[0]]


def on_lone_boost() -> tuple[Draws, Draws]:
    """Draw after boost, and from the same state without it."""
    model = nn.Sequential(nn.Linear(2, 2))
    found = []
    for boosts in (True, False):
        seed_process(1)
        if boosts:
            Booster(Recompute(blocks=("0",))).boost(model, None)
        found.append(draw())
    return found[0], found[1]


def test_boost_on_one_process_draws_nothing() -> None:
    """A run of one process has the same bits with and without a Booster."""
    for boosted, plain in run_ranks(on_lone_boost, 1):
        assert boosted == plain
