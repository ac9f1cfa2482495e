"""Serial tensors, put together from the boxes that ranks hold, and edits of them, taken apart again.

The one idea: of the ranks that hold a box one puts it into a tensor of zeros, and a sum over all ranks makes
that tensor whole on each of them; bits are added as integers, so nothing is rounded. Where every rank holds
everything, nothing is communicated or copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from colossal_core.boxes import Box

if TYPE_CHECKING:
    from colossal_core.mesh import MeshLayout
    from colossal_core.runtime.context import Context
    from colossal_core.runtime.table import Entry, Key

__all__ = ["is_everywhere", "whole_tensors"]

PHASE = "whole"


def is_everywhere(entry: Entry, layout: MeshLayout, rank: int) -> bool:
    """Whether every rank of the run holds all of a tensor; all ranks give the same answer."""
    if len(entry.parts) != 1:
        return False
    part = entry.parts[0]
    return part.box.size == entry.shape and len(layout.members(part.holders, rank)) == layout.world_size


@contextmanager
def whole_tensors(
    local: Mapping[Key, torch.Tensor], dtypes: Mapping[Key, torch.dtype], context: Context
) -> Iterator[dict[Key, torch.Tensor]]:
    """Show tensors in their serial shapes; edits are copied back at the end; collective over all ranks.

    Args:
        local: Local tensors by key: those of the wanted ones that this rank holds something of.
        dtypes: Element types of all wanted ones, the same keys in the same order on all ranks.
        context: Table, mesh and collectives.
    """
    layout, rank = context.mesh.layout, context.mesh.rank
    shown: dict[Key, torch.Tensor] = {}
    joined: list[Key] = []
    for key, dtype in dtypes.items():
        entry = context.table[key]
        if is_everywhere(entry, layout, rank):
            shown[key] = local[key]
            continue
        whole = torch.zeros(entry.shape, dtype=dtype, device=context.mesh.device)
        for part in entry.parts:
            if min(layout.members(part.holders, rank)) == rank:
                whole[part.box.slices] = local[key].detach()[Box(part.local, part.box.size).slices]
        if whole.numel():
            context.collectives.all_reduce(_as_integers(whole), context.mesh.everyone(), phase=PHASE).wait()
        shown[key] = whole
        joined.append(key)
    yield shown
    with torch.no_grad():
        for key in joined:
            for part in context.table[key].parts:
                held = local[key].detach()[Box(part.local, part.box.size).slices]
                edited = shown[key][part.box.slices].to(held.dtype)
                if not torch.equal(held, edited):  # otherwise its version would say that it was written
                    held.copy_(edited)


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as integers that every backend can add."""
    raw = tensor.view(-1).view(torch.uint8)
    return raw.view(torch.int64) if raw.numel() % 8 == 0 else raw
