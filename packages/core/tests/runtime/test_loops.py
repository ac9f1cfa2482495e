"""Parity of loops with several losses, models, optimizers and groups, on 2, 3 and 4 ranks and in fp16."""

from __future__ import annotations

import pytest

from colossal_core import Replicated
from colossal_testkit import run_ranks

from .loops import LOOPS, run_loop

HALF = {"gan": False, "wgan": True, "two losses": False, "shared trunk": False, "late groups": False}
"""Loops for fp16, and whether they need ``booster.backward`` there."""


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", LOOPS)
def test_loops_equal_one_process(name: str, world_size: int) -> None:
    """Plain ``loss.backward()`` on equal shares is plain torch on all rows, to 1e-10."""
    for worst, skipped in run_ranks(run_loop, world_size, name, "fp64", {}, is_explicit=False):
        assert worst < 1e-10
        assert not any(skipped)


@pytest.mark.parametrize("name", LOOPS)
def test_loops_equal_one_process_by_the_explicit_backward(name: str) -> None:
    """``booster.backward`` is never wrong."""
    for worst, _ in run_ranks(run_loop, 2, name, "fp64", {}, is_explicit=True):
        assert worst < 1e-10


@pytest.mark.parametrize("name", LOOPS)
def test_loops_equal_one_process_when_every_backward_reduces(name: str) -> None:
    """So does ``Replicated(reduce="backward")``."""
    for worst, _ in run_ranks(run_loop_reducing, 2, name):
        assert worst < 1e-10


def run_loop_reducing(name: str) -> tuple[float, list[int]]:
    """Run a loop whose gradients are reduced after every backward."""
    return run_loop(name, "fp64", {"pieces": [Replicated(reduce="backward")]}, is_explicit=False)


@pytest.mark.parametrize("name", HALF)
def test_loops_in_fp16_are_right_to_its_accuracy(name: str) -> None:
    """Four steps of Adam move each weight by up to 0.04; fp16 keeps three digits."""
    for worst, skipped in run_ranks(run_loop, 2, name, "fp16", {}, is_explicit=HALF[name]):
        assert not any(skipped)
        assert worst < 4e-3
