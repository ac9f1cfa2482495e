"""Pictures of a step: which chunks are on the device in each moment, and how full that is. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from colossal_gemini.budgets import show_bytes

if TYPE_CHECKING:
    from colossal_gemini.report import FitReport

__all__ = ["describe", "draw_svg"]

COLOURS = {
    "waited for": "#e15759",
    "needed": "#4c78a8",
    "comes early": "#76b7b2",
    "resident": "#c6d5e5",
    "lives there": "#59a14f",
    "leaves": "#f2cf5b",
}
"""Of the cells of chunks; the first that holds is shown."""

ROW, LEFT, TOP, GRAPH, BELOW, RIGHT = 14, 190, 80, 150, 28, 190
"""Pixels of a row, of what stands to the left of and above the cells, of the graph of bytes, below it, and to
the right of both."""

WIDEST = 1400
"""Pixels for all moments together; each takes 26 at most."""


def draw_svg(report: FitReport) -> str:
    """Return a step as a picture: a row for each chunk, a column for each moment, the device's bytes below.

    Args:
        report: One that fits.
    """
    assert report.plan is not None, "what does not fit has no plan"
    number = len(report.trace.moments)
    column = max(3.0, min(26.0, WIDEST / number))
    height = TOP + ROW * len(report.trace.chunks) + 24 + GRAPH + BELOW
    parts = [*_draw_cells(report, column), *_draw_bytes(report, column), *_draw_phases(report, column)]
    width = LEFT + column * number + RIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join([*_draw_legend(report, parts), *parts])
        + "\n</svg>\n"
    )


def describe(report: FitReport) -> str:
    """Return the figures of the picture in one line."""
    assert report.plan is not None, "what does not fit has no plan"
    plan = report.plan
    waits = sum(len(stay.gathers) for stay in plan.moments)
    return (
        f"{len(plan.moments)} moments, {len(report.trace.chunks)} chunks: {plan.num_gathers} gathers, "
        f"{waits} of them waited for, {plan.num_evictions} evictions; peak {show_bytes(plan.peak)} of "
        f"{show_bytes(report.budgets.device)}"
    )


def _draw_legend(report: FitReport, drawn: Iterable[str]) -> list[str]:
    """Return title, figures and the colours of cells that were drawn."""
    parts = [f'<text x="8" y="18" font-size="14" font-weight="bold">{_escape(report.title)}</text>']
    parts.append(f'<text x="8" y="36" fill="#555555">{_escape(describe(report))}</text>')
    body = "\n".join(drawn)
    shown = [(name, colour) for name, colour in COLOURS.items() if f": {name}</title>" in body]
    for position, (name, colour) in enumerate(shown):
        x = LEFT + 110 * position
        parts.append(f'<rect x="{x}" y="48" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="58">{name}</text>')
    return parts


def _draw_cells(report: FitReport, column: float) -> list[str]:
    """Return the rows of chunks."""
    assert report.plan is not None
    homes = report.plan.room.homes
    parts = [
        f'<text x="8" y="{TOP + ROW * (row + 1) - 3}">{_escape(chunk.name[-28:])}</text>'
        for row, chunk in enumerate(report.trace.chunks)
    ]
    for index, (moment, stay) in enumerate(zip(report.trace.moments, report.plan.moments, strict=True)):
        needs = report.trace.needs_at(index)
        x = LEFT + column * index
        shown: dict[int, str] = dict.fromkeys(stay.evictions, "leaves")
        for chunk in stay.resident:
            shown[chunk] = "lives there" if chunk in homes else "resident"
            if chunk in needs:
                shown[chunk] = "waited for" if chunk in stay.gathers else "needed"
            elif chunk in stay.prefetches:
                shown[chunk] = "comes early"
        for chunk, state in sorted(shown.items()):
            title = f"{report.trace.chunks[chunk].name}, {moment.phase} of {moment.name}: {state}"
            parts.append(
                f'<rect x="{x:.1f}" y="{TOP + ROW * chunk}" width="{column - 1:.1f}" height="{ROW - 2}" '
                f'fill="{COLOURS[state]}"><title>{_escape(title)}</title></rect>'
            )
    return parts


def _draw_bytes(report: FitReport, column: float) -> list[str]:
    """Return the graph of the device's bytes, with everything that is no chunk below, and the budget."""
    assert report.plan is not None
    trace, plan = report.trace, report.plan
    top = TOP + ROW * len(trace.chunks) + 24
    budget = report.budgets.device
    # A budget far above what is used would leave a flat line.
    is_far = budget > 2 * plan.peak
    most = plan.peak if is_far else max(budget, plan.peak)
    if not most:
        return []

    def y_of(number: float) -> float:
        return top + GRAPH - GRAPH * number / most

    rows = [("all", [stay.num_bytes for stay in plan.moments], COLOURS["needed"])]
    rows.append(("no chunk", [moment.other for moment in trace.moments], "#9d9da1"))
    parts, below = [], float(top)
    for name, numbers, colour in rows:
        beside = max(below, y_of(numbers[-1]) - 2)  # where names would lie on each other
        below = beside + ROW
        corners = [
            f"{LEFT + column * (index + side):.1f},{y_of(number):.1f}"
            for index, number in enumerate(numbers)
            for side in (0, 1)
        ]
        right = LEFT + column * len(numbers)
        edge = f"{LEFT},{top + GRAPH} {' '.join(corners)} {right:.1f},{top + GRAPH}"
        parts.append(f'<polygon points="{edge}" fill="{colour}" fill-opacity="0.5" stroke="{colour}"/>')
        parts.append(
            f'<text x="{right + 6:.1f}" y="{beside:.1f}" fill="{colour}">'
            f"{name}: {show_bytes(max(numbers))} at most</text>"
        )
    if is_far:
        parts.append(f'<text x="8" y="{top + 10}">budget {show_bytes(budget)}, far above</text>')
    else:
        parts.append(
            f'<line x1="{LEFT}" x2="{LEFT + column * len(trace.moments):.1f}" y1="{y_of(budget):.1f}" '
            f'y2="{y_of(budget):.1f}" stroke="#e15759" stroke-dasharray="5 3"/>'
        )
        parts.append(
            f'<text x="8" y="{y_of(budget) + 4:.1f}" fill="#e15759">budget {show_bytes(budget)}</text>'
        )
    return parts


def _draw_phases(report: FitReport, column: float) -> list[str]:
    """Return the names of the passes, and lines between them."""
    moments = report.trace.moments
    bottom = TOP + ROW * len(report.trace.chunks) + 24 + GRAPH
    start, parts = 0, list[str]()
    for index, moment in enumerate(moments):
        is_last = index + 1 == len(moments)
        if not is_last and moments[index + 1].phase == moment.phase:
            continue
        middle, end = LEFT + column * (start + index + 1) / 2, LEFT + column * (index + 1) - 0.5
        parts.append(f'<text x="{middle:.1f}" y="{bottom + 16}" text-anchor="middle">{moment.phase}</text>')
        if not is_last:
            parts.append(
                f'<line x1="{end:.1f}" x2="{end:.1f}" y1="{TOP}" y2="{bottom}" stroke="#333333" '
                'stroke-width="0.6"/>'
            )
        start = index + 1
    return parts


def _escape(text: str) -> str:
    """Return text as it may stand in XML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
