"""Which elements of a dim a rank has: plain integers, so every case can be tested.

The one idea: what is cut is a number of *units*, heads or single features, of which each rank gets a run; a
layer has a number of rows for each unit, in one or several fused parts. Ranks get as many units each as the
others, or one fewer, so no rank is empty as long as there are as many units as ranks.
"""

from __future__ import annotations

import itertools

from attrs import frozen

from colossal_core.errors import UsageError

__all__ = ["Span", "Split", "legal_degrees", "split_evenly"]

Span = tuple[int, int]
"""First index, and one past the last."""


def split_evenly(count: int, degree: int) -> tuple[Span, ...]:
    """Return runs of ``count`` indices for each rank, the first ones larger by one where it does not divide.

    This is what ``torch.Tensor.tensor_split`` does.
    """
    each, left = divmod(count, degree)
    starts = [rank * each + min(rank, left) for rank in range(degree + 1)]
    return tuple(itertools.pairwise(starts))


@frozen(kw_only=True)
class Split:
    """How a dim of a layer divides among ranks.

    Attributes:
        parts: ``(first element, elements of a unit, number of units)`` of each fused part, in order. A part
            with fewer units than there are ranks, keys and values of shared heads, is held by several.
    """

    parts: tuple[tuple[int, int, int], ...]

    @classmethod
    def whole(cls, size: int, num_units: int, num_parts: int = 1) -> Split:
        """Return the split of a dim into equal parts with equally many units.

        Args:
            size: Elements of the dim.
            num_units: Units of each part.
            num_parts: Fused parts.
        """
        width = size // num_parts
        return cls(parts=tuple((index * width, width // num_units, num_units) for index in range(num_parts)))

    @property
    def size(self) -> int:
        """Elements of the dim."""
        first, width, count = self.parts[-1]
        return first + width * count

    @property
    def is_even(self) -> bool:
        """Whether it is one part without shared units, cut as :func:`split_evenly` cuts its elements."""
        return len(self.parts) == 1 and self.parts[0][1] == 1

    def spans(self, rank: int, degree: int) -> tuple[Span, ...]:
        """Return the elements of a rank, one run for each part."""
        found = []
        for first, width, count in self.parts:
            if count >= degree:
                start, stop = split_evenly(count, degree)[rank]
            else:
                start = rank // (degree // count)
                stop = start + 1
            found.append((first + start * width, first + stop * width))
        return tuple(found)

    def sharers(self, part: int, degree: int) -> tuple[tuple[int, ...], ...]:
        """Return the sets of ranks that hold the same elements of a part; empty when each has its own."""
        count = self.parts[part][2]
        if count >= degree:
            return ()
        each = degree // count
        return tuple(tuple(range(first, first + each)) for first in range(0, degree, each))

    def local_size(self, rank: int, degree: int) -> int:
        """Return how many elements a rank has."""
        return sum(stop - start for start, stop in self.spans(rank, degree))


def legal_degrees(num_heads: int, num_kv_heads: int | None = None, *, limit: int = 64) -> tuple[int, ...]:
    """Return the degrees that divide the heads, and divide the KV heads or are a multiple of them."""
    if num_heads < 1:
        raise UsageError(f"there are {num_heads} heads", hint="give at least 1")
    kv = num_heads if num_kv_heads is None else num_kv_heads
    return tuple(
        degree
        for degree in range(1, min(num_heads, limit) + 1)
        if num_heads % degree == 0 and max(kv, degree) % min(kv, degree) == 0
    )
