"""The arithmetic of ranks and groups, exhaustively for every small layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest

from colossal_core.errors import UsageError
from colossal_core.mesh import BASE_AXES, Axis, GroupSpec, MeshLayout

DEGREES = (
    (1,),
    (4,),
    (2, 3),
    (1, 3),
    (3, 1, 2),
    (2, 2, 3),
    (2, 1, 2, 2),
)
"""Degrees of small meshes: one axis, degree 1 in every position, degrees that do not divide each other."""


def make_layout(degrees: Sequence[int]) -> MeshLayout:
    """Return a layout with the first names of the base axes."""
    axes = (Axis(name=name, degree=degree) for name, degree in zip(BASE_AXES, degrees, strict=False))
    return MeshLayout(tuple(axes))


def list_subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield every set of axes, the empty one included."""
    for count in range(len(names) + 1):
        yield from itertools.combinations(names, count)


GRID = MeshLayout(
    (
        Axis(name="expert_data", degree=2, divides_batch=True, gradients="average", part_of="data"),
        Axis(name="expert", degree=3, divides_batch=True, gradients="average", part_of="data"),
        Axis(name="tensor", degree=4),
    )
)
"""24 ranks, the data axis split in two."""

SHARED_HEADS = GroupSpec(("tensor",), (((0,), (1,)), ((2,), (3,))))
"""Two KV heads, each on two of four tensor ranks."""


@pytest.mark.parametrize("degrees", DEGREES)
def test_ranks_and_coordinates_are_one_to_one(degrees: tuple[int, ...]) -> None:
    """Every rank has coordinates of its own that lead back to it, the innermost axis counting fastest."""
    layout = make_layout(degrees)

    places = [layout.coordinates(rank) for rank in range(layout.world_size)]

    assert layout.world_size == math.prod(degrees)
    assert [tuple(place.values()) for place in places] == list(itertools.product(*map(range, degrees)))
    assert [layout.rank(place) for place in places] == list(range(layout.world_size))


def test_coordinates_that_are_not_given_are_zero() -> None:
    """A few coordinates are enough to name the first rank that has them."""
    assert GRID.rank({"expert": 2}) == 8


@pytest.mark.parametrize("rank", [-1, 24])
def test_rank_outside_the_world_is_refused(rank: int) -> None:
    """The error says how large the world is."""
    with pytest.raises(UsageError, match=f"rank {rank} is outside a world of 24"):
        GRID.coordinates(rank)


@pytest.mark.parametrize("degrees", DEGREES)
def test_groups_of_any_axes_partition_the_world(degrees: tuple[int, ...]) -> None:
    """Each rank is in exactly one group, which is the one that `members` says, of the size of the axes."""
    layout = make_layout(degrees)
    for axes in list_subsets(layout.names):
        groups = layout.enumerate(GroupSpec(axes))

        assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
        assert {len(group) for group in groups} == {math.prod(layout.degree(name) for name in axes)}
        assert all(group == layout.members(GroupSpec(axes), rank) for group in groups for rank in group)
        assert all(list(group) == sorted(group) for group in groups)


@pytest.mark.parametrize("degrees", DEGREES)
def test_members_differ_along_the_axes_of_the_group_only(degrees: tuple[int, ...]) -> None:
    """Who is in a group follows from the coordinates: equal outside the axes, anything inside."""
    layout = make_layout(degrees)
    for axes in list_subsets(layout.names):
        for rank in range(layout.world_size):
            mine = layout.coordinates(rank)
            same = [
                other
                for other in range(layout.world_size)
                if all(layout.coordinates(other)[name] == mine[name] for name in set(mine) - set(axes))
            ]

            assert layout.members(GroupSpec(axes), rank) == tuple(same)


def test_order_of_axes_in_a_group_means_nothing() -> None:
    """Two ways to write one group are the same ranks."""
    assert GRID.enumerate(GroupSpec(("tensor", "expert"))) == GRID.enumerate(GroupSpec(("expert", "tensor")))


