"""Zero-bubble schedules: backward in two halves, of which the second fills what would be bubbles.

The one idea: the stage before waits only for gradients of activations, so those of weights can be computed
whenever the rank has nothing better to do.

Source: Qi et al., *Zero Bubble Pipeline Parallelism*, 2024 (arXiv 2401.10241); *Pipeline Parallelism with
Controllable Memory*, 2024 (arXiv 2405.15362) for the V.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, final

from colossal_core.interfaces.schedule import AbstractSchedule
from colossal_core.schedule import Action, Work, v_placement

if TYPE_CHECKING:
    from colossal_core.schedule import PipelineShape

__all__ = ["ZeroBubbleH1", "ZeroBubbleV"]


@final
class ZeroBubbleH1(AbstractSchedule):
    """1F1B in which weight gradients of rank s lag s micro-batches behind; memory as rank 0 of 1F1B."""

    def actions(self, shape: PipelineShape) -> tuple[tuple[Action, ...], ...]:
        """Return 1F1B with split backward; what lags behind comes at the end."""
        total = shape.num_microbatches
        rows = []
        for rank in range(shape.degree):
            warm_up = min(total, shape.degree - 1 - rank)
            row = [Action(Work.FORWARD, rank, number) for number in range(warm_up)]
            for number in range(total):
                if warm_up + number < total:
                    row.append(Action(Work.FORWARD, rank, warm_up + number))
                row.append(Action(Work.INPUT, rank, number))
                if number >= rank:
                    row.append(Action(Work.WEIGHT, rank, number - rank))
            late = range(max(0, total - rank), total)
            row.extend(Action(Work.WEIGHT, rank, number) for number in late)
            rows.append(tuple(row))
        return tuple(rows)

    def bounds(self, shape: PipelineShape) -> Sequence[int | None]:
        """Return min(m, p) for every rank."""
        return (min(shape.num_microbatches, shape.degree),) * shape.degree


@final
class ZeroBubbleV(AbstractSchedule):
    """Two stages on each rank, laid out as a V: the first rank has the first stage and the last one.

    With equal times of forward and of both halves of backward, no rank idles once it has begun. With
    fewer than 2p - 1 micro-batches, it is the schedule of that many without those that are not there.
    """

    chunks = 2

    def placement(self, shape: PipelineShape) -> tuple[int, ...]:
        """Return the V."""
        return v_placement(shape)

    def actions(self, shape: PipelineShape) -> tuple[tuple[Action, ...], ...]:
        """Return for each rank its part of the V."""
        total = max(2 * shape.degree - 1, shape.num_microbatches)
        return tuple(
            tuple(a for a in _v_row(shape, rank, total) if a.microbatch < shape.num_microbatches)
            for rank in range(shape.degree)
        )

    def bounds(self, shape: PipelineShape) -> Sequence[int | None]:
        """Return 2p activations of a stage, which are half a rank's share each."""
        return (min(2 * shape.num_microbatches, 2 * shape.degree),) * shape.degree


def _v_row(shape: PipelineShape, rank: int, total: int) -> list[Action]:
    """Return the actions of one rank for at least 2p - 1 micro-batches.

    A name's digit is the rank's stage: 0 on the way down the V, 1 on the way up.
    """
    above, below = rank, shape.degree - rank  # ranks on either side, this one counted below
    names = ["F0"] * (2 * below - 1) + ["F1", "F0"] * above + ["F1", "I1", "W1"] * below
    for number in range(total - shape.degree):
        if number <= total - shape.degree - below:
            names.append("F0")
        names += ["I0", "W0", "F1", "I1", "W1"]
    names += ["I0", "I1"] * above + ["I0", "W0"] * below + ["W1"] * above + ["W0"] * above
    stages = {"0": rank, "1": shape.num_stages - 1 - rank}
    microbatches: dict[str, Iterator[int]] = {name: itertools.count() for name in set(names)}
    return [Action(Work(name[0]), stages[name[1]], next(microbatches[name])) for name in names]
