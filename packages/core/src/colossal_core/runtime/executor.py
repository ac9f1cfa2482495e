"""The plain executor: one forward, one backward, and a loss that is the mean over the global batch.

The one idea: the weights of all ranks are summed while forward runs, so the loss can be scaled before
backward and gradients need nothing but the sum that they get anyway. Loss and weight are one fp64 number
each: 16 bytes per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils import _pytree as pytree

from colossal_core.errors import ColossalError, RankMismatchError, UsageError
from colossal_core.interfaces import AbstractExecutor
from colossal_core.mesh import GroupSpec
from colossal_core.runtime.batches import Weight, loss_of, loss_weight, split_batch

if TYPE_CHECKING:
    from torch import nn

    from colossal_core.runtime.agreement import Agreement
    from colossal_core.runtime.context import Context

__all__ = ["PlainExecutor"]


@final
class PlainExecutor(AbstractExecutor):
    """Runs a step on one model replica per data coordinate."""

    def __init__(self, context: Context, agreement: Agreement) -> None:
        """Use the group of all ranks that bring different samples; collective, since it may create it."""
        layout = context.mesh.layout
        self._context = context
        self._agreement = agreement
        self._group = context.mesh.group(
            GroupSpec(tuple(axis.name for axis in layout.axes if axis.divides_batch))
        )
        self._degree = math.prod(axis.degree for axis in layout.axes if axis.gradients == "average")

    def run(
        self,
        model: nn.Module,
        batch: Any,
        criterion: Callable[..., torch.Tensor] | None,
        weight: Weight = None,
    ) -> torch.Tensor:
        """Run forward and backward; see :class:`~colossal_core.interfaces.AbstractExecutor`.

        Raises:
            UsageError: The batch, the criterion or the loss is not as documented; on the rank where it is so.
            RankMismatchError: It is so on another rank.
        """
        collectives = self._context.collectives
        share: float | None = math.nan
        total = torch.full((), math.nan, dtype=torch.float64)
        try:
            call = split_batch(batch, self._context.mesh.device)
            share = loss_weight(batch, call, criterion, weight)
            total.fill_(1.0 / self._group.size if share is None else share)
        except ColossalError as err:
            self._fail(total, err)
            raise
        total = total.to(self._context.mesh.device)
        pending = collectives.all_reduce(total, self._group, phase="loss")
        outputs = model(*call.args, **call.kwargs)
        mean = torch.full_like(total, math.nan)
        try:
            loss = loss_of(outputs, call, criterion)
            if not loss.requires_grad:
                raise UsageError(
                    "the loss does not require gradients",
                    hint="call it outside torch.no_grad, with trainable weights",
                )
            if share == 0:  # no valid target here: take part with zero gradients, whatever 0 / 0 the loss is
                loss = _zero_through(outputs, loss)
        except ColossalError as err:
            self._fail(mean, err)
            raise
        pending.wait()
        everything = float(total)
        if not everything > 0:
            self._explain(everything)
        part = (1.0 if share is None else share) / everything
        mean = loss.detach().double() * part
        pending = collectives.all_reduce(mean, self._group, phase="loss")
        (loss * (part * self._degree)).backward()
        pending.wait()
        if not bool(torch.isfinite(mean)):
            self._agreement.raise_noted_failure()
        return mean.to(torch.float32)

    def _fail(self, message: torch.Tensor, error: ColossalError) -> None:
        """Let the other ranks know why this one cannot go on, in place of the message that they wait for."""
        self._agreement.note_failure(error)
        self._context.collectives.all_reduce(message, self._group, phase="loss").wait()

    def _explain(self, total: float) -> None:
        """Raise for a sum of weights that is not positive."""
        self._agreement.raise_noted_failure()
        if math.isnan(total):
            raise RankMismatchError(
                "another rank could not read its batch", hint="see the output of that rank"
            )
        raise UsageError(
            f"the weights of all ranks sum to {total}: no rank has a target that counts",
            hint="skip this batch on all ranks, or check ignore_index and the targets",
        )


def _zero_through(outputs: Any, loss: torch.Tensor) -> torch.Tensor:
    """Return a zero that depends on the outputs like the loss does."""
    leaves = [
        leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    total = torch.zeros((), dtype=loss.dtype, device=loss.device)
    for leaf in leaves:
        total = total + (leaf * 0).sum().to(total.dtype)
    return total
