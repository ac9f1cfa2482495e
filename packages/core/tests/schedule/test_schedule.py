"""The validator finds every fault, and the simulator follows the arrows."""

from __future__ import annotations

import pytest

from colossal_core.errors import PluginError, UsageError
from colossal_core.schedule import (
    Action,
    PipelineShape,
    StageTimes,
    Work,
    check_schedule,
    find_problems,
    loop_placement,
    peak_activations,
    simulate,
    v_placement,
)

SHAPE = PipelineShape(2, 2)
PLACEMENT = (0, 1)


def row(text: str) -> tuple[Action, ...]:
    """Read actions: ``"0F1"`` is the forward of stage 0 for micro-batch 1."""
    return tuple(Action(Work(word[1]), int(word[0]), int(word[2:])) for word in text.split())


GOOD = (row("0F0 0F1 0B0 0B1"), row("1F0 1I0 1F1 1B1 1W0"))


def test_a_right_schedule_has_no_problems() -> None:
    """Halves of backward and whole ones may be mixed."""
    assert find_problems(SHAPE, PLACEMENT, GOOD, bounds=(2, 2)) == []
    check_schedule("good", SHAPE, PLACEMENT, GOOD)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"), "stage 0 has 1 F for micro-batch 1"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1B0 1F1 1B1"), "stage 1 has 1 F, 2 B for micro-batch 0"),
        (("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1B1"), "stage 1 has 1 F, 1 I for micro-batch 0"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 1F2"), "1F2 is no stage or micro-batch"),
        (("0F0 0F1 0B0 0B1 1F0", "1B0 1F1 1B1"), "1F0 is on rank 0, its stage on rank 1"),
        (("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"), "rank 0 stops before 0B0, which waits for 1B0"),
        (("0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1"), "rank 1 stops before 1B0, which waits for 1F0"),
    ],
)
def test_every_fault_is_found(rows: tuple[str, str], problem: str) -> None:
    """Missing, doubled and misplaced actions and deadlocks are told in words."""
    actions = [row(text) for text in rows]

    problems = find_problems(SHAPE, PLACEMENT, actions)

    assert any(problem in found for found in problems), problems
    with pytest.raises(PluginError, match="schedule 'bad' with 2 ranks"):
        check_schedule("bad", SHAPE, PLACEMENT, actions)


def test_a_broken_promise_of_memory_is_found() -> None:
    """The bound of each rank is held against what it holds."""
    (problem,) = find_problems(SHAPE, PLACEMENT, GOOD, bounds=(1, None))

    assert problem == "rank 0 holds 2 activations at once, and promised at most 1"


def test_placements_and_lists_have_to_fit() -> None:
    """A stage without a rank, or a rank without a list, is the only problem told."""
    assert "does not put 2 stages" in find_problems(SHAPE, (0, 2), GOOD)[0]
    assert "1 lists of actions for 2 ranks" in find_problems(SHAPE, PLACEMENT, GOOD[:1])[0]


def test_simulated_actions_start_when_what_they_need_has_arrived() -> None:
    """By hand: two stages of unequal times, and messages that take half a unit."""
    times = StageTimes(forward=(1.0, 2.0), inputs=(1.0, 1.0), weights=(1.0, 3.0), transfer=0.5)

    timeline = simulate(PLACEMENT, GOOD, times)

    assert [(str(span.action), span.start, span.stop) for span in timeline.ranks[1]] == [
        ("1F0", 1.5, 3.5),
        ("1I0", 3.5, 4.5),
        ("1F1", 4.5, 6.5),
        ("1B1", 6.5, 10.5),
        ("1W0", 10.5, 13.5),
    ]
    assert [(span.start, span.stop) for span in timeline.ranks[0]] == [(0, 1), (1, 2), (5, 7), (11, 13)]
    assert timeline.makespan == 13.5
    assert timeline.bubble == pytest.approx(1.5)
    assert timeline.idle_inside(1) == 0.0
    assert timeline.bubble_fraction == pytest.approx(1 - 18 / 27)


def test_a_deadlock_cannot_be_simulated() -> None:
    """It is an error that names where the ranks stop."""
    with pytest.raises(PluginError, match="stop before 0B0, 1B0"):
        simulate(PLACEMENT, (row("0B0 0F0"), row("1B0 1F0")), StageTimes.equal(PipelineShape(2, 1)))


def test_held_activations_are_counted_until_either_half() -> None:
    """A split backward keeps activations until its second half."""
    assert peak_activations(GOOD[1]) == 2
    assert peak_activations(GOOD[1], until=Work.INPUT) == 1


def test_placements_go_round_or_forth_and_back() -> None:
    """The two ways to put several stages on a rank."""
    shape = PipelineShape(3, 1, 2)

    assert loop_placement(shape) == (0, 1, 2, 0, 1, 2)
    assert v_placement(shape) == (0, 1, 2, 2, 1, 0)


def test_sizes_and_times_are_checked() -> None:
    """Zero ranks and negative times mean nothing."""
    with pytest.raises(UsageError, match="num_microbatches 0"):
        PipelineShape(2, 0)
    with pytest.raises(UsageError, match="times for 1, 1 and 2 stages"):
        StageTimes(forward=(1.0,), inputs=(1.0,), weights=(1.0, 1.0))
