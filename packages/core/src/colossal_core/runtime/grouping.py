"""Which trainable parameters are in which group of an optimizer, to notice when that changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["grouping_of", "is_same"]


def grouping_of(optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
    """Return the trainable parameters of each group, in order."""
    return [
        [parameter for parameter in group["params"] if parameter.requires_grad]
        for group in optimizer.param_groups
    ]


def is_same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    """Whether two groupings hold the same objects in the same order."""
    return len(one) == len(other) and all(
        len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
        for a, b in zip(one, other, strict=True)
    )
