"""``colossal pipeline``: pictures of schedules. Imported by the command line, which brings click."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from colossal_core.errors import UsageError
from colossal_core.schedule import PipelineShape, StageTimes, Timeline
from colossal_pipeline.drawing import describe, draw_svg, draw_text, plan_timeline
from colossal_pipeline.finding import find_schedule
from colossal_pipeline.timeline import Recording

__all__ = ["pipeline"]

COUNT = click.IntRange(min=1)
TIME = click.FloatRange(min=0.0)


@click.group()
def pipeline() -> None:
    """Look at pipeline schedules."""


@pipeline.command("draw")
@click.option("--schedule", "name", metavar="NAME", help="1f1b, zbv, or one of a plugin.")
@click.option("--stages", "degree", type=COUNT, metavar="P", help="Ranks of the pipeline.")
@click.option("--microbatches", type=COUNT, metavar="M", help="Micro-batches of a step.")
@click.option(
    "--recorded", type=click.Path(path_type=Path), help="A step that Pipeline(timeline=...) wrote, instead."
)
@click.option("--chunks", type=COUNT, metavar="V", help="Stages on each rank.")
@click.option("--forward", type=TIME, default=1.0, show_default=True, help="Time of a rank's forward.")
@click.option("--inputs", type=TIME, default=1.0, show_default=True, help="Of the first half of backward.")
@click.option("--weights", type=TIME, default=1.0, show_default=True, help="Of its second half.")
@click.option("--transfer", type=TIME, default=0.0, show_default=True, help="Of a message.")
@click.option("-o", "output", type=click.Path(path_type=Path), help="An SVG file; else text is printed.")
@click.pass_obj
def draw(
    session: Any, /, name: str | None, output: Path | None, recorded: Path | None, **numbers: Any
) -> None:
    """Draw a schedule, or a recorded step beside it, with its bubble and what ranks hold."""
    given = [name, numbers["degree"], numbers["microbatches"]]
    if recorded is not None and any(value is not None for value in given):
        raise UsageError(
            "a recorded step has a schedule, stages and micro-batches of its own",
            hint="leave --schedule, --stages and --microbatches out, or --recorded",
        )
    if recorded is not None:
        step = Recording.read(recorded)
        shape = step.shape
        timelines = [
            (f"{step.schedule}, planned for the times of stages", step.planned()),
            ("as it was", step.actual()),
        ]
    elif name is None or None in given:
        raise UsageError(
            "there is nothing to draw", hint="write --schedule, --stages and --microbatches, or --recorded"
        )
    else:
        shape, timeline = _plan(session, name, numbers)
        title = f"{name}: {shape.degree} ranks with {shape.chunks} stages"
        timelines = [(f"{title}, {shape.num_microbatches} micro-batches", timeline)]
    if output is not None:
        output.write_text(draw_svg(timelines), encoding="utf-8")
        click.echo(f"written to {output}")
    for title, timeline in timelines:
        prefix = f"{title}: " if len(timelines) > 1 else ""
        if output is None:
            click.echo(draw_text(timeline))
        click.echo(prefix + describe(timeline, shape))


def _plan(session: Any, name: str, numbers: Any) -> tuple[PipelineShape, Timeline]:
    """Return a pipeline and its simulated step."""
    schedule = find_schedule(session.registry, name)
    chunks = numbers["chunks"] or schedule.chunks or (2 if name == "interleaved" else 1)
    if schedule.chunks not in {None, chunks}:
        raise UsageError(
            f"schedule {name!r} puts {schedule.chunks} stages on each rank, not {chunks}",
            hint=f"leave --chunks out, or write --chunks {schedule.chunks}",
        )
    shape = PipelineShape(numbers["degree"], numbers["microbatches"], chunks)
    work = {key: numbers[key] for key in ("forward", "inputs", "weights", "transfer")}
    return shape, plan_timeline(name, schedule, shape, StageTimes.equal(shape, **work))
