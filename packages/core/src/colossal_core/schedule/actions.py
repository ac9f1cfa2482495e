"""The words of a schedule: actions, the shape of a pipeline, and where its stages live.

The one idea: a schedule is one list of computations for each rank. What has to be sent follows from the
lists, since a stage needs what the one before it computed, so generators say nothing about messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import final

from attrs import frozen

from colossal_core.errors import UsageError

__all__ = ["Action", "PipelineShape", "Work", "loop_placement", "needs_of", "v_placement"]


@final
class Work(Enum):
    """What a stage computes for one micro-batch; the values are the letters of pictures."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward."""
    INPUT = "I"
    """The half of backward that the stage before waits for: gradients of what came in."""
    WEIGHT = "W"
    """The other half: gradients of weights."""


@final
@frozen
class Action:
    """One computation of a rank.

    Attributes:
        work: What is computed.
        stage: On which stage, counted in the order of the model.
        microbatch: For which micro-batch.
    """

    work: Work
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """Return ``"2F5"``: stage 2, forward, micro-batch 5."""
        return f"{self.stage}{self.work.value}{self.microbatch}"


@final
@frozen
class PipelineShape:
    """How large a pipeline is.

    Attributes:
        degree: Number of ranks, at least 1.
        num_microbatches: Micro-batches of one step, at least 1; fewer than ranks are allowed.
        chunks: Stages on each rank, at least 1.
    """

    degree: int
    num_microbatches: int
    chunks: int = 1

    def __attrs_post_init__(self) -> None:
        """Refuse sizes below 1."""
        for name in ("degree", "num_microbatches", "chunks"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"a pipeline has {name} {getattr(self, name)}", hint="each of its sizes is at least 1"
                )

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.degree * self.chunks


def loop_placement(shape: PipelineShape) -> tuple[int, ...]:
    """Return the rank of each stage where stages go round the ranks: 0 1 2 0 1 2."""
    return tuple(stage % shape.degree for stage in range(shape.num_stages))


def v_placement(shape: PipelineShape) -> tuple[int, ...]:
    """Return the rank of each stage where stages go forth and back: 0 1 2 2 1 0."""
    forth = list(range(shape.degree))
    turns: Iterable[list[int]] = (forth if chunk % 2 == 0 else forth[::-1] for chunk in range(shape.chunks))
    return tuple(rank for turn in turns for rank in turn)


def needs_of(action: Action, num_stages: int) -> Iterator[tuple[Action, ...]]:
    """Yield what has to be done before an action; of the actions in one tuple, one is enough."""
    stage, microbatch = action.stage, action.microbatch
    if action.work is Work.FORWARD:
        if stage > 0:
            yield (Action(Work.FORWARD, stage - 1, microbatch),)
    elif action.work is Work.WEIGHT:
        yield (Action(Work.INPUT, stage, microbatch),)
    else:
        yield (Action(Work.FORWARD, stage, microbatch),)
        if stage < num_stages - 1:
            yield tuple(Action(work, stage + 1, microbatch) for work in (Work.BACKWARD, Work.INPUT))
