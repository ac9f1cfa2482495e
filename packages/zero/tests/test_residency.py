"""Stage 3: which units are resident when, and which are on their way before they are needed."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colossal_core import Booster, UsageError
from colossal_core.runtime.residency import Residency
from colossal_testkit import run_ranks
from colossal_testkit.engine import engine_of
from colossal_zero.parameters import DividedManager

from .models import boost, loss_of


def residency_of(booster: Booster) -> Residency:
    """Return what knows which units are resident."""
    manager = engine_of(booster).manager
    assert isinstance(manager, DividedManager)
    return manager._residency


def find_held(residency: Residency, *, at_most: int, with_root: bool) -> list[str]:
    """Return the units that have memory; a message that has arrived may hold its own for a moment longer."""
    deadline = time.monotonic() + 5
    while True:
        residency._free_lingering()
        units = [home.unit for home in residency._homes.values() if home.storage.nbytes()]
        held = [unit.name for unit in units if with_root or not unit.is_root]
        if len(held) <= at_most or time.monotonic() > deadline:
            return held
        time.sleep(0.001)


def watch_residency() -> tuple[int, list[list[str]]]:
    """Return the largest number of units besides the root's that had memory, and what is left resident."""
    booster, model, optimizer = boost()
    residency = residency_of(booster)
    most = 0

    def count(*_: Any) -> None:
        nonlocal most
        most = max(most, len(find_held(residency, at_most=2, with_root=False)))

    for module in model.modules():
        module.register_forward_hook(count)
    for parameter in model.parameters():
        parameter.register_hook(count)
    left = []
    for step in range(4):  # in the last two, gathers for backward start when forward ends
        loss = loss_of(model, dist.get_rank(), step)
        count()
        loss.backward()
        left.append(find_held(residency, at_most=0, with_root=True))
        optimizer.step()
        optimizer.zero_grad()
    return most, left


def test_at_most_two_units_are_resident_besides_the_root() -> None:
    """The one that runs and the one that comes next, in forward and in backward; none after backward."""
    for most, left in run_ranks(watch_residency, 2):
        assert most == 2
        assert left == [[], [], [], []]


def leave_out_backward() -> tuple[list[int], list[str], str]:
    """Return the gathers of passes without backward, what they leave, and the error of a write before one."""
    booster, model, optimizer = boost()
    ledger = engine_of(booster).context.collectives.ledger
    rank, counts = dist.get_rank(), []
    for step in range(3):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for step in range(4):
        with ledger.recording() as transfers:
            loss_of(model, rank, step)
        counts.append(sum(transfer.phase == "parameters" for transfer in transfers))
    left = find_held(residency_of(booster), at_most=0, with_root=True)
    for step in range(3):
        loss_of(model, rank, step).backward()
        optimizer.zero_grad()
    loss = loss_of(model, rank, 0)
    with torch.no_grad():
        model.enter.weight.zero_()
    with pytest.raises(UsageError) as caught:
        loss.backward()
    return counts, left, str(caught.value)


def test_a_backward_that_is_expected_and_does_not_come_is_given_up() -> None:
    """What was on its way for it is given back, and writes meanwhile are refused as ever."""
    for counts, left, error in run_ranks(leave_out_backward, 2):
        assert counts == [6, 4, 4, 4]
        assert left == []
        assert "enter.weight" in error
