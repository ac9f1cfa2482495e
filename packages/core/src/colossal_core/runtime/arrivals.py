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
        are_unseen: Whether no code of the user runs that may look at gradients: see :meth:`unseen`.
    """

    def __init__(self, loss_scale: LossScale | None = None) -> None:
        """Start with a weight of 1."""
        self.weight = 1.0
        self.loss_scale = loss_scale
        self.are_unseen = False

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

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Run several backward passes between which nobody looks at ``p.grad``; inside of a hold.

        Gradients may then stay in the place of ``p.grad`` from pass to pass, until the hold ends.
        """
        before, self.are_unseen = self.are_unseen, True
        try:
            yield
        finally:
            self.are_unseen = before
