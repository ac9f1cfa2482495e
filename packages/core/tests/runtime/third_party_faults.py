"""Strategies that break a promise, one each, and two that bring an executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from attrs import evolve
from torch import nn

from colossal_core.boxes import Box
from colossal_core.errors import UsageError
from colossal_core.interfaces import AbstractExecutor, AbstractMemoryManager, AbstractStrategy, Proposal
from colossal_core.mesh import GroupSpec, MeshLayout
from colossal_core.plugins import AxisSpec, Finding, StrategySpec
from colossal_core.runtime.context import Context
from colossal_core.runtime.table import Key, Part
from colossal_testkit.registry import target_of

from .third_party_cuts import slab

if TYPE_CHECKING:
    from colossal_core.plan import Plan

__all__ = ["FAULTY", "MICRO_BATCHES", "OTHER_EXECUTOR", "Faulty"]


@attrs.frozen(kw_only=True)
class Faulty:
    """Options: which promise is broken."""

    fault: str
    degree: int = 2


class FaultyStrategy(AbstractStrategy):
    """Cuts the rows of ``up.weight`` of every model over ``tensor``; the model is not meant to run."""

    def __init__(self, options: Faulty) -> None:
        self.fault = options.fault

    def propose(self, models: Mapping[str, nn.Module], plan: Plan, layout: MeshLayout, rank: int) -> Proposal:
        """Propose the cut, or something that cannot be."""
        if self.fault == "propose raises on rank 1" and rank == 1:
            raise UsageError("13 heads do not divide among 2 ranks", hint="choose another degree")
        parts = [self._part(module, layout, rank) for module in models.values()]
        cuts: dict[Key, tuple[Part, ...]] = {
            (model, self._name()): (part,) for model, part in zip(models, parts, strict=True)
        }
        groups = [GroupSpec(("tensor",)), GroupSpec(("data",))]
        if self.fault == "groups differ" and rank == 1:
            groups.reverse()
        findings = []
        if self.fault == "finding":
            findings.append(
                Finding(severity="error", code="T001", message="heads are odd", hint="even heads")
            )
        if self.fault == "nothing proposed":
            cuts = {}
        return Proposal(cuts=cuts, groups=tuple(groups), findings=tuple(findings))

    def apply(self, models: Mapping[str, nn.Module], proposal: Proposal, context: Context) -> None:
        """Cut, or do something else."""
        if self.fault == "apply raises on rank 1" and context.mesh.rank == 1:
            raise UsageError("13 rows do not divide among 2 ranks", hint="choose another degree")
        layout = context.mesh.layout
        for model, module in models.items():
            part = self._part(module, layout, context.mesh.rank)
            if self.fault == "holders without data":
                part = evolve(part, holders=GroupSpec())
            if self.fault == "beyond the tensor":
                part = evolve(part, box=Box((0, 0), (99, 1)))
            parameter = module.get_submodule("up").get_parameter("weight")
            parameter.data = parameter.detach()[part.box.slices].clone()
            context.table.cut((model, "up.weight"), parts=[part])

    def _name(self) -> str:
        """Return the name of what is cut."""
        return "up.weights" if self.fault == "unknown name" else "up.weight"

    def _part(self, module: nn.Module, layout: MeshLayout, rank: int) -> Part:
        """Return the rows of a rank."""
        shape = module.get_submodule("up").get_parameter("weight").shape
        index, each = layout.coordinates(rank)["tensor"], shape[0] // 2
        return slab(shape, {0: (index * each, (index + 1) * each)}, layout.without("tensor"))


@attrs.frozen(kw_only=True)
class MicroBatches:
    """Options: into how many pieces the batch of a rank is cut."""

    count: int = 2


class MicroBatchExecutor(AbstractExecutor):
    """Runs a backward for each micro-batch, and says which is the last; all have equally many samples."""

    def __init__(self, count: int, context: Context, manager: AbstractMemoryManager) -> None:
        self._count, self._context, self._manager = count, context, manager
        self._group = context.mesh.group(GroupSpec(("data",)))

    def run(
        self,
        model: nn.Module,
        batch: Any,
        criterion: Callable[..., torch.Tensor] | None,
        weight: Any = None,
        batch_dims: Mapping[str, int | None] | None = None,
    ) -> torch.Tensor:
        """Return the mean over all micro-batches of all ranks; gradients are those of it."""
        assert criterion is not None
        assert weight is None
        assert batch_dims is None
        inputs, target = batch
        pieces = list(zip(inputs.chunk(self._count), target.chunk(self._count), strict=True))
        with self._manager.hold():
            losses = [self._backward(model, criterion, piece) for piece in pieces[:-1]]
        losses.append(self._backward(model, criterion, pieces[-1]))
        mean = torch.stack(losses).mean() / self._group.size
        self._context.collectives.all_reduce(mean, self._group, phase="loss").wait()
        return mean.to(torch.float32)

    def evaluate(
        self,
        model: nn.Module,
        batch: Any,
        criterion: Callable[..., torch.Tensor] | None,
        *,
        wants_outputs: bool = True,
        batch_dims: Mapping[str, int | None] | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Not needed here."""
        raise NotImplementedError

    def _backward(
        self,
        model: nn.Module,
        criterion: Callable[..., torch.Tensor],
        piece: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Run forward and backward of one micro-batch."""
        loss = criterion(model(piece[0]), piece[1])
        with self._context.arrivals.weighed():
            (loss / self._count).backward()
        return loss.detach().double()


class MicroBatchesStrategy(AbstractStrategy):
    """Cuts nothing and brings an executor."""

    def __init__(self, options: MicroBatches) -> None:
        self.options = options

    def propose(self, models: Mapping[str, nn.Module], plan: Plan, layout: MeshLayout, rank: int) -> Proposal:
        """Propose nothing."""
        return Proposal()

    def apply(self, models: Mapping[str, nn.Module], proposal: Proposal, context: Context) -> None:
        """Change nothing."""

    def executor(self, context: Context, manager: AbstractMemoryManager) -> AbstractExecutor:
        """Return the executor."""
        return MicroBatchExecutor(self.options.count, context, manager)


FAULTY = StrategySpec(
    name="faulty",
    summary="A strategy of the tests.",
    options=target_of(Faulty),
    target=target_of(FaultyStrategy),
    axes=(AxisSpec(name="tensor"),),
    phase="shard",
)
MICRO_BATCHES, OTHER_EXECUTOR = (
    StrategySpec(
        name=name,
        summary="A strategy of the tests.",
        options=target_of(MicroBatches),
        target=target_of(MicroBatchesStrategy),
        phase="transform",
    )
    for name in ("micro-batches", "other-executor")
)
