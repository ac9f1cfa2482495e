"""Which chunks stay on the device, which leave, and which come early. No torch here.

The one idea: a step repeats itself, so the future is known. Who has to leave is who is needed again furthest
in the future (Belady's rule), which loads least for chunks of one size, also where the room changes from
moment to moment; for chunks of different sizes it is the usual heuristic. The update makes every gathered
copy of trainable values worthless, so no trainable chunk has a next use beyond it, and after its backward a
chunk is the first to leave. Leaving costs nothing: copies are clean.

# Note [Room]
What chunks may take in a moment is the budget less everything else: what lives on the device, staging,
unreduced gradients, and what the trace says of activations and work space. It is counted in bytes that
tensors hold; the arenas hold chunks to it exactly.

# Note [Fetching ahead]
While a moment runs, what the next one lacks may come already, in room that is free in all moments until then,
or in place of chunks that will have to leave for it anyway. So fetching ahead never adds a gather.

Source: Belady, *A study of replacement algorithms for a virtual-storage computer*, 1966; Peserico, *Paging
with dynamic memory capacity*, 2019, for room that changes.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, final

import attrs

from colossal_core.errors import CapabilityError
from colossal_gemini.budgets import show_bytes

if TYPE_CHECKING:
    from colossal_gemini.trace import Trace

__all__ = [
    "Load",
    "NextUse",
    "Plan",
    "Room",
    "Stay",
    "choose_victims",
    "find_peak",
    "least_budget",
    "simulate",
]

_MAX_STEPS = 16
"""Steps after which frozen chunks that stay beyond the update are taken as settled."""


@final
@attrs.frozen(kw_only=True)
class Room:
    """Memory of the compute device, and what of it chunks cannot come and go in; see Note [Room].

    Attributes:
        budget: Bytes that training may use, everything included.
        fixed: Bytes that live there all the time: shards, gradients, optimizer state; without ``homes``.
        staging: Bytes of buffers that transfers go through, in every moment.
        update: Bytes of buffers that the update goes through, in its moments.
        homes: Chunks whose only copy lives there: always resident and never gathered.
        gradient_homes: Chunks whose unreduced gradient is part of ``fixed``.
    """

    budget: int
    fixed: int = 0
    staging: int = 0
    update: int = 0
    homes: frozenset[int] = frozenset()
    gradient_homes: frozenset[int] = frozenset()


@final
@attrs.frozen(kw_only=True)
class Load:
    """The least that one moment takes, in bytes by what takes them.

    Attributes:
        moment: Which one.
        fixed: What lives on the device.
        staging: Buffers of transfers and of the update.
        values: Values of the chunks that are needed and do not live there.
        gradients: Unreduced gradients.
        other: Everything that is no chunk.
    """

    moment: int
    fixed: int
    staging: int
    values: int
    gradients: int
    other: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.fixed + self.staging + self.values + self.gradients + self.other


@final
@attrs.frozen(kw_only=True)
class Stay:
    """What happens in one moment.

    Attributes:
        evictions: Chunks that leave before it, or while it runs to make room for what comes early.
        gathers: Chunks that it waits for.
        prefetches: Chunks that come while it runs, in the order in which they are needed.
        resident: Chunks that are there, those that come early included, homes too.
        num_bytes: What it takes on the device in all.
    """

    evictions: tuple[int, ...]
    gathers: tuple[int, ...]
    prefetches: tuple[int, ...]
    resident: tuple[int, ...]
    num_bytes: int


@final
@attrs.frozen(kw_only=True)
class Plan:
    """One step, as it repeats.

    Attributes:
        room: The memory that it was planned for.
        moments: What happens in each moment of the trace.
        gathered_bytes: Bytes of all chunks that are gathered, as often as they are.
    """

    room: Room
    moments: tuple[Stay, ...]
    gathered_bytes: int

    @property
    def num_gathers(self) -> int:
        """How many chunks are gathered in a step, early or not."""
        return sum(len(stay.gathers) + len(stay.prefetches) for stay in self.moments)

    @property
    def num_evictions(self) -> int:
        """How many chunks have to leave; what the update makes worthless does not count."""
        return sum(len(stay.evictions) for stay in self.moments)

    @property
    def peak(self) -> int:
        """Most bytes that a moment takes."""
        return max(stay.num_bytes for stay in self.moments)

    def gathers_of(self, chunk: int) -> int:
        """Return how often a chunk is gathered in a step."""
        return sum((stay.gathers + stay.prefetches).count(chunk) for stay in self.moments)


@final
class NextUse:
    """When each chunk is needed next, in a step that repeats itself."""

    def __init__(self, trace: Trace) -> None:
        """Read a trace.

        Args:
            trace: One step; the next one is taken to be like it.
        """
        self.needs = tuple(trace.needs_at(index) for index in range(len(trace.moments)))
        self.updates = tuple(index for index, row in enumerate(trace.moments) if row.phase == "update")
        self._trainable = tuple(chunk.is_trainable for chunk in trace.chunks)
        self._uses: list[list[int]] = [[] for _ in trace.chunks]
        for index, needs in enumerate(self.needs):
            for chunk in needs:
                self._uses[chunk].append(index)

    def after(self, moment: int, chunk: int) -> int | None:
        """Return when a copy that is there in a moment is of use again.

        Args:
            moment: The moment; its own need does not count.
            chunk: The chunk.

        Returns:
            A later moment, beyond the last one where it is one of the next step; or None when the copy never
            is: nothing needs the chunk, or an update comes first.
        """
        uses = self._uses[chunk]
        if not uses:
            return None
        place = bisect.bisect_right(uses, moment)
        length = len(self.needs)
        found = uses[place] if place < len(uses) else uses[0] + length
        if self._trainable[chunk] and any(
            moment <= update < found or update + length < found for update in self.updates
        ):
            return None
        return found

    def before(self, moment: int, chunk: int) -> int:
        """Return when a chunk was needed last before a moment; -1 when it was not in this step."""
        place = bisect.bisect_left(self._uses[chunk], moment)
        return self._uses[chunk][place - 1] if place else -1


def choose_victims(
    resident: Iterable[int],
    excess: int,
    *,
    moment: int,
    keep: Collection[int],
    next_use: NextUse,
    sizes: Sequence[int],
) -> list[int]:
    """Return the chunks that leave: those without a next use first, then the furthest next use first.

    Of those that are alike the one whose last use is longest ago leaves first: it may leave earlier.

    Args:
        resident: Chunks that are there.
        excess: Bytes that have to become free; nothing leaves when that is no more than 0.
        moment: For which this is.
        keep: Chunks that must stay: what is needed now, pinned, or on its way.
        next_use: Of the trace.
        sizes: Bytes of each chunk.

    Returns:
        In the order in which they leave. Together less than ``excess`` when the rest must stay.
    """

    def furthest(chunk: int) -> tuple[float, int]:
        found = next_use.after(moment, chunk)
        return (-math.inf if found is None else -found, next_use.before(moment, chunk))

    chosen: list[int] = []
    for chunk in sorted(sorted(set(resident).difference(keep)), key=furthest):
        if excess <= 0:
            break
        chosen.append(chunk)
        excess -= sizes[chunk]
    for chunk in reversed(chosen.copy()):  # of chunks of different sizes the last ones may have been enough
        if sizes[chunk] <= -excess:
            chosen.remove(chunk)
            excess += sizes[chunk]
    return chosen


def loads(trace: Trace, room: Room) -> list[Load]:
    """Return the least that each moment takes."""
    sizes = [chunk.whole_bytes for chunk in trace.chunks]
    fixed = room.fixed + sum(sizes[chunk] for chunk in room.homes)
    return [
        Load(
            moment=index,
            fixed=fixed,
            staging=room.staging + (room.update if moment.phase == "update" else 0),
            values=sum(sizes[chunk] for chunk in trace.needs_at(index) - room.homes),
            gradients=sum(sizes[chunk] for chunk in set(moment.gradients) - room.gradient_homes),
            other=moment.other,
        )
        for index, moment in enumerate(trace.moments)
    ]


def find_peak(trace: Trace, room: Room) -> Load:
    """Return the moment that needs most, whatever is evicted; the budget of the room does not matter."""
    return max(loads(trace, room), key=lambda load: load.total)


def least_budget(trace: Trace, room: Room) -> int:
    """Return the least budget with which a step runs: one byte less does not do."""
    return find_peak(trace, room).total


def describe_load(load: Load, trace: Trace) -> str:
    """Return what a moment takes, in words, for errors and reports."""
    moment = trace.moments[load.moment]
    parts = {
        "values": load.values,
        "gradients": load.gradients,
        "what lives there": load.fixed,
        "staging": load.staging,
        "activations and work space": load.other,
    }
    shown = ", ".join(f"{name} {show_bytes(part)}" for name, part in parts.items() if part)
    what = "the update" if moment.phase == "update" else f"{moment.phase} of {moment.name!r}"
    return f"{what} takes {load.total} bytes on the device ({shown})"


def simulate(trace: Trace, room: Room, *, prefetch: bool = True, start: Iterable[int] | None = None) -> Plan:
    """Return what a step does, moment by moment.

    Args:
        trace: The step.
        room: What it has.
        prefetch: Whether to fetch ahead; see Note [Fetching ahead].
        start: Chunks that are there when it begins; by default what steps before it leave, which is frozen
            chunks at most.

    Raises:
        CapabilityError: A moment needs more than there is.
    """
    walk = _Walk(trace, room, prefetch=prefetch)
    if start is not None:
        return walk.run(frozenset(start))[0]
    begin = frozenset[int]()
    for _ in range(_MAX_STEPS):
        plan, end = walk.run(begin)
        if end == begin:
            return plan
        begin = end
    return walk.run(begin)[0]


@final
class _Walk:
    """Walks steps of one trace in one room."""

    def __init__(self, trace: Trace, room: Room, *, prefetch: bool) -> None:
        """Work out what chunks may take in each moment."""
        self._trace = trace
        self._plan_room = room
        self._prefetch = prefetch
        self._sizes = [chunk.whole_bytes for chunk in trace.chunks]
        self._next_use = NextUse(trace)
        self._needs = [needs - room.homes for needs in self._next_use.needs]
        self._loads = loads(trace, room)
        self._room = [room.budget - load.total + load.values for load in self._loads]
        self._stale = frozenset(chunk.index for chunk in trace.chunks if chunk.is_trainable)

    def run(self, start: frozenset[int]) -> tuple[Plan, frozenset[int]]:
        """Walk one step, and return what is there after it, too."""
        resident = set(start) - self._plan_room.homes
        stays, moved = list[Stay](), 0
        for index, moment in enumerate(self._trace.moments):
            if moment.phase == "update":
                resident -= self._stale
            evictions = self._make_room(index, resident)
            resident.difference_update(evictions)
            gathers = sorted(self._needs[index] - resident)
            resident.update(gathers)
            left, early = self._fetch_ahead(index, resident) if self._prefetch else ([], [])
            resident.difference_update(left)
            resident.update(early)
            load, held = self._loads[index], self._bytes(resident)
            stays.append(
                Stay(
                    evictions=(*evictions, *left),
                    gathers=tuple(gathers),
                    prefetches=tuple(early),
                    resident=tuple(sorted(resident | self._plan_room.homes)),
                    num_bytes=load.total - load.values + held,
                )
            )
            moved += self._bytes((*gathers, *early))
        plan = Plan(room=self._plan_room, moments=tuple(stays), gathered_bytes=moved)
        return plan, frozenset(resident)

    def _bytes(self, chunks: Iterable[int]) -> int:
        """Return how much chunks take together."""
        return sum(self._sizes[chunk] for chunk in chunks)

    def _victims(self, index: int, resident: Collection[int]) -> list[int]:
        """Return who has to leave for what a moment needs."""
        needs = self._needs[index]
        excess = self._bytes(needs.union(resident)) - self._room[index]
        return choose_victims(
            resident, excess, moment=index, keep=needs, next_use=self._next_use, sizes=self._sizes
        )

    def _make_room(self, index: int, resident: set[int]) -> list[int]:
        """Return who leaves before a moment.

        Raises:
            CapabilityError: What it needs alone is more than there is.
        """
        load, budget = self._loads[index], self._plan_room.budget
        if load.total > budget:
            raise CapabilityError(
                f"{describe_load(load, self._trace)}, {load.total - budget} more than its budget of {budget}",
                hint=f"let device_budget be at least {least_budget(self._trace, self._plan_room)}, or let "
                "what is no chunk take less: a smaller batch, Recompute()",
            )
        return self._victims(index, resident)

    def _fetch_ahead(self, index: int, resident: set[int]) -> tuple[list[int], list[int]]:
        """Return who leaves and who comes while a moment runs; see Note [Fetching ahead]."""
        target = index + 1
        while target < len(self._needs) and not self._needs[target] - resident:
            target += 1
        if target >= len(self._needs) or any(index <= update < target for update in self._next_use.updates):
            return [], []
        missing = self._needs[target] - resident
        busy = frozenset[int]().union(*self._needs[index:target])
        leaving = [chunk for chunk in self._victims(target, resident) if chunk not in busy]
        room = min(self._room[index:target]) - self._bytes(resident)
        left, early = list[int](), list[int]()
        for chunk in sorted(missing):
            while leaving and self._sizes[chunk] > room:
                left.append(leaving.pop(0))
                room += self._sizes[left[-1]]
            if self._sizes[chunk] > room:
                break
            early.append(chunk)
            room -= self._sizes[chunk]
        return (left, early) if early else ([], [])
