"""A run that was saved and loaded is the run that was not: bit for bit on the same layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import evolve

from colossal_testkit import run_ranks

from .runs import Run, Trace, train

CASES = {
    "fp32 on one rank": (1, Run(root=Path())),
    "fp32": (2, Run(root=Path())),
    "fp64 on three ranks": (3, Run(root=Path(), precision="fp64", scheduler="cycle")),
    "bf16": (2, Run(root=Path(), precision="bf16", scheduler="sequence")),
    "fp16": (2, Run(root=Path(), precision="fp16")),
    "accumulation": (2, Run(root=Path(), accumulate=3, steps=5)),
    "beside training": (2, Run(root=Path(), asynchronous=True)),
    "momentum": (2, Run(root=Path(), optimizer="momentum", precision="bf16")),
    "whole-shaped optimizer": (2, Run(root=Path(), optimizer="adafactor", average=False)),
}


def compare(one: Trace | None, other: Trace | None) -> None:
    """Hold two runs to each other, bit for bit."""
    assert one is not None
    assert other is not None
    assert one.losses == other.losses
    assert one.counters == other.counters
    assert one.rates == other.rates
    assert one.drawn == other.drawn
    for mine, theirs in (
        (one.weights, other.weights),
        (one.moments, other.moments),
        (one.averages, other.averages),
    ):
        assert len(mine) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(case: str, tmp_path: Path) -> None:
    """Losses, weights, moments, averages, rates, counters and what is drawn next, on every rank."""
    nproc, run = CASES[case]
    whole = run_ranks(train, nproc, evolve(run, root=tmp_path / "none"))

    run_ranks(train, nproc, evolve(run, root=tmp_path / "some", save_at=(2, 3)))
    resumed = run_ranks(train, nproc, evolve(run, root=tmp_path / "some"))

    for rank in range(nproc):
        compare(whole[rank], resumed[rank])


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 1), (4, 2)])
def test_other_number_of_ranks_goes_on_with_the_same_samples(before: int, after: int, tmp_path: Path) -> None:
    """Without dropout, a run in fp64 that changes its number of ranks keeps its losses to 1e-10."""
    run = Run(root=tmp_path / "none", precision="fp64", dropout=0.0, steps=6)
    run_ranks(train, before, evolve(run, root=tmp_path / "some", save_at=(2,)))

    whole = run_ranks(train, before, run)[0]
    resumed = run_ranks(train, after, evolve(run, root=tmp_path / "some"))

    assert whole is not None
    for trace in resumed:
        assert trace is not None
        assert trace.counters[:3] == whole.counters[:3]
        assert trace.losses == pytest.approx(whole.losses, rel=1e-6)  # losses leave in fp32
        for mine, theirs in zip(trace.weights, whole.weights, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
        for mine, theirs in zip(trace.moments, whole.moments, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
