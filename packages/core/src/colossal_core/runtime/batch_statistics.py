"""Batch statistics over ranks: the messages, the merge, and the gradient.

The one idea: each rank reduces its rows to (mean, sum of squared deviations, count) per channel, one message
brings the triples of all ranks to each, and every rank merges them in rank order as Chan, Golub and LeVeque
do, which is stable where a difference of sums of squares is not, and gives the same bits everywhere. Backward
needs one message too: the sums over the batch of the gradient, and of the gradient times the normalised
input. Gradients of weight and bias stay shares, which the gradient window adds like all others; it averages
them over ranks, so each rank's loss is a mean over its share, sums over ranks are the right thing here, and
nothing is divided.

# Note [Channel of batch statistics]
Messages of forward, of recomputation and of backward have the same order on all ranks, because models and
graphs are equal; gradient buffers leave in between at moments of each rank's own. So they share no channel.

# Note [Weighed losses]
In the plain loop the losses of uneven shares are not weighed before backward: gradients are, where they
arrive at their parameters. What ranks exchange inside backward comes earlier, so it is weighed here, and what
comes back is brought into the terms of this rank again, since it will be multiplied by the weight later on.
Under create_graph nothing is weighed: a gradient that a loss is made of (a gradient penalty) is one of
outputs that count alike. ``loss.backward(create_graph=True)`` over uneven shares is therefore not served.

Source: Chan, Golub, LeVeque, *Algorithms for computing the sample variance*, 1983, equation 2.1 for groups of
any size; Ioffe and Szegedy, *Batch Normalization*, 2015, section 3 for the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch
from attrs import frozen

from colossal_core.errors import UsageError

if TYPE_CHECKING:
    from colossal_core.runtime.arrivals import Arrivals
    from colossal_core.runtime.collectives import Collectives
    from colossal_core.runtime.mesh import Group

__all__ = ["CHANNEL", "Statistics", "Wire", "gather_statistics", "normalise"]

CHANNEL = "batchnorm"
"""Channel, and phase in the ledger, of batch statistics; see Note [Channel of batch statistics]."""


@final
@frozen(kw_only=True, eq=False)
class Wire:
    """How statistics travel.

    Attributes:
        group: Ranks that bring different samples.
        collectives: Where messages go.
        arrivals: What this rank's loss weighs in the running backward.
    """

    group: Group
    collectives: Collectives
    arrivals: Arrivals

    def gather(self, message: torch.Tensor) -> torch.Tensor:
        """Return the messages of all ranks, ``[ranks, words]``."""
        rows = message.new_empty(self.group.size, len(message))
        self.collectives.all_gather(rows, message, self.group, phase=CHANNEL).wait()
        return rows

    def sum(self, message: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks; ``message`` is kept."""
        total = message.detach().clone()
        self.collectives.all_reduce(total, self.group, phase=CHANNEL).wait()
        return total

    def sum_gradients(self, gradients: torch.Tensor) -> torch.Tensor:
        """Sum the gradients of all ranks' losses, in this rank's terms; see Note [Weighed losses]."""
        if torch.is_grad_enabled():
            return _sum(gradients, self)
        weight = self.arrivals.weight
        if weight == 1:
            return self.sum(gradients)
        return self.sum(gradients * weight) / (weight or 1.0)  # where the weight is 0, no row counts either


@final
@frozen(kw_only=True, eq=False)
class Statistics:
    """Statistics of the global batch, equal on all ranks but for ``shares``.

    Attributes:
        mean: ``[channels]``, in at least fp32.
        variance: ``[channels]``, biased.
        count: 0-d: how many values of one channel count.
        shares: What a value counts for in a mean over the batch: 0-d, or ``[rows, 1, ...]``.
        eps: What is added to the variance.
        wire: How they travelled.
    """

    mean: torch.Tensor
    variance: torch.Tensor
    count: torch.Tensor
    shares: torch.Tensor
    eps: float
    wire: Wire


def gather_statistics(
    rows: torch.Tensor, weights: float | torch.Tensor | None, *, name: str, eps: float, wire: Wire
) -> Statistics:
    """Merge the moments of all ranks; one message of ``2 * channels + 1`` words from each.

    Args:
        rows: ``[rows, channels, ...]`` of this rank, without a graph.
        weights: How much its rows count; see :class:`~.batchnorm.RowWeights`.
        name: Of the module, for errors.
        eps: What is added to the variance.
        wire: How messages travel.

    Raises:
        UsageError: Weights do not fit the rows; or, on all ranks, at most one value of a channel counts.
    """
    wide = _widen(rows)
    num_values = rows.numel() // rows.shape[1]
    if isinstance(weights, torch.Tensor):
        per_row = _weights_of_rows(wide, weights, name)
        spatial = num_values // max(len(rows), 1)
        mean, squares, count = _weighted_moments(wide, per_row, per_row.sum() * spatial)
        counts_enough = False
    else:
        number = 1.0 if weights is None else float(weights)
        per_row = wide.new_full((), number)
        mean, squares, count = _moments(wide, number * num_values)
        counts_enough = number * num_values > 1
    gathered = wire.gather(torch.cat([mean, squares, count.view(1)]))
    means, all_squares, counts = gathered.split([len(mean), len(mean), 1], dim=1)
    total = counts.sum()
    # Reading the total waits for the accelerator. Where it is at least 2 here, it is so for all ranks.
    if not counts_enough and not float(total) > 1:
        raise UsageError(
            f"module {name!r} would take batch statistics of {float(total):g} values per channel "
            f"over {wire.group.size} ranks, and needs more than one",
            hint="use a larger batch, drop_last=True in the loader, or evaluation mode",
        )
    mean = (means * counts).sum(0) / total
    squares = all_squares.sum(0) + ((means - mean).square() * counts).sum(0)
    return Statistics(
        mean=mean,
        variance=squares / total,
        count=total,
        shares=per_row / total,
        eps=eps,
        wire=wire,
    )


