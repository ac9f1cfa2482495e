"""What a rank publishes in the two books, as plain values that a test puts together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import torch

from colossal_core.runtime.booster import Booster
from colossal_core.runtime.cover import HeldEntry, held_entries
from colossal_core.runtime.ledger import Transfer
from colossal_core.runtime.table import Key, ParameterTable, Place
from colossal_testkit.engine import engine_of
from colossal_testkit.parity import Slab, Trace, join_slabs
from colossal_testkit.traffic import all_reduce_words

__all__ = ["Published", "expected_gradient_words", "join_states", "publish"]

Slabs = dict[str, list[Slab]]
"""``model.name`` to the boxes of it that a rank holds."""


@attrs.frozen(kw_only=True, eq=False)
class Published:
    """What one rank says about itself.

    Attributes:
        book: Its table.
        trainable: Keys of parameters that have a gradient.
        local_numel: Elements of each local tensor.
        states: By state (``"value"``, ``"gradient"``, ``"exp_avg"``, ...), the boxes that its places hold.
        transfers: What it communicated in the last step.
    """

    book: Mapping[Key, HeldEntry]
    trainable: frozenset[Key]
    local_numel: Mapping[Key, int]
    states: Mapping[str, Slabs]
    transfers: Sequence[Transfer]


def publish(booster: Booster) -> Published:
    """Read the two books of this rank.

    Raises:
        AssertionError: A place holds elements twice, or some of a state of a tensor but not all of it.
    """
    engine = engine_of(booster)
    table = engine.context.table
    flat: dict[tuple[str, Key], torch.Tensor] = {}
    filled: dict[tuple[str, Key], torch.Tensor] = {}
    for place in engine.manager.places():
        numel = math.prod(table.tensor(table[place.key]).shape)
        what = (place.state, place.key)
        whole = flat.setdefault(what, torch.zeros(numel, dtype=place.tensor.dtype))
        known = filled.setdefault(what, torch.zeros(numel, dtype=torch.bool))
        _fill(place, whole, known)
    assert all(bool(known.all()) for known in filled.values())
    states: dict[str, Slabs] = {}
    for (state, key), whole in flat.items():
        states.setdefault(state, {})[".".join(key)] = _slabs_of(table, key, whole)
    return Published(
        book=held_entries(table, engine.context.mesh.rank),
        trainable=frozenset(entry.key for entry in table if entry.trainable),
        local_numel={entry.key: table.tensor(entry).numel() for entry in table},
        states=states,
        transfers=tuple(booster.last_traffic),
    )


def _fill(place: Place, whole: torch.Tensor, known: torch.Tensor) -> None:
    """Copy the elements of a place to where they belong in the local tensor."""
    span = slice(place.start, place.start + place.tensor.numel())
    assert place.tensor.is_contiguous()
    assert not bool(known[span].any())
    whole[span], known[span] = place.tensor.detach().reshape(-1), True


def _slabs_of(table: ParameterTable, key: Key, flat: torch.Tensor) -> list[Slab]:
    """Return the boxes of a local tensor that the table speaks of."""
    entry = table[key]
    local = flat.view(table.tensor(entry).shape)
    slabs = []
    for part in entry.parts:
        box = tuple(slice(at, at + n) for at, n in zip(part.local, part.box.size, strict=True))
        slabs.append(Slab(shape=entry.shape, offset=part.box.offset, values=local[box].clone()))
    return slabs


def join_states(ranks: Sequence[Published], state: str) -> dict[str, torch.Tensor]:
    """Put one state together over all ranks, by ``model.name``.

    Raises:
        ParityError: An element is held by no rank, or two ranks hold different bits of it.
    """
    slabs = [published.states.get(state, {}) for published in ranks]
    return join_slabs([Trace(losses=(), norms=(), slabs=held) for held in slabs])


def expected_gradient_words(published: Published, *, num_notes: int) -> float:
    """Return the words that one rank receives for gradients in a step, by the table alone.

    Each group of ranks sums all its local gradients, a flag for each of them, and some notes; ranks that
    computed shares of a gradient sum those boxes once more, with a flag for each parameter.

    Args:
        published: Of that rank.
        num_notes: Notes of each group.
    """
    lanes: dict[tuple[int, ...], float] = {}
    sums: dict[tuple[int, ...], float] = {}
    for key in published.trainable:
        entry = published.book[key]
        if not entry.parts:
            continue
        lanes[entry.reduce] = lanes.get(entry.reduce, num_notes) + published.local_numel[key] + 1
        shared = {part.sum_over for part in entry.parts if len(part.sum_over) > 1}
        for group in shared:
            boxes = [part.box.volume for part in entry.parts if part.sum_over == group]
            sums[group] = sums.get(group, 0) + sum(boxes) + 1
    return sum(
        all_reduce_words(count, len(group)) for found in (lanes, sums) for group, count in found.items()
    )
