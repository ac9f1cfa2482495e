"""A pipeline gives the numbers of one process over the same micro-batches: fp64, to 1e-10, clipped."""

from __future__ import annotations

import functools

import pytest

from colossal_pipeline import Pipeline
from colossal_testkit import run_ranks

from . import trials
from .models import BUILDERS

TOLERANCE = 1e-10

CASES = [
    ("gpt", Pipeline(degree=2, microbatches=4, schedule="gpipe")),
    ("gpt", Pipeline(degree=3, microbatches=7)),
    ("gpt", Pipeline(degree=4, microbatches=3, schedule="zbh1")),
    ("gpt", Pipeline(degree=2, microbatches=5, schedule="interleaved", chunks=3)),
    ("gpt", Pipeline(degree=3, microbatches=7, schedule="zbv", chunks=2)),
    ("gpt-tied", Pipeline(degree=4, microbatches=9)),
    ("gpt-tied", Pipeline(degree=2, microbatches=1, schedule="zbh1")),
    ("gpt-tied", Pipeline(degree=3, microbatches=4, schedule="interleaved", chunks=2)),
    ("gpt-tied", Pipeline(degree=2, microbatches=3, schedule="zbv", chunks=2)),
    ("resnet", Pipeline(degree=3, microbatches=4)),
    ("resnet", Pipeline(degree=2, microbatches=3, schedule="zbv", chunks=2)),
    ("resnet", Pipeline(degree=4, microbatches=2, schedule="gpipe", balance=("low.1", "high.0", "head"))),
    ("widths", Pipeline(degree=4, microbatches=9, schedule="zbh1")),
    (
        "widths",
        Pipeline(degree=2, microbatches=3, schedule="interleaved", chunks=3, balance=(0, 1, 1, 1, 1, 1)),
    ),
    ("widths", Pipeline(degree=1, microbatches=4)),
]
"""Sampled over models, schedules, 2 to 4 stages, 1 to 2p + 1 micro-batches, chunks, and ways to balance."""


@functools.cache
def reference(name: str, number: int) -> trials.Outcome:
    """Return the run of one process."""
    return trials.train_by_hand(BUILDERS[name](), number)


def describe(value: object) -> str | None:
    """Return a short id of a case."""
    if isinstance(value, Pipeline):
        return f"{value.schedule}-p{value.degree}-m{value.microbatches}-v{value.chunks}"
    return None


@pytest.mark.parametrize(("name", "piece"), CASES, ids=describe)
def test_numbers_are_those_of_one_process(name: str, piece: Pipeline) -> None:
    """Losses, norms and weights of all ranks, and the buffers that each holds."""
    found = run_ranks(trials.train, piece.degree, name, [piece])

    for outcome in found:
        assert outcome.difference(reference(name, piece.microbatches)) < TOLERANCE
    assert len({tuple(outcome.losses) for outcome in found}) == 1
