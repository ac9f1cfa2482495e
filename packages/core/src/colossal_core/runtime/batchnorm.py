"""BatchNorm over the global batch: the statistics of all ranks that bring different samples.

The one idea: the user's own forward runs, also that of a subclass of theirs. What is replaced is the one
function that all of them call, ``torch.nn.functional.batch_norm``, by a mode that is active only inside that
module's forward. So momentum, ``momentum=None``, ``track_running_stats=False`` and evaluation are torch's own
code, and user code that runs modules again, in whatever context, gets what it got the first time.
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

from colossal_core.errors import CapabilityError
from colossal_core.mesh import GroupSpec
from colossal_core.runtime.batch_statistics import CHANNEL, Wire, gather_statistics, normalise
from colossal_core.runtime.replacement import Stand, check_replaceable, replace_module, replacement_of

if TYPE_CHECKING:
    from colossal_core.mesh import MeshLayout
    from colossal_core.plan import Plan
    from colossal_core.runtime.context import Context

__all__ = ["RowWeights", "Synchronised", "install_batchnorms", "needs_batchnorms"]


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
        UsageError: A BatchNorm has a forward that was set on the object.
    """
    synchronises = plan.synchronise_batchnorm and layout.data_degree > 1
    if not synchronises and plan.precision not in {"bf16", "fp16"}:
        return False
    found = False
    for model in models.values():
        for name, module in model.named_modules():
            if synchronises:
                _check(name, module)
            if isinstance(module, _BatchNorm) and (name or synchronises):
                check_replaceable(models.values(), name, module)
                found = True
    return found


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
    wire = Wire(group=group, collectives=context.collectives, arrivals=context.arrivals)
    run = torch.compiler.disable(_run)
    known: set[nn.Module] = set()
    for model in models.values():
        for name, module in list(model.named_modules()):
            if isinstance(module, _BatchNorm) and module not in known and name:
                known.add(module)
                payload = _Payload(name=name, wire=wire, row_weights=context.row_weights, run=run)
                replacement = replace_module(models.values(), name, module, Synchronised, payload)
                known.add(replacement.new)
                context.undo.append(replacement.undo)


# --- the module ---------------------------------------------------------------------------------------------


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
    wire: Wire
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
    found = gather_statistics(call.rows.detach(), weights, name=payload.name, eps=call.eps, wire=payload.wire)
    if call.running_mean is not None and call.running_var is not None:
        _follow(call.running_mean, found.mean, call.momentum)
        _follow(call.running_var, found.variance * (found.count / (found.count - 1)), call.momentum)
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
