"""``colossal pipeline``: pictures of schedules. Imported by the command line, which brings click."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from colossal_core.errors import UsageError
from colossal_core.schedule import PipelineShape, StageTimes
from colossal_pipeline.drawing import describe, draw_svg, draw_text, plan_timeline
from colossal_pipeline.finding import find_schedule

__all__ = ["pipeline"]

COUNT = click.IntRange(min=1)
TIME = click.FloatRange(min=0.0)


@click.group()
def pipeline() -> None:
    """Look at pipeline schedules."""


@pipeline.command("draw")
@click.option("--schedule", "name", required=True, metavar="NAME", help="1f1b, zbv, or one of a plugin.")
@click.option("--stages", "degree", required=True, type=COUNT, metavar="P", help="Ranks of the pipeline.")
@click.option("--microbatches", required=True, type=COUNT, metavar="M", help="Micro-batches of a step.")
@click.option("--chunks", type=COUNT, metavar="V", help="Stages on each rank.")
@click.option("--forward", type=TIME, default=1.0, show_default=True, help="Time of a rank's forward.")
@click.option("--inputs", type=TIME, default=1.0, show_default=True, help="Of the first half of backward.")
@click.option("--weights", type=TIME, default=1.0, show_default=True, help="Of its second half.")
@click.option("--transfer", type=TIME, default=0.0, show_default=True, help="Of a message.")
@click.option("-o", "output", type=click.Path(path_type=Path), help="An SVG file; else text is printed.")
@click.pass_obj
def draw(session: Any, /, name: str, output: Path | None, **numbers: Any) -> None:
    """Draw a schedule, with its bubble and what ranks hold."""
    schedule = find_schedule(session.registry, name)
    chunks = numbers["chunks"] or schedule.chunks or (2 if name == "interleaved" else 1)
    if schedule.chunks not in {None, chunks}:
        raise UsageError(
            f"schedule {name!r} puts {schedule.chunks} stages on each rank, not {chunks}",
            hint=f"leave --chunks out, or write --chunks {schedule.chunks}",
        )
    shape = PipelineShape(numbers["degree"], numbers["microbatches"], chunks)
    work = {key: numbers[key] for key in ("forward", "inputs", "weights", "transfer")}
    timeline = plan_timeline(name, schedule, shape, StageTimes.equal(shape, **work))
    if output is None:
        click.echo(draw_text(timeline))
    else:
        title = f"{name}: {shape.degree} ranks with {chunks} stages, {shape.num_microbatches} micro-batches"
        output.write_text(draw_svg([(title, timeline)]), encoding="utf-8")
        click.echo(f"written to {output}")
    click.echo(describe(timeline, shape))
