"""Options of the memory manager ``gemini``. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, final

import attrs

from colossal_core.errors import UsageError
from colossal_core.plugins import Target
from colossal_gemini.budgets import parse_bytes

if TYPE_CHECKING:
    from torch import nn

    from colossal_gemini.costs import Rates
    from colossal_gemini.report import FitReport

__all__ = ["Gemini"]


def _check_placement(_piece: object, _field: attrs.Attribute[str], value: object) -> None:
    """Refuse what is not a choice."""
    if value not in {"auto", "static"}:
        raise UsageError(
            f"Gemini: placement must be 'auto' or 'static', got {value!r}",
            hint="'auto' lets what is used most live nearest; 'static' keeps everything in the last tier",
        )


@final
@attrs.frozen(kw_only=True)
class Gemini:
    """Train what does not fit: values, gradients and optimizer state live in tiers, each within its budget.

    Tiers are the device that computes, host memory, and files. Values come to the device module unit by
    module unit while they are needed, and stay for as long as the budget allows; optimizer state is updated
    where it lives, or one tier above files. On a machine without accelerator host memory computes; with
    ``device_budget`` a part of it stands in for one, so that everything can be tried.

    The numbers are those of ``zero3`` and of one process, whatever the budgets are.

    Attributes:
        device_budget: Bytes of the accelerator that training may use, everything included: ``"8GiB"``. None
            for all that is free, or, without accelerator, for none apart from host memory.
        host_budget: Bytes of host memory that chunks of this rank may use; None for no limit.
        disk: A folder on a fast local disk, for what exceeds host memory; None for no files.
        placement: ``"auto"`` lets state live as near as the budgets allow, by what a step is seen to need;
            ``"static"`` keeps everything in the last tier while it is not needed.
        chunk_bytes: Most bytes of the values of one chunk; None to choose it from the model.
        prefetch: Whether to fetch chunks before they are needed, where the budget has room.
        trace: A file that :meth:`FitReport.save` wrote: what does not fit is then refused by ``boost``, and
            the first step is planned like all others. None to learn from the first step.

    Raises:
        UsageError: An option is something else.
    """

    device_budget: int | None = attrs.field(default=None, converter=parse_bytes)
    host_budget: int | None = attrs.field(default=None, converter=parse_bytes)
    disk: str | None = attrs.field(default=None)
    placement: Literal["auto", "static"] = attrs.field(default="auto", validator=_check_placement)
    chunk_bytes: int | None = attrs.field(default=None, converter=parse_bytes)
    prefetch: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
    trace: str | None = attrs.field(default=None)

    def fit(
        self,
        model: nn.Module,
        batch: Any,
        *,
        criterion: Callable[..., Any] | None = None,
        ranks: int = 1,
        precision: str = "fp32",
        keep_float32: Sequence[str] = (),
        optimizer_states: int = 2,
        recompute: bool = False,
        accumulate: int = 1,
        rates: Rates | Literal["measured"] | None = None,
    ) -> FitReport:
        """Say whether a model trains within these budgets, what will live where, and what that costs.

        One step is traced on tensors without memory, so it takes seconds for models of any size, and nothing
        of the model changes. Budgets that were left open are those of this machine.

        Args:
            model: The serial model; may be on the ``meta`` device.
            batch: What one rank will give to ``booster.forward_backward``; may be on ``meta``, too.
            criterion: As there; None when the outputs carry a ``loss``.
            ranks: Number of data ranks.
            precision: That of the plan.
            keep_float32: That of the plan.
            optimizer_states: States per element that the optimizer keeps: 2 for Adam, 1 for momentum.
            recompute: Whether the plan has ``Recompute()``.
            accumulate: That of the plan: passes whose gradients add up before an update.
            rates: Bytes per second of links and updates; those of an accelerator on PCIe 4 by default,
                ``"measured"`` for those of this machine, which takes a second.

        Returns:
            The report: printed, it is a table. When the model does not fit, it says by how much, in which
            moment, and with which settings it would.

        Raises:
            CapabilityError: Forward looks at values, so the model cannot be traced without any.
            UsageError: Batch, criterion, loss or an argument are not as documented.
        """
        # By name, since this module is read where torch must not be.
        judge_model = cast("Callable[..., FitReport]", Target("colossal_gemini.fit:fit").load())
        return judge_model(
            self,
            model,
            batch,
            criterion=criterion,
            ranks=ranks,
            precision=precision,
            keep_float32=keep_float32,
            optimizer_states=optimizer_states,
            recompute=recompute,
            accumulate=accumulate,
            rates=rates,
        )