def _weights_of_rows(rows: torch.Tensor, weights: torch.Tensor, name: str) -> torch.Tensor:
    """Return the weights as ``[rows, 1, ...]``.

    Raises:
        UsageError: There is not one for each row.
    """
    if weights.shape != rows.shape[:1]:
        raise UsageError(
            f"module {name!r} has an input with {len(rows)} rows, and the row weights have shape "
            f"{tuple(weights.shape)}",
            hint="weigh the whole batch by one number, or keep dim 0 of this input the rows of the batch",
        )
    return weights.to(rows).view(-1, *[1] * (rows.dim() - 1))


def _moments(rows: torch.Tensor, count: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean, sum of squared deviations and count of this rank, for rows that count alike."""
    if count == 0:
        nothing = rows.new_zeros(rows.shape[1])
        return nothing, nothing, rows.new_zeros(())
    variance, mean = torch.var_mean(rows, dim=_others(rows), correction=0)
    return mean, variance * count, rows.new_full((), count)


def _weighted_moments(
    rows: torch.Tensor, weights: torch.Tensor, count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean, sum of squared deviations and count of this rank, for rows with a weight each."""
    mean = (rows * weights).sum(_others(rows)) / torch.where(count > 0, count, 1)
    squares = ((rows - _spread(mean, rows)).square() * weights).sum(_others(rows))
    return mean, squares, count


def _others(rows: torch.Tensor) -> list[int]:
    """Return every dim but that of channels."""
    return [0, *range(2, rows.dim())]


def _spread(channels: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return a vector over channels in a shape that broadcasts over the rows."""
    return channels.view(-1, *[1] * (rows.dim() - 2))


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 16-bit tensor in fp32 and others as they are."""
    return tensor.float() if tensor.dtype.itemsize == 2 else tensor


# --- gradients ----------------------------------------------------------------------------------------------


class _Sum(torch.autograd.Function):
    """The sum over all ranks, whose gradient is the sum of all gradients."""

    @staticmethod
    def forward(ctx: Any, message: torch.Tensor, wire: Wire) -> torch.Tensor:
        """Sum a message."""
        ctx.wire = wire
        return wire.sum(message)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sum the gradients: what a rank's share did to the losses of all ranks."""
        return ctx.wire.sum_gradients(gradient), None


def _sum(message: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Return the sum over all ranks, differentiable."""
    summed: Callable[..., torch.Tensor] = _Sum.apply
    return summed(message, wire)


def normalise(
    rows: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, statistics: Statistics
) -> torch.Tensor:
    """Normalise rows by statistics, scale and shift, in their dtype; backward sends one message."""
    apply: Callable[..., torch.Tensor] = _Normalise.apply
    return apply(rows, weight, bias, statistics)


class _Normalise(torch.autograd.Function):
    """Normalisation by statistics that depend on the rows of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: Statistics,
    ) -> torch.Tensor:
        """Normalise this rank's rows."""
        mean, invstd = statistics.mean, (statistics.variance + statistics.eps).rsqrt()
        ctx.save_for_backward(rows, weight, mean, invstd, statistics.shares)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.eps, ctx.wire = statistics.eps, statistics.wire
        scale = invstd if weight is None else invstd * weight
        outputs = (_widen(rows) - _spread(mean, rows)) * _spread(scale, rows)
        if bias is not None:
            outputs += _spread(bias, rows)
        return outputs.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients, of the rows over all ranks' losses, of weight and bias as this rank's share.

        With ``create_graph`` everything is computed in differentiable steps, statistics included, for two
        more messages.
        """
        rows, weight, mean, invstd, shares = ctx.saved_tensors
        wide, wide_gradient, others = _widen(rows), _widen(gradient), _others(rows)
        if torch.is_grad_enabled():
            mean = _sum((wide * shares).sum(others), ctx.wire)
            squares = (wide - _spread(mean, rows)).square() * shares
            invstd = (_sum(squares.sum(others), ctx.wire) + ctx.eps).rsqrt()
        normal = (wide - _spread(mean, rows)) * _spread(invstd, rows)
        sums = torch.cat([wide_gradient.sum(others), (wide_gradient * normal).sum(others)])
        for_bias, for_weight = sums.chunk(2)
        for_rows = None
        if ctx.needs_input_grad[0]:
            first, second = ctx.wire.sum_gradients(sums).chunk(2)
            inner = wide_gradient - shares * (_spread(first, rows) + normal * _spread(second, rows))
            scale = invstd if weight is None else invstd * weight
            for_rows = (inner * _spread(scale, rows)).to(rows.dtype)
        return (
            for_rows,
            None if weight is None or not ctx.needs_input_grad[1] else for_weight.to(weight.dtype),
            None if ctx.bias_dtype is None or not ctx.needs_input_grad[2] else for_bias.to(ctx.bias_dtype),
            None,
        )
