"""``colossal pipeline draw``: from the package, through the hook, on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from colossal_cli.main import cli


def test_a_schedule_is_drawn_into_a_file(tmp_path: Path) -> None:
    """With its figures on the terminal."""
    file = tmp_path / "schedule.svg"
    words = ["pipeline", "draw", "--schedule", "zbv", "--stages", "4", "--microbatches", "8", "-o", str(file)]

    done = CliRunner().invoke(cli, words)

    assert done.exit_code == 0, done.output
    assert file.read_text(encoding="utf-8").startswith("<svg")
    assert "bubble 1.5" in done.output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--schedule", "zbw", "--stages", "2", "--microbatches", "2"], "'zbw'"),
        (["--schedule", "zbv", "--stages", "2", "--microbatches", "2", "--chunks", "3"], "puts 2 stages"),
    ],
)
def test_what_cannot_be_drawn_is_wrong_usage(words: list[str], text: str) -> None:
    """Unknown names, and chunks that a schedule does not have."""
    done = CliRunner().invoke(cli, ["pipeline", "draw", *words])

    assert done.exit_code != 0
    assert text in done.output + str(done.exception)
