"""The timeline of a step: written by the first rank, read again, and simulated with its own times."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from colossal_core.errors import UsageError
from colossal_core.schedule import PipelineShape, Span
from colossal_pipeline import Pipeline
from colossal_pipeline.schedules.zero_bubble import ZeroBubbleV
from colossal_pipeline.timeline import Recording
from colossal_testkit import run_ranks

from . import trials
from .models import build_gpt


def train_and_record(path: str) -> None:
    """Take two steps; the second one is what the file has."""
    run = build_gpt(num_blocks=4)
    piece = Pipeline(degree=2, microbatches=3, schedule="zbv", chunks=2, timeline=path)
    booster, optimizer = trials.boost(run, [piece])
    for batch in run.batches[:2]:
        booster.forward_backward(run.model, batch, run.criterion)
        optimizer.step()
        optimizer.zero_grad()


def test_a_step_is_recorded_and_planned_beside_itself(tmp_path: Path) -> None:
    """Every action of every rank, in order and one after another; the plan has the same actions."""
    path = tmp_path / "runs" / "step.json"

    run_ranks(train_and_record, 2, str(path))

    found = Recording.read(path)
    rows = [[span.action for span in row] for row in found.ranks]
    assert rows == [list(row) for row in ZeroBubbleV().actions(found.shape)]
    for row in found.ranks:
        assert all(0 <= span.start <= span.stop for span in row)
        assert all(before.stop <= after.start for before, after in itertools.pairwise(row))
    planned = found.planned()
    assert [[span.action for span in row] for row in planned.ranks] == rows
    assert found.actual().makespan >= max(found.actual().busy(rank) for rank in range(2))
    assert planned.makespan > 0


def test_recordings_come_back_as_they_were(tmp_path: Path) -> None:
    """Through the file; what is no recording is named."""
    rows = ZeroBubbleV().actions(PipelineShape(2, 3, 2))
    ranks = tuple(tuple(Span(action, n, n + 1.0) for n, action in enumerate(row)) for row in rows)
    step = Recording(schedule="zbv", placement=(0, 1, 1, 0), ranks=ranks)
    file = tmp_path / "step.json"

    step.write(file)

    assert Recording.read(file) == step
    for text in ("", "[]", '{"schedule": "zbv"}'):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match="holds no timeline"):
            Recording.read(file)
