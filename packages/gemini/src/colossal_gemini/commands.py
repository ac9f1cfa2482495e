"""``colossal gemini``: pictures of steps. Imported by the command line, which brings click."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import click

from colossal_core.errors import CapabilityError
from colossal_gemini.budgets import parse_bytes
from colossal_gemini.drawing import describe, draw_svg
from colossal_gemini.report import FitReport, judge

__all__ = ["gemini"]


@click.group()
def gemini() -> None:
    """Look at what training within budgets does."""


@gemini.command("draw")
@click.argument("report", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--device-budget", metavar="BYTES", help="Another budget than the report's: 8GiB.")
@click.option("--host-budget", metavar="BYTES", help="Another budget of host memory.")
@click.option(
    "-o", "output", type=click.Path(path_type=Path), help="An SVG file; else the report is printed."
)
@click.pass_obj
def draw(
    session: Any, /, report: Path, output: Path | None, device_budget: str | None, host_budget: str | None
) -> None:
    """Draw a step from a REPORT that Gemini(...).fit(model, batch).save(path) wrote."""
    del session
    found = FitReport.load(report)
    if device_budget or host_budget:
        budgets = found.budgets
        device, host = parse_bytes(device_budget) or budgets.device, parse_bytes(host_budget)
        found = judge(
            found.trace,
            attrs.evolve(budgets, device=device, host=budgets.host if host is None else host),
            title=found.title,
            ranks=found.ranks,
            optimizer_states=found.optimizer_states,
            policy=found.policy,
            rates=found.rates,
            prefetch=found.prefetch,
        )
    if output is None:
        click.echo(str(found))
        return
    if not found.fits:
        raise CapabilityError(found.refusal, hint=found.hint)
    output.write_text(draw_svg(found), encoding="utf-8")
    click.echo(f"written to {output}")
    click.echo(describe(found))
