"""How large chunks are, and which parameters of a unit share one. No torch here.

The one idea: buffers are cut to their content, so a chunk of a few small parameters wastes nothing but the
padding that equal shards need. What its size decides is something else: the memory of the buffers that
optimizer state passes through, which are as large as the largest chunk, against what each transfer costs to
begin. Both are counted in bytes here, and the sizes at which a unit is cut differently are tried.

A unit is cut where the next parameter would exceed the size; a parameter is never cut, so one that is larger
than the size is a chunk of its own, whatever is chosen.

Source: the search of PatrickStar and Elixir (Fang et al., 2021; Huang et al., 2022), for sizes of buffers
that are not cut to their content.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import final

import attrs

__all__ = ["ChunkChoice", "bound_waste", "choose_chunk_bytes", "cut_unit", "pad_numel"]

ALIGNMENT_BYTES = 64
"""Shards are padded to a multiple of this, as core's flat buffers are."""

NUM_BUFFERS = 3
"""Optimizer state passes through so many buffers: one is read, one updated, one written."""

LATENCY_BYTES = 4 << 20
"""What a link of 25 GB/s carries in the 150 microseconds that a transfer and its books take to begin."""


@final
@attrs.frozen(kw_only=True)
class ChunkChoice:
    """A size of chunks, and what follows from it.

    Attributes:
        chunk_bytes: Most bytes of the values of one chunk, but for parameters that are larger.
        num_chunks: How many there are.
        largest_bytes: Bytes of the largest one.
        waste: Padding as a fraction of what parameters take.
    """

    chunk_bytes: int
    num_chunks: int
    largest_bytes: int
    waste: float


def cut_unit(sizes: Sequence[int], *, value_bytes: int, chunk_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Deal the parameters of a unit into chunks, in the given order.

    Args:
        sizes: Elements of each.
        value_bytes: Bytes of an element.
        chunk_bytes: Bytes that no chunk exceeds, unless it holds a single parameter.

    Returns:
        Indices into ``sizes``, one tuple for each chunk.
    """
    chunks: list[tuple[int, ...]] = []
    held = 0
    for index, size in enumerate(sizes):
        if chunks and held + size * value_bytes <= chunk_bytes:
            chunks[-1] += (index,)
        else:
            chunks.append((index,))
            held = 0
        held += size * value_bytes
    return tuple(chunks)


def pad_numel(numel: int, *, ranks: int, value_bytes: int) -> int:
    """Return the elements of a chunk with its padding: equal aligned shards, and one element to spare.

    Args:
        numel: Elements of its parameters.
        ranks: Among how many ranks it is divided; one rank needs no padding.
        value_bytes: Bytes of an element.
    """
    if ranks == 1:
        return numel
    step = max(1, ALIGNMENT_BYTES // value_bytes)
    span = -(-(numel + 1) // ranks)
    return ranks * step * -(-span // step)


def bound_waste(numel: int, *, ranks: int, value_bytes: int) -> float:
    """Return what the padding of a chunk cannot exceed, as a fraction of its elements."""
    if ranks == 1:
        return 0.0
    return ranks * max(1, ALIGNMENT_BYTES // value_bytes) / numel


def choose_chunk_bytes(
    units: Iterable[Sequence[int]], *, value_bytes: int, ranks: int = 1, bound: int | None = None
) -> ChunkChoice:
    """Return the size of chunks that costs least; see above.

    Args:
        units: Elements of the parameters of each unit, in the order in which they are dealt.
        value_bytes: Bytes of an element.
        ranks: Among how many ranks chunks are divided; each then transfers a share of a chunk.
        bound: Most bytes of a chunk that come into question, when the user says so; it is then taken.
    """
    kinds = Counter(tuple(sizes) for sizes in units if sizes)
    if bound is not None:
        return _judge(kinds, bound, value_bytes, ranks)[1]
    candidates = {
        sum(part) * value_bytes
        for sizes in kinds
        for start in range(len(sizes))
        for part in itertools.islice(_prefixes(sizes[start:]), _MAX_PARTS)
    }
    chosen = (_judge(kinds, size, value_bytes, ranks) for size in sorted(candidates)[-_MAX_SIZES:])
    return min(chosen, key=lambda found: found[0])[1]


_MAX_PARTS, _MAX_SIZES = 32, 2048
"""Bounds of the search, which no model of repeated units comes near."""


def _prefixes(sizes: Sequence[int]) -> Iterable[Sequence[int]]:
    """Yield what a chunk that begins with the first parameter may hold."""
    return (sizes[:stop] for stop in range(1, len(sizes) + 1))


def _judge(
    kinds: Counter[tuple[int, ...]], chunk_bytes: int, value_bytes: int, ranks: int
) -> tuple[tuple[float, int], ChunkChoice]:
    """Return the cost of a size in bytes, smaller sizes first where it is the same, and what follows."""
    number = used = held = largest = 0
    for sizes, times in kinds.items():
        for chunk in cut_unit(sizes, value_bytes=value_bytes, chunk_bytes=chunk_bytes):
            numel = sum(sizes[index] for index in chunk)
            padded = pad_numel(numel, ranks=ranks, value_bytes=value_bytes)
            number, used, held = number + times, used + times * numel, held + times * padded
            largest = max(largest, padded * value_bytes)
    cost = NUM_BUFFERS * largest / ranks + number * LATENCY_BYTES + (held - used) * value_bytes
    choice = ChunkChoice(
        chunk_bytes=chunk_bytes,
        num_chunks=number,
        largest_bytes=largest,
        waste=(held - used) / used if used else 0.0,
    )
    return (cost, chunk_bytes), choice
