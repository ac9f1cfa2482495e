"""A pipeline gives the numbers of one process over the same micro-batches: fp64, to 1e-10, clipped."""

from __future__ import annotations

import functools

import pytest
import torch

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


# --- everything -------------------------------------------------------------------------------------------

SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zbh1", 1),
    ("zbv", 2),
]
"""Schedules with their chunks."""

DEGREES = (2, 3, 4)


def train_often(name: str, degree: int, schedule: str, chunks: int) -> list[trials.Outcome]:
    """Train anew with each number of micro-batches from 1 to 2p + 1."""
    pieces = [
        Pipeline(degree=degree, microbatches=number, schedule=schedule, chunks=chunks)
        for number in range(1, 2 * degree + 2)
    ]
    return [trials.train(name, [piece]) for piece in pieces]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("name", ["gpt", "gpt-tied", "resnet-deep", "widths-deep"])
def test_numbers_are_those_of_one_process_with_any_number_of_micro_batches(
    name: str, schedule: str, chunks: int, degree: int
) -> None:
    """Every schedule on 2, 3 and 4 ranks, with 1 to 3 stages on each, and 1 to 2p + 1 micro-batches."""
    for outcomes in run_ranks(train_often, degree, name, degree, schedule, chunks, timeout_seconds=200):
        for number, outcome in enumerate(outcomes, start=1):
            assert outcome.difference(reference(name, number)) < TOLERANCE, number


@functools.cache
def reference_of_dropout() -> trials.Outcome:
    """Return the run of a pipeline of one stage; seeds of modules are not those of a plain loop."""
    return run_ranks(train_with_dropout, 1, Pipeline(degree=1, microbatches=4))[0]


def train_with_dropout(piece: Pipeline) -> trials.Outcome:
    """Train with dropout, from the same seed on all ranks."""
    torch.manual_seed(11)
    return trials.train("dropout-deep", [piece])


@pytest.mark.slow
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_dropout_draws_the_same_everywhere(schedule: str, chunks: int, degree: int) -> None:
    """Under every schedule on 2, 3 and 4 ranks."""
    piece = Pipeline(degree=degree, microbatches=4, schedule=schedule, chunks=chunks)

    for outcome in run_ranks(train_with_dropout, degree, piece):
        assert outcome.difference(reference_of_dropout()) < TOLERANCE
