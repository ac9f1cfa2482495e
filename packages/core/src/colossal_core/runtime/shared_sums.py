"""Sums of gradient shares among ranks that each computed only a part of a gradient.

The one idea: the table's ``sum_over`` says for which boxes this is so (norm weights in sequence regions, KV
heads that several tensor ranks share, tied embeddings on two stages). All boxes of one group travel in one
message, with one flag per parameter behind them, so that a parameter counts as touched when any of these
ranks touched it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from colossal_core.boxes import Box
from colossal_core.runtime.mesh import GRADIENTS

if TYPE_CHECKING:
    from colossal_core.mesh import GroupSpec, MeshLayout
    from colossal_core.runtime.collectives import Collectives
    from colossal_core.runtime.mesh import Group, Mesh
    from colossal_core.runtime.table import Entry
    from colossal_core.runtime.touch import Touch

__all__ = ["SharedSum", "shared_sums", "shares_of"]


@frozen(eq=False)
class SharedSum:
    """Boxes of gradients that are summed over one group.

    Attributes:
        group: The ranks.
        touches: The parameters that have such boxes.
        views: The boxes, as views of the gradient buffers.
    """

    group: Group
    touches: tuple[Touch, ...]
    views: tuple[torch.Tensor, ...]

    def run(self, collectives: Collectives) -> None:
        """Sum the boxes in place and mark what any rank touched; collective over the group."""
        if self.group.size == 1:
            return
        flags = torch.tensor([float(touch.is_live) for touch in self.touches])
        pieces = [view.reshape(-1) for view in self.views]
        message = torch.cat([*pieces, flags.to(pieces[0].dtype).to(pieces[0].device)])
        collectives.all_reduce(message, self.group, phase="gradients").wait()
        start = 0
        for view in self.views:
            view.copy_(message[start : start + view.numel()].view(view.shape))
            start += view.numel()
        for touch, flag in zip(self.touches, message[start:].tolist(), strict=True):
            touch.is_live = touch.is_live or flag > 0


def shared_sums(touches: Sequence[Touch], mesh: Mesh, channel: str = GRADIENTS) -> list[SharedSum]:
    """Collect the boxes that need a further sum, by group and dtype; collective, since it may create groups.

    Args:
        touches: All parameters of one window, in an order that is the same on all ranks that share boxes.
        mesh: Where groups come from.
        channel: Channel of those groups.
    """
    found: dict[tuple[GroupSpec, torch.dtype], tuple[dict[Touch, None], list[torch.Tensor]]] = {}
    for touch in touches:
        for part in touch.slot.entry.parts:
            if part.sum_over.axes:
                owners, views = found.setdefault((part.sum_over, touch.view.dtype), ({}, []))
                owners[touch] = None
                views.append(touch.view[Box(part.local, part.box.size).slices])
    order = sorted(found, key=lambda key: (key[0].axes, repr(key[0].blocks), str(key[1])))
    return [
        SharedSum(mesh.group(spec, channel), tuple(found[spec, d][0]), tuple(found[spec, d][1]))
        for spec, d in order
    ]


def shares_of(
    entry: Entry, layout: MeshLayout, rank: int, divisor: int
) -> tuple[tuple[tuple[slice, ...], float], ...]:
    """Return by what a whole gradient is multiplied, box by box, so that what ranks then sum is it again.

    A gradient that was reduced in an earlier window is whole on each rank. It goes through the sums once more
    when the user does not clear it: over ``reduce``, whose size need not be the divisor, and ``sum_over``.

    Args:
        entry: The parameter.
        layout: Axes of the run.
        rank: This rank.
        divisor: What the sum will be divided by.

    Returns:
        Boxes of the local tensor with their factor; those that stay as they are are left out.
    """
    ratio = divisor / len(layout.members(entry.reduce, rank))
    found = [
        (Box(part.local, part.box.size).slices, ratio / len(layout.members(part.sum_over, rank)))
        for part in entry.parts
    ]
    return tuple((box, share) for box, share in found if share != 1.0)