def test_group_without_axes_is_the_rank_alone() -> None:
    """No axes, or axes that the mesh lacks, mean that nobody else is meant."""
    for spec in (GroupSpec(), GroupSpec(("pipeline",))):
        assert GRID.members(spec, 5) == (5,)
        assert GRID.enumerate(spec) == tuple((rank,) for rank in range(24))


def test_everyone_is_the_whole_world() -> None:
    """The group over all axes holds all ranks."""
    assert GRID.members(GRID.everyone(), 7) == tuple(range(24))


def test_name_of_a_split_axis_stands_for_its_parts() -> None:
    """Pieces that know `data` need not know that another piece has split it."""
    assert GRID.degree("data") == 6
    assert GRID.expand(("tensor", "data")) == ("expert_data", "expert", "tensor")
    assert GRID.members(GroupSpec(("data",)), 1) == (1, 5, 9, 13, 17, 21)
    assert GRID.members(GroupSpec(("expert_data",)), 1) == (1, 13)
    assert GRID.members(GroupSpec(("expert",)), 1) == (1, 5, 9)


def test_share_of_the_batch_counts_all_axes_that_divide_it() -> None:
    """Ranks that differ along `tensor` only bring the same samples, all others different ones."""
    shares = [GRID.data_coordinate(rank) for rank in range(24)]

    assert GRID.data_degree == 6
    assert shares == [share for share in range(6) for _ in range(4)]


def test_blocks_hold_only_the_coordinates_that_belong_together() -> None:
    """A group can be a part of an axis, at every coordinate of the others."""
    assert GRID.members(SHARED_HEADS, 0) == (0, 1)
    assert GRID.members(SHARED_HEADS, 7) == (6, 7)
    assert GRID.enumerate(SHARED_HEADS) == tuple((rank, rank + 1) for rank in range(0, 24, 2))


def test_rank_in_no_block_is_alone() -> None:
    """First and last stage share a weight; the stages between them have nobody to share with."""
    layout = make_layout((4, 1, 2))
    ends = GroupSpec(("pipeline",), (((0,), (3,)),))

    assert [layout.members(ends, rank) for rank in (0, 7)] == [(0, 6), (1, 7)]
    assert [layout.members(ends, rank) for rank in (2, 5)] == [(2,), (5,)]
    assert layout.enumerate(ends) == ((0, 6), (1, 7))


def test_blocks_give_coordinates_in_the_order_of_their_axes() -> None:
    """A block may span several axes; its coordinates follow the names beside it, not the mesh."""
    pairs = GroupSpec(("tensor", "expert"), (((3, 1), (0, 2)),))

    assert GRID.members(pairs, GRID.rank({"expert": 2})) == (7, 8)
    assert GRID.members(pairs, GRID.rank({"expert": 2, "expert_data": 1})) == (19, 20)
    assert GRID.members(pairs, GRID.rank({"expert": 1})) == (4,)


def test_blocks_over_a_split_axis_give_coordinates_of_its_parts() -> None:
    """A parent stands for its parts, in mesh order."""
    ends = GroupSpec(("data",), (((0, 0), (1, 2)),))

    assert GRID.members(ends, 1) == (1, 21)
    assert GRID.members(ends, 5) == (5,)


def test_product_of_whole_groups_is_the_group_over_all_their_axes() -> None:
    """Groups along different axes multiply."""
    found = GRID.product([GroupSpec(("expert",)), GroupSpec(("tensor",)), GroupSpec()])

    assert found == GroupSpec(("expert", "tensor"))


def test_product_with_blocks_holds_whoever_is_connected() -> None:
    """KV heads shared by two of four tensor ranks, times two expert replicas, are on four ranks."""
    found = GRID.product([SHARED_HEADS, GroupSpec(("expert_data",))])

    assert GRID.members(found, 0) == (0, 1, 12, 13)
    assert GRID.members(found, 11) == (10, 11, 22, 23)
    groups = GRID.enumerate(found)
    assert sorted(itertools.chain(*groups)) == list(range(24))
    assert {len(group) for group in groups} == {4}


