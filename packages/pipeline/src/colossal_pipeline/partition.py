"""Where stages begin: cutting a row of costs so that the most expensive piece is as cheap as possible.

The one idea: stages are runs of neighbours, so the best cut of the first i items into k stages extends the
best cut of some fewer items into k - 1 (exact dynamic programming). Of cuts with equally cheap most
expensive stages it prefers those whose stages are alike. Integers and floats only: no torch here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from colossal_core.errors import UsageError

__all__ = ["cut_by", "cut_evenly", "starts_of_blocks", "starts_of_names"]

Starts = tuple[int, ...]
"""For each stage, the position of its first item; the first is 0."""

Fits = Callable[[int, int, int], bool]
"""Whether a stage may hold the items from one position up to another one."""


def cut_evenly(costs: Sequence[float], num_stages: int, *, fits: Fits | None = None) -> Starts:
    """Cut items into stages of at least one item each; the largest sum of costs is as small as possible.

    Args:
        costs: Cost of each item, at least 0.
        num_stages: Number of stages.
        fits: Whether a stage may hold the items from one position up to another one.

    Raises:
        UsageError: There are fewer items than stages, or no cut fits.
    """
    sums = list(itertools.accumulate(costs, initial=0.0))

    def cost(stage: int, start: int, stop: int) -> float:
        allowed = fits is None or fits(stage, start, stop)
        return sums[stop] - sums[start] if allowed else math.inf

    starts, largest = cut_by(cost, len(costs), num_stages)
    if math.isinf(largest):
        raise UsageError(
            f"no cut of {len(costs)} modules into {num_stages} stages fits",
            hint="allow a stage to hold more, or use more stages",
        )
    return starts


def cut_by(cost: Callable[[int, int, int], float], num_items: int, num_stages: int) -> tuple[Starts, float]:
    """Return the cut whose most expensive stage is cheapest, and what that costs.

    Args:
        cost: What a stage costs that holds the items from one position up to another one.
        num_items: Number of items.
        num_stages: Number of stages.

    Raises:
        UsageError: There are fewer items than stages.
    """
    _check_number(num_items, num_stages)
    # best[i]: for the first i items in the stages so far, the largest cost, the sum of squares, the starts.
    best: list[tuple[float, float, Starts] | None] = [None] * (num_items + 1)
    best[0] = (0.0, 0.0, ())
    for stage in range(num_stages):
        extended: list[tuple[float, float, Starts] | None] = [None] * (num_items + 1)
        for stop in range(1, num_items + 1):
            for start in range(stop):
                before = best[start]
                if before is None:
                    continue
                added = cost(stage, start, stop)
                found = (max(before[0], added), before[1] + added * added, (*before[2], start))
                known = extended[stop]
                if known is None or found < known:
                    extended[stop] = found
        best = extended
    cut = best[-1]
    assert cut is not None
    return cut[2], cut[0]


def starts_of_blocks(is_block: Sequence[bool], numbers: Sequence[int]) -> Starts:
    """Return the cut that gives each stage a number of repeated blocks.

    What stands between blocks goes with the block before it, what stands before the first with the first
    stage.

    Args:
        is_block: For each item, whether it is a repeated block.
        numbers: Blocks of each stage.

    Raises:
        UsageError: The numbers do not sum to the blocks, or leave a stage without items.
    """
    positions = [index for index, flag in enumerate(is_block) if flag]
    if sum(numbers) != len(positions):
        raise UsageError(
            f"balance = {list(numbers)} sums to {sum(numbers)} blocks, and the model has {len(positions)}",
            hint="give each stage a number of blocks",
        )
    starts, taken = [0], 0
    for number in numbers[:-1]:
        taken += number
        starts.append(positions[taken] if taken < len(positions) else len(is_block) - 1)
    if sorted(set(starts)) != starts:
        raise UsageError(
            f"balance = {list(numbers)} leaves a stage without any module",
            hint="give each stage at least one block, or name where stages begin",
        )
    return tuple(starts)


def starts_of_names(names: Sequence[str], begins: Sequence[str], num_stages: int) -> Starts:
    """Return the cut whose stages begin with named items.

    Args:
        names: Name of each item.
        begins: Names of the first items of all stages but the first.
        num_stages: Number of stages.

    Raises:
        UsageError: A name is no item, or they are not as many as needed and in order.
    """
    unknown = [name for name in begins if name not in names]
    if unknown:
        raise UsageError(
            f"balance names {unknown[0]!r}, where no stage can begin; the modules are {', '.join(names)}",
            hint="name the first module of each stage but the first",
        )
    starts = (0, *(names.index(name) for name in begins))
    if len(starts) != num_stages or sorted(set(starts)) != list(starts):
        raise UsageError(
            f"balance names {len(begins)} modules for {num_stages} stages, in the order {', '.join(begins)}",
            hint=f"name {num_stages - 1} modules, in the order of the model, not the first one",
        )
    return starts


def _check_number(num_items: int, num_stages: int) -> None:
    """Refuse more stages than items."""
    if num_items < num_stages:
        raise UsageError(
            f"the model has {num_items} modules between which it can be cut, fewer than {num_stages} stages",
            hint="lower degree or chunks",
        )
