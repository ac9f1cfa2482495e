"""Pictures of schedules: one row for each rank, one box for each action, as SVG or as text. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from colossal_core.schedule import PipelineShape, StageTimes, Work, check_schedule, peak_activations, simulate

if TYPE_CHECKING:
    from colossal_core.interfaces import AbstractSchedule
    from colossal_core.schedule import Timeline

__all__ = ["describe", "draw_svg", "draw_text", "plan_timeline"]

COLOURS = {Work.FORWARD: "#4c78a8", Work.BACKWARD: "#59a14f", Work.INPUT: "#76b7b2", Work.WEIGHT: "#edc948"}
LABELS = {
    Work.FORWARD: "forward",
    Work.BACKWARD: "backward",
    Work.INPUT: "backward of inputs",
    Work.WEIGHT: "backward of weights",
}
UNIT, HEIGHT, LEFT, TOP = 36, 28, 70, 40
"""Pixels of one unit of time, of a row, and of what stands to the left of and above the rows."""


def plan_timeline(
    name: str, schedule: AbstractSchedule, shape: PipelineShape, times: StageTimes | None = None
) -> Timeline:
    """Return when each action runs.

    Args:
        name: Of the schedule, for messages.
        schedule: The schedule.
        shape: The pipeline.
        times: What work takes; by default 1 for forward and for each half of backward of a rank's share.

    Raises:
        PluginError: The schedule cannot run.
    """
    placement, actions = schedule.placement(shape), schedule.actions(shape)
    check_schedule(name, shape, placement, actions, bounds=schedule.bounds(shape))
    return simulate(placement, actions, StageTimes.equal(shape) if times is None else times)


def describe(timeline: Timeline, shape: PipelineShape) -> str:
    """Return the figures of a timeline in one line."""
    rows = [[span.action for span in row] for row in timeline.ranks]
    held = ", ".join(f"{peak_activations(row) / shape.chunks:g}" for row in rows)
    return (
        f"step {timeline.makespan:g}, bubble {timeline.bubble:g} ({timeline.bubble_fraction:.1%} of all "
        f"time); held by each rank, in shares of a rank for one micro-batch: {held}"
    )


def draw_text(timeline: Timeline, *, columns: int = 100) -> str:
    """Return a timeline as text: the digit of a micro-batch, forward upper, backward lower, idling dots.

    Args:
        timeline: The timeline.
        columns: Characters for the whole step.
    """
    letters = {Work.FORWARD: "F", Work.BACKWARD: "B", Work.INPUT: "I", Work.WEIGHT: "W"}
    scale = columns / timeline.makespan if timeline.makespan else 1.0
    lines = []
    for rank, row in enumerate(timeline.ranks):
        cells = ["."] * columns
        for span in row:
            start, stop = round(span.start * scale), round(span.stop * scale)
            text = f"{letters[span.action.work]}{span.action.microbatch}".ljust(stop - start, "-")
            cells[start:stop] = list(text[: stop - start])
        lines.append(f"rank {rank}  {''.join(cells[:columns])}")
    return "\n".join(lines)


def draw_svg(timelines: Sequence[tuple[str, Timeline]]) -> str:
    """Return timelines as one picture, below each other and on one scale: planned beside measured.

    Args:
        timelines: Each with its title; times are in one unit.
    """
    width = LEFT + 20 + UNIT * max(12.0, *(timeline.makespan for _, timeline in timelines))
    parts, y = list[str](), TOP
    for number, work in enumerate(Work):
        x = LEFT + number * 150
        parts.append(f'<rect x="{x}" y="8" width="14" height="14" fill="{COLOURS[work]}"/>')
        parts.append(f'<text x="{x + 20}" y="20">{LABELS[work]}</text>')
    for title, timeline in timelines:
        parts.append(f'<text x="{LEFT}" y="{y + 14}" font-weight="bold">{_escape(title)}</text>')
        y += 22
        for rank, row in enumerate(timeline.ranks):
            parts.append(f'<text x="8" y="{y + 18}">rank {rank}</text>')
            for span in row:
                left, length = LEFT + span.start * UNIT, (span.stop - span.start) * UNIT
                parts.append(
                    f'<rect x="{left:.1f}" y="{y}" width="{length:.1f}" height="{HEIGHT - 4}" '
                    f'fill="{COLOURS[span.action.work]}" stroke="white"><title>{span.action}: '
                    f"{span.start:g} to {span.stop:g}</title></rect>"
                )
                if length >= 12:
                    parts.append(
                        f'<text x="{left + length / 2:.1f}" y="{y + 17}" text-anchor="middle" fill="white">'
                        f"{span.action.microbatch}</text>"
                    )
            y += HEIGHT
        y += 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{y}" '
        f'font-family="sans-serif" font-size="12">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _escape(text: str) -> str:
    """Return text as it may stand in XML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
