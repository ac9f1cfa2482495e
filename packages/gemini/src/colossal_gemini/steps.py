"""From a far arrangement of a chunk to nearer ones, in steps that save less and less. No torch here.

The one idea: of all arrangements only those on the lower hull of price over size come into question, since
between two of these every other one costs more than its share of memory would save elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import attrs

if TYPE_CHECKING:
    from colossal_gemini.costs import Arrangement

__all__ = ["Step", "find_way"]


@final
@attrs.frozen
class Step:
    """Part of the way of a chunk from a far arrangement to a near one.

    Attributes:
        chunk: Which one.
        where: The arrangement that it leads to.
        saved: Seconds that it saves.
        size: Bytes that it takes.
    """

    chunk: int
    where: Arrangement
    saved: float
    size: int

    def sort_key(self) -> tuple[float, int]:
        """Return the order of steps: most saved for each byte first, of what is alike the small ones."""
        return (-float(f"{self.saved / self.size:.6g}"), self.size)


def find_way(
    chunk: int, first: tuple[int, float], places: Sequence[tuple[Arrangement, int, float]]
) -> list[Step]:
    """Return the steps of one chunk, those that save most for each byte first.

    Args:
        chunk: Which one.
        first: Bytes and seconds of the arrangement that it begins with.
        places: Arrangements with their bytes and seconds.
    """
    (size, seconds), way = first, list[Step]()
    while True:
        better = [
            Step(chunk, where, seconds - price, taken - size)
            for where, taken, price in places
            if taken > size and price < seconds
        ]
        if not better:
            return way
        way.append(min(better, key=Step.sort_key))
        size, seconds = size + way[-1].size, seconds - way[-1].saved
