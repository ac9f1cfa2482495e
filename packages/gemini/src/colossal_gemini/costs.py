"""What a chunk's states take, and what it costs in seconds to have them here or there. No torch here.

The one idea: with its states in given places a chunk moves a known number of bytes over known links in each
step, so every arrangement has a price, and arrangements are compared by nothing else.

# Note [Traffic of a chunk]
For every gather its values come from where they live, and from the other ranks. After its backward its
gradient goes to where gradients live. The update brings together gradient, masters and moments, and writes
masters, moments and values back; where values are as wide as masters there are none, and the values are read,
too. What lives where the update runs does not move.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, final

import attrs

if TYPE_CHECKING:
    from colossal_gemini.eviction import Room
    from colossal_gemini.trace import Chunk, Trace

__all__ = [
    "TIERS",
    "Arrangement",
    "Budgets",
    "Placement",
    "Prices",
    "Rates",
    "States",
    "Tier",
    "count_visits",
    "states_of",
]

Tier = Literal["device", "host", "disk"]

TIERS: tuple[Tier, ...] = ("device", "host", "disk")
"""From near to far."""


@final
@attrs.frozen(kw_only=True)
class Rates:
    """Bytes per second; by default about those of an accelerator on PCIe 4, until some are measured.

    Attributes:
        device_host: Between the device and host memory, each way.
        host_disk: Between host memory and files, each way.
        gather: What arrives from other ranks in a gather or a reduce-scatter.
        device_update: Of optimizer state that the device updates: what is read and written.
        host_update: Of what the host updates.
        compute: Not bytes, but floating point operations per second that the model reaches.
    """

    device_host: float = 20e9
    host_disk: float = 2.5e9
    gather: float = 100e9
    device_update: float = 1e12
    host_update: float = 40e9
    compute: float = 150e12


@final
@attrs.frozen(kw_only=True)
class Budgets:
    """Bytes of each tier on this rank.

    Attributes:
        device: Of the device that computes, everything included.
        host: Of host memory; None without limit, 0 where the device is host memory and there is none beside.
        disk: Of files; None without limit, 0 without files.
    """

    device: int
    host: int | None = None
    disk: int | None = 0


@final
@attrs.frozen(kw_only=True)
class States:
    """Bytes that one rank keeps of one chunk.

    Attributes:
        value: The values that models compute with; this rank's shard.
        gradient: Of the reduced gradient.
        master: Of wider copies of the values; 0 where values are wide enough.
        moments: Of what the optimizer keeps.
        sums: Of gradients that are added up over several passes, where the update runs; see :meth:`held_for`.
    """

    value: int
    gradient: int = 0
    master: int = 0
    moments: int = 0
    sums: int = 0

    @property
    def total(self) -> int:
        """All of them, without sums."""
        return self.value + self.gradient + self.master + self.moments

    def held_for(self, where: Arrangement, tier: Tier) -> int:
        """Return what sums take in a tier; wide gradients on the host are added up where they live."""
        is_inside = not self.master and where.gradient == where.update == "host"
        return self.sums if where.update == tier and not is_inside else 0


@final
@attrs.frozen(kw_only=True)
class Arrangement:
    """Where the states of one chunk live.

    Attributes:
        value: Home of the values.
        gradient: Home of the reduced gradient.
        state: Home of masters and moments.
        update: Where the update runs.
        keeps_copy: Whether room is left for its gathered copy to stay from forward to backward.
    """

    value: Tier
    gradient: Tier
    state: Tier
    update: Tier
    keeps_copy: bool = False


@final
@attrs.frozen(kw_only=True)
class Placement:
    """Where everything lives that outlasts its use.

    Attributes:
        chunks: For each chunk of the trace.
        states: Bytes of each chunk on this rank.
        room: What is left on the device for gathered values, as :func:`~colossal_gemini.eviction.simulate`
            takes it.
        host_staging: Bytes of host memory that files are read into and written from.
        seconds: Estimate of a step's traffic and update, if nothing overlapped.
        ranks: Among how many ranks chunks are divided.
    """

    chunks: tuple[Arrangement, ...]
    states: tuple[States, ...]
    room: Room
    host_staging: int
    seconds: float
    ranks: int

    def bytes_in(self, tier: Tier) -> dict[str, int]:
        """Return what lives in a tier, by category."""
        found = dict.fromkeys(("values", "gradients", "masters", "moments"), 0)
        for where, states in zip(self.chunks, self.states, strict=True):
            found["values"] += states.value * (where.value == tier)
            found["gradients"] += states.gradient * (where.gradient == tier) + states.held_for(where, tier)
            found["masters"] += states.master * (where.state == tier)
            found["moments"] += states.moments * (where.state == tier)
        return found


def states_of(chunk: Chunk, *, ranks: int, optimizer_states: int = 2, adds_up: bool = False) -> States:
    """Return what one of some ranks keeps of a chunk.

    Args:
        chunk: The chunk.
        ranks: Among how many it is divided.
        optimizer_states: Moments that the optimizer keeps for each element, in fp32 at least.
        adds_up: Whether a step adds up gradients of several passes.
    """
    span, wide = -(-chunk.numel // ranks), max(4, chunk.value_bytes)
    if not chunk.is_trainable:
        return States(value=span * chunk.value_bytes)
    return States(
        value=span * chunk.value_bytes,
        gradient=span * chunk.value_bytes,
        master=span * wide if chunk.value_bytes < wide else 0,
        moments=span * wide * optimizer_states,
        sums=span * wide if adds_up else 0,
    )


def count_visits(trace: Trace) -> list[int]:
    """Return how often each chunk is gathered when nothing stays longer than it is needed."""
    counts, before = [0] * len(trace.chunks), frozenset[int]()
    for index in range(len(trace.moments)):
        needs = trace.needs_at(index)
        for chunk in needs - before:
            counts[chunk] += 1
        before = needs
    return counts


def update_moves(states: States, where: Arrangement) -> list[tuple[int, Tier, Tier]]:
    """Return what the update of a chunk moves: bytes, from where, to where.

    Args:
        states: What this rank keeps of it.
        where: Where that lives.
    """
    kept, runs = states.master + states.moments, where.update
    moves: list[tuple[int, Tier, Tier]] = [
        (states.gradient, where.gradient, runs),
        (kept, where.state, runs),
        (kept, runs, where.state),
        (states.value, runs, where.value),
    ]
    if not states.master:  # the values are the masters
        moves.append((states.value, where.value, runs))
    return moves


@final
@attrs.frozen
class Prices:
    """Seconds of arrangements.

    Attributes:
        rates: Of links and updates.
        ranks: Among how many chunks are divided.
        has_host: Whether host memory is a tier of its own.
        streams: Whether the device may update what does not live on it.
    """

    rates: Rates
    ranks: int
    has_host: bool
    streams: bool = attrs.field(kw_only=True)

    def move(self, num_bytes: float, start: Tier, end: Tier) -> float:
        """Return how long it takes to move bytes from one tier to another."""
        places = sorted((TIERS.index(start), TIERS.index(end)))
        seconds = 0.0
        for first in TIERS[places[0] : places[1]]:
            if first == "host":
                seconds += num_bytes / self.rates.host_disk
            elif self.has_host:
                seconds += num_bytes / self.rates.device_host
        return seconds

    def seconds(self, chunk: Chunk, states: States, where: Arrangement, visits: int) -> float:
        """Return what a chunk costs in a step; see Note [Traffic of a chunk].

        Args:
            chunk: The chunk.
            states: What this rank keeps of it.
            where: Where that lives.
            visits: How often it is gathered when its copy does not stay.
        """
        gathers = min(visits, 1 if chunk.is_trainable else 0) if where.keeps_copy else visits
        total = gathers * (self.move(states.value, where.value, "device") + self.gather(chunk))
        if not chunk.is_trainable:
            return total
        total += self.gather(chunk) + self.move(states.gradient, "device", where.gradient)
        total += sum(self.move(*row) for row in update_moves(states, where))
        return total + self.update(states, where)

    def gather(self, chunk: Chunk) -> float:
        """Return how long it takes to gather a chunk from other ranks, or to reduce its gradient to them."""
        return chunk.whole_bytes * (self.ranks - 1) / self.ranks / self.rates.gather

    def update(self, states: States, where: Arrangement) -> float:
        """Return how long the update of a chunk takes."""
        kept = 2 * (states.master + states.moments)
        touched = kept + states.gradient + states.value * (1 if states.master else 2)
        return touched / (self.rates.device_update if where.update == "device" else self.rates.host_update)

    def updates(self, state: Tier) -> Iterator[Tier]:
        """Yield where the update of state that lives in a tier may run."""
        if state == "device" or self.streams:
            yield "device"
        if state != "device" and self.has_host:
            yield "host"
