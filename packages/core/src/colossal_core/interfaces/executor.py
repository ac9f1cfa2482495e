"""How one step runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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
        self,
        model: nn.Module,
        batch: Any,
        criterion: Callable[..., torch.Tensor] | None,
        weight: Any = None,
        batch_dims: Mapping[str, int | None] | None = None,
    ) -> torch.Tensor:
        """Run forward and backward on this rank's share of the batch.

        Args:
            model: The boosted model.
            batch: ``(inputs, target)`` or one mapping.
            criterion: Loss function, or None when the output carries its ``loss``.
            weight: Weight of this rank's share in the mean: a number, a callable of the batch, or None to
                derive it.
            batch_dims: By name, the dim of samples of what does not have them in dim 0, None for what every
                sample needs as a whole.

        Returns:
            The mean loss over the global batch: 0-d, fp32, detached, the same on every rank.
        """

    @abstractmethod
    def evaluate(
        self,
        model: nn.Module,
        batch: Any,
        criterion: Callable[..., torch.Tensor] | None,
        *,
        wants_outputs: bool = True,
        batch_dims: Mapping[str, int | None] | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Run forward in evaluation mode without gradients; the modes of all modules are restored.

        Args:
            model: The boosted model.
            batch: As for :meth:`run`.
            criterion: As for :meth:`run`.
            wants_outputs: Whether the outputs are asked for; where they have to travel, only then.
            batch_dims: As for :meth:`run`.

        Returns:
            The mean loss over the global batch (0-d, fp32, the same on every rank), and the outputs of the
            samples that this data rank brought, or None where they are not asked for and were not at hand.
        """
