"""``colossal pipeline draw``: from the package, through the hook, on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from colossal_cli.main import cli
from colossal_core.schedule import PipelineShape, StageTimes, simulate
from colossal_pipeline.schedules.one_forward_one_backward import OneForwardOneBackward
from colossal_pipeline.timeline import Recording


def test_a_schedule_is_drawn_into_a_file(tmp_path: Path) -> None:
    """With its figures on the terminal."""
    file = tmp_path / "schedule.svg"
    words = ["pipeline", "draw", "--schedule", "zbv", "--stages", "4", "--microbatches", "8", "-o", str(file)]

    done = CliRunner().invoke(cli, words)

    assert done.exit_code == 0, done.output
    assert file.read_text(encoding="utf-8").startswith("<svg")
    assert "bubble 1.5" in done.output


def test_a_recorded_step_is_drawn_beside_its_plan(tmp_path: Path) -> None:
    """Two pictures in one, and the figures of both."""
    placement, rows = (0, 1), OneForwardOneBackward().actions(PipelineShape(2, 3))
    times = StageTimes.equal(PipelineShape(2, 3), forward=0.5, transfer=0.1)
    step = Recording(schedule="1f1b", placement=placement, ranks=simulate(placement, rows, times).ranks)
    step.write(tmp_path / "step.json")
    words = ["pipeline", "draw", "--recorded", str(tmp_path / "step.json")]

    done = CliRunner().invoke(cli, [*words, "-o", str(tmp_path / "step.svg")])
    printed = CliRunner().invoke(cli, words)

    assert done.exit_code == 0, done.output
    assert (tmp_path / "step.svg").read_text(encoding="utf-8").count("font-weight") == 2
    assert "as it was: step " in done.output
    assert "1f1b, planned for the times of stages: step " in printed.output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--recorded", "step.json", "--stages", "2"], "of its own"),
        (["--recorded", "step.json"], "holds no timeline"),
        (["--stages", "2"], "nothing to draw"),
        (["--schedule", "zbw", "--stages", "2", "--microbatches", "2"], "'zbw'"),
        (["--schedule", "zbv", "--stages", "2", "--microbatches", "2", "--chunks", "3"], "puts 2 stages"),
    ],
)
def test_what_cannot_be_drawn_is_wrong_usage(words: list[str], text: str) -> None:
    """Unknown names, and chunks that a schedule does not have."""
    done = CliRunner().invoke(cli, ["pipeline", "draw", *words])

    assert done.exit_code != 0
    assert text in done.output + str(done.exception)
