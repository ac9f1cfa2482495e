"""BatchNorm over the global batch: the statistics of all ranks that bring different samples.

The one idea: each rank reduces its rows to (mean, sum of squared deviations, count) per channel, one message
brings the triples of all ranks to each, and every rank merges them in rank order as Chan, Golub and LeVeque
do, which is stable where a difference of sums of squares is not, and gives the same bits everywhere. Backward
needs one message too: the sums over the batch of the gradient, and of the gradient times the normalised
input. Gradients of weight and bias stay shares, which the gradient window adds like all others; it averages
them over ranks, so each rank's loss is a mean over its share, sums over ranks are the right thing here, and
nothing is divided.

The user's own forward runs, also that of a subclass of theirs: what is replaced is the one function that all
of them call, ``torch.nn.functional.batch_norm``, by a mode that is active only inside that module's forward.
So momentum, ``momentum=None``, ``track_running_stats=False`` and evaluation are torch's own code.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
import torch.nn.functional as F
from attrs import define, frozen
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from colossal_core.errors import CapabilityError, UsageError
from colossal_core.mesh import GroupSpec
from colossal_core.runtime.replacement import Stand, replace_module, replacement_of

if TYPE_CHECKING:
    from colossal_core.mesh import MeshLayout
    from colossal_core.plan import Plan
    from colossal_core.runtime.arrivals import Arrivals
    from colossal_core.runtime.collectives import Collectives
    from colossal_core.runtime.context import Context
    from colossal_core.runtime.mesh import Group

__all__ = ["CHANNEL", "RowWeights", "Synchronised", "install_batchnorms", "needs_batchnorms"]

CHANNEL = "batchnorm"
"""Channel, and phase in the ledger, of batch statistics; see Note [Channel of batch statistics]."""


@final
@define(eq=False)
class RowWeights:
    """How much each row of this rank's batch counts in batch statistics.

    Whoever hands out a batch sets it, and it holds until the next batch: backward may run modules again.

    Attributes:
        value: None counts each row once. A number counts each row so often: 0 for a sample that is there only
            because this rank's share is empty. A 1-D tensor has a weight for each row, and then dim 0 of
            every BatchNorm's input has to be the rows of the batch.
    """

    value: float | torch.Tensor | None = None

    @contextmanager
    def set(self, value: float | torch.Tensor | None) -> Iterator[None]:
        """Count rows differently inside this context, which includes their backward."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before


# --- set-up -------------------------------------------------------------------------------------------------


def needs_batchnorms(models: Mapping[str, nn.Module], plan: Plan, layout: MeshLayout) -> bool:
    """Tell whether any BatchNorm of the serial models has to be replaced; pure, the same on every rank.

    It has where several ranks bring different samples and the plan synchronises, and under a 16-bit
    precision: weights are 16-bit then and running statistics are not, which torch's kernels do not mix.

    Raises:
        CapabilityError: A module cannot be synchronised: ``SyncBatchNorm``, an InstanceNorm with running
            statistics, or a model that is a BatchNorm itself.
    """
    synchronises = plan.synchronise_batchnorm and layout.data_degree > 1
    found = False
    for model in models.values():
        for name, module in model.named_modules():
            if synchronises:
                _check(name, module)
            found = found or isinstance(module, _BatchNorm)
    return found and (synchronises or plan.precision in {"bf16", "fp16"})


