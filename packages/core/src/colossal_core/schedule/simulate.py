"""The one simulator of schedules: when each action runs, how long ranks idle, what they hold.

The one idea: ranks take their actions in order, each as soon as the rank is free and what it needs has
arrived. Nothing else decides, so the simulated times are those of a run whose messages travel beside the
computation, in the units of the times that are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from attrs import frozen

from colossal_core.errors import PluginError, UsageError
from colossal_core.schedule.actions import Action, PipelineShape, Work, needs_of

__all__ = ["Span", "StageTimes", "Timeline", "peak_activations", "simulate"]


@final
@frozen(kw_only=True)
class StageTimes:
    """What the work of each stage takes for one micro-batch, in one unit for all.

    Attributes:
        forward: For each stage, its forward.
        inputs: For each stage, the half of backward that gives gradients of what came in.
        weights: For each stage, the other half. The whole backward takes the sum.
        transfer: A message between two ranks.
    """

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    transfer: float = 0.0

    def __attrs_post_init__(self) -> None:
        """Refuse numbers that do not belong together."""
        lengths = {len(self.forward), len(self.inputs), len(self.weights)}
        if len(lengths) != 1 or min(*self.forward, *self.inputs, *self.weights, self.transfer) < 0:
            raise UsageError(
                f"times for {len(self.forward)}, {len(self.inputs)} and {len(self.weights)} stages",
                hint="give each stage three times of at least 0",
            )

    @classmethod
    def equal(
        cls,
        shape: PipelineShape,
        *,
        forward: float = 1.0,
        inputs: float = 1.0,
        weights: float = 1.0,
        transfer: float = 0.0,
    ) -> StageTimes:
        """Return equal stages, given the times of one rank's whole share of the model."""
        stages, chunks = shape.num_stages, shape.chunks
        return cls(
            forward=(forward / chunks,) * stages,
            inputs=(inputs / chunks,) * stages,
            weights=(weights / chunks,) * stages,
            transfer=transfer,
        )

    def of(self, action: Action) -> float:
        """Return what an action takes."""
        inputs, weights = self.inputs[action.stage], self.weights[action.stage]
        return {
            Work.FORWARD: self.forward[action.stage],
            Work.BACKWARD: inputs + weights,
            Work.INPUT: inputs,
            Work.WEIGHT: weights,
        }[action.work]


@final
@frozen
class Span:
    """One action in time.

    Attributes:
        action: The action.
        start: When it starts.
        stop: When it ends.
    """

    action: Action
    start: float
    stop: float


@final
@frozen(kw_only=True)
class Timeline:
    """A schedule in time.

    Attributes:
        ranks: For each rank its spans, in order.
    """

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """When the last rank is done."""
        return max((row[-1].stop for row in self.ranks if row), default=0.0)

    @property
    def bubble(self) -> float:
        """How long the busiest rank idles: the makespan without its work."""
        return self.makespan - max(self.busy(rank) for rank in range(len(self.ranks)))

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which they idle, in ``[0, 1)``."""
        total = self.makespan * len(self.ranks)
        return 1 - sum(map(self.busy, range(len(self.ranks)))) / total if total else 0.0

    def busy(self, rank: int) -> float:
        """Return how long a rank works."""
        return sum(span.stop - span.start for span in self.ranks[rank])

    def idle_inside(self, rank: int) -> float:
        """Return how long a rank idles between its first and its last action."""
        row = self.ranks[rank]
        return row[-1].stop - row[0].start - self.busy(rank) if row else 0.0


def simulate(placement: Sequence[int], actions: Sequence[Sequence[Action]], times: StageTimes) -> Timeline:
    """Return when each action runs.

    Args:
        placement: Rank of each stage.
        actions: For each rank, what it computes in order.
        times: What it takes.

    Raises:
        PluginError: Nobody can go on before all is done.
    """
    num_stages = len(placement)
    spans: list[list[Span]] = [[] for _ in actions]
    ends: dict[Action, float] = {}
    remaining = sum(map(len, actions))
    while remaining:
        before = remaining
        for rank, row in enumerate(actions):
            while len(spans[rank]) < len(row):
                action = row[len(spans[rank])]
                ready = _ready(action, ends, placement, times.transfer, num_stages)
                if ready is None:
                    break
                start = max(ready, spans[rank][-1].stop if spans[rank] else 0.0)
                ends[action] = start + times.of(action)
                spans[rank].append(Span(action, start, ends[action]))
                remaining -= 1
        if remaining == before:
            waiting = [
                str(row[len(done)]) for row, done in zip(actions, spans, strict=True) if len(done) < len(row)
            ]
            raise PluginError(
                f"{remaining} actions of the schedule are never reached; "
                f"ranks stop before {', '.join(waiting)}",
                hint="check_schedule() says what they wait for",
            )
    return Timeline(ranks=tuple(map(tuple, spans)))


def peak_activations(actions: Sequence[Action], *, until: Work = Work.WEIGHT) -> int:
    """Return how many activations, of one stage for one micro-batch, a rank holds at most at once.

    They are held from forward to the end of backward.

    Args:
        actions: Of one rank, in order.
        until: ``Work.INPUT`` counts activations of a split backward until its first half only.
    """
    held = peak = 0
    for action in actions:
        if action.work is Work.FORWARD:
            held += 1
            peak = max(peak, held)
        elif action.work in {Work.BACKWARD, until}:
            held -= 1
    return peak


def _ready(
    action: Action, ends: dict[Action, float], placement: Sequence[int], transfer: float, num_stages: int
) -> float | None:
    """Return when everything that an action needs is there, or None while some of it was not computed."""
    latest = 0.0
    for options in needs_of(action, num_stages):
        found = next((need for need in options if need in ends), None)
        if found is None:
            return None
        travels = placement[found.stage] != placement[action.stage]
        latest = max(latest, ends[found] + (transfer if travels else 0.0))
    return latest
