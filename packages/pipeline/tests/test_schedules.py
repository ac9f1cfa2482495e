"""The schedules have the bubbles and the memory that their papers say."""

from __future__ import annotations

import pytest

from colossal_core.interfaces import AbstractSchedule
from colossal_core.plugins import Registry
from colossal_core.schedule import PipelineShape, StageTimes, Timeline, Work, peak_activations, simulate
from colossal_pipeline import plugin
from colossal_pipeline.schedules.gpipe import GPipe
from colossal_pipeline.schedules.one_forward_one_backward import Interleaved, OneForwardOneBackward
from colossal_pipeline.schedules.zero_bubble import ZeroBubbleH1, ZeroBubbleV
from colossal_testkit.contracts import ScheduleContract

TIMES = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.7), (2.0, 2.5, 2.0)]
"""Times of forward and of both halves of backward."""

DEGREES = (2, 3, 4, 6)


class TestGPipe(ScheduleContract):
    """All forwards first."""

    def make_schedule(self) -> AbstractSchedule:
        """Return it."""
        return GPipe()


class TestOneForwardOneBackward(ScheduleContract):
    """In turn."""

    def make_schedule(self) -> AbstractSchedule:
        """Return it."""
        return OneForwardOneBackward()


class TestInterleaved(ScheduleContract):
    """Several stages on each rank."""

    def make_schedule(self) -> AbstractSchedule:
        """Return it."""
        return Interleaved()


class TestZeroBubbleH1(ScheduleContract):
    """Split backward."""

    def make_schedule(self) -> AbstractSchedule:
        """Return it."""
        return ZeroBubbleH1()


class TestZeroBubbleV(ScheduleContract):
    """Split backward in a V."""

    def make_schedule(self) -> AbstractSchedule:
        """Return it."""
        return ZeroBubbleV()


def play(schedule: AbstractSchedule, shape: PipelineShape, times: tuple[float, float, float]) -> Timeline:
    """Return the simulated step for times of a rank's whole share."""
    forward, inputs, weights = times
    equal = StageTimes.equal(shape, forward=forward, inputs=inputs, weights=weights)
    return simulate(schedule.placement(shape), schedule.actions(shape), equal)


def shares(schedule: AbstractSchedule, shape: PipelineShape, until: Work = Work.WEIGHT) -> list[float]:
    """Return the most that each rank holds, in its share of the model for one micro-batch."""
    return [peak_activations(row, until=until) / shape.chunks for row in schedule.actions(shape)]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("p", DEGREES)
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_gpipe_is_as_published(p: int, chunks: int, times: tuple[float, float, float]) -> None:
    """Bubble (p-1)(F+B+W)/v; all m micro-batches are held."""
    for m in range(p, 3 * p):
        shape = PipelineShape(p, m, chunks)

        assert play(GPipe(), shape, times).bubble == pytest.approx((p - 1) * sum(times) / chunks)
        assert shares(GPipe(), shape) == [m] * p


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("p", DEGREES)
def test_1f1b_is_as_published(p: int, times: tuple[float, float, float]) -> None:
    """Bubble (p-1)(F+B+W); min(m, p-s) micro-batches are held, also when there are few of them."""
    for m in range(1, 3 * p):
        shape, schedule = PipelineShape(p, m), OneForwardOneBackward()

        assert play(schedule, shape, times).bubble == pytest.approx((p - 1) * sum(times))
        assert shares(schedule, shape) == [min(m, p - s) for s in range(p)]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("p", DEGREES)
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved_is_as_published(p: int, chunks: int, times: tuple[float, float, float]) -> None:
    """Bubble (p-1)(F+B+W)/v; rank 0 holds p(1 + (p-1)/(pv))."""
    for m in range(2 * p, 5 * p, p):
        shape, schedule = PipelineShape(p, m, chunks), Interleaved()
        held = [(2 * (p - s - 1) + (chunks - 1) * p + 1) / chunks for s in range(p)]

        assert play(schedule, shape, times).bubble == pytest.approx((p - 1) * sum(times) / chunks)
        assert shares(schedule, shape) == pytest.approx(held)
        assert held[0] == pytest.approx(p * (1 + (p - 1) / (p * chunks)))


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("p", DEGREES)
def test_zbh1_is_as_published(p: int, times: tuple[float, float, float]) -> None:
    """Bubble (p-1)(F+B-W); p micro-batches are held, p-s of them until gradients of inputs are there."""
    forward, inputs, weights = times
    for m in range(2 * p, 4 * p):
        shape, schedule = PipelineShape(p, m), ZeroBubbleH1()

        bubble = play(schedule, shape, times).bubble
        assert bubble == pytest.approx((p - 1) * (forward + inputs - weights))
        assert shares(schedule, shape) == [p] * p
        assert shares(schedule, shape, until=Work.INPUT) == [p - s for s in range(p)]


@pytest.mark.parametrize("p", DEGREES)
def test_zbv_is_as_published(p: int) -> None:
    """No rank idles once it has begun; p micro-batches are held by each."""
    for m in range(2 * p, 4 * p):
        shape, schedule = PipelineShape(p, m, 2), ZeroBubbleV()
        timeline = play(schedule, shape, (1.0, 1.0, 1.0))

        assert [timeline.idle_inside(rank) for rank in range(p)] == pytest.approx([0.0] * p)
        assert timeline.bubble == pytest.approx((p - 1) / 2)
        assert shares(schedule, shape) == [p] * p


def test_bubbles_are_ordered_as_the_papers_say() -> None:
    """zbv < zbh1 < interleaved < 1f1b, at four ranks and equal times."""
    bubbles = [
        play(schedule, PipelineShape(4, 16, chunks), (1.0, 1.0, 1.0)).bubble
        for schedule, chunks in (
            (ZeroBubbleV(), 2),
            (ZeroBubbleH1(), 1),
            (Interleaved(), 2),
            (OneForwardOneBackward(), 1),
        )
    ]

    assert bubbles == [1.5, 3.0, 4.5, 9.0]


def test_schedules_are_found_by_name() -> None:
    """What users type is what the registry resolves."""
    registry = Registry.isolated({"pipeline": plugin})

    found = {
        name: registry.find("pipeline_schedule", name).load_target() for name in ("1f1b", "pipeline:zbv")
    }

    assert found == {"1f1b": OneForwardOneBackward, "pipeline:zbv": ZeroBubbleV}
    assert len(registry.records("pipeline_schedule")) == 5