def _check(name: str, module: nn.Module) -> None:
    """Refuse what would silently compute statistics of something else than the global batch."""
    off = "or pass synchronise_batchnorm=False for statistics of each rank's share"
    if isinstance(module, nn.SyncBatchNorm):
        raise CapabilityError(
            f"module {name!r} is torch's SyncBatchNorm, which refuses CPU and knows no mesh axes",
            hint=f"leave out convert_sync_batchnorm: every BatchNorm is synchronised by boost; {off}",
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        raise CapabilityError(
            f"module {name!r} is a {type(module).__name__} with running statistics, which are not "
            "synchronised over ranks",
            hint=f"build it with track_running_stats=False, {off}",
        )
    if isinstance(module, _BatchNorm) and not name:
        raise CapabilityError(
            f"the model is a {type(module).__name__} itself, which has to be replaced and has no parent",
            hint="wrap it: torch.nn.Sequential(module)",
        )


def install_batchnorms(models: Mapping[str, nn.Module], context: Context) -> None:
    """Let every BatchNorm compute with the statistics of the global batch; collective, may create a group.

    Args:
        models: The models, cut as planned.
        context: Mesh, collectives and plan; :attr:`~.Context.undo` receives what gives the modules back.
    """
    layout = context.mesh.layout
    synchronises = context.plan.synchronise_batchnorm
    axes = tuple(axis.name for axis in layout.axes if axis.divides_batch) if synchronises else ()
    group = context.mesh.group(GroupSpec(axes), CHANNEL)
    wire = _Wire(group=group, collectives=context.collectives, arrivals=context.arrivals)
    run = torch.compiler.disable(_run)
    known: set[nn.Module] = set()
    for model in models.values():
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm) and module not in known and (name or group.size > 1):
                known.add(module)
                payload = _Payload(name=name, wire=wire, row_weights=context.row_weights, run=run)
                replacement = replace_module(models.values(), name, module, Synchronised, payload)
                known.add(replacement.new)
                context.undo.append(replacement.undo)


# --- the module ---------------------------------------------------------------------------------------------


@final
@frozen(kw_only=True, eq=False)
class _Wire:
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
class _Payload:
    """What a replaced BatchNorm needs.

    Attributes:
        name: Its name in the model, for errors.
        wire: How statistics travel.
        row_weights: How much rows count.
        run: What runs its forward, outside of what ``torch.compile`` traces.
    """

    name: str
    wire: _Wire
    row_weights: RowWeights
    run: Callable[..., Any]


class Synchronised(Stand):
    """A BatchNorm whose batch statistics are those of the global batch."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward, with the statistics of all ranks in place of this rank's.

        Raises:
            CapabilityError: It is in training and does not call ``torch.nn.functional.batch_norm``, so
                whatever statistics it used were those of this rank.
        """
        replacement = replacement_of(self)
        payload: _Payload = replacement.payload
        return payload.run(payload, replacement.old, super().forward, args, kwargs)


def _run(
    payload: _Payload, old: nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Any
) -> Any:
    """Run the forward of one module; see :meth:`Synchronised.forward`."""
    mode = _Interception(payload)
    with mode:
        outputs = forward(*args, **kwargs)
    if old.training and not mode.was_used and payload.wire.group.size > 1:
        raise CapabilityError(
            f"module {payload.name!r} of class {type(old).__name__} computes its statistics without "
            "torch.nn.functional.batch_norm, so they cannot be synchronised",
            hint="call super().forward in it, or pass synchronise_batchnorm=False",
        )
    return outputs


class _Interception(TorchFunctionMode):
    """Answers calls of ``F.batch_norm`` while it is active."""

    def __init__(self, payload: _Payload) -> None:
        """Answer for one module."""
        super().__init__()
        self._payload = payload
        self.was_used = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer one function and pass all others."""
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        self.was_used = True
        return _batch_norm(self._payload, _Call(*args, **(kwargs or {})))


@final
@frozen(eq=False)
class _Call:
    """The arguments of ``F.batch_norm``, in its order and with its defaults."""

    rows: torch.Tensor
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


def _batch_norm(payload: _Payload, call: _Call) -> torch.Tensor:
    """Do what ``F.batch_norm`` does, on the global batch."""
    weights = payload.row_weights.value
    if weights is None and payload.wire.arrivals.weight == 0:
        weights = 0.0
    if not call.training or (payload.wire.group.size == 1 and weights is None):
        return _batch_norm_here(call)
    found = _gather_statistics(payload, call, weights)
    if call.running_mean is not None and call.running_var is not None:
        _follow(call.running_mean, found.mean, call.momentum)
        _follow(call.running_var, found.variance * (found.count / (found.count - 1)), call.momentum)
    normalise: Callable[..., torch.Tensor] = _Normalise.apply
    return normalise(call.rows, call.weight, call.bias, found)


def _batch_norm_here(call: _Call) -> torch.Tensor:
    """Run torch's own; its kernels do not take 16-bit weights beside wide statistics."""
    weight, bias = call.weight, call.bias
    if call.running_mean is not None:
        weight = None if weight is None else weight.to(call.running_mean.dtype)
        bias = None if bias is None else bias.to(call.running_mean.dtype)
    return F.batch_norm(
        call.rows, call.running_mean, call.running_var, weight, bias, call.training, call.momentum, call.eps
    )


