"""The one validator of schedules: complete, ordered, free of deadlocks, and within their promise of memory.

The one idea: a schedule is right when it can be played. Each rank takes its actions in order; an action
waits for what it needs from other stages; when nobody can go on before all is done, that is the deadlock,
and the actions at the front of the ranks' lists are its explanation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from colossal_core.errors import PluginError
from colossal_core.schedule.actions import Action, PipelineShape, Work, needs_of
from colossal_core.schedule.simulate import peak_activations

__all__ = ["check_schedule", "find_problems"]

SHOWN_PROBLEMS = 5
"""Problems listed in an error before the rest is counted."""


def check_schedule(
    name: str,
    shape: PipelineShape,
    placement: Sequence[int],
    actions: Sequence[Sequence[Action]],
    *,
    bounds: Sequence[int | None] | None = None,
) -> None:
    """Refuse a schedule with problems.

    Args:
        name: Of the schedule, for messages.
        shape: The pipeline.
        placement: Rank of each stage.
        actions: For each rank, what it computes in order.
        bounds: For each rank, how many activations it may hold at once, or None.

    Raises:
        PluginError: Listing the problems of :func:`find_problems`.
    """
    problems = find_problems(shape, placement, actions, bounds=bounds)
    if problems:
        rest = len(problems) - SHOWN_PROBLEMS
        shown = "; ".join(problems[:SHOWN_PROBLEMS]) + (f"; and {rest} more" if rest > 0 else "")
        raise PluginError(
            f"schedule {name!r} with {shape.degree} ranks, {shape.chunks} chunks and "
            f"{shape.num_microbatches} micro-batches cannot run: {shown}",
            hint="correct the schedule; find_problems() lists everything",
        )


def find_problems(
    shape: PipelineShape,
    placement: Sequence[int],
    actions: Sequence[Sequence[Action]],
    *,
    bounds: Sequence[int | None] | None = None,
) -> list[str]:
    """Return everything that is wrong with a schedule, in words; empty when it is right.

    Args:
        shape: The pipeline.
        placement: Rank of each stage.
        actions: For each rank, what it computes in order.
        bounds: For each rank, how many activations (of one stage for one micro-batch) it may hold at once
            between forward and the end of backward, or None for any number.
    """
    if len(placement) != shape.num_stages or not set(placement) <= set(range(shape.degree)):
        return [f"the placement {tuple(placement)} does not put {shape.num_stages} stages on ranks"]
    if len(actions) != shape.degree:
        return [f"there are {len(actions)} lists of actions for {shape.degree} ranks"]
    problems = [*_find_missing(shape, placement, actions)]
    if not problems:
        problems.extend(_find_deadlock(actions, shape.num_stages))
    for rank, bound in enumerate(bounds or ()):
        peak = peak_activations(actions[rank])
        if bound is not None and peak > bound:
            problems.append(f"rank {rank} holds {peak} activations at once, and promised at most {bound}")
    return problems


def _find_missing(
    shape: PipelineShape, placement: Sequence[int], actions: Sequence[Sequence[Action]]
) -> Iterator[str]:
    """Yield what is computed on a wrong rank, several times, or not at all."""
    for rank, row in enumerate(actions):
        for action in row:
            known = 0 <= action.stage < shape.num_stages
            if not known or not 0 <= action.microbatch < shape.num_microbatches:
                yield f"{action} is no stage or micro-batch of this pipeline"
            elif placement[action.stage] != rank:
                yield f"{action} is on rank {rank}, its stage on rank {placement[action.stage]}"
    counts = Counter(action for row in actions for action in row)
    for stage in range(shape.num_stages):
        for microbatch in range(shape.num_microbatches):
            found = {work: counts[Action(work, stage, microbatch)] for work in Work}
            whole = {Work.FORWARD: 1, Work.BACKWARD: 1, Work.INPUT: 0, Work.WEIGHT: 0}
            split = {Work.FORWARD: 1, Work.BACKWARD: 0, Work.INPUT: 1, Work.WEIGHT: 1}
            if found not in (whole, split):
                seen = ", ".join(f"{number} {work.value}" for work, number in found.items() if number)
                yield (
                    f"stage {stage} has {seen or 'nothing'} for micro-batch {microbatch}, "
                    "expected one F and either one B or one I and one W"
                )


def _find_deadlock(actions: Sequence[Sequence[Action]], num_stages: int) -> Iterator[str]:
    """Play the schedule, and yield who waits for what when nobody can go on."""
    positions = [0] * len(actions)
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(actions):
            while positions[rank] < len(row) and not _missing(row[positions[rank]], done, num_stages):
                done.add(row[positions[rank]])
                positions[rank] += 1
                moved = True
    for rank, row in enumerate(actions):
        if positions[rank] < len(row):
            action = row[positions[rank]]
            missing = ", ".join(map(str, _missing(action, done, num_stages)))
            yield f"rank {rank} stops before {action}, which waits for {missing}"


def _missing(action: Action, done: set[Action], num_stages: int) -> list[Action]:
    """Return what an action still waits for."""
    return [options[0] for options in needs_of(action, num_stages) if not done.intersection(options)]
