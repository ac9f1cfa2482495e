"""In which order the stages of a pipeline compute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from colossal_core.schedule import loop_placement

if TYPE_CHECKING:
    from colossal_core.schedule import Action, PipelineShape

__all__ = ["AbstractSchedule"]


class AbstractSchedule(ABC):
    """Makes the lists of actions of a pipeline. Built without arguments; holds nothing; imports no torch.

    What it makes goes through :func:`colossal_core.schedule.check_schedule` before it runs.

    Attributes:
        chunks: Stages on each rank that it serves: a number, or None for any.
    """

    chunks: ClassVar[int | None] = 1

    def placement(self, shape: PipelineShape) -> tuple[int, ...]:
        """Return the rank of each stage; by default stages go round the ranks.

        Args:
            shape: The pipeline.
        """
        return loop_placement(shape)

    @abstractmethod
    def actions(self, shape: PipelineShape) -> tuple[tuple[Action, ...], ...]:
        """Return for each rank what it computes, in order; any number of micro-batches is served.

        Args:
            shape: The pipeline; its chunks are as :attr:`chunks` says.
        """

    def bounds(self, shape: PipelineShape) -> Sequence[int | None]:
        """Return for each rank how many activations it holds at most, or None where nothing is promised.

        An activation is that of one stage for one micro-batch, from its forward to the end of its backward.

        Args:
            shape: The pipeline.
        """
        return (None,) * shape.degree
