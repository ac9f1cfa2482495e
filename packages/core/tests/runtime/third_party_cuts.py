"""Cutting tensors by boxes and writing it down: what every strategy of these tests does in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve

from colossal_core.boxes import Box
from colossal_core.interfaces import Proposal
from colossal_core.mesh import GroupSpec
from colossal_core.runtime.context import Context
from colossal_core.runtime.table import Key, Part

__all__ = ["apply_cuts", "cut_further", "slab", "stack"]


def slab(
    shape: Sequence[int],
    ranges: Mapping[int, tuple[int, int]],
    holders: GroupSpec,
    sum_over: GroupSpec = GroupSpec(),
) -> Part:
    """Return the part that is cut to ``[start, stop)`` along some dims and whole along the others."""
    spans = [ranges.get(dim, (0, extent)) for dim, extent in enumerate(shape)]
    box = Box(tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans))
    return Part(box=box, local=(0,) * len(spans), holders=holders, sum_over=sum_over)


def stack(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Put parts behind each other along dim 0 of the local tensor."""
    found, row = [], 0
    for part in parts:
        found.append(evolve(part, local=(row, *part.local[1:])))
        row += part.box.size[0]
    return tuple(found)


def apply_cuts(proposal: Proposal, context: Context, *, reduce: GroupSpec | None = None) -> None:
    """Cut every tensor to its proposed parts, in place, and write the parts into the table.

    Args:
        proposal: What is cut; a rank without parts of a tensor keeps an empty one.
        context: Of the boosted models.
        reduce: Ranks over which gradients of the cut parameters are summed, where the axes do not say it.
    """
    for key, parts in proposal.cuts.items():
        tensor = context.table.tensor(context.table[key])
        whole = tensor.detach()
        if not parts:
            tensor.data = whole.new_empty(0)
        else:
            tensor.data = whole.new_empty(_local_shape(parts))
            for part in parts:
                local = Box(part.local, part.box.size)
                tensor.detach()[local.slices] = whole[part.box.slices]
        context.table.cut(key, parts=parts, reduce=reduce)


def cut_further(key: Key, rows: tuple[int, int], axis: str, context: Context) -> None:
    """Cut dim 0 of what an earlier strategy left whole of a tensor; nothing happens where it left nothing.

    Who holds the new part held the old one and is at the same coordinate; sums of its gradient stay.
    """
    entry = context.table[key]
    if not entry.parts:
        return
    (part,) = entry.parts
    layout, tensor = context.mesh.layout, context.table.tensor(entry)
    tensor.data = tensor.detach()[slice(*rows)].clone()
    holders = layout.intersection([part.holders, layout.without(axis)])
    context.table.cut(key, parts=[slab(entry.shape, {0: rows}, holders, part.sum_over)])


def _local_shape(parts: Sequence[Part]) -> tuple[int, ...]:
    """Return the shape of a tensor that holds parts and nothing else."""
    ends = [
        [start + extent for start, extent in zip(part.local, part.box.size, strict=True)] for part in parts
    ]
    return tuple(max(end) for end in zip(*ends, strict=True))
