"""Do the tables of all ranks together describe the serial models, each element once?

A table says what one rank holds, and who else is meant to hold the same. Whether those others agree cannot
be seen on one rank. This file compares the tables of all ranks, as plain values that any channel can carry:
a test of a strategy does so, and so can a run that looks for a mistake in one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen

from colossal_core.boxes import Box
from colossal_core.runtime.table import Key, ParameterTable

__all__ = ["HeldEntry", "HeldPart", "find_cover_problems", "held_entries"]


@frozen(kw_only=True)
class HeldPart:
    """A part of a parameter on one rank, its groups spelled out.

    Attributes:
        box: The box in the global index space.
        holders: Ranks that are said to hold this very box.
        sum_over: Ranks that are said to have computed a share of its gradient.
    """

    box: Box
    holders: tuple[int, ...]
    sum_over: tuple[int, ...]


@frozen(kw_only=True)
class HeldEntry:
    """What one rank's table says about one parameter or buffer.

    Attributes:
        shape: Global shape.
        parts: What the rank holds.
        reduce: Ranks over which it sums the gradient.
        divisor: What it divides that sum by.
    """

    shape: tuple[int, ...]
    parts: tuple[HeldPart, ...]
    reduce: tuple[int, ...]
    divisor: int


Book = Mapping[Key, HeldEntry]
"""What one rank's table says, by ``(model, name)``."""


def held_entries(table: ParameterTable, rank: int) -> dict[Key, HeldEntry]:
    """Return what a rank's table says, as plain values; nothing is communicated.

    Args:
        table: The table of ``rank``.
        rank: Global rank whose table it is.
    """
    members = table.layout.members
    found = {}
    for entry in table:
        parts = [
            HeldPart(box=part.box, holders=members(part.holders, rank), sum_over=members(part.sum_over, rank))
            for part in entry.parts
        ]
        found[entry.key] = HeldEntry(
            shape=entry.shape,
            parts=tuple(parts),
            reduce=members(entry.reduce, rank),
            divisor=entry.divisor,
        )
    return found


def find_cover_problems(books: Sequence[Book]) -> list[str]:
    """Return everything that is wrong with the tables of all ranks, in words; nothing when they fit.

    They fit when, for each parameter and buffer, all ranks know it with one shape; its distinct boxes cover
    each element once; exactly those ranks hold a box that each of them names as its holders; and ranks that
    sum a gradient, by ``sum_over`` or ``reduce``, say the same about that sum.

    Args:
        books: What :func:`held_entries` returned on each rank, in rank order.
    """
    keys = dict.fromkeys(itertools.chain(*books))
    return [f"{'.'.join(key)}: {problem}" for key in keys for problem in _find_problems(key, books)]


def _find_problems(key: Key, books: Sequence[Book]) -> Iterator[str]:
    """Yield what is wrong with one parameter."""
    missing = [rank for rank, book in enumerate(books) if key not in book]
    if missing:
        yield f"ranks {missing} do not know it"
        return
    entries = [book[key] for book in books]
    shapes = {entry.shape for entry in entries}
    if len(shapes) > 1:
        yield f"ranks give it the shapes {sorted(shapes)}"
        return
    held: dict[Box, dict[int, HeldPart]] = {}
    for rank, entry in enumerate(entries):
        for part in entry.parts:
            if rank in held.setdefault(part.box, {}):
                yield f"rank {rank} holds {part.box} twice"
            held[part.box][rank] = part
    for one, other in itertools.combinations(held, 2):
        if one.intersect(other) is not None:
            yield f"{one} of ranks {sorted(held[one])} overlaps {other} of ranks {sorted(held[other])}"
    covered, numel = sum(box.volume for box in held), math.prod(shapes.pop())
    if covered != numel:
        yield f"its boxes have {covered} elements of {numel}"
    for box, parts in held.items():
        yield from _find_group_problems(box, parts)
    yield from _find_reduction_problems(entries)


def _find_group_problems(box: Box, parts: Mapping[int, HeldPart]) -> Iterator[str]:
    """Yield what is wrong with the groups of one box, given its parts by rank."""
    ranks = tuple(sorted(parts))
    for rank, part in parts.items():
        if part.holders != ranks:
            yield f"rank {rank} says that {box} is held by {part.holders}, and it is held by {ranks}"
        for other in part.sum_over:
            theirs = parts[other].sum_over if other in parts else "nothing"
            if theirs != part.sum_over:
                yield f"rank {rank} sums {box} over {part.sum_over}, rank {other} over {theirs}"


def _find_reduction_problems(entries: Sequence[HeldEntry]) -> Iterator[str]:
    """Yield what is wrong with the reduction of a gradient, given the entry of each rank."""
    for rank, entry in enumerate(entries):
        for other in entry.reduce if entry.parts else ():
            theirs = entries[other]
            if (theirs.reduce, theirs.divisor) != (entry.reduce, entry.divisor):
                yield (
                    f"rank {rank} sums over {entry.reduce} and divides by {entry.divisor}, "
                    f"rank {other} over {theirs.reduce} and by {theirs.divisor}"
                )
            if [part.box for part in theirs.parts] != [part.box for part in entry.parts]:
                yield f"ranks {rank} and {other} reduce its gradient together, and hold different boxes"
