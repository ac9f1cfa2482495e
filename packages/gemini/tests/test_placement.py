"""Where states live: within budgets, and as near to the best as is promised."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal_core.errors import CapabilityError
from colossal_gemini.costs import TIERS, Arrangement, Budgets, Prices, Rates, Tier, count_visits, states_of
from colossal_gemini.eviction import find_peak, least_budget, simulate
from colossal_gemini.placement import Placement, least_device_budget, place
from colossal_gemini.trace import Trace

from .traces import random_traces, sweep

RATES = Rates(device_host=10.0, host_disk=1.0, gather=40.0, device_update=500.0, host_update=20.0)
"""Small numbers, so that seconds are no rounding errors."""


def total_in(placement: Placement, tier: Tier) -> int:
    """Return what lives in a tier."""
    return sum(placement.bytes_in(tier).values())


def check(placement: Placement, trace: Trace, budgets: Budgets) -> None:
    """Hold a placement against its budgets, in every moment."""
    everything = sum(states.total for states in placement.states)
    assert find_peak(trace, placement.room).total <= budgets.device
    assert simulate(trace, placement.room).peak <= budgets.device
    if budgets.host is not None:
        assert total_in(placement, "host") + placement.host_staging <= budgets.host
    if budgets.disk is not None:
        assert total_in(placement, "disk") <= budgets.disk
    assert sum(total_in(placement, tier) for tier in TIERS) == everything


def fewest_seconds(trace: Trace, budgets: Budgets, ranks: int) -> float:
    """Return the seconds of the best placement on device and host, over all of them."""
    prices = Prices(RATES, ranks, has_host=True, streams=False)
    visits, best = count_visits(trace), float("inf")
    states = [states_of(chunk, ranks=ranks) for chunk in trace.chunks]
    near: list[Tier] = ["device", "host"]
    options = [
        Arrangement(value=value, gradient=state, state=state, update=state, keeps_copy=keeps)
        for value, state in itertools.product(near, repeat=2)
        for keeps in ((False, True) if ranks > 1 else (False,))
    ]
    base = place(trace, budgets, ranks=ranks, rates=RATES, policy="static").room
    free = budgets.device - least_budget(trace, base)
    for chosen in itertools.product(options, repeat=len(trace.chunks)):
        taken = sum(
            one.value * (where.value == "device")
            + (one.gradient + one.master + one.moments) * (where.state == "device")
            + chunk.whole_bytes * where.keeps_copy
            for one, where, chunk in zip(states, chosen, trace.chunks, strict=True)
        )
        if taken <= free:
            rows = zip(trace.chunks, states, chosen, visits, strict=True)
            best = min(best, sum(prices.seconds(*row) for row in rows))
    return best


@given(
    trace=random_traces(),
    device=st.integers(0, 400),
    host=st.none() | st.integers(1, 900),
    disk=st.none() | st.integers(0, 900),
    ranks=st.integers(1, 3),
)
@settings(max_examples=80, deadline=None)
def test_budgets_are_kept_or_it_is_refused(
    trace: Trace, device: int, host: int | None, disk: int | None, ranks: int
) -> None:
    """Of every tier, for every kind of trace."""
    budgets = Budgets(device=device, host=host, disk=disk)

    try:
        placement = place(trace, budgets, ranks=ranks, rates=RATES)
    except CapabilityError as err:
        refusal = err
    else:
        check(placement, trace, budgets)
        return

    assert "more than" in refusal.message
    assert refusal.hint


@given(trace=random_traces(), more=st.integers(0, 300), ranks=st.integers(2, 3))
@settings(max_examples=15, deadline=None)
def test_a_placement_is_at_most_one_step_worse_than_the_best(trace: Trace, more: int, ranks: int) -> None:
    """With as much as the costliest chunk could save at most."""
    small = Trace(
        key="",
        chunks=trace.chunks[:3],
        moments=tuple(
            type(m)(name=m.name, phase=m.phase, needs=tuple(c for c in m.needs if c < 3), other=m.other)
            for m in trace.moments
        ),
    )
    base = place(small, Budgets(device=10**6), ranks=ranks, rates=RATES, policy="static").room
    budgets = Budgets(device=least_budget(small, base) + more)

    found = place(small, budgets, ranks=ranks, rates=RATES)

    prices, visits = Prices(RATES, ranks, has_host=True, streams=False), count_visits(small)
    far = Arrangement(value="host", gradient="host", state="host", update="host")
    near = Arrangement(value="device", gradient="device", state="device", update="device", keeps_copy=True)
    slack = max(
        prices.seconds(c, states_of(c, ranks=ranks), far, v)
        - prices.seconds(c, states_of(c, ranks=ranks), near, v)
        for c, v in zip(small.chunks, visits, strict=True)
    )
    best = fewest_seconds(small, budgets, ranks)
    assert found.seconds <= best + slack + 1e-9


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_larger_budget_never_costs_more(ranks: int) -> None:
    """For equal chunks every byte more helps or does nothing, from the least budget to all resident."""
    trace = sweep(6, size=12, gradients=True, other=5, value_bytes=2)
    seconds, gathered = list[float](), list[int]()

    for device in range(90, 1500, 30):
        placement = place(trace, Budgets(device=device), ranks=ranks, rates=RATES)
        check(placement, trace, Budgets(device=device))
        seconds.append(placement.seconds)
        gathered.append(simulate(trace, placement.room).num_gathers)

    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 3 * seconds[-1]
    assert (gathered[0], gathered[-1]) == (10 if ranks == 1 else 11, 0 if ranks == 1 else 6)


def test_everything_lives_on_a_device_that_is_just_large_enough() -> None:
    """On one rank its values are never gathered, and its gradients are where they are reduced to."""
    trace = sweep(4, size=10, gradients=True, other=7, value_bytes=2)
    everything = sum(states_of(chunk, ranks=1).total for chunk in trace.chunks)

    placement = place(trace, Budgets(device=everything + 7), rates=RATES)

    assert total_in(placement, "device") == everything
    assert {where.update for where in placement.chunks} == {"device"}
    assert simulate(trace, placement.room).num_gathers == 0


def test_static_leaves_everything_in_the_last_tier() -> None:
    """Whatever there is room for."""
    budgets = Budgets(device=10**6, host=10**6, disk=None)

    placement = place(sweep(4, size=10), budgets, rates=RATES, policy="static")

    assert total_in(placement, "disk") == sum(states.total for states in placement.states)


def test_files_hold_what_exceeds_host_memory() -> None:
    """Values, which are read most often, are the last to go there."""
    trace = sweep(6, size=10, gradients=True, value_bytes=2)
    least = 3 * states_of(trace.chunks[0], ranks=1).total  # buffers of files

    placement = place(trace, Budgets(device=45, host=least + 400, disk=None), rates=RATES)

    check(placement, trace, Budgets(device=45, host=least + 400, disk=None))
    assert placement.bytes_in("host")["values"] == 120
    assert 0 < placement.bytes_in("disk")["moments"] < 480


def test_the_update_comes_to_the_device_where_the_host_is_slow() -> None:
    """And memory is left for the buffers that state passes through."""
    slow = Rates(device_host=10.0, host_disk=1.0, gather=40.0, device_update=500.0, host_update=0.1)
    trace = sweep(8, size=4, other=100)

    placement = place(trace, Budgets(device=170), rates=slow)

    assert "host" in {where.state for where in placement.chunks}
    assert {where.update for where in placement.chunks} == {"device"}
    assert placement.room.update == 3 * placement.states[0].total


def test_files_can_lie_right_below_the_device() -> None:
    """Where the device is host memory itself."""
    trace = sweep(6, size=10, gradients=True)
    total = sum(states_of(chunk, ranks=1).total for chunk in trace.chunks)

    placement = place(trace, Budgets(device=total // 2 + 100, host=0, disk=None), rates=RATES)

    assert total_in(placement, "host") == 0
    assert 0 < total_in(placement, "disk") < total
    check(placement, trace, Budgets(device=total // 2 + 100, host=0, disk=None))


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    """Device, host and disk, each with its number."""
    trace = sweep(4, size=10, gradients=True, other=30)

    with pytest.raises(CapabilityError, match=r"backward of .* takes 50 bytes .*, 9 more than") as device:
        place(trace, Budgets(device=41), rates=RATES)
    with pytest.raises(CapabilityError, match=r"takes .* bytes more than its budget of 100") as host:
        place(trace, Budgets(device=60, host=100), rates=RATES)

    assert "device_budget be at least 50" in device.value.hint
    place(trace, Budgets(device=50), rates=RATES)
    assert "disk=" in host.value.hint
    enough = int(host.value.hint.split("at least ")[1].split(",")[0])
    place(trace, Budgets(device=60, host=enough), rates=RATES)


@given(trace=random_traces(), host=st.none() | st.integers(0, 500), ranks=st.integers(1, 2))
@settings(max_examples=40, deadline=None)
def test_the_least_budget_of_the_device_is_exact(trace: Trace, host: int | None, ranks: int) -> None:
    """Also where host memory is short, so that the device has to hold the rest; one byte less is refused."""
    budgets = Budgets(device=0, host=host)

    least = least_device_budget(trace, budgets, ranks=ranks, rates=RATES)

    assert least is not None
    place(trace, Budgets(device=least, host=host), ranks=ranks, rates=RATES)
    with pytest.raises(CapabilityError):
        place(trace, Budgets(device=least - 1, host=host), ranks=ranks, rates=RATES)
