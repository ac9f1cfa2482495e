"""What a step moves, and how much of the memory is put to use: as the formulas say, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from colossal_core import Booster
from colossal_gemini import Gemini
from colossal_gemini.costs import Budgets
from colossal_gemini.eviction import find_peak
from colossal_gemini.report import FitReport, judge
from colossal_testkit import run_ranks
from colossal_testkit.engine import engine_of
from colossal_testkit.models import GPT, TokenLoss

NUM_BLOCKS = 8
IDS = torch.arange(24).view(4, 6)

Step = dict[str, Any]


def fit(ranks: int, precision: str, accumulate: int = 1, **budgets: Any) -> FitReport:
    """Return the report on a small GPT of a few blocks."""
    options = Gemini(**{"device_budget": 1, "host_budget": "4MiB", **budgets})
    batch = (IDS, IDS + 1)
    model: nn.Module = GPT(num_blocks=NUM_BLOCKS)
    return options.fit(
        model, batch, criterion=TokenLoss(), precision=precision, ranks=ranks, accumulate=accumulate
    )


def train(precision: str, options: dict[str, Any], accumulate: int = 1) -> Step:
    """Take three steps within budgets; return what the last one did."""
    torch.manual_seed(5)
    model: nn.Module = GPT(num_blocks=NUM_BLOCKS)
    booster = Booster(
        Gemini(**options) if options else "replicated", precision=precision, accumulate=accumulate
    )
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = []
    for _ in range(3 * accumulate):
        losses.append(float(booster.forward_backward(model, (IDS, IDS + 1), TokenLoss())))
        optimizer.step()
        optimizer.zero_grad()
    manager: Any = engine_of(booster).manager
    if not options:
        return {"losses": losses}
    found = booster.report()
    moves = [
        (one.op, one.full_bytes) for one in booster.last_traffic if one.phase in {"parameters", "gradients"}
    ]
    return {
        "moved": found["moved"],
        "tiers": found["tiers"],
        "gathers": [size for op, size in moves if op == "all_gather"],
        "reductions": [size for op, size in moves if op == "reduce_scatter"],
        "planned": manager.plan.num_gathers,
        "losses": losses,
    }


def keep(report: FitReport, folder: Path) -> dict[str, Any]:
    """Save a report, and return options that train as it says."""
    path = folder / "fit.json"
    report.save(path)
    return {
        "device_budget": report.budgets.device,
        "host_budget": report.budgets.host,
        "placement": report.policy,
        "trace": str(path),
    }


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("times", [1.0, 1.5, 2.5])
def test_a_step_moves_what_its_report_says(ranks: int, precision: str, times: float, tmp_path: Path) -> None:
    """Byte for byte between tiers; among ranks each chunk is reduced once, and gathered as planned."""
    least = fit(ranks, precision).least_budget
    report = fit(ranks, precision, device_budget=int(times * (least or 0)))
    assert report.plan is not None

    steps = run_ranks(train, ranks, precision, keep(report, tmp_path))

    wanted = {way: report.moved_bytes[way] for way in ("host to device", "device to host")}
    sizes = [chunk.whole_bytes for chunk in report.trace.chunks]
    for step in steps:
        assert {way: step["moved"].get(way, 0) for way in wanted} == wanted
        assert step["planned"] == report.plan.num_gathers
        if ranks > 1:
            assert len(step["gathers"]) == report.plan.num_gathers
            assert sum(step["gathers"]) == report.plan.gathered_bytes
            assert sorted(step["reductions"]) == sorted(sizes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_moves_the_least_that_any_can(ranks: int, tmp_path: Path) -> None:
    """With everything elsewhere each gradient leaves once, and values come with each of 2C - B gathers."""
    least = fit(ranks, "bf16", placement="static").least_budget
    report = fit(ranks, "bf16", placement="static", device_budget=least)
    number = len(report.trace.chunks)
    whole = sum(chunk.whole_bytes for chunk in report.trace.chunks)
    twice = [
        c.whole_bytes for c in report.trace.chunks if report.plan and report.plan.gathers_of(c.index) > 1
    ]

    steps = run_ranks(train, ranks, "bf16", keep(report, tmp_path))

    # The root stays, and what forward ends with is where backward begins.
    assert len(twice) == number - 2
    for step in steps:
        assert step["planned"] == 2 * number - 2
        assert step["moved"] == {
            "device to host": whole // ranks,
            "host to device": (whole + sum(twice)) // ranks,
        }


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sums_of_several_passes_are_within_budgets(ranks: int, precision: str, tmp_path: Path) -> None:
    """Also from the least budget of the device and of host memory; they take 4 bytes for each element."""
    once, least = (fit(ranks, precision, accumulate).least_budget or 0 for accumulate in (1, 3))
    report = fit(ranks, precision, 3, device_budget=least)
    host = least_host(report, least)
    tight = judge(report.trace, Budgets(device=least, host=host), ranks=ranks)

    steps = run_ranks(train, ranks, precision, keep(tight, tmp_path), 3)

    wanted = run_ranks(train, ranks, precision, {}, 3)
    assert least >= once
    for step, other in zip(steps, wanted, strict=True):
        assert step["losses"] == pytest.approx(other["losses"], rel=1e-6 if precision == "fp32" else 1e-2)
        assert step["tiers"]["host"]["peak"] <= host
        assert step["tiers"]["device"]["peak"] <= least


def least_host(report: FitReport, device: int) -> int:
    """Return the least budget of host memory with which a step trains, to 16 bytes."""
    low, high = 0, 1 << 24
    while high - low > 16:
        middle = (low + high) // 2
        budgets = Budgets(device=device, host=middle)
        if judge(report.trace, budgets, ranks=report.ranks).fits:
            high = middle
        else:
            low = middle
    return high


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("times", [1.2, 2.0])
def test_budgets_hold_nine_tenths_of_what_could_be_held(ranks: int, times: float, tmp_path: Path) -> None:
    """State fills what the device has left besides its busiest moment, and host memory; and it trains so.

    The formula: bytes of the state over (host memory + device - what the busiest moment takes by itself).
    """
    report = fit(ranks, "bf16")
    device = int(times * (report.least_budget or 0))
    host = least_host(report, device)
    tight = judge(report.trace, Budgets(device=device, host=host), ranks=ranks)
    assert tight.placement is not None
    room = tight.placement.room
    alone = attrs.evolve(room, fixed=0, staging=0, homes=frozenset(), gradient_homes=frozenset())
    free = device - find_peak(report.trace, alone).total
    state = sum(states.total for states in tight.placement.states)

    steps = run_ranks(train, ranks, "bf16", keep(tight, tmp_path))

    assert state >= 0.9 * (host + free)
    for step in steps:
        assert step["tiers"]["host"]["peak"] <= host
        assert step["tiers"]["device"]["peak"] <= device
