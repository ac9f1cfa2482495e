"""What holds for the gradients that backward delivers now: their weight and their loss scale.

The one idea: a gradient is brought to common terms where it arrives in its buffer, so what is reduced later
is a plain sum. In the plain loop a rank's loss counts by its share of the rows that the boosted loader gave
last; under fp16 the gradients of one window are kept in the scale of its first one. Both factors are usually
1, and then cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    import torch

    from colossal_core.runtime.loss_scale import LossScale

__all__ = ["Arrivals"]


@final
class Arrivals:
    """Weight and scale of arriving gradients; one per Booster, read by all its gradient windows.

    Attributes:
        weight: Factor of gradients of losses that the user's own code computes: rows of this rank times the
            data degree over rows of the global batch. 1.0 without a boosted loader.
        loss_scale: The loss scale of fp16, or None.
    """

    def __init__(self, loss_scale: LossScale | None = None) -> None:
        """Start with a weight of 1."""
        self.weight = 1.0
        self.loss_scale = loss_scale

    @property
    def scale(self) -> float:
        """Scale of the gradients that arrive now; 1.0 without fp16."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def check(self, name: str, parameter: torch.Tensor) -> None:
        """Refuse a gradient that should be scaled and is not; see :meth:`LossScale.check`."""
        if self.loss_scale is not None:
            self.loss_scale.check(name, parameter)

    @contextmanager
    def weighed(self, weight: float = 1.0) -> Iterator[None]:
        """Run a backward whose loss was scaled already.

        Args:
            weight: What its gradients count; 1.0 when the loss was weighed already, too.
        """
        before, self.weight = self.weight, weight
        try:
            if self.loss_scale is None:
                yield
            else:
                with self.loss_scale.explicit():
                    yield
        finally:
            self.weight = before