def test_product_keeps_ranks_of_no_block_alone_along_that_axis() -> None:
    """Stages between the tied ends multiply by the other axes only."""
    layout = make_layout((3, 1, 2))
    ends = GroupSpec(("pipeline",), (((0,), (2,)),))

    found = layout.product([ends, GroupSpec(("data",))])

    assert layout.members(found, 0) == (0, 1, 4, 5)
    assert layout.members(found, 2) == (2, 3)


def test_intersection_of_whole_groups_is_the_group_over_their_common_axes() -> None:
    """Who holds a part along data and tensor, once tensor is cut, holds it along data."""
    outer = GroupSpec(("data", "tensor"))

    assert GRID.intersection([outer, GRID.without("tensor")]) == GroupSpec(("expert_data", "expert"))


def test_intersection_with_blocks_holds_who_is_in_all_groups() -> None:
    """A weight tied across two stages, then cut over tensor, is on both at one tensor coordinate."""
    layout = make_layout((3, 1, 2, 1, 2))
    tied = layout.product([GroupSpec(("pipeline",), (((0,), (2,)),)), GroupSpec(("data", "tensor"))])

    found = layout.intersection([tied, layout.without("tensor")])

    assert layout.members(tied, 0) == (0, 1, 2, 3, 8, 9, 10, 11)
    assert layout.members(found, 0) == (0, 2, 8, 10)
    assert layout.members(found, 5) == (5, 7)


@pytest.mark.parametrize("degrees", [degrees for degrees in DEGREES if len(degrees) > 1])
def test_products_and_intersections_agree_with_the_members(degrees: tuple[int, ...]) -> None:
    """A product holds its factors, an intersection is what they have in common, for blocks of every axis."""
    layout = make_layout(degrees)
    halves = [
        GroupSpec((axis.name,), (tuple((i,) for i in range(axis.degree - 1)),) if axis.degree > 1 else None)
        for axis in layout.axes
    ]
    for pair in itertools.product(
        halves + [GroupSpec(axes) for axes in list_subsets(layout.names)], repeat=2
    ):
        product, common = layout.product(pair), layout.intersection(pair)
        for rank in range(layout.world_size):
            members = [set(layout.members(spec, rank)) for spec in pair]

            assert set(layout.members(product, rank)) >= members[0] | members[1]
            assert set(layout.members(common, rank)) == members[0] & members[1]


def test_group_without_an_axis_is_all_ranks_of_one_coordinate() -> None:
    """What is cut over some axes is held by all ranks that agree on them; a parent stands for its parts."""
    assert GRID.without("tensor") == GroupSpec(("expert_data", "expert"))
    assert GRID.without("data") == GroupSpec(("tensor",))
    assert GRID.without("expert", "tensor") == GroupSpec(("expert_data",))
    assert GRID.without() == GRID.everyone()


def test_sum_of_gradients_is_divided_along_averaged_axes_only() -> None:
    """Axes that are summed count different samples of one share, so they do not divide."""
    layout = MeshLayout(
        (
            Axis(name="data", degree=3, divides_batch=True, gradients="average"),
            Axis(name="sequence", degree=2, divides_batch=True, gradients="sum"),
            Axis(name="tensor", degree=2),
        )
    )

    assert layout.gradient_divisor == 3
    assert layout.gradient_group == GroupSpec(("data", "sequence"))


def list_partitions(places: Sequence[tuple[int, ...]]) -> Iterator[tuple[tuple[tuple[int, ...], ...], ...]]:
    """Yield every way to put places into blocks."""
    if not places:
        yield ()
        return
    first, *rest = places
    for count in range(len(rest) + 1):
        for company in itertools.combinations(rest, count):
            others = [place for place in rest if place not in company]
            for blocks in list_partitions(others):
                yield ((first, *company), *blocks)


