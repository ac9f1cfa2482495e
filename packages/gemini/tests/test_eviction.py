"""Who leaves, who comes early, and the least budget."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal_core.errors import CapabilityError
from colossal_gemini.eviction import NextUse, Room, choose_victims, find_peak, least_budget, simulate
from colossal_gemini.trace import Trace

from .traces import make_trace, random_traces, sweep


def count_fewest(trace: Trace, budget: int, num_steps: int) -> int:
    """Return the fewest gathers of some steps, over everything that could be kept in each moment."""
    sizes = [chunk.whole_bytes for chunk in trace.chunks]
    best = {frozenset[int](): 0}
    for index in list(range(len(trace.moments))) * num_steps:
        needs, room = trace.needs_at(index), budget - trace.moments[index].other
        found: dict[frozenset[int], int] = {}
        for before, count in best.items():
            there = before
            if trace.moments[index].phase == "update":
                there = frozenset(chunk for chunk in before if not trace.chunks[chunk].is_trainable)
            spare = sorted(there - needs)
            for kept in itertools.chain.from_iterable(
                itertools.combinations(spare, number) for number in range(len(spare) + 1)
            ):
                after = needs.union(kept)
                if sum(sizes[chunk] for chunk in after) <= room:
                    cost = count + len(needs - there)
                    found[after] = min(cost, found.get(after, cost))
        best = found
    return min(best.values())


@given(trace=random_traces(are_equal=True), more=st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_no_plan_gathers_less_than_furthest_next_use(trace: Trace, more: int) -> None:
    """Chunks of one size, room that changes from moment to moment, and frozen chunks beyond the update."""
    budget = least_budget(trace, Room(budget=0)) + more
    start, count = frozenset[int](), 0

    for _ in range(3):
        plan = simulate(trace, Room(budget=budget), start=start)
        count += plan.num_gathers
        start = frozenset(plan.moments[-1].resident)

    assert count == count_fewest(trace, budget, 3)


@given(trace=random_traces(are_equal=True), more=st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_fetching_ahead_adds_no_gather(trace: Trace, more: int) -> None:
    """It takes free room, or that of chunks that have to leave anyway."""
    room = Room(budget=least_budget(trace, Room(budget=0)) + more)

    early, late = (simulate(trace, room, prefetch=prefetch, start=()) for prefetch in (True, False))

    assert early.num_gathers == late.num_gathers
    assert not any(stay.prefetches for stay in late.moments)


@given(trace=random_traces(), more=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_a_plan_is_legal(trace: Trace, more: int) -> None:
    """What is needed is there, nothing exceeds the budget, and only what is there leaves."""
    room = Room(budget=least_budget(trace, Room(budget=0)) + more)

    plan = simulate(trace, room, start=())

    there: set[int] = set()
    for index, stay in enumerate(plan.moments):
        moment = trace.moments[index]
        if moment.phase == "update":
            there -= {chunk.index for chunk in trace.chunks if chunk.is_trainable}
        assert trace.needs_at(index) <= set(stay.resident)
        assert there.isdisjoint(stay.gathers + stay.prefetches)
        there |= {*stay.gathers, *stay.prefetches}
        assert there.issuperset(stay.evictions)
        there -= set(stay.evictions)
        assert there == set(stay.resident)
        held = sum(trace.chunks[chunk].whole_bytes for chunk in there)
        assert stay.num_bytes == held + moment.other <= room.budget


@given(trace=random_traces(), fixed=st.integers(0, 3), staging=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_the_least_budget_is_exact(trace: Trace, fixed: int, staging: int) -> None:
    """A step runs with it, and not with one byte less."""
    least = least_budget(trace, Room(budget=0, fixed=fixed, staging=staging))

    plan = simulate(trace, Room(budget=least, fixed=fixed, staging=staging))

    assert plan.peak <= least
    with pytest.raises(CapabilityError, match="1 more than its budget"):
        simulate(trace, Room(budget=least - 1, fixed=fixed, staging=staging))


@pytest.mark.parametrize(("num_units", "num_there"), [(6, 1), (6, 3), (6, 6), (12, 5)])
def test_a_step_gathers_twice_what_does_not_stay(num_units: int, num_there: int) -> None:
    """C chunks, room for B of them: 2 C - B gathers."""
    plan = simulate(sweep(num_units, size=8), Room(budget=8 * num_there))

    assert plan.num_gathers == 2 * num_units - num_there
    assert plan.gathered_bytes == 8 * plan.num_gathers


def test_unreduced_gradients_take_room() -> None:
    """Backward has room for one chunk less than forward."""
    plan = simulate(sweep(6, size=8, gradients=True), Room(budget=32))

    assert plan.num_gathers == 2 * 6 - 3
    assert plan.peak == 32


def test_what_lives_on_the_device_is_never_gathered() -> None:
    """Homes take room all the time, and nothing moves when all are."""
    everything = Room(budget=48, homes=frozenset(range(6)))

    plan = simulate(sweep(6, size=8), everything)

    assert (plan.num_gathers, plan.num_evictions, plan.peak) == (0, 0, 48)
    assert find_peak(sweep(6, size=8), everything).fixed == 48


def test_frozen_chunks_stay_beyond_the_update() -> None:
    """Their copies are still right."""
    trace = make_trace([1, 1], [(0,), (1,), (0,)], frozen=[0])

    plan = simulate(trace, Room(budget=2))

    assert plan.gathers_of(0) == 0
    assert plan.gathers_of(1) == 1


def test_the_next_unit_comes_early_where_there_is_room() -> None:
    """Everything but the first and the first of backward, which is there."""
    plan = simulate(sweep(4), Room(budget=2))

    assert [stay.gathers for stay in plan.moments] == [(0,), *[()] * 8]
    assert [stay.prefetches for stay in plan.moments[:3]] == [(1,), (2,), (3,)]


def test_victims_are_no_more_than_needed() -> None:
    """Of chunks of different sizes a large one may make small ones unnecessary."""
    trace = make_trace([1, 8, 1], [(2,), (1,), (0,), (2,)])
    sizes = [chunk.whole_bytes for chunk in trace.chunks]

    chosen = choose_victims([0, 1], 8, moment=0, keep={2}, next_use=NextUse(trace), sizes=sizes)

    assert chosen == [1]


def test_a_refusal_says_what_takes_the_memory() -> None:
    """With the moment, the shortfall, and the budget that does."""
    trace = make_trace([10, 20], [(0,), (0, 1)], others=[0, 7, 0])

    with pytest.raises(CapabilityError) as caught:
        simulate(trace, Room(budget=30, fixed=4))

    assert str(caught.value).startswith(
        "forward of 'm1' takes 41 bytes on the device (values 30 B, what lives there 4 B, activations and "
        "work space 7 B), 11 more than its budget of 30"
    )
    assert "device_budget be at least 41" in caught.value.hint


def test_a_trace_survives_json() -> None:
    """What is written is what is read."""
    trace = sweep(3, gradients=True)

    assert Trace.from_dict(trace.to_dict()) == trace
