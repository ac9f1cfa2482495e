"""The contract of pipeline schedules: complete, ordered, free of deadlocks, within their bounds, and pure.

It plays every pipeline of up to five ranks, up to three times as many micro-batches and one, and up to four
stages on each rank, as far as the schedule serves them. No torch and no processes: it takes milliseconds.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from colossal_core.interfaces import AbstractSchedule
from colossal_core.schedule import PipelineShape, StageTimes, Work, find_problems, simulate
from colossal_testkit.contracts.protection import Contract

__all__ = ["ScheduleContract"]

MAX_DEGREE, MAX_CHUNKS = 5, 4


class ScheduleContract(Contract, is_contract=True):
    """What every schedule promises. A subclass says which it is."""

    open_names: ClassVar[frozenset[str]] = frozenset({"make_schedule", "waivers"})

    @abstractmethod
    def make_schedule(self) -> AbstractSchedule:
        """Return the schedule."""

    def test_every_pipeline_can_be_played(self) -> None:
        """Each stage runs once for each micro-batch, in an order in which nobody waits for ever."""
        schedule = self.make_schedule()
        found = {}
        for shape in self._shapes():
            problems = find_problems(
                shape, schedule.placement(shape), schedule.actions(shape), bounds=schedule.bounds(shape)
            )
            if problems:
                found[shape] = problems

        assert found == {}

    def test_every_rank_has_its_number_of_stages(self) -> None:
        """The placement puts ``chunks`` stages on each rank."""
        schedule = self.make_schedule()
        for shape in self._shapes():
            placement = schedule.placement(shape)

            assert [placement.count(rank) for rank in range(shape.degree)] == [shape.chunks] * shape.degree

    def test_schedules_are_values(self) -> None:
        """Asked again, a schedule says the same, also another object of its class."""
        schedule = self.make_schedule()
        for shape in self._shapes():
            assert schedule.actions(shape) == schedule.actions(shape) == type(schedule)().actions(shape)

    def test_no_schedule_is_slower_than_taking_turns(self) -> None:
        """With equal times the step takes no longer than if only one rank worked at any moment."""
        schedule = self.make_schedule()
        for shape in self._shapes():
            times = StageTimes.equal(shape)
            timeline = simulate(schedule.placement(shape), schedule.actions(shape), times)

            assert timeline.makespan <= 3 * shape.degree * shape.num_microbatches + 1e-9

    def test_micro_batches_of_a_stage_keep_their_order(self) -> None:
        """Gradients of a stage are added in the order of micro-batches, whatever the schedule."""
        schedule = self.make_schedule()
        for shape in self._shapes():
            for row in schedule.actions(shape):
                for stage in {action.stage for action in row}:
                    for work in Work:
                        order = [a.microbatch for a in row if (a.stage, a.work) == (stage, work)]
                        assert order == sorted(order)

    def _shapes(self) -> Iterator[PipelineShape]:
        """Yield the pipelines that are played."""
        served = self.make_schedule().chunks
        for degree in range(1, MAX_DEGREE + 1):
            for chunks in range(1, MAX_CHUNKS + 1) if served is None else (served,):
                for num_microbatches in range(1, 3 * degree + 2):
                    yield PipelineShape(degree, num_microbatches, chunks)
