"""Accumulation: several micro-batches in one gradient window.

The one idea: gradients of micro-batches simply add up, each scaled by what its mean counts relative to a
    fixed
reference, so the mean over the window is the sum divided by the sum of those ratios, which are known when the
window closes. A window that closes early is right by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch

__all__ = ["WEIGHING", "AccumulationWindow", "LossWeights"]

WEIGHING = (
    "the first that applies: weight=, what the torch loss counts, num_items_in_batch, samples",
    "no forward_backward yet",
)
"""What a rank's loss weighs in the mean over the global batch, before there is a batch to tell, and why."""


@final
class AccumulationWindow:
    """Counts the micro-batches of one optimizer.

    Attributes:
        size: Micro-batches in a full window.
        num_batches: Micro-batches in the window so far.
    """

    def __init__(self, size: int) -> None:
        """Start empty.

        Args:
            size: Micro-batches in a full window, at least 1.
        """
        self.size = size
        self.num_batches = 0
        self._ratios: list[float | torch.Tensor] = []

    @property
    def is_full(self) -> bool:
        """Whether the next real step is due."""
        return self.num_batches >= self.size

    def add(self, ratio: float | torch.Tensor | None) -> None:
        """Count a micro-batch.

        Args:
            ratio: Its weight relative to the reference; None counts as 1. May be a 0-d tensor, which is read
                when the window closes.
        """
        self.num_batches += 1
        self._ratios.append(1.0 if ratio is None else ratio)

    def share(self, last: float | torch.Tensor | None = None) -> float:
        """Return the factor of the summed gradients if the window closes with one more micro-batch."""
        return 1.0 / sum(float(ratio) for ratio in [*self._ratios, 1.0 if last is None else last])

    def close(self) -> float:
        """Empty the window and return the factor of its summed gradients; 1.0 for a window of one."""
        ratios, self._ratios, self.num_batches = self._ratios, [], 0
        if self.size == 1:
            return 1.0
        return 1.0 / sum(float(ratio) for ratio in ratios)


@final
class LossWeights:
    """What losses of micro-batches weigh relative to a fixed reference; for executors and optimizers.

    Only in use when the plan accumulates: otherwise every loss is a mean of its own, and repeated backward
    passes add, as in torch.

    Attributes:
        rows_ratio: What a micro-batch counts whose losses the user's own code computes: rows of the batch
            that a boosted loader gave last, relative to its first one; 1.0 without.
        rule: What the last loss of an executor was weighed by; "" before the first.
    """

    def __init__(self, *, num_optimizers: int, is_active: bool) -> None:
        """Start without a reference.

        Args:
            num_optimizers: Optimizers whose windows are counted.
            is_active: Whether the plan accumulates.
        """
        self.rows_ratio = 1.0
        self.rule = ""
        self.is_active = is_active
        self._num_optimizers = num_optimizers
        self._reference: torch.Tensor | None = None
        self._first: dict[int, torch.Tensor] = {}
        self._before: tuple[torch.Tensor | None, dict[int, torch.Tensor]] = (None, {})

    def describe(self) -> tuple[str, str]:
        """Return what a loss weighs, and where that is seen."""
        return (self.rule, "the last forward_backward") if self.rule else WEIGHING

    def ratio(self, total: torch.Tensor) -> torch.Tensor | None:
        """Return what a loss is multiplied by beside its mean; None when nothing accumulates.

        Args:
            total: Sum of the weights of all ranks: 0-d fp64. The first one of the run is the reference.
        """
        if not self.is_active:
            return None
        self._before = (self._reference, dict(self._first))
        if self._reference is None:
            self._reference = total.detach().clone()
        found = total / self._reference.to(total.device)
        for index in range(self._num_optimizers):
            # A micro-batch with several losses (real and fake samples of a GAN) counts as its first one.
            self._first.setdefault(index, found)
        return found

    def state(self) -> dict[str, float | None]:
        """Return what a checkpoint keeps."""
        return {"reference": None if self._reference is None else float(self._reference)}

    def load_state(self, state: Mapping[str, float | None]) -> None:
        """Continue from :meth:`state`."""
        reference = state["reference"]
        if reference is not None:
            self._reference = torch.tensor(reference, dtype=torch.float64)

    def forget(self) -> None:
        """Take the last :meth:`ratio` back: its loss came to nothing, because a rank could not take part."""
        self._reference, self._first = self._before

    def peek(self, optimizer: int) -> float | torch.Tensor:
        """Return the ratio of the running micro-batch of an optimizer."""
        return self._first.get(optimizer, self.rows_ratio)

    def take(self, optimizer: int) -> float | torch.Tensor:
        """Return the ratio of the micro-batch that ends for an optimizer, and begin the next one."""
        return self._first.pop(optimizer, self.rows_ratio)
