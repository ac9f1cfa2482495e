"""Running steps and evaluations of models that are cut into stages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from colossal_core.interfaces import AbstractExecutor
from colossal_core.mesh import GroupSpec
from colossal_core.runtime.agreement import Agreement
from colossal_core.runtime.launch import rendezvous_store
from colossal_core.runtime.swapping import evaluating
from colossal_core.schedule import PipelineShape, Span
from colossal_pipeline.step import Gear, Step
from colossal_pipeline.timeline import Recording
from colossal_pipeline.transport import AXIS, CHANNELS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from colossal_core.interfaces import AbstractMemoryManager, AbstractSchedule
    from colossal_core.runtime.batches import BatchDims, Weight
    from colossal_core.runtime.context import Context
    from colossal_pipeline.cut_model import CutModel
    from colossal_pipeline.options import Pipeline
    from colossal_pipeline.step import Criterion

__all__ = ["PipelineExecutor"]


@final
class PipelineExecutor(AbstractExecutor):
    """Runs steps of cut models along a schedule."""

    def __init__(
        self,
        context: Context,
        manager: AbstractMemoryManager,
        models: Mapping[nn.Module, CutModel],
        schedule: AbstractSchedule,
        options: Pipeline,
    ) -> None:
        """Make the groups; collective.

        Args:
            context: Mesh, table, collectives and plan.
            manager: Is told that several backward passes follow each other.
            models: What was cut, by model.
            schedule: In which order stages compute.
            options: How large the pipeline is, and whether times of steps are written.
        """
        shape = PipelineShape(options.degree, options.microbatches, options.chunks)
        layout, mesh = context.mesh.layout, context.mesh
        for channel in CHANNELS:
            mesh.group(GroupSpec((AXIS,)), channel)
        batch_axes = tuple(axis.name for axis in layout.axes if axis.divides_batch)
        self._models = dict(models)
        self._degree = layout.gradient_divisor
        self._gear = Gear(
            context=context,
            manager=manager,
            agreement=Agreement(rendezvous_store(), mesh.rank, layout.world_size),
            line=mesh.group(GroupSpec((AXIS,))),
            everyone=mesh.group(GroupSpec((*batch_axes, AXIS))),
            schedule=schedule,
            shape=shape,
            placement=schedule.placement(shape),
            anchor=torch.zeros((), requires_grad=True),
            timeline=None if options.timeline is None else Path(options.timeline),
            splits=all(piece.record.name != "recompute" for piece in context.plan.strategies),
        )
        self._name = options.schedule

    def run(
        self,
        model: nn.Module,
        batch: Any,
        criterion: Criterion,
        weight: Weight = None,
        batch_dims: BatchDims = None,
    ) -> torch.Tensor:
        """Run forward and backward; see :class:`~colossal_core.interfaces.AbstractExecutor`.

        Raises:
            ColossalError: The batch, the criterion or the loss is not as documented, or a stage cannot go on.
            RankMismatchError: It is so on another rank.
        """
        cut = self._models[model]
        step = Step(self._gear, cut, criterion, trains=True, wants_outputs=False)
        share, total = step.prepare(batch, weight, batch_dims)
        self._gear.context.weights.rule = share.rule
        ratio = self._gear.context.weights.ratio(total)
        factor = self._degree * self._gear.context.arrivals.scale * (1.0 if ratio is None else float(ratio))
        try:
            with self._gear.context.arrivals.weighed():
                loss = step.play(share, float(total), factor)
        except Exception:
            self._gear.context.weights.forget()
            self._gear.manager.drop_gradients()
            raise
        if self._gear.timeline is not None:
            self._write(step, len(share.microbatches), self._gear.timeline)
        return loss

    def _write(self, step: Step, num_microbatches: int, path: Path) -> None:
        """Collect the times of a step along the first pipeline, and write them; collective along each."""
        gear = self._gear
        rows = gear.actions(num_microbatches, trains=True)
        mine = torch.zeros(max(map(len, rows)), 2, dtype=torch.float64, device=gear.context.mesh.device)
        mine[: len(step.spans)] = torch.tensor(step.spans, dtype=torch.float64)
        every = mine.new_empty(gear.line.size, *mine.shape)
        gear.context.collectives.all_gather(every, mine, gear.line, phase="timeline").wait()
        if gear.context.mesh.rank != 0:
            return
        ranks = tuple(
            tuple(Span(action, *times) for action, times in zip(row, found, strict=False))
            for row, found in zip(rows, every.tolist(), strict=True)
        )
        Recording(schedule=self._name, placement=gear.placement, ranks=ranks).write(path)

    def evaluate(
        self,
        model: nn.Module,
        batch: Any,
        criterion: Criterion,
        *,
        wants_outputs: bool = True,
        batch_dims: BatchDims = None,
    ) -> tuple[torch.Tensor, Any]:
        """Run forward in evaluation mode; see :class:`~colossal_core.interfaces.AbstractExecutor`.

        With outputs the batch is one micro-batch, so that they are what the model returns.
        """
        cut = self._models[model]
        with evaluating(model), torch.no_grad():
            step = Step(self._gear, cut, criterion, trains=False, wants_outputs=wants_outputs)
            share, total = step.prepare(batch, None, batch_dims)
            loss = step.play(share, float(total), 1.0)
            outputs = step.tell_outputs() if wants_outputs else None
        return loss, outputs
