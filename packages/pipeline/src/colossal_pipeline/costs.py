"""What an item costs, as far as it can be told without a batch.

The one idea: nearly all time of a model goes into products with its weights. Where a guessed input went
through (:mod:`~colossal_pipeline.probing`), their operations were counted; elsewhere the time of a product
per token or pixel grows with the size of the weight. Either way a head costs what its vocabulary makes it,
and an embedding, which only looks rows up, next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from torch import nn

if TYPE_CHECKING:
    from colossal_pipeline.flow import Flow
    from colossal_pipeline.items import Item

__all__ = ["costs_of"]

_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


def costs_of(
    items: Sequence[Item], balance: Literal["time", "parameters"], flow: Flow | None = None
) -> list[float]:
    """Return the cost of each item.

    Args:
        items: The items of a model.
        balance: ``"parameters"`` counts them, tied ones where they come first; ``"time"`` counts operations
            of products, or elements of weights that multiply, wherever they are used.
        flow: What flows between items for a guessed input, where there is one.
    """
    if balance == "parameters":
        seen: set[nn.Parameter] = set()
        costs = []
        for item in items:
            fresh = [parameter for parameter in item.module.parameters() if parameter not in seen]
            seen.update(fresh)
            costs.append(float(sum(parameter.numel() for parameter in fresh)))
        return costs
    if flow is not None and any(flow.flops.values()):
        return [flow.flops.get(item.name, 0.0) + 1.0 for item in items]
    return [float(_multiplied(item.module)) for item in items]


def _multiplied(module: nn.Module) -> int:
    """Return the elements of weights that multiply, plus one for each other parameter: nothing is free."""
    total = 0
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            is_matrix = parameter.dim() >= 2 and not isinstance(child, _LOOKUPS)
            total += parameter.numel() if is_matrix else 1
    return total
