"""A real step in time: what each rank computed when, beside what the simulator expects. No torch here.

The one idea: the plan is simulated with the times that stages really took, so what differs between the two
pictures is what the schedule does not explain: messages, other work of the machine, and uneven micro-batches.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import final

from attrs import frozen

from colossal_core.errors import UsageError
from colossal_core.schedule import Action, PipelineShape, Span, StageTimes, Timeline, Work, simulate

__all__ = ["Recording"]


@final
@frozen(kw_only=True)
class Recording:
    """One step as it happened.

    Attributes:
        schedule: Name of the schedule.
        placement: Rank of each stage.
        ranks: For each rank its actions, with start and stop in seconds since the step began.
    """

    schedule: str
    placement: tuple[int, ...]
    ranks: tuple[tuple[Span, ...], ...]

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read what :meth:`write` wrote.

        Raises:
            UsageError: The file is something else.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            ranks = tuple(
                tuple(Span(Action(Work(work), stage, number), *times) for stage, work, number, *times in row)
                for row in found["ranks"]
            )
            return cls(schedule=found["schedule"], placement=tuple(found["placement"]), ranks=ranks)
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise UsageError(
                f"{path} holds no timeline of a step: {err}",
                hint="write one with Pipeline(timeline='step.json', ...)",
            ) from err

    def write(self, path: Path) -> None:
        """Write it as JSON, whole or not at all."""
        rows = [
            [
                [span.action.stage, span.action.work.value, span.action.microbatch, span.start, span.stop]
                for span in row
            ]
            for row in self.ranks
        ]
        text = json.dumps({"schedule": self.schedule, "placement": self.placement, "ranks": rows})
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".part")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)

    @property
    def shape(self) -> PipelineShape:
        """How large the pipeline was."""
        numbers = {span.action.microbatch for row in self.ranks for span in row}
        degree = len(self.ranks)
        return PipelineShape(degree, len(numbers), len(self.placement) // degree)

    @property
    def seconds_of_forward(self) -> float:
        """Median time of a rank's forward of one micro-batch, all its stages together."""
        per_rank = len(self.placement) / len(self.ranks)
        return per_rank * statistics.median(self._durations(Work.FORWARD, range(len(self.placement))))

    def actual(self) -> Timeline:
        """Return the step as it was, in units of a rank's forward."""
        unit = self.seconds_of_forward
        return Timeline(
            ranks=tuple(
                tuple(Span(span.action, span.start / unit, span.stop / unit) for span in row)
                for row in self.ranks
            )
        )

    def planned(self) -> Timeline:
        """Return the step as the simulator expects it, in the same units: median times, free messages."""
        unit = self.seconds_of_forward
        stages = range(len(self.placement))

        def median(work: Work, stage: int) -> float:
            found = self._durations(work, [stage])
            return statistics.median(found) / unit if found else 0.0

        times = StageTimes(
            forward=tuple(median(Work.FORWARD, stage) for stage in stages),
            # A whole backward counts as its two halves; the simulator adds them up again.
            inputs=tuple(median(Work.INPUT, stage) + median(Work.BACKWARD, stage) for stage in stages),
            weights=tuple(median(Work.WEIGHT, stage) for stage in stages),
        )
        return simulate(self.placement, [[span.action for span in row] for row in self.ranks], times)

    def _durations(self, work: Work, stages: Sequence[int]) -> list[float]:
        """Return the times of one kind of work on some stages."""
        return [
            span.stop - span.start
            for row in self.ranks
            for span in row
            if span.action.work is work and span.action.stage in stages
        ]
