"""Buckets: which parameters share a flat buffer, and which buffers share a lane.

The one idea: what is reduced over the same ranks and divided among the same ranks lies together, in the
order in which backward fills it, in buffers of a few megabytes. The plan follows from the table alone, so it
also says what a manager will hold before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from colossal_core.runtime.flat import BufferKind, FlatBuffer, fill_buffers
from colossal_core.runtime.lanes import NOTES_PER_BUFFER

if TYPE_CHECKING:
    import torch
    from torch import nn

    from colossal_core.mesh import GroupSpec
    from colossal_core.runtime.table import Entry

__all__ = ["BUFFER_BYTES", "LAST_BUFFER_BYTES", "BucketRules", "LanePlan", "plan_lanes"]

BUFFER_BYTES = 8 << 20
"""A buffer is closed at this size. Small enough that most of them leave before backward ends, large enough
that the latency of a message does not count; see benchmarks/replicated.py."""

LAST_BUFFER_BYTES = 1 << 20
"""Wanted bound of the buffer that backward fills last: its message cannot hide behind anything."""


@frozen(kw_only=True, eq=False)
class BucketRules:
    """How parameters are put into buffers.

    Attributes:
        dtype_of: Element type of an entry's values and gradients.
        divided: Ranks among which an entry's buffer is divided; no axes when each holds it whole.
        num_ranks: Number of ranks of such a group.
        keeps_whole: Whether no parameter may be cut by a border between ranks.
        by_unit: Whether each module unit has one buffer of its own.
        cut: What cuts a unit into several buffers, given elements of its parameters and bytes of an element;
            returns positions. None for one buffer.
        divides_alone: Whether the shard of an entry's buffer is kept apart from it on one rank, too; never,
            when None.
        larger: Factor of the sizes: a message on an accelerator's links needs more bytes before its latency
            does not count.
        device: Where buffers are; None for where their parameters are.
    """

    dtype_of: Callable[[Entry, nn.Parameter], torch.dtype]
    divided: Callable[[Entry], GroupSpec]
    num_ranks: Callable[[GroupSpec], int]
    keeps_whole: bool = False
    by_unit: bool = False
    cut: Callable[[Sequence[int], int], Sequence[Sequence[int]]] | None = None
    divides_alone: Callable[[Entry], bool] | None = None
    larger: int = 1
    device: torch.device | None = None

    def divides(self, divided: GroupSpec, entry: Entry) -> bool:
        """Whether the buffer of an entry is divided among the ranks of a group."""
        return self.num_ranks(divided) > 1 or (self.divides_alone is not None and self.divides_alone(entry))


@frozen(kw_only=True, eq=False)
class LanePlan:
    """The buffers of one lane, laid out and not allocated.

    Attributes:
        reduce: Ranks over which gradients are summed.
        divided: Ranks among which the buffers are divided.
        buffers: In launch order.
    """

    reduce: GroupSpec
    divided: GroupSpec
    buffers: list[FlatBuffer]

    @property
    def is_divided(self) -> bool:
        """Whether shards of the buffers are kept apart from them."""
        return self.buffers[0].is_divided


@frozen(kw_only=True)
class _Kind(BufferKind):
    """What all parameters of one buffer have in common, with the ranks among which it is divided."""

    divided: GroupSpec
    is_divided: bool


def plan_lanes(members: Sequence[tuple[Entry, nn.Parameter]], rules: BucketRules) -> list[LanePlan]:
    """Lay out buffers, those of one lane together, in the order in which backward fills them.

    Args:
        members: Trainable parameters with their entries, in the order of the models.
        rules: How they are put together.
    """
    by_kind: dict[_Kind, list[int]] = {}
    backward = list(reversed(members))
    for index, (entry, parameter) in enumerate(backward):
        divided = rules.divided(entry)
        kind = _Kind(
            dtype=rules.dtype_of(entry, parameter),
            reduce=entry.reduce,
            divisor=entry.divisor,
            unit=entry.unit if rules.by_unit and rules.divides(divided, entry) else "",
            is_divided=rules.divides(divided, entry),
            divided=divided,
        )
        by_kind.setdefault(kind, []).append(index)
    lanes: dict[tuple[GroupSpec, GroupSpec, bool], list[tuple[int, _Kind, list[int]]]] = {}
    for kind, indices in by_kind.items():
        for positions in _fill(kind, [backward[index][1].numel() for index in indices], rules):
            chosen = [indices[position] for position in positions]
            key = (kind.reduce, kind.divided, kind.is_divided)
            lanes.setdefault(key, []).append((max(chosen), kind, chosen))
    found = []
    for (reduce, divided, _), plans in lanes.items():
        plans.sort(key=lambda plan: plan[0])
        num_shards = rules.num_ranks(divided)
        num_notes = [0] * (len(plans) - 1) + [NOTES_PER_BUFFER * len(plans)]
        buffers = [
            FlatBuffer(
                (backward[index] for index in chosen),
                kind,
                num_notes=0 if kind.is_divided else notes,
                num_shards=num_shards,
                is_divided=kind.is_divided,
                keeps_whole=rules.keeps_whole,
                device=rules.device,
            )
            for (_, kind, chosen), notes in zip(plans, num_notes, strict=True)
        ]
        found.append(LanePlan(reduce=reduce, divided=divided, buffers=buffers))
    return found


def _fill(kind: _Kind, sizes: Sequence[int], rules: BucketRules) -> Iterable[Sequence[int]]:
    """Deal the parameters of one kind into buffers."""
    num_shards = rules.num_ranks(kind.divided)
    if rules.by_unit and kind.is_divided:
        if rules.cut is not None:
            return rules.cut(sizes, kind.dtype.itemsize)
        return [range(len(sizes))]
    # Whole parameters fill the shards of a small buffer unevenly.
    larger = rules.larger * (num_shards if rules.keeps_whole else 1)
    return fill_buffers(
        sizes,
        item_bytes=kind.dtype.itemsize,
        buffer_bytes=larger * BUFFER_BYTES,
        last_bytes=larger * LAST_BUFFER_BYTES if rules.keeps_whole else LAST_BUFFER_BYTES,
    )
