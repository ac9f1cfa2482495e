"""Judging a model before there is memory for it; see :meth:`colossal_gemini.Gemini.fit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch

from colossal_core.errors import UsageError
from colossal_core.runtime.precision import DTYPES, Precision
from colossal_gemini.budgeting import budgets_of, disk_budget, measure
from colossal_gemini.costs import Rates
from colossal_gemini.report import FitReport, judge
from colossal_gemini.tracing import trace_step

if TYPE_CHECKING:
    from torch import nn

    from colossal_gemini.options import Gemini

__all__ = ["fit"]


def fit(
    options: Gemini,
    model: nn.Module,
    batch: Any,
    *,
    criterion: Callable[..., torch.Tensor] | None = None,
    ranks: int = 1,
    precision: str = "fp32",
    keep_float32: Sequence[str] = (),
    optimizer_states: int = 2,
    recompute: bool = False,
    accumulate: int = 1,
    rates: Rates | Literal["measured"] | None = None,
) -> FitReport:
    """Trace a step without memory and judge it; see :meth:`colossal_gemini.Gemini.fit`."""
    if precision not in DTYPES or min(ranks, accumulate) < 1 or optimizer_states < 0:
        raise UsageError(
            f"fit got precision {precision!r}, {ranks} ranks, {optimizer_states} optimizer states, "
            f"accumulate {accumulate}",
            hint=f"precision is one of {', '.join(DTYPES)}; ranks and accumulate are at least 1, states at "
            "least 0",
        )
    dtypes = Precision(precision, tuple(keep_float32))
    dtypes.check_patterns([model])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    number = sum(parameter.numel() for parameter in model.parameters())
    budgets = budgets_of(options, device, disk_budget(options))
    if rates == "measured":
        rates = measure(options, device)

    def judged(chunk_bytes: int | None) -> FitReport:
        trace = trace_step(
            model,
            batch,
            criterion,
            ranks=ranks,
            precision=dtypes,
            chunk_bytes=chunk_bytes,
            recompute=recompute,
        )
        return judge(
            trace.repeated(accumulate),
            budgets,
            title=f"{type(model).__name__} of {_show_count(number)} parameters in {precision} on {ranks} "
            f"rank{'s' if ranks > 1 else ''}",
            ranks=ranks,
            optimizer_states=optimizer_states,
            policy=options.placement,
            rates=rates,
            prefetch=options.prefetch,
        )

    report = judged(options.chunk_bytes)
    if report.fits or options.chunk_bytes is not None:
        return report
    smallest = max((p.numel() * dtypes.compute.itemsize for p in model.parameters()), default=0)
    least = judged(smallest).least_budget if smallest else None
    if least is None or (report.least_budget is not None and least >= report.least_budget):
        return report
    hint = f"{report.hint}; or chunk_bytes={smallest}, with which device_budget={least} does"
    return attrs.evolve(report, hint=hint)


def _show_count(number: int) -> str:
    """Return a number of parameters as people say it."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
