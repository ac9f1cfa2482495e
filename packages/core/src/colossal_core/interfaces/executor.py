"""How one step runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["AbstractExecutor"]


class AbstractExecutor(ABC):
    """Runs forward and backward of one batch for ``Booster.forward_backward``.

    A plan has exactly one: that of the only strategy that brings one (a pipeline), else core's plain one.
    """

    @abstractmethod
    def run(
        self, model: nn.Module, batch: Any, criterion: Callable[..., torch.Tensor] | None, weight: Any = None
    ) -> torch.Tensor:
        """Run forward and backward on this rank's share of the batch.

        Args:
            model: The boosted model.
            batch: ``(inputs, target)`` or one mapping.
            criterion: Loss function, or None when the output carries its ``loss``.
            weight: Weight of this rank's share in the mean: a number, a callable of the batch, or None to
                derive it.

        Returns:
            The mean loss over the global batch: 0-d, fp32, detached, the same on every rank.
        """
