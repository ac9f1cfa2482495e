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
    """Let one rank come late."""
    context = engine_of(boost_impatiently()).context
    value = torch.ones(1)
    if dist.get_rank() == 1:
        time.sleep(2)
    context.collectives.all_reduce(value, context.mesh.everyone(), phase="test").wait()
    return value.item()


def test_a_slow_rank_is_waited_for() -> None:
    """Whoever publishes nothing may still come."""
    assert run_ranks(come_late, 2) == [2.0, 2.0]


def gather_in_a_circle() -> str:
    """Let every rank begin with another gather, and say what one more finds."""
    context = engine_of(boost_impatiently()).context
    groups = [context.mesh.everyone(), context.mesh.group(GroupSpec(("data",)), PARAMETERS)]
    output, mine = torch.empty(3), torch.ones(1)
    try:
        for group in groups if dist.get_rank() != 1 else reversed(groups):
            context.collectives.all_gather(output, mine, group, phase="test").wait()
    except RankMismatchError:
        context.collectives.all_gather(output, mine, groups[0], phase="test").wait()
    return "went on"


def test_ranks_that_gather_in_a_circle_say_where() -> None:
    """A gather is waited for without end, and still ends; so does the next one."""
    errors = run_ranks_expecting_errors(gather_in_a_circle, 3, error=RankMismatchError)

    for error in errors:
        assert "rank 1 waits in all_gather of test" in str(error)
        assert "data/parameters" in str(error)


def gather_other_sizes() -> None:
    """Let ranks gather pieces of different sizes at the same place."""
    context = engine_of(boost_impatiently()).context
    mine = torch.ones(2 + dist.get_rank())
    context.collectives.all_gather(mine.repeat(2), mine, context.mesh.everyone(), phase="test").wait()


def test_gathers_of_different_sizes_do_not_meet() -> None:
    """Both ranks raise, with both sizes, and no process ends."""
    errors = run_ranks_expecting_errors(gather_other_sizes, 2, error=RankMismatchError)

    for error in errors:
        assert "(16 bytes)" in str(error)
        assert "(24 bytes)" in str(error)


def gather_late() -> list[float]:
    """Let one rank come late."""
    context = engine_of(boost_impatiently()).context
    values = torch.empty(2)
    for number in range(2):
        if dist.get_rank() == 1:
            time.sleep(0.9)
        own = torch.full((1,), float(2 * number + dist.get_rank()))
        context.collectives.all_gather(values, own, context.mesh.everyone(), phase="test").wait()
    return [float(value) for value in values]


def test_gathers_wait_for_a_slow_rank() -> None:
    """Notes are compared meanwhile, which changes nothing."""
    assert run_ranks(gather_late, 2) == [[2.0, 3.0], [2.0, 3.0]]
