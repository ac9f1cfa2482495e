"""1F1B and its form with several stages on each rank.

The one idea: after a warm-up that fills the pipeline, each rank runs one backward for each forward, so that
activations stop growing.

Sources: Narayanan et al., *PipeDream-flush*, 2021 (arXiv 2006.09503); *Efficient Large-Scale Language Model
Training*, 2021 (arXiv 2104.04473), section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from colossal_core.interfaces.schedule import AbstractSchedule
from colossal_core.schedule import Action, Work

if TYPE_CHECKING:
    from colossal_core.schedule import PipelineShape

__all__ = ["Interleaved", "OneForwardOneBackward"]


def alternate(forward: Sequence[Action], backward: Sequence[Action], num_warm_up: int) -> tuple[Action, ...]:
    """Return a warm-up of forwards, then one forward and one backward in turn, then the other backwards.

    Args:
        forward: All forwards of a rank, in order.
        backward: All backwards, in order.
        num_warm_up: Forwards before the first pair.
    """
    row = list(forward[:num_warm_up])
    for one, other in zip(forward[num_warm_up:], backward, strict=False):
        row.extend((one, other))
    row.extend(backward[len(forward) - num_warm_up :])
    return tuple(row)


@final
class OneForwardOneBackward(AbstractSchedule):
    """Rank s of p holds the activations of at most p - s micro-batches."""

    def actions(self, shape: PipelineShape) -> tuple[tuple[Action, ...], ...]:
        """Return p - 1 - s forwards, one forward and one backward in turn, then the other backwards."""
        microbatches = range(shape.num_microbatches)
        rows = []
        for rank in range(shape.degree):
            forward = [Action(Work.FORWARD, rank, number) for number in microbatches]
            backward = [Action(Work.BACKWARD, rank, number) for number in microbatches]
            rows.append(alternate(forward, backward, min(len(microbatches), shape.degree - 1 - rank)))
        return tuple(rows)

    def bounds(self, shape: PipelineShape) -> Sequence[int | None]:
        """Return min(m, p - s) for rank s."""
        return [min(shape.num_microbatches, shape.degree - rank) for rank in range(shape.degree)]


@final
class Interleaved(AbstractSchedule):
    """Several stages on each rank, so that the bubble shrinks by their number, and messages multiply by it.

    Micro-batches go through a rank's stages in rounds of p. Where p does not divide their number, it is the
    schedule of the next multiple of p without those that are not there: a round that is merely shorter
    would come to a deadlock.
    """

    chunks = None

    def actions(self, shape: PipelineShape) -> tuple[tuple[Action, ...], ...]:
        """Return a warm-up of 2(p - s - 1) + (v - 1)p forwards, then forwards and backwards in turn."""
        degree, chunks, total = shape.degree, shape.chunks, shape.num_microbatches
        rounds = [range(first, first + degree) for first in range(0, total, degree)]
        rows = []
        for rank in range(degree):
            stages = [rank + chunk * degree for chunk in range(chunks)]
            forward = [Action(Work.FORWARD, stage, m) for turn in rounds for stage in stages for m in turn]
            backward = [
                Action(Work.BACKWARD, stage, m) for turn in rounds for stage in reversed(stages) for m in turn
            ]
            row = alternate(forward, backward, min(len(forward), _warm_up(shape, rank)))
            rows.append(tuple(action for action in row if action.microbatch < total))
        return tuple(rows)

    def bounds(self, shape: PipelineShape) -> Sequence[int | None]:
        """Return one more than the warm-up, and no more than there are."""
        most = shape.num_microbatches * shape.chunks
        return [min(most, _warm_up(shape, rank) + 1) for rank in range(shape.degree)]


def _warm_up(shape: PipelineShape, rank: int) -> int:
    """Return the forwards of a rank before its first backward, less one."""
    if shape.chunks == 1:
        return shape.degree - 1 - rank
    return 2 * (shape.degree - rank - 1) + (shape.chunks - 1) * shape.degree
