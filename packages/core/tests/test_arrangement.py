"""Axes of pieces become the layout of ranks."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from colossal_core import Plan, PlanError, build_plan
from colossal_core.plugins import Registry


def describe(plan: Plan, world_size: int) -> list[tuple[str, int]]:
    """Return axes and degrees, outermost first."""
    return [(axis.name, axis.degree) for axis in plan.layout(world_size).axes]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_data_takes_the_whole_world_when_alone(world_size: int) -> None:
    """A plan without strategies is plain data parallelism."""
    (axis,) = Plan().layout(world_size).axes

    assert (axis.name, axis.degree, axis.divides_batch, axis.gradients) == (
        "data",
        world_size,
        True,
        "average",
    )


def test_axes_have_their_fixed_order(registry: Registry, acme: ModuleType) -> None:
    """Outermost to innermost, whatever the order of the pieces; data takes the rest."""
    pieces = [acme.Shards(degree=2), acme.Sharded(replicas=3), acme.Stages(degree=2, microbatches=4)]

    plan = build_plan(registry, pieces)

    assert describe(plan, 24) == [("pipeline", 2), ("replica", 3), ("data", 2), ("tensor", 2)]
    assert plan.layout(24).data_degree == 6


def test_an_axis_without_a_degree_does_not_exist(registry: Registry, acme: ModuleType) -> None:
    """``replicas=None`` leaves the axis out of the mesh."""
    plan = build_plan(registry, [acme.Sharded()])

    assert describe(plan, 4) == [("data", 4)]


def test_a_new_axis_stands_just_inside_its_anchor(registry: Registry, acme: ModuleType) -> None:
    """Core needs no list of axes."""
    plan = build_plan(registry, [acme.Ring(degree=2), acme.Shards(degree=2)])

    assert describe(plan, 8) == [("data", 2), ("ring", 2), ("tensor", 2)]
    assert plan.layout(8).axis("ring").gradients == "sum"


def test_parts_stand_in_place_of_the_whole(registry: Registry, acme: ModuleType) -> None:
    """The parts of an axis that nobody gives as a whole multiply to its degree."""
    layout = build_plan(registry, [acme.Grid(rows=2, columns=3)]).layout(12)

    assert [(axis.name, axis.degree, axis.part_of) for axis in layout.axes] == [
        ("data", 2, None),
        ("rows", 2, "tensor"),
        ("columns", 3, "tensor"),
    ]
    assert layout.degree("tensor") == 6


@pytest.mark.parametrize(
    ("data", "world_size", "axes"),
    [
        ("auto", 8, [("expert_data", 4), ("expert", 2)]),
        ("auto", 2, [("expert_data", 1), ("expert", 2)]),
        (6, 6, [("expert_data", 3), ("expert", 2)]),
    ],
)
def test_a_part_takes_the_rest_of_the_data_axis(
    registry: Registry, acme: ModuleType, data: Any, world_size: int, axes: list[tuple[str, int]]
) -> None:
    """Experts need not know the size of the world."""
    plan = build_plan(registry, [acme.Experts(degree=2)], data=data)

    assert describe(plan, world_size) == axes
    assert plan.layout(world_size).data_degree == world_size


def test_a_rest_without_other_parts_does_not_exist(registry: Registry, acme: ModuleType) -> None:
    """With the one real part left out, the axis is whole again."""
    plan = build_plan(registry, [acme.Experts(degree=None)])

    assert describe(plan, 4) == [("data", 4)]


@pytest.mark.parametrize(
    ("data", "world_size", "message", "hint"),
    [
        (
            2,
            8,
            "pipeline(2) x data(2) x tensor(4) = 16 ranks, but the world has 8",
            "lower one degree or start 16 processes",
        ),
        (
            2,
            32,
            "pipeline(2) x data(2) x tensor(4) = 16 ranks, but the world has 32",
            "raise one degree or start 16 processes",
        ),
        (
            "auto",
            12,
            "pipeline(2) x tensor(4) = 8 ranks, and the world of 12 is not a multiple of that",
            "start 8 or 16 processes, or change a degree",
        ),
        (
            "auto",
            3,
            "pipeline(2) x tensor(4) = 8 ranks, and the world of 3 is not a multiple of that",
            "start 8 processes, or change a degree",
        ),
    ],
)
def test_an_impossible_product_shows_the_arithmetic(
    registry: Registry, acme: ModuleType, data: Any, world_size: int, message: str, hint: str
) -> None:
    """And how many processes would fit."""
    pieces = [acme.Shards(degree=4), acme.Stages(degree=2, microbatches=1)]
    plan = build_plan(registry, pieces, data=data)

    with pytest.raises(PlanError) as caught:
        plan.layout(world_size)

    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_parts_of_the_data_axis_must_fit_the_world(registry: Registry, acme: ModuleType) -> None:
    """The parts are in the arithmetic."""
    plan = build_plan(registry, [acme.Experts(degree=4)])

    with pytest.raises(PlanError, match=r"parts of data\(4\) = 4 ranks, and the world of 6"):
        plan.layout(6)


def test_parts_must_divide_the_whole(registry: Registry, acme: ModuleType) -> None:
    """Known without a world."""
    with pytest.raises(
        PlanError, match=r"expert_data\(rest\) x expert\(4\) = 4 .* must divide its degree of 6"
    ):
        build_plan(registry, [acme.Experts(degree=4)], data=6)


@pytest.mark.parametrize("degree", [0, -1, "2", 1.5, True])
def test_a_degree_is_a_positive_integer(registry: Registry, acme: ModuleType, degree: Any) -> None:
    """Objects from Python are checked too."""
    with pytest.raises(
        PlanError, match=f"piece 'shards': degree is {degree!r}, expected an integer of at least 1"
    ):
        build_plan(registry, [acme.Shards(degree=degree)])


def test_strategies_cut_by_phase_and_then_from_outside(registry: Registry, acme: ModuleType) -> None:
    """partition, shard, transform, recompute; the order in which they were given does not matter."""
    pieces = [
        acme.Again(),
        acme.Ring(),
        acme.Shards(degree=1),
        acme.Experts(),
        acme.Stages(degree=1, microbatches=1),
    ]

    plan = build_plan(registry, pieces)

    assert [piece.name for piece in plan.strategies] == ["stages", "experts", "shards", "ring", "again"]
