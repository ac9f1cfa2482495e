"""Boxes and flat ranges, against index sets counted one by one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal_core.boxes import Box, flat_range_boxes

examined = settings(deadline=None, max_examples=200)
"""Without a deadline, which a busy machine would miss."""

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def shapes_and_ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Draw a shape with a range of its row-major order, empty ones included."""
    shape = draw(SHAPES)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@st.composite
def pairs_of_boxes(draw: st.DrawFn) -> tuple[Box, Box]:
    """Draw two boxes of one small index space."""
    dims = draw(st.integers(0, 3))
    numbers = st.lists(st.integers(0, 4), min_size=dims, max_size=dims).map(tuple)
    return Box(draw(numbers), draw(numbers)), Box(draw(numbers), draw(numbers))


def list_indices(box: Box) -> list[tuple[int, ...]]:
    """Return every index in a box, in row-major order."""
    return list(itertools.product(*(range(s.start, s.stop) for s in box.slices)))


def flatten(index: Sequence[int], shape: Sequence[int]) -> int:
    """Return the row-major position of an index."""
    position = 0
    for i, extent in zip(index, shape, strict=True):
        position = position * extent + i
    return position


@examined
@given(shapes_and_ranges())
def test_boxes_of_a_range_cover_it_exactly_and_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    """Row by row, box by box, the flat indices come out as the range counts them."""
    shape, start, stop = case

    covered = [
        flatten(index, shape)
        for box, _ in flat_range_boxes(shape, start, stop)
        for index in list_indices(box)
    ]

    assert covered == list(range(start, stop))


@examined
@given(shapes_and_ranges())
def test_each_box_of_a_range_says_where_it_begins(case: tuple[tuple[int, ...], int, int]) -> None:
    """The flat index beside a box is that of its first element; the others follow without gaps."""
    shape, start, stop = case
    for box, first in flat_range_boxes(shape, start, stop):
        assert [flatten(index, shape) for index in list_indices(box)] == list(
            range(first, first + box.volume)
        )


@examined
@given(shapes_and_ranges())
def test_a_range_is_at_most_two_boxes_for_each_dim_but_one(case: tuple[tuple[int, ...], int, int]) -> None:
    """A range of n dims needs at most 2n - 1 boxes, none of them empty; one of no dims needs one."""
    shape, start, stop = case

    boxes = [box for box, _ in flat_range_boxes(shape, start, stop)]

    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.volume > 0 for box in boxes)


def test_a_whole_tensor_is_one_box() -> None:
    """The common case costs nothing."""
    assert list(flat_range_boxes((3, 4, 5), 0, 60)) == [(Box((0, 0, 0), (3, 4, 5)), 0)]


def test_the_bound_on_the_number_of_boxes_is_reached() -> None:
    """A range that starts and ends in the middle of rows and planes needs all five boxes of three dims."""
    boxes = list(flat_range_boxes((4, 3, 5), 7, 52))

    assert [box.size for box, _ in boxes] == [(1, 1, 3), (1, 1, 5), (2, 3, 5), (1, 1, 5), (1, 1, 2)]


@pytest.mark.parametrize(("start", "stop", "count"), [(0, 0, 0), (0, 1, 1), (1, 1, 0)])
def test_a_scalar_is_a_box_without_dims(start: int, stop: int, count: int) -> None:
    """A 0-d tensor has one element, in the box that has no dims."""
    assert list(flat_range_boxes((), start, stop)) == [(Box((), ()), 0)] * count
    assert Box((), ()).volume == 1
    assert Box((), ()).intersect(Box((), ())) == Box((), ())


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 2)])
def test_a_tensor_without_elements_has_no_boxes(shape: tuple[int, ...]) -> None:
    """Nothing is covered by nothing."""
    assert list(flat_range_boxes(shape, 0, 0)) == []


@examined
@given(pairs_of_boxes())
def test_intersection_holds_what_both_boxes_hold(pair: tuple[Box, Box]) -> None:
    """The common box has the common indices, or is None where there are none; the order does not matter."""
    left, right = pair

    common = left.intersect(right)

    expected = set(list_indices(left)) & set(list_indices(right))
    assert (set() if common is None else set(list_indices(common))) == expected
    assert (common is None) == (not expected)
    assert right.intersect(left) == common


@examined
@given(pairs_of_boxes())
def test_moving_a_box_back_leaves_it_where_it_was(pair: tuple[Box, Box]) -> None:
    """A shift changes the offset only."""
    box, by = pair[0], pair[1].offset

    moved = box.shifted(by)

    assert moved.size == box.size
    assert moved.shifted([-step for step in by]) == box


def test_slices_select_the_box() -> None:
    """A box is an index expression of any tensor of its space."""
    assert Box((1, 0), (2, 3)).slices == (slice(1, 3), slice(0, 3))
