"""Where values, gradients and optimizer state live. No torch here.

The one idea: memory is spent where a byte saves most seconds. Every chunk has a few arrangements, each with a
price and a size (:mod:`colossal_gemini.costs`); from the farthest one it is moved nearer in the steps that
save most for each byte, over all chunks in the order of what that is, for as long as there is room.

# Note [How good this is]
A chunk's arrangements are thinned out to those on the lower hull of price over size, so its steps save less
and less for each byte, and taking the steps of all chunks in the order of savings for each byte is optimal
but for the last one that does not fit. So the seconds are at most those of the best placement and what one
step saves; smaller steps that still fit are then taken, too. First the device is filled, as if all the rest
lived in host memory, then host memory, as if all the rest lived in files.

# Note [Room for copies]
Memory of the device is not only worth something as a home: a gathered copy that stays from forward to
backward saves a gather. It is an arrangement like others, and when it is chosen, memory is left for it, which
:mod:`colossal_gemini.eviction` then uses for whatever is best in each moment.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, final

import attrs

from colossal_core.errors import CapabilityError
from colossal_gemini.budgets import show_bytes
from colossal_gemini.costs import (
    TIERS,
    Arrangement,
    Budgets,
    Placement,
    Prices,
    Rates,
    States,
    Tier,
    count_visits,
    states_of,
)
from colossal_gemini.eviction import Room, describe_load, find_peak, loads
from colossal_gemini.search import NUM_BUFFERS
from colossal_gemini.steps import Step, find_way

if TYPE_CHECKING:
    from colossal_gemini.trace import Trace

__all__ = ["Placement", "least_device_budget", "place"]

_OTHERWISE = ", or let what is no chunk take less: a smaller batch, Recompute()"


def place(
    trace: Trace,
    budgets: Budgets,
    *,
    ranks: int = 1,
    optimizer_states: int = 2,
    rates: Rates | None = None,
    policy: Literal["auto", "static"] = "auto",
    staging: int | None = None,
) -> Placement:
    """Return where the states of each chunk live, and where it is updated.

    Args:
        trace: One step.
        budgets: Bytes of each tier.
        ranks: Among how many ranks chunks are divided.
        optimizer_states: Moments that the optimizer keeps for each element.
        rates: Of links and updates.
        policy: ``"static"`` leaves everything in the farthest tier that there is.
        staging: Bytes of the device's buffers for transfers; by default what two shards take.

    Raises:
        CapabilityError: It does not fit; with the shortfall, the moment, and settings with which it would.
    """
    placers = _make_placers(
        trace, budgets, ranks=ranks, optimizer_states=optimizer_states, rates=rates, staging=staging
    )
    is_static, found, errors = policy == "static", list[Placement](), list[CapabilityError]()
    for placer in placers:
        try:
            found.append(placer.run(budgets.device, is_static=is_static))
        except CapabilityError as err:
            errors.append(err)
    if found:
        return min(found, key=lambda placement: placement.seconds)
    chosen = 0 if budgets.host != 0 else -1
    least = _least_of(placers, is_static=is_static)
    raise placers[chosen].advise(errors[chosen], least, is_static=is_static)


def least_device_budget(
    trace: Trace,
    budgets: Budgets,
    *,
    ranks: int = 1,
    optimizer_states: int = 2,
    rates: Rates | None = None,
    policy: Literal["auto", "static"] = "auto",
    staging: int | None = None,
) -> int | None:
    """Return the least budget of the device with which :func:`place` succeeds; one byte less does not do.

    None when no budget of the device is enough for the others. Arguments are those of :func:`place`; the
    budget of the device does not matter.
    """
    terms = {"ranks": ranks, "optimizer_states": optimizer_states}
    placers = _make_placers(trace, budgets, rates=rates, staging=staging, **terms)
    return _least_of(placers, is_static=policy == "static")


def _least_of(placers: Iterable[_Placer], *, is_static: bool) -> int | None:
    """Return the least budget with which any of some succeeds."""
    found = [placer.least_budget(is_static=is_static) for placer in placers]
    return min((budget for budget in found if budget is not None), default=None)


def _make_placers(
    trace: Trace,
    budgets: Budgets,
    *,
    ranks: int,
    optimizer_states: int,
    rates: Rates | None,
    staging: int | None,
) -> list[_Placer]:
    """Return who places, without and with updates on the device of what does not live there."""
    terms = {"ranks": ranks, "optimizer_states": optimizer_states}
    states = tuple(states_of(chunk, **terms, adds_up=trace.adds_up) for chunk in trace.chunks)
    if staging is None:
        uses_some = ranks > 1 or trace.adds_up
        staging = 2 * max((one.value for one in states), default=0) if uses_some else 0
    has_host, rates = budgets.host != 0, Rates() if rates is None else rates
    return [
        _Placer(trace, budgets, states, staging, Prices(rates, ranks, has_host, streams=streams))
        for streams in ((False, True) if has_host or budgets.disk != 0 else (False,))
    ]


@final
class _Placer:
    """Places the chunks of one trace, where the device does or does not update what lives elsewhere."""

    def __init__(
        self, trace: Trace, budgets: Budgets, states: tuple[States, ...], staging: int, prices: Prices
    ) -> None:
        """Work out what there is to choose from."""
        self._trace, self._budgets, self._states, self._prices = trace, budgets, states, prices
        self._visits = count_visits(trace)
        self._needs = [trace.needs_at(index) for index in range(len(trace.moments))]
        self._buffers = NUM_BUFFERS * max((one.total for one in states), default=0)
        self._room = Room(budget=0, staging=staging, update=self._buffers if prices.streams else 0)
        has_disk = budgets.disk != 0 and (prices.has_host or prices.streams)
        is_there: dict[Tier, bool] = {"host": prices.has_host, "disk": has_disk}
        self._lower = [tier for tier, found in is_there.items() if found] or [TIERS[0]]
        self._first_steps: list[Step] | None = None
        self._loads: dict[tuple[int, Arrangement], list[int]] = {}
        kinds = [
            (chunk.whole_bytes, one, visits)
            for chunk, one, visits in zip(trace.chunks, states, self._visits, strict=True)
        ]
        self._alike = [kinds.index(kind) for kind in kinds]
        self._known: dict[tuple[int, Arrangement], float] = {}

    def least_budget(self, *, is_static: bool) -> int | None:
        """Return the least budget with which :meth:`run` succeeds; None when there is none."""
        low = self._least_alone(is_static=is_static)
        high = low + sum(states.total + states.sums for states in self._states)
        if self._succeeds(low, is_static=is_static):
            return low
        if not self._succeeds(high, is_static=is_static):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if self._succeeds(middle, is_static=is_static):
                high = middle
            else:
                low = middle
        return high

    def advise(self, error: CapabilityError, least: int | None, *, is_static: bool) -> CapabilityError:
        """Return an error of :meth:`run` with all settings that would do, of the device and of what is below.

        Args:
            error: The error.
            least: The least budget of the device that is enough for the others; None when there is none.
            is_static: As for :meth:`run`.
        """
        alone, hint = self._least_alone(is_static=is_static), error.hint
        if self._budgets.device < alone:
            hint = f"let device_budget be at least {alone}{_OTHERWISE}"
            try:
                self.run(alone, is_static=is_static)
            except CapabilityError as err:
                hint += f"; besides, {err.hint}"
            else:
                return CapabilityError(error.message, hint=hint)
        if least is not None:
            hint += f", or device_budget at least {least}"
        return CapabilityError(error.message, hint=hint)

    def _least_alone(self, *, is_static: bool) -> int:
        """Return what the device needs with everything elsewhere that can be."""
        first = self._lower[-1] if is_static else self._lower[0]
        chosen = [self._cheapest(chunk, first, first, first) for chunk in range(len(self._states))]
        return find_peak(self._trace, self._room_with(chosen)).total

    def _succeeds(self, budget: int, *, is_static: bool) -> bool:
        """Return whether everything fits."""
        with contextlib.suppress(CapabilityError):
            self.run(budget, is_static=is_static)
            return True
        return False

    def run(self, budget: int, *, is_static: bool) -> Placement:
        """Return the placement.

        Args:
            budget: That of the device.
            is_static: Whether everything stays in the farthest tier.

        Raises:
            CapabilityError: It does not fit.
        """
        self._room = attrs.evolve(self._room, budget=budget)
        first = self._lower[-1] if is_static else self._lower[0]
        chosen = [self._cheapest(chunk, first, first, first) for chunk in range(len(self._states))]
        self._check_device(chosen)
        if not is_static:
            self._fill_device(chosen)
            if self._lower == ["host"]:
                self._relieve_host(chosen)
        if self._lower == ["host", "disk"] and (is_static or self._host_excess(chosen) > 0):
            chosen = [self._sink(chunk, where) for chunk, where in enumerate(chosen)]
            if not is_static:
                self._fill_host(chosen)
        self._check_lower(chosen)
        seconds = sum(self._seconds(chunk, where) for chunk, where in enumerate(chosen))
        return Placement(
            chunks=tuple(chosen),
            states=self._states,
            room=self._room_with(chosen),
            host_staging=self._host_staging(chosen),
            seconds=seconds,
            ranks=self._prices.ranks,
        )

    # --- arrangements ---------------------------------------------------------------------------------------

    def _seconds(self, chunk: int, where: Arrangement) -> float:
        """Return the price of an arrangement, worked out once for chunks that are alike."""
        alike = self._alike[chunk], where
        if alike not in self._known:
            row = self._trace.chunks[chunk], self._states[chunk], where, self._visits[chunk]
            self._known[alike] = self._prices.seconds(*row)
        return self._known[alike]

    def _cheapest(
        self, chunk: int, value: Tier, gradient: Tier, state: Tier, *, keeps_copy: bool = False
    ) -> Arrangement:
        """Return an arrangement whose update runs where it costs least."""
        places = [
            Arrangement(value=value, gradient=gradient, state=state, update=update, keeps_copy=keeps_copy)
            for update in self._prices.updates(state)
        ]
        return min(places, key=lambda where: self._seconds(chunk, where))

    def _device_options(self, chunk: int, first: Arrangement) -> Iterable[Arrangement]:
        """Yield arrangements with more on the device than the first one."""
        has_copy = self._prices.ranks > 1
        for value in dict.fromkeys((first.value, TIERS[0])):
            for state in dict.fromkeys((first.state, TIERS[0])):
                gradient = TIERS[0] if state == TIERS[0] else first.gradient
                for keeps_copy in (False, True) if has_copy else (False,):
                    yield self._cheapest(chunk, value, gradient, state, keeps_copy=keeps_copy)

    def _host_options(self, chunk: int, first: Arrangement) -> Iterable[Arrangement]:
        """Yield arrangements with more in host memory than the first one."""
        nearer: dict[Tier, tuple[Tier, ...]] = {"disk": ("disk", "host")}
        for value in nearer.get(first.value, (first.value,)):
            for gradient in nearer.get(first.gradient, (first.gradient,)):
                for state in nearer.get(first.state, (first.state,)):
                    yield self._cheapest(chunk, value, gradient, state, keeps_copy=first.keeps_copy)

    def _steps(
        self,
        chosen: Sequence[Arrangement],
        options: Callable[[int, Arrangement], Iterable[Arrangement]],
        size_of: Callable[[int, Arrangement], int],
    ) -> list[Step]:
        """Return the steps of all chunks, those that save most for each byte first."""
        ways = (
            find_way(
                chunk,
                (size_of(chunk, first), self._seconds(chunk, first)),
                [
                    (where, size_of(chunk, where), self._seconds(chunk, where))
                    for where in options(chunk, first)
                ],
            )
            for chunk, first in enumerate(chosen)
        )
        return list(heapq.merge(*ways, key=Step.sort_key))

    # --- the device -----------------------------------------------------------------------------------------

    def _fixed_bytes(self, chunk: int, where: Arrangement) -> int:
        """Return what lives on the device all the time, without values that are never divided."""
        states = self._states[chunk]
        fixed = states.gradient * (where.gradient == "device") + states.held_for(where, "device")
        fixed += (states.master + states.moments) * (where.state == "device")
        return fixed + states.value * (where.value == "device" and self._prices.ranks > 1)

    def _device_bytes(self, chunk: int, where: Arrangement) -> int:
        """Return what an arrangement takes on the device in a moment that does not use the chunk."""
        is_whole = where.keeps_copy or (where.value == "device" and self._prices.ranks == 1)
        return self._fixed_bytes(chunk, where) + self._trace.chunks[chunk].whole_bytes * is_whole

    def _load_of(self, chunk: int, where: Arrangement) -> list[int]:
        """Return what an arrangement adds in each moment to what the step needs anyway; worked out once."""
        if (chunk, where) not in self._loads:
            self._loads[chunk, where] = self._add_up(chunk, where)
        return self._loads[chunk, where]

    def _add_up(self, chunk: int, where: Arrangement) -> list[int]:
        """Return what an arrangement adds in each moment."""
        fixed, whole = self._fixed_bytes(chunk, where), self._trace.chunks[chunk].whole_bytes
        is_alone = self._prices.ranks == 1
        added = []
        for needs, moment in zip(self._needs, self._trace.moments, strict=True):
            is_home = is_alone and where.value == "device"
            stays = is_home or (where.keeps_copy and moment.phase != "update")
            reuses = is_alone and where.gradient == "device" and chunk in moment.gradients
            added.append(fixed + whole * (stays and chunk not in needs) - whole * reuses)
        return added

    def _fill_device(self, chosen: list[Arrangement]) -> None:
        """Move to the device what saves most there."""
        if self._first_steps is None:
            self._first_steps = self._steps(chosen, self._device_options, self._device_bytes)
        total = [load.total for load in loads(self._trace, self._room)]
        full = set[int]()
        for step in self._first_steps:
            if step.chunk not in full and not self._take(step, chosen, total):
                full.add(step.chunk)

    def _take(self, step: Step, chosen: list[Arrangement], total: list[int]) -> bool:
        """Go one step if the device has room in every moment, and return whether it has."""
        old, new = (self._load_of(step.chunk, where) for where in (chosen[step.chunk], step.where))
        wanted = [a + b - c for a, b, c in zip(total, new, old, strict=True)]
        if max(wanted) > self._room.budget:
            return False
        total[:], chosen[step.chunk] = wanted, step.where
        return True

    def _relieve_host(self, chosen: list[Arrangement]) -> None:
        """Move to the device what host memory has no room for, whatever that costs; without copies."""
        excess, moved = self._host_excess(chosen), {-1}
        while excess > 0 and moved:
            steps, total = list[Step](), [load.total for load in loads(self._trace, self._room)]
            for chunk, first in enumerate(chosen):
                total = [a + b for a, b in zip(total, self._load_of(chunk, first), strict=True)]
                before = self._bytes_of("host", first, self._states[chunk])
                for where in self._device_options(chunk, first):
                    freed = before - self._bytes_of("host", where, self._states[chunk])
                    if freed and not where.keeps_copy:
                        saved = self._seconds(chunk, first) - self._seconds(chunk, where)
                        steps.append(Step(chunk, where, saved, freed))
            moved = set()
            for step in sorted(steps, key=Step.sort_key):
                if excess > 0 and step.chunk not in moved and self._take(step, chosen, total):
                    moved.add(step.chunk)
                    excess = self._host_excess(chosen)

    def _room_with(self, chosen: Sequence[Arrangement]) -> Room:
        """Return the room that is left for gathered values."""
        is_alone = self._prices.ranks == 1
        return attrs.evolve(
            self._room,
            fixed=sum(self._fixed_bytes(chunk, where) for chunk, where in enumerate(chosen)),
            update=self._buffers if any(w.update == "device" != w.state for w in chosen) else 0,
            homes=frozenset(c for c, where in enumerate(chosen) if is_alone and where.value == "device"),
            gradient_homes=frozenset(
                c for c, where in enumerate(chosen) if is_alone and where.gradient == "device"
            ),
        )

    def _check_device(self, chosen: Sequence[Arrangement]) -> None:
        """Refuse what does not even fit with everything elsewhere."""
        room = self._room_with(chosen)
        peak = find_peak(self._trace, room)
        if peak.total > room.budget:
            what = describe_load(peak, self._trace)
            raise CapabilityError(
                f"{what}, {peak.total - room.budget} more than its budget of {room.budget}, with everything "
                "elsewhere that can be",
                hint=f"let device_budget be at least {peak.total}{_OTHERWISE}",
            )

    # --- below it -------------------------------------------------------------------------------------------

    def _bytes_in(self, tier: Tier, chosen: Sequence[Arrangement]) -> int:
        """Return what lives in a tier."""
        return sum(
            self._bytes_of(tier, where, states) for where, states in zip(chosen, self._states, strict=True)
        )

    @staticmethod
    def _bytes_of(tier: Tier, where: Arrangement, states: States) -> int:
        """Return what of one chunk lives in a tier."""
        kept = (states.master + states.moments) * (where.state == tier) + states.held_for(where, tier)
        return kept + states.value * (where.value == tier) + states.gradient * (where.gradient == tier)

    def _host_staging(self, chosen: Sequence[Arrangement]) -> int:
        """Return the host memory that files, or what an update needs of the device, pass through."""
        if not self._prices.has_host:
            return 0
        if _uses_files(chosen):
            return self._buffers
        return max(
            (
                states.value * (where.value != "host") + states.gradient * (where.gradient != "host")
                for states, where in zip(self._states, chosen, strict=True)
                if where.update == "host"
            ),
            default=0,
        )

    def _host_excess(self, chosen: Sequence[Arrangement]) -> int:
        """Return by how much host memory is exceeded; not positive where it is not."""
        limit = self._budgets.host
        return 0 if limit is None else self._bytes_in("host", chosen) + self._host_staging(chosen) - limit

    def _sink(self, chunk: int, where: Arrangement) -> Arrangement:
        """Return an arrangement with files in place of host memory."""
        value, gradient, state = (
            "disk" if tier == "host" else tier for tier in (where.value, where.gradient, where.state)
        )
        return self._cheapest(chunk, value, gradient, state, keeps_copy=where.keeps_copy)

    def _fill_host(self, chosen: list[Arrangement]) -> None:
        """Move from files to host memory what saves most there."""

        def host_bytes(chunk: int, where: Arrangement) -> int:
            return self._bytes_of("host", where, self._states[chunk])

        free, full = -self._host_excess(chosen), set[int]()
        for step in self._steps(chosen, self._host_options, host_bytes):
            if step.size > free or step.chunk in full:
                full.add(step.chunk)
                continue
            free -= step.size
            chosen[step.chunk] = step.where

    def _check_lower(self, chosen: Sequence[Arrangement]) -> None:
        """Refuse what exceeds host memory or files."""
        excess = self._host_excess(chosen)
        if excess > 0:
            staged = self._host_staging(chosen)
            raise CapabilityError(
                f"host memory takes {excess} bytes more than its budget of {self._budgets.host}: what lives "
                f"there {show_bytes(self._bytes_in('host', chosen))}, staging {show_bytes(staged)}; "
                f"the device holds {show_bytes(self._bytes_in('device', chosen))}",
                hint=f"let host_budget be at least {(self._budgets.host or 0) + excess}"
                + ("" if _uses_files(chosen) else ", or disk= a folder with that much space"),
            )
        wanted, limit = self._bytes_in("disk", chosen), self._budgets.disk
        if limit is not None and wanted > limit:
            raise CapabilityError(
                f"files take {wanted} bytes, {wanted - limit} more than there is space for",
                hint=f"let disk= be a folder with {show_bytes(wanted)} of space, or host_budget "
                f"{wanted - limit} bytes larger",
            )


def _uses_files(chosen: Iterable[Arrangement]) -> bool:
    """Whether anything lives in files."""
    return any("disk" in {where.value, where.gradient, where.state} for where in chosen)
