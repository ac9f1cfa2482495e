"""Axis-aligned boxes of a tensor: intersection, and the boxes that a flat range covers.

The one idea: every cut of a parameter, by whichever strategy, is a set of boxes ``(offset, size)`` in its
global index space, and every flat shard is a range of the row-major order, which is a handful of boxes.
Norms, checkpoints and reports are then written once, over boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from attrs import frozen

__all__ = ["Box", "flat_range_boxes"]


@frozen
class Box:
    """A box of a tensor's index space; 0-d tensors have the box ``Box((), ())`` of volume 1.

    Attributes:
        offset: First index along each dim.
        size: Extent along each dim; an extent of 0 makes the box empty.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index expression that selects the box."""
        return tuple(
            slice(start, start + length) for start, length in zip(self.offset, self.size, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """Return the common box, or None when nothing is common."""
        offset = tuple(map(max, self.offset, other.offset))
        end = tuple(
            min(a + m, b + n)
            for a, m, b, n in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )
        size = tuple(stop - start for start, stop in zip(offset, end, strict=True))
        return Box(offset, size) if all(length > 0 for length in size) else None

    def shifted(self, by: Sequence[int]) -> Box:
        """Return the box moved by an offset."""
        return Box(tuple(start + step for start, step in zip(self.offset, by, strict=True)), self.size)


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Split the range ``[start, stop)`` of a tensor's row-major order into boxes.

    Args:
        shape: Shape of the tensor.
        start: First flat index.
        stop: One past the last flat index, at most the number of elements.

    Yields:
        ``(box, first)``: a box and the flat index of its first element, ascending; the elements of each box
        are consecutive in row-major order. At most ``2 * len(shape) - 1`` boxes.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ()), 0
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # the whole range lies inside one row
        yield from _inside_row(shape, first - 1, start, stop, row)
        return
    if start < first * row:
        yield from _inside_row(shape, first - 1, start, first * row, row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])), first * row
    if last * row < stop:
        yield from _inside_row(shape, last, last * row, stop, row)


def _inside_row(
    shape: Sequence[int], index: int, start: int, stop: int, row: int
) -> Iterator[tuple[Box, int]]:
    """Yield the boxes of a range that lies inside one row of dim 0."""
    for box, first in flat_range_boxes(shape[1:], start - index * row, stop - index * row):
        yield Box((index, *box.offset), (1, *box.size)), first + index * row
