"""Ranks that wait for each other raise within seconds; ranks that are only slow are waited for."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from colossal_core import Booster, RankMismatchError
from colossal_core.mesh import GroupSpec
from colossal_core.runtime import standstill
from colossal_core.runtime.mesh import PARAMETERS
from colossal_testkit import run_ranks, run_ranks_expecting_errors
from colossal_testkit.engine import engine_of

from .small_models import make


def boost_impatiently() -> Booster:
    """Boost a model whose collectives are watched from half a second on."""
    vars(standstill).update(PATIENCE_SECONDS=0.3)
    booster = Booster()
    booster.boost(*make())
    return booster


def wait_in_a_circle() -> None:
    """Let every rank begin with another collective."""
    context = engine_of(boost_impatiently()).context
    groups = [context.mesh.everyone(), context.mesh.group(GroupSpec(("data",)), PARAMETERS)]
    for group in groups if dist.get_rank() != 1 else reversed(groups):
        context.collectives.all_reduce(torch.ones(1), group, phase="test").wait()


def test_ranks_that_wait_for_each_other_say_where() -> None:
    """All three raise, with the two places."""
    errors = run_ranks_expecting_errors(wait_in_a_circle, 3, error=RankMismatchError)

    for error in errors:
        assert "rank 1 waits in all_reduce of test" in str(error)
        assert "data/parameters" in str(error)


def meet_with_other_operations() -> None:
    """Let ranks meet in one group with different operations."""
    context = engine_of(boost_impatiently()).context
    everyone = context.mesh.everyone()
    if dist.get_rank() == 0:
        context.collectives.all_reduce(torch.ones(4), everyone, phase="test").wait()
    else:
        context.collectives.all_gather(torch.ones(64), torch.ones(32), everyone, phase="test").wait()


def test_ranks_that_meet_with_different_operations_do_not_hang() -> None:
    """Some backends notice by themselves; where none does, the notes do."""
    start = time.monotonic()

    outcomes = run_ranks_expecting_errors(meet_with_other_operations, 2, error=RankMismatchError)

    assert len(outcomes) == 2
    assert time.monotonic() - start < 20


def come_late() -> float:
    """Let one rank come two seconds late."""
    context = engine_of(boost_impatiently()).context
    value = torch.ones(1)
    if dist.get_rank() == 1:
        time.sleep(2)
    context.collectives.all_reduce(value, context.mesh.everyone(), phase="test").wait()
    return value.item()


def test_a_slow_rank_is_waited_for() -> None:
    """Whoever publishes nothing may still come."""
    assert run_ranks(come_late, 2) == [2.0, 2.0]
