"""The plain executor: one forward, one backward, and a loss that is the mean over the global batch.

The one idea: the weights of all ranks are summed while forward runs, so the loss can be scaled before
backward and gradients need nothing but the sum that they get anyway. Loss and weight are one fp64 number
each: 16 bytes per step.

# Note [Failures of one rank]
A rank that cannot go on sends NaN in place of its numbers, and the others then find its reason. They run
forward and backward while the numbers travel, and all gradients of the step are dropped on every rank, since
some may have left already. Two cases are *careful*, and wait for each number before they go on: models whose
forward communicates, as synchronised BatchNorms do, would wait there for a rank that does not come; and in
an accumulation window the gradients of the micro-batches before must stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils import _pytree as pytree

from colossal_core.errors import ColossalError, UsageError
from colossal_core.interfaces import AbstractExecutor
from colossal_core.mesh import GroupSpec
from colossal_core.runtime.batches import BatchDims, Call, Weight, loss_of, loss_weight, split_batch
from colossal_core.runtime.batchnorm import Synchronised
from colossal_core.runtime.swapping import evaluating

if TYPE_CHECKING:
    from torch import nn

    from colossal_core.runtime.agreement import Agreement
    from colossal_core.runtime.collectives import Pending
    from colossal_core.runtime.context import Context

__all__ = ["PlainExecutor"]


@final
class PlainExecutor(AbstractExecutor):
    """Runs a step on one model replica per data coordinate."""

    def __init__(self, context: Context, agreement: Agreement, *, drop_gradients: Callable[[], None]) -> None:
        """Use the group of all ranks that bring different samples; collective, since it may create it.

        Args:
            context: Mesh, collectives and plan.
            agreement: How ranks tell each other why they cannot go on.
            drop_gradients: Called on every rank when some rank could not go on.
        """
        layout = context.mesh.layout
        self._context = context
        self._agreement = agreement
        self._group = context.mesh.group(
            GroupSpec(tuple(axis.name for axis in layout.axes if axis.divides_batch))
        )
        self._degree = layout.gradient_divisor
        self._drop_gradients = drop_gradients
        self._has_failed = False
        self._communicating: dict[nn.Module, bool] = {}

    def run(
        self,
        model: nn.Module,
        batch: Any,
        criterion: Callable[..., torch.Tensor] | None,
        weight: Weight = None,
        batch_dims: BatchDims = None,
    ) -> torch.Tensor:
        """Run forward and backward; see :class:`~colossal_core.interfaces.AbstractExecutor`.

        Raises:
            UsageError: The batch, the criterion or the loss is not as documented; on the rank where it is so.
            RankMismatchError: It is so on another rank.
        """
        self._has_failed = False
        try:
            return self._run(model, batch, criterion, weight, batch_dims)
        except Exception:
            if self._has_failed and not self._is_careful(model):
                self._drop_gradients()
            raise

    def _run(
        self,
        model: nn.Module,
        batch: Any,
        criterion: Callable[..., torch.Tensor] | None,
        weight: Weight,
        batch_dims: BatchDims,
    ) -> torch.Tensor:
        """Run forward and backward."""
        self._agreement.begin_exchange()
        call, share, weights = self._weigh(model, batch, criterion, weight, batch_dims)
        # Rows that the user gives no weight at all are in the global batch no more than a stand-in is.
        rows = self._context.row_weights
        with rows.set(0.0 if weight is not None and share == 0 else rows.value):
            outputs = self._forward(model, call)
            loss = self._loss(outputs, call, criterion, needs_gradient=True)
            if share == 0 or self._stands_in:  # take part with zero gradients, whatever 0 / 0 the loss is
                loss = _zero_through(outputs, loss)
            part = self._part(share, weights)
            mean = loss.detach().double() * part
            pending = self._context.collectives.all_reduce(mean, self._group, phase="loss")
            if self._is_careful(model):
                pending.wait()
                self._check(mean, weights)
            ratio = self._context.weights.ratio(weights[0])
            factor = part * self._degree if ratio is None else part * self._degree * ratio
            scale = self._context.arrivals.scale
            with self._context.arrivals.weighed():
                (loss * (factor * scale).to(loss.dtype)).backward()
        pending.wait()
        try:
            self._check(mean, weights)
        except ColossalError:
            self._context.weights.forget()
            raise
        return mean.to(torch.float32)

    def evaluate(
        self,
        model: nn.Module,
        batch: Any,
        criterion: Callable[..., torch.Tensor] | None,
        *,
        wants_outputs: bool = True,
        batch_dims: BatchDims = None,
    ) -> tuple[torch.Tensor, Any]:
        """Run forward in evaluation mode; see :class:`~colossal_core.interfaces.AbstractExecutor`."""
        del wants_outputs  # they are here anyway
        self._agreement.begin_exchange()
        with evaluating(model), torch.no_grad():
            call, share, weights = self._weigh(model, batch, criterion, None, batch_dims)
            outputs = self._forward(model, call)
            loss = self._loss(outputs, call, criterion, needs_gradient=False)
            counts = share != 0 and not self._stands_in
            mean = loss.double() if counts else torch.zeros_like(weights[0])
            mean = mean * self._part(share, weights)
            self._context.collectives.all_reduce(mean, self._group, phase="loss").wait()
            self._check(mean, weights)
        return mean.to(torch.float32), outputs

    @property
    def _stands_in(self) -> bool:
        """Whether the boosted loader gave this rank a sample only because its share of the batch is empty."""
        return self._context.arrivals.weight == 0

    # --- the two messages ----------------------------------------------------------------------------------

    def _weigh(
        self,
        model: nn.Module,
        batch: Any,
        criterion: Callable[..., torch.Tensor] | None,
        weight: Weight,
        batch_dims: BatchDims,
    ) -> tuple[Call, float | None, tuple[torch.Tensor, Pending]]:
        """Read the batch and start to sum the weights of all ranks; NaN says that this rank cannot."""
        share: float | None = None
        try:
            call = split_batch(batch, self._context.mesh.device, batch_dims, model)
            share, rule = loss_weight(batch, call, criterion, weight, model)
        except ColossalError as err:
            self._fail(err, num_messages=1 if self._is_careful(model) else 2)
            raise
        self._context.weights.rule = rule
        if share is not None and self._stands_in:
            share = 0.0
        own = 1.0 / self._group.size if share is None else share
        total = torch.full((), own, dtype=torch.float64, device=self._context.mesh.device)
        pending = self._context.collectives.all_reduce(total, self._group, phase="loss")
        if self._is_careful(model):
            pending.wait()
            self._check(total, (total, pending))
        return call, share, (total, pending)

    def _is_careful(self, model: nn.Module) -> bool:
        """Whether this rank waits for the numbers of the others; see Note [Failures of one rank]."""
        return self._context.weights.is_active or self._communicates(model)

    def _communicates(self, model: nn.Module) -> bool:
        """Whether forward waits for the other ranks."""
        if model not in self._communicating:
            found = any(isinstance(module, Synchronised) for module in model.modules())
            self._communicating[model] = found and self._group.size > 1
        return self._communicating[model]

    def _forward(self, model: nn.Module, call: Call) -> Any:
        """Call the model; where it fails on this rank only, the others know why."""
        try:
            with self._context.crossing.to_loss():
                return model(*call.args, **call.kwargs)
        except Exception as err:
            if not self._communicates(model):  # else the others may be anywhere inside of it
                told = f"{type(err).__name__}: {err}"
                self._fail(err if isinstance(err, ColossalError) else ColossalError(told), num_messages=1)
            raise

    def _loss(
        self,
        outputs: Any,
        call: Call,
        criterion: Callable[..., torch.Tensor] | None,
        *,
        needs_gradient: bool,
    ) -> torch.Tensor:
        """Return the loss of this rank, or let the others know that there is none."""
        try:
            loss = loss_of(outputs, call, criterion)
            if needs_gradient and not loss.requires_grad:
                raise UsageError(
                    "the loss does not require gradients",
                    hint="call it outside torch.no_grad, with trainable weights",
                )
        except ColossalError as err:
            self._fail(err, num_messages=1)
            raise
        return loss

    @staticmethod
    def _part(share: float | None, weights: tuple[torch.Tensor, Pending]) -> torch.Tensor:
        """Return which part of the global mean this rank's loss is: 0-d fp64, on the device."""
        total, pending = weights
        pending.wait()
        return (1.0 if share is None else share) / total

    def _check(self, mean: torch.Tensor, weights: tuple[torch.Tensor, Pending]) -> None:
        """Raise when a rank could not take part, or when nothing counted; a loss may be NaN by itself."""
        if bool(torch.isfinite(mean)):
            return
        self._has_failed = True
        self._agreement.raise_noted_failure()
        total = float(weights[0])
        if not total > 0:
            raise UsageError(
                f"the weights of all ranks sum to {total}: no rank has a target that counts",
                hint="skip this batch on all ranks, or check ignore_index and the targets",
            )
        self._has_failed = False

    def _fail(self, error: ColossalError, *, num_messages: int) -> None:
        """Let the other ranks know why this one cannot go on, in place of the messages that they wait for."""
        self._has_failed = True
        self._agreement.note_failure(error)
        for _ in range(num_messages):
            message = torch.full((), math.nan, dtype=torch.float64, device=self._context.mesh.device)
            self._context.collectives.all_reduce(message, self._group, phase="loss").wait()


def _zero_through(outputs: Any, loss: torch.Tensor) -> torch.Tensor:
    """Return a zero that depends on the outputs like the loss does."""
    leaves = [
        leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    total = torch.zeros((), dtype=loss.dtype, device=loss.device)
    for leaf in leaves:
        total = total + (leaf * 0).sum().to(total.dtype)
    return total
