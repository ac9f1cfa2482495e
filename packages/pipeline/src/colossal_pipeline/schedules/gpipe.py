"""GPipe: all forwards, then all backwards.

Source: Huang et al., *GPipe*, 2018 (arXiv 1811.06965).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from colossal_core.interfaces.schedule import AbstractSchedule
from colossal_core.schedule import Action, Work

if TYPE_CHECKING:
    from colossal_core.schedule import PipelineShape

__all__ = ["GPipe"]


@final
class GPipe(AbstractSchedule):
    """Each stage runs forward for all micro-batches before the first backward.

    With several chunks a rank runs its first stage for all micro-batches, then its second. It holds
    the activations of all micro-batches.
    """

    chunks = None

    def actions(self, shape: PipelineShape) -> tuple[tuple[Action, ...], ...]:
        """Return forwards stage by stage, then backwards from the last stage."""
        microbatches = range(shape.num_microbatches)
        rows = []
        for rank in range(shape.degree):
            stages = range(rank, shape.num_stages, shape.degree)
            forward = [Action(Work.FORWARD, stage, number) for stage in stages for number in microbatches]
            backward = [
                Action(Work.BACKWARD, stage, number) for stage in reversed(stages) for number in microbatches
            ]
            rows.append((*forward, *backward))
        return tuple(rows)

    def bounds(self, shape: PipelineShape) -> Sequence[int | None]:
        """Return all of them."""
        return (shape.num_microbatches * shape.chunks,) * shape.degree