@pytest.mark.parametrize("degrees", [(1, 2, 2), (2, 1, 3)])
def test_specs_that_mean_the_same_groups_have_one_normal_form(degrees: tuple[int, ...]) -> None:
    """However a group is written, the normal form is one spec with the same members."""
    layout = make_layout(degrees)
    specs = [GroupSpec(axes) for axes in list_subsets(layout.names)]
    for axes in list_subsets(layout.names):
        places = list(itertools.product(*(range(layout.degree(name)) for name in axes)))
        specs += [GroupSpec(axes, blocks) for blocks in list_partitions(places)]
    seen: dict[tuple[tuple[int, ...], ...], GroupSpec] = {}
    for spec in specs:
        groups = tuple(layout.members(spec, rank) for rank in range(layout.world_size))
        normal = layout.normalise(spec)

        assert tuple(layout.members(normal, rank) for rank in range(layout.world_size)) == groups
        assert seen.setdefault(groups, normal) == normal
        assert layout.normalise(normal) == normal


def test_normal_form_drops_what_changes_nothing() -> None:
    """Axes of degree 1, parents, the order of names and blocks of one rank leave no trace."""
    layout = make_layout((1, 2, 3))

    assert layout.normalise(GroupSpec(("data", "pipeline", "replica"))) == GroupSpec(("replica", "data"))
    assert layout.normalise(GroupSpec(("data",), (((2,),), ((1,), (0,))))) == GroupSpec(
        ("data",), (((0,), (1,)),)
    )
    assert layout.normalise(GroupSpec(("data",), (((1,), (2,), (0,)),))) == GroupSpec(("data",))
    assert GRID.normalise(GroupSpec(("data",))) == GroupSpec(("expert_data", "expert"))


@pytest.mark.parametrize("degree", [0, -2])
def test_degree_below_one_is_refused(degree: int) -> None:
    """An axis has at least one rank."""
    with pytest.raises(UsageError, match=f"'data' has degree {degree}"):
        Axis(name="data", degree=degree)


def test_axis_that_appears_twice_is_refused() -> None:
    """Names are how axes are told apart."""
    with pytest.raises(UsageError, match="'data' appears more than once"):
        MeshLayout((Axis(name="data", degree=2), Axis(name="data", degree=3)))


def test_parts_that_do_not_stand_together_are_refused() -> None:
    """Parts take the place of the axis, so nothing can stand between them."""
    with pytest.raises(UsageError, match="parent axis 'tensor' appears more than once"):
        MeshLayout(
            (
                Axis(name="rows", degree=2, part_of="tensor"),
                Axis(name="data", degree=2),
                Axis(name="columns", degree=2, part_of="tensor"),
            )
        )


def test_unknown_axis_names_those_that_exist() -> None:
    """The error of a lookup lists what could have been meant."""
    with pytest.raises(UsageError, match="no mesh axis 'pipeline'; the mesh has expert_data, expert, tensor"):
        GRID.axis("pipeline")


def test_unknown_axis_in_a_group_is_refused() -> None:
    """A typo must not become a group of one, which would sum nothing."""
    with pytest.raises(UsageError, match="no mesh axis 'dta'"):
        GRID.members(GroupSpec(("dta",)), 0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GroupSpec(("tensor",), (((0,), (1,)), ((1,), (2,)))), r"holds \(1,\) twice"),
        (GroupSpec(("tensor",), (((0,), (4,)),)), r"over tensor\(4\) holds \(4,\), which is outside"),
        (GroupSpec(("tensor",), (((0, 1),),)), r"over tensor\(4\) holds \(0, 1\), which is outside"),
    ],
    ids=["overlap", "outside", "length"],
)
def test_blocks_that_no_group_can_have_are_refused(spec: GroupSpec, message: str) -> None:
    """Blocks are disjoint sets of coordinates of the axes; a rank cannot be in two groups of one spec."""
    with pytest.raises(UsageError, match=message):
        GRID.enumerate(spec)
    with pytest.raises(UsageError, match=message):
        GRID.members(spec, 0)
