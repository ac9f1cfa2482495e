"""Judging a model before there is memory for it; see :meth:`colossal_gemini.Gemini.fit`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from colossal_core.errors import UsageError
from colossal_core.runtime.precision import DTYPES, Precision
from colossal_gemini.budgeting import NO_LIMIT
from colossal_gemini.costs import Budgets, Rates
from colossal_gemini.report import FitReport, judge
from colossal_gemini.tracing import trace_step

if TYPE_CHECKING:
    from torch import nn

    from colossal_gemini.options import Gemini

__all__ = ["budgets_of", "fit"]


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
    rates: Rates | None = None,
) -> FitReport:
    """Trace a step without memory and judge it; see :meth:`colossal_gemini.Gemini.fit`."""
    if precision not in DTYPES or ranks < 1 or optimizer_states < 0:
        raise UsageError(
            f"fit got precision {precision!r}, {ranks} ranks, {optimizer_states} optimizer states",
            hint=f"precision is one of {', '.join(DTYPES)}; ranks are at least 1, states at least 0",
        )
    dtypes = Precision(precision, tuple(keep_float32))
    dtypes.check_patterns([model])
    trace = trace_step(
        model,
        batch,
        criterion,
        ranks=ranks,
        precision=dtypes,
        chunk_bytes=options.chunk_bytes,
        recompute=recompute,
    )
    number = sum(parameter.numel() for parameter in model.parameters())
    return judge(
        trace,
        budgets_of(options),
        title=f"{type(model).__name__} of {_show_count(number)} parameters in {precision} on {ranks} "
        f"rank{'s' if ranks > 1 else ''}",
        ranks=ranks,
        optimizer_states=optimizer_states,
        policy=options.placement,
        rates=rates,
        prefetch=options.prefetch,
    )


def budgets_of(options: Gemini) -> Budgets:
    """Return the budgets of a rank on this machine, where the options leave them open."""
    disk = None if options.disk is None else Path(options.disk)
    files = 0 if disk is None else shutil.disk_usage(disk).free if disk.is_dir() else None
    if options.device_budget is not None:
        return Budgets(device=options.device_budget, host=options.host_budget, disk=files)
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return Budgets(device=free, host=options.host_budget, disk=files)
    return Budgets(device=options.host_budget or NO_LIMIT, host=0, disk=files)


def _show_count(number: int) -> str:
    """Return a number of parameters as people say it."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
