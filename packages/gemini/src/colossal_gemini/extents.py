"""How large batches are: whether what was traced with one is enough for another.

The one idea: a step takes no more memory than a traced one whose batch has the same tensors, none of them
shorter in any dimension. So the longest batch that was seen stands for all shorter ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from colossal_core.runtime.collectives import Collectives
    from colossal_core.runtime.mesh import Group

__all__ = ["agree_on_extent", "extent_of"]

PHASE = "plan"

MAX_LENGTHS = 16
"""Lengths of dimensions that are told apart; of those beyond, the largest counts."""

Extent = tuple[int, ...]
"""What identifies the number, dimensions and types of tensors, and then their lengths."""


def extent_of(batch: Any) -> Extent:
    """Return the extent of all tensors in a batch."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    kinds = " ".join(f"{leaf.dim()}:{leaf.dtype}" for leaf in leaves)
    lengths = [length for leaf in leaves for length in leaf.shape]
    if len(lengths) > MAX_LENGTHS:
        lengths = [*lengths[: MAX_LENGTHS - 1], max(lengths[MAX_LENGTHS - 1 :])]
    return (zlib.crc32(kinds.encode()), *lengths)


def agree_on_extent(collectives: Collectives, everyone: Group) -> Callable[[Extent], Extent | None]:
    """Return what makes the extents of all ranks one; collective.

    It returns the largest lengths of any rank, or None where ranks have different kinds of batches.
    """

    def agree(extent: Extent) -> Extent | None:
        if everyone.size == 1:
            return extent
        lengths = [*extent[1:], *([0] * (MAX_LENGTHS + 1 - len(extent)))]
        message = torch.tensor([extent[0], -extent[0], *lengths], device=everyone.device)
        collectives.all_reduce(message, everyone, phase=PHASE, op="max").wait()
        kind, negative, *found = message.tolist()
        return (kind, *found[: len(extent) - 1]) if kind == -negative else None

    return agree
