"""Cuts are the best there are: compared with all cuts, on all small cases."""

from __future__ import annotations

import itertools

import pytest
import torch

from colossal_core.errors import UsageError
from colossal_pipeline import Pipeline
from colossal_pipeline.fitting import choose
from colossal_pipeline.measuring import Measured
from colossal_pipeline.partition import cut_evenly, starts_of_blocks, starts_of_names
from colossal_pipeline.schedules.one_forward_one_backward import OneForwardOneBackward


def sums(costs: list[float], starts: tuple[int, ...]) -> list[float]:
    """Return the cost of each stage."""
    ends = (*starts[1:], len(costs))
    return [sum(costs[start:stop]) for start, stop in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("num_items", range(1, 9))
def test_cuts_equal_brute_force(num_items: int) -> None:
    """The largest stage is as small as that of the best of all cuts, and of these the most even is taken."""
    source = torch.Generator().manual_seed(num_items)
    for num_stages in range(1, num_items + 1):
        for _ in range(12):
            drawn = torch.randint(0, 7, (num_items,), generator=source).tolist()
            costs = [(0.0, 1.0, 1.0, 2.0, 3.0, 5.0, 20.0)[index] for index in drawn]

            starts = cut_evenly(costs, num_stages)

            every = [(0, *rest) for rest in itertools.combinations(range(1, num_items), num_stages - 1)]
            best = min(max(sums(costs, one)) for one in every)
            assert starts in every
            assert max(sums(costs, starts)) == best


@pytest.mark.parametrize("num_items", range(1, 8))
def test_cuts_under_a_limit_equal_brute_force(num_items: int) -> None:
    """Of the cuts that every rank's memory allows, the fastest one; where there is none, the least limit."""
    source = torch.Generator().manual_seed(num_items)
    for degree in range(1, num_items + 1):
        for _ in range(12):
            drawn = torch.randint(0, 6, (3, num_items), generator=source).tolist()
            items = [
                Measured(name=f"m{n}", seconds=float(time), kept_bytes=kept, parameters={f"p{n}": held})
                for n, (time, kept, held) in enumerate(zip(*drawn, strict=True))
            ]
            piece, limit = Pipeline(degree=degree, microbatches=3), 4 * num_items + 8
            every = [(0, *rest) for rest in itertools.combinations(range(1, num_items), degree - 1)]
            most = {one: max(bytes_of(items, one, piece)) for one in every}
            allowed = [one for one in every if most[one] <= limit]

            if not allowed:
                with pytest.raises(UsageError, match=f"needs less than {min(most.values())} on some rank"):
                    choose(piece, items, OneForwardOneBackward(), limit_bytes=limit, element_bytes=2)
                continue
            fit = choose(piece, items, OneForwardOneBackward(), limit_bytes=limit, element_bytes=2)

            times = [item.seconds for item in items]
            assert max(fit.seconds) == min(max(sums(times, one)) for one in allowed)
            assert max(fit.rank_bytes) <= limit
            starts = (0, *(int(str(name)[1:]) for name in fit.piece.balance))
            assert list(fit.rank_bytes) == bytes_of(items, starts, piece)


def bytes_of(items: list[Measured], starts: tuple[int, ...], piece: Pipeline) -> list[int]:
    """Return what ranks hold under 1F1B with two bytes for each element."""
    ends = (*starts[1:], len(items))
    return [
        sum(2 * sum(item.parameters.values()) for item in items[start:stop])
        + min(piece.microbatches, piece.degree - rank) * sum(item.kept_bytes for item in items[start:stop])
        for rank, (start, stop) in enumerate(zip(starts, ends, strict=True))
    ]


def test_a_large_vocabulary_gets_a_stage_with_fewer_blocks() -> None:
    """The slowest stage is at least 15% faster than with equal numbers of blocks."""
    block, head = 12 * 256**2, 256 * 8192
    costs = [1.0, *[float(block)] * 8, 1.0, float(head)]

    starts = cut_evenly(costs, 4)

    equal = sums(costs, (0, 3, 5, 7))
    assert max(sums(costs, starts)) < 0.85 * max(equal)


def test_numbers_of_blocks_say_where_stages_begin() -> None:
    """What stands before the first block and behind the last one goes to the first and the last stage."""
    is_block = [False, True, True, False, True, True, False]

    assert starts_of_blocks(is_block, [1, 3]) == (0, 2)
    assert starts_of_blocks(is_block, [2, 2]) == (0, 4)
    assert starts_of_blocks(is_block, [4, 0]) == (0, 6)
    for numbers in ([1, 2], [0, 4, 0, 0]):
        with pytest.raises(UsageError, match="balance = "):
            starts_of_blocks(is_block, numbers)


def test_names_say_where_stages_begin() -> None:
    """In the order of the model, and not the first one."""
    names = ["embed", "block", "head"]

    assert starts_of_names(names, ["head"], 2) == (0, 2)
    for begins in (["tail"], ["head", "block"], ["embed"], ["block", "head"]):
        with pytest.raises(UsageError, match="balance names"):
            starts_of_names(names, begins, 2)


def test_more_stages_than_items_are_refused() -> None:
    """With both numbers."""
    with pytest.raises(UsageError, match=r"2 modules .* fewer than 3 stages"):
        cut_evenly([1.0, 2.0], 3)