def _follow(running: torch.Tensor, value: torch.Tensor, momentum: float) -> None:
    """Move a running statistic towards a value."""
    with torch.no_grad():
        running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


# --- statistics ---------------------------------------------------------------------------------------------


@final
@frozen(kw_only=True, eq=False)
class _Statistics:
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
    wire: _Wire


def _gather_statistics(payload: _Payload, call: _Call, weights: float | torch.Tensor | None) -> _Statistics:
    """Merge the moments of all ranks; one message of ``2 * channels + 1`` words from each.

    Raises:
        UsageError: Weights do not fit the rows; or, on all ranks, at most one value of a channel counts.
    """
    rows = call.rows.detach()
    wide = _widen(rows)
    num_values = rows.numel() // rows.shape[1]
    if isinstance(weights, torch.Tensor):
        per_row = _weights_of_rows(payload, wide, weights)
        spatial = num_values // max(len(rows), 1)
        mean, squares, count = _weighted_moments(wide, per_row, per_row.sum() * spatial)
        counts_enough = False
    else:
        number = 1.0 if weights is None else float(weights)
        per_row = wide.new_tensor(number)
        mean, squares, count = _moments(wide, number * num_values)
        counts_enough = number * num_values > 1
    gathered = payload.wire.gather(torch.cat([mean, squares, count.view(1)]))
    means, all_squares, counts = gathered.split([len(mean), len(mean), 1], dim=1)
    total = counts.sum()
    # Reading the total waits for the accelerator. Where it is at least 2 here, it is so for all ranks.
    if not counts_enough and not float(total) > 1:
        raise UsageError(
            f"module {payload.name!r} would take batch statistics of {float(total):g} values per channel "
            f"over {payload.wire.group.size} ranks, and needs more than one",
            hint="use a larger batch, or evaluation mode",
        )
    mean = (means * counts).sum(0) / total
    squares = all_squares.sum(0) + ((means - mean).square() * counts).sum(0)
    return _Statistics(
        mean=mean,
        variance=squares / total,
        count=total,
        shares=per_row / total,
        eps=call.eps,
        wire=payload.wire,
    )


def _weights_of_rows(payload: _Payload, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weights as ``[rows, 1, ...]``.

    Raises:
        UsageError: There is not one for each row.
    """
    if weights.shape != rows.shape[:1]:
        raise UsageError(
            f"module {payload.name!r} has an input with {len(rows)} rows, and the row weights have shape "
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
    return mean, variance * count, rows.new_tensor(count)


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
    def forward(ctx: Any, message: torch.Tensor, wire: _Wire) -> torch.Tensor:
        """Sum a message."""
        ctx.wire = wire
        return wire.sum(message)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sum the gradients: what a rank's share did to the losses of all ranks."""
        return ctx.wire.sum_gradients(gradient), None


def _sum(message: torch.Tensor, wire: _Wire) -> torch.Tensor:
    """Return the sum over all ranks, differentiable."""
    summed: Callable[..., torch.Tensor] = _Sum.apply
    return summed(message, wire)


class _Normalise(torch.autograd.Function):
    """Normalisation by statistics that depend on the rows of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: _Statistics,
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
