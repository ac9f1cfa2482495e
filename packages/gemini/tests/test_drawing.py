"""Pictures show what the plan says."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from colossal_core.errors import CapabilityError
from colossal_gemini.costs import Budgets
from colossal_gemini.drawing import describe, draw_svg
from colossal_gemini.report import judge

from .traces import sweep

TRACE = sweep(6, size=100, gradients=True, other=50, value_bytes=2)


def test_a_picture_has_a_cell_for_each_chunk_that_is_there() -> None:
    """In each moment, with what it is there for, and a line of the budget."""
    report = judge(TRACE, Budgets(device=900), title="a <sweep>")
    assert report.plan is not None

    picture = ET.fromstring(draw_svg(report))  # noqa: S314

    cells = [box[0].text or "" for box in picture.iter() if box.tag.endswith("rect") and len(box)]
    there = sum(len(stay.resident) for stay in report.plan.moments)
    left = report.plan.num_evictions
    assert len(cells) == there + left
    assert sum(cell.endswith("waited for") for cell in cells) == sum(
        len(s.gathers) for s in report.plan.moments
    )
    assert "u0, forward of u0: waited for" in cells[0].replace("unit", "u")
    texts = [text.text for text in picture.iter() if text.tag.endswith("text")]
    assert "a <sweep>" in texts
    assert "budget 900 B" in texts
    assert describe(report).startswith("13 moments, 6 chunks: ")


def test_a_budget_far_above_is_said_and_not_drawn() -> None:
    """Since nothing else could be seen."""
    picture = draw_svg(judge(TRACE, Budgets(device=1 << 40)))

    assert "budget 1 TiB, far above" in picture
    assert "stroke-dasharray" not in picture


def test_the_command_draws_a_saved_report(tmp_path: Path) -> None:
    """With its budgets or others; without a file it prints the report; what does not fit is refused."""
    pytest.importorskip("click")
    from click.testing import CliRunner

    from colossal_gemini.commands import gemini

    saved, drawn = tmp_path / "report.json", tmp_path / "step.svg"
    judge(TRACE, Budgets(device=900), title="a sweep").save(saved)
    run = CliRunner()

    printed = run.invoke(gemini, ["draw", str(saved)])
    written = run.invoke(gemini, ["draw", str(saved), "--device-budget", "700", "-o", str(drawn)])
    refused = run.invoke(gemini, ["draw", str(saved), "--device-budget", "300", "-o", str(drawn)])

    assert "a sweep: fits" in printed.output
    assert "peak" in written.output
    assert "budget 700 B" in drawn.read_text(encoding="utf-8")
    assert isinstance(refused.exception, CapabilityError)
