"""Plans drawn at random, one going on where another stopped: the numbers stay those of one process."""

from __future__ import annotations

import random
import tempfile

import attrs
import pytest

from colossal_core import Recompute, Replicated
from colossal_gemini import Gemini
from colossal_pipeline import Pipeline
from colossal_tensor_parallel import TensorParallel
from colossal_testkit.models import Workload, build_workload
from colossal_testkit.parity import (
    FP64,
    Loop,
    Recipe,
    boost_workload,
    collect_slabs,
    compare_traces,
    take_steps,
    train_serial,
)
from colossal_testkit.ranks import run_ranks
from colossal_testkit.traces import Trace
from colossal_zero import Zero

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbh1": 1, "zbv": 2}
"""Chunks of each."""


def draw_plan(source: random.Random, name: str, num_ranks: int) -> tuple[object, ...]:
    """Return pieces that go together on so many ranks."""
    pieces: list[object] = []
    left = num_ranks
    if name.startswith("gpt"):
        if left % 2 == 0 and source.random() < 0.5:
            left //= 2
            pieces.append(TensorParallel(degree=2, sequence=source.random() < 0.5))
        if left % 2 == 0 and source.random() < 0.5:
            left //= 2
            schedule = source.choice(sorted(SCHEDULES))
            pieces.append(
                Pipeline(
                    degree=2,
                    microbatches=source.randint(1, 5),
                    schedule=schedule,
                    chunks=SCHEDULES[schedule],
                )
            )
    managers: list[object] = [Replicated(), Zero(stage=1), Zero(stage=2), Zero(stage=2, offload="optimizer")]
    if not any(isinstance(piece, Pipeline) for piece in pieces):
        managers += [Zero(stage=3), Gemini(), Gemini(device_budget="64MiB")]
    if left == 4:
        managers += [Zero(stage=1, replicas=2), Zero(stage=2, replicas=2)]
    pieces.append(source.choice(managers))
    if name.startswith("gpt") and source.random() < 0.3:
        pieces.append(Recompute())
    return tuple(pieces)


@attrs.frozen
class Leg:
    """A part of a run: on how many ranks, under which plan, up to which step."""

    num_ranks: int
    pieces: tuple[object, ...]
    start: int
    stop: int


def draw_run(seed: int) -> tuple[Recipe, list[Leg]]:
    """Return a run and the plans that it goes through."""
    source = random.Random(seed)  # noqa: S311 - the same plans each time
    name = source.choice(["gpt", "gpt-tied", "gpt-tied", "mlp", "branches", "lstm"])
    optimizers = ["adamw", "sgd"]
    if not name.startswith(
        "gpt"
    ):  # whose keys' bias has no gradient but noise, which adafactor makes steps of
        optimizers.append("adafactor")
    stop = source.randint(1, 3)
    cuts = [(0, stop), (stop, 4)]
    counts = [source.choice([1, 2, 3, 4, 4]) for _ in cuts]
    legs = [Leg(count, draw_plan(source, name, count), *cut) for count, cut in zip(counts, cuts, strict=True)]
    loops: list[Loop] = ["forward_backward"]
    if not any(isinstance(piece, Pipeline) for leg in legs for piece in leg.pieces):
        loops += ["plain", "twice", "held"]
    loop = source.choice(loops)
    by_rows = loop == "forward_backward"  # in the others, shares are equal, and so is what counts in them
    recipe = Recipe(
        builder=build_workload,
        arguments={
            "name": name,
            "num_samples": source.choice([11, 12, 13]) if by_rows else 24,
            "num_steps": 4,
            "ignores_some": by_rows and source.random() < 0.5,
            "optimizer": source.choice(optimizers),
        },
        loop=loop,
        max_grad_norm=source.choice([None, 0.5]),
    )
    return recipe, legs


def run_leg(recipe: Recipe, leg: Leg, folder: str) -> Trace:
    """Go on from the newest checkpoint, take the steps of a leg, and save."""
    work: Workload = recipe.build()
    work = attrs.evolve(work, batches=work.batches[leg.start : leg.stop])
    booster, work = boost_workload(recipe, leg.pieces, {"precision": "fp64"}, work=work)
    loaded = booster.load(folder, missing_ok=True)
    assert (0 if loaded is None else loaded.step) == leg.start
    losses, norms = take_steps(recipe, booster, work)
    booster.save(folder)
    return Trace(losses=losses, norms=norms, slabs=collect_slabs(booster, work.model))


def check_run(seed: int) -> None:
    """Compare a run that changes its plan with one process."""
    recipe, legs = draw_run(seed)
    reference = run_ranks(train_serial, 1, recipe, process_group=False)[0]
    with tempfile.TemporaryDirectory() as folder:
        for leg in legs:
            found = run_ranks(run_leg, leg.num_ranks, recipe, leg, folder, timeout_seconds=60)
            part = attrs.evolve(
                reference,
                losses=reference.losses[leg.start : leg.stop],
                norms=reference.norms[leg.start : leg.stop],
                slabs=reference.slabs if leg.stop == 4 else found[0].slabs,
            )
            if leg.stop != 4:
                found = [attrs.evolve(trace, slabs=part.slabs) for trace in found]
            compare_traces(found, part, FP64)


@pytest.mark.parametrize("seed", range(3))
def test_a_run_may_change_its_plan(seed: int) -> None:
    """Losses, norms and final weights, by the digits of fp64."""
    check_run(seed)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(3, 200))
def test_runs_may_change_their_plans(seed: int) -> None:
    """The same, for many more."""
    check_run(seed)
