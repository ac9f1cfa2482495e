"""Where to cut a model so that its slowest stage is as fast as possible and every rank's memory suffices.

The one idea: times and bytes are measured on the machine that will run the model
(:mod:`~colossal_pipeline.measuring`), and the schedule says for how many micro-batches a rank holds
activations at once; what remains is exact (:mod:`~colossal_pipeline.partition`).

# Note [Memory of a rank]
A rank holds for each element of its parameters a value, a gradient and what the optimizer keeps, and for each
of its stages what forward keeps, for as many micro-batches as its schedule holds. Messages on their way and
what an operation needs for a moment come on top. With several stages on a rank each gets an equal part of
the limit, which is safe and a little strict.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from attrs import evolve, frozen

from colossal_core.errors import UsageError
from colossal_core.schedule import PipelineShape, peak_activations
from colossal_pipeline.finding import find_schedule
from colossal_pipeline.partition import Starts, cut_by, cut_evenly

if TYPE_CHECKING:
    from torch import nn

    from colossal_core.interfaces import AbstractSchedule
    from colossal_pipeline.measuring import Criterion, Measured
    from colossal_pipeline.options import Pipeline

__all__ = ["Fit", "choose", "fit_model"]


@final
@frozen(kw_only=True)
class Fit:
    """A cut, and what it is expected to cost.

    Attributes:
        piece: The options with the cut in ``balance``: give them to the Booster.
        items: What was measured, in the order of forward.
        seconds: For each stage, forward and backward of one micro-batch.
        rank_bytes: For each rank along the axis, parameters with all that belongs to them, and activations.
    """

    piece: Pipeline
    items: tuple[Measured, ...]
    seconds: tuple[float, ...]
    rank_bytes: tuple[int, ...]

    def __str__(self) -> str:
        """Return a table of stages."""
        begins = (self.items[0].name, *map(str, self.piece.balance))
        lines = [
            f"stage {stage} from {name!r}: {1e3 * seconds:.2f} ms for a micro-batch"
            for stage, (name, seconds) in enumerate(zip(begins, self.seconds, strict=True))
        ]
        lines += [f"rank {rank}: {held / 2**20:.1f} MiB" for rank, held in enumerate(self.rank_bytes)]
        return "\n".join(lines)


def fit_model(
    piece: Pipeline,
    model: nn.Module,
    batch: Any,
    criterion: Criterion,
    *,
    limit_bytes: int | None,
    element_bytes: int,
) -> Fit:
    """Measure a model and cut it; see :meth:`colossal_pipeline.Pipeline.fit`."""
    # Here, since choosing a cut needs no torch.
    from colossal_core.plugins import Registry
    from colossal_pipeline.measuring import measure_items
    from colossal_pipeline.probing import look_at

    schedule = find_schedule(Registry.discover(), piece.schedule)
    measured = _agree(lambda: measure_items(model, look_at(model).items, batch, criterion))
    return choose(piece, measured, schedule, limit_bytes=limit_bytes, element_bytes=element_bytes)


def _agree(measure: Callable[[], tuple[Measured, ...]]) -> tuple[Measured, ...]:
    """Measure on all ranks, and let the shortest time of each item count, so that all cut alike."""
    import torch.distributed as dist

    from colossal_core.runtime.agreement import Agreement
    from colossal_core.runtime.launch import rendezvous_store

    if not dist.is_initialized():
        return measure()
    agreement = Agreement(rendezvous_store(), dist.get_rank(), dist.get_world_size())
    found = agreement.attempt("fit", measure)
    texts = agreement.share("fit", json.dumps([item.seconds for item in found]))
    columns = zip(*map(json.loads, texts), strict=True)
    return tuple(evolve(item, seconds=min(column)) for item, column in zip(found, columns, strict=True))


def choose(
    piece: Pipeline,
    items: Sequence[Measured],
    schedule: AbstractSchedule,
    *,
    limit_bytes: int | None = None,
    element_bytes: int = 16,
) -> Fit:
    """Return the best cut of measured items.

    Args:
        piece: The options.
        items: What was measured.
        schedule: The schedule of these options.
        limit_bytes: What a rank may hold, or None.
        element_bytes: What it holds for each element of its parameters.

    Raises:
        UsageError: There are fewer items than stages, or no cut fits.
    """
    shape = PipelineShape(piece.degree, piece.microbatches, piece.chunks)
    placement = schedule.placement(shape)
    rows = schedule.actions(shape)
    held = [
        peak_activations([action for action in rows[placement[stage]] if action.stage == stage])
        for stage in range(shape.num_stages)
    ]

    def count(stage: int, start: int, stop: int) -> float:
        return float(_stage_bytes(items[start:stop], held[stage], element_bytes))

    allowed = math.inf if limit_bytes is None else limit_bytes / piece.chunks
    _, least = cut_by(count, len(items), shape.num_stages)
    if least > allowed:
        raise UsageError(
            f"a rank may hold {limit_bytes} bytes, and no cut into {shape.num_stages} stages needs less than "
            f"{math.ceil(least * piece.chunks)} on some rank: {element_bytes} for each element of its "
            f"parameters, and activations of up to {max(held)} micro-batches of this size",
            hint="use more stages, smaller or fewer micro-batches, recompute, or zero1",
        )
    starts = cut_evenly(
        [item.seconds for item in items],
        shape.num_stages,
        fits=lambda stage, start, stop: count(stage, start, stop) <= allowed,
    )
    ends = (*starts[1:], len(items))
    parts = [items[start:stop] for start, stop in zip(starts, ends, strict=True)]
    ranks = [0] * piece.degree
    for stage, part in enumerate(parts):
        ranks[placement[stage]] += _stage_bytes(part, held[stage], element_bytes)
    return Fit(
        piece=evolve(piece, balance=_begins(items, starts)),
        items=tuple(items),
        seconds=tuple(sum(item.seconds for item in part) for part in parts),
        rank_bytes=tuple(ranks),
    )


def _begins(items: Sequence[Measured], starts: Starts) -> tuple[str, ...]:
    """Return the names of the first items of all stages but the first."""
    return tuple(items[start].name for start in starts[1:])


def _stage_bytes(items: Sequence[Measured], held: int, element_bytes: int) -> int:
    """Return what a stage holds; see Note [Memory of a rank]."""
    parameters: Mapping[str, int] = {
        name: elements for item in items for name, elements in item.parameters.items()
    }
    kept = sum(item.kept_bytes for item in items)
    return sum(parameters.values()) * element_bytes + held * kept
