"""The strategy ``pipeline``: deals the items of each model to stages, and lets go of what others hold.

The one idea: a parameter lives with the module that uses it. Tied weights are held by the ranks of all
modules that use them, parameters outside of all modules that run by every rank; each of these computes a
share of the gradient, which is what the table calls ``sum_over``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import nn

from colossal_core.errors import CapabilityError, UsageError
from colossal_core.interfaces import AbstractStrategy, Proposal
from colossal_core.mesh import GroupSpec
from colossal_core.pieces import Replicated
from colossal_core.runtime.table import Part, whole_part
from colossal_core.schedule import PipelineShape, check_schedule
from colossal_pipeline.costs import costs_of
from colossal_pipeline.cut_model import CutModel
from colossal_pipeline.executor import PipelineExecutor
from colossal_pipeline.finding import find_schedule
from colossal_pipeline.partition import cut_evenly, starts_of_blocks, starts_of_names
from colossal_pipeline.probing import Look, look_at
from colossal_pipeline.routes import stages_of_calls
from colossal_pipeline.transport import AXIS

if TYPE_CHECKING:
    from colossal_core.interfaces import AbstractMemoryManager, AbstractSchedule
    from colossal_core.mesh import MeshLayout
    from colossal_core.plan import Plan
    from colossal_core.plugins import Registry
    from colossal_core.runtime.context import Context
    from colossal_core.runtime.table import Key
    from colossal_pipeline.options import Pipeline

__all__ = ["PipelineStrategy", "stages_of"]


@final
class PipelineStrategy(AbstractStrategy):
    """Cuts models along the axis ``pipeline``."""

    def __init__(self, options: Pipeline) -> None:
        """Remember the options; see :class:`colossal_pipeline.Pipeline`."""
        self.options = options
        self._schedule: AbstractSchedule | None = None
        self._stages: dict[str, dict[str, int]] = {}
        self._holders: dict[str, dict[str, frozenset[int]]] = {}
        self._cut: dict[nn.Module, CutModel] = {}

    def connect(self, registry: Registry) -> None:
        """Find the schedule.

        Raises:
            UnknownNameError: There is none of that name.
            PluginError: It is something else, or cannot run.
            UsageError: It does not serve that many chunks.
        """
        self._schedule = schedule = find_schedule(registry, self.options.schedule)
        if schedule.chunks not in {None, self.options.chunks}:
            raise UsageError(
                f"schedule {self.options.schedule!r} puts {schedule.chunks} stages on each rank, "
                f"and chunks is {self.options.chunks}",
                hint=f"write Pipeline(schedule={self.options.schedule!r}, chunks={schedule.chunks}, ...)",
            )
        for number in range(1, self.options.microbatches + 1):
            shape = PipelineShape(self.options.degree, number, self.options.chunks)
            check_schedule(
                self.options.schedule,
                shape,
                schedule.placement(shape),
                schedule.actions(shape),
                bounds=schedule.bounds(shape),
            )

    def propose(self, models: Mapping[str, nn.Module], plan: Plan, layout: MeshLayout, rank: int) -> Proposal:
        """Deal items to stages; see :class:`~.interfaces.AbstractStrategy`.

        Raises:
            UsageError: A model has too few modules, or the options name what it does not have.
            CapabilityError: The plan holds what does not go together with it yet.
        """
        self._check_plan(plan)
        here = layout.coordinates(rank)[AXIS]
        placement = self._placement()
        cuts: dict[Key, tuple[Part, ...]] = {}
        for name, model in models.items():
            if any("OptimizedModule" in type(module).__name__ for module in model.modules()):
                raise CapabilityError(
                    f"model {name!r} holds compiled modules, which do not run under a pipeline yet",
                    hint="leave torch.compile out",
                )
            look = look_at(model)
            self._stages[name] = stages = stages_of(look, self.options)
            calls = () if look.flow is None else stages_of_calls(look.flow, stages)
            computed = _computed_on(look, stages, calls)
            found = self._ranks_of(model, look, computed, calls, placement)
            self._holders[name] = {
                path: frozenset(stage for stage, owner in enumerate(placement) if owner in ranks)
                for path, ranks in found.items()
            }
            for path, tensor in (*model.named_parameters(), *model.named_buffers()):
                ranks = found.get(path)
                if ranks is not None:
                    part = _part(tensor, ranks, layout)
                    cuts[name, path] = (part,) if here in ranks else ()
        return Proposal(cuts=cuts, groups=(GroupSpec((AXIS,)),))

    def apply(self, models: Mapping[str, nn.Module], proposal: Proposal, context: Context) -> None:
        """Let go of what other ranks hold, and refuse calls of the models."""
        for key, parts in proposal.cuts.items():
            tensor = context.table.tensor(context.table[key])
            if not parts and isinstance(tensor, nn.Parameter):
                if tensor.is_meta:
                    empty = nn.Parameter(torch.empty(0, device="meta"), requires_grad=tensor.requires_grad)
                    torch.utils.swap_tensors(tensor, empty)
                else:
                    tensor.data = tensor.detach().new_empty(0)
            context.table.cut(key, parts=parts)
        for name, model in models.items():
            cut = CutModel(
                model,
                self._stages[name],
                self._holders[name],
                context,
                keeps_forms=self.options.flow == "shapes",
            )
            self._cut[model] = cut
            # The hook stays after release(): what is left here is no whole model.
            model.register_forward_pre_hook(cut.refuse_calls, prepend=True)

    def executor(self, context: Context, manager: AbstractMemoryManager) -> PipelineExecutor:
        """Return the executor."""
        assert self._schedule is not None
        return PipelineExecutor(context, manager, self._cut, self._schedule, self.options)

    def _placement(self) -> tuple[int, ...]:
        """Return the rank of each stage, along the axis."""
        assert self._schedule is not None
        shape = PipelineShape(self.options.degree, self.options.microbatches, self.options.chunks)
        return self._schedule.placement(shape)

    def _check_plan(self, plan: Plan) -> None:
        """Refuse what does not go together."""
        assert self._schedule is not None
        if self.options.degree > 1 and plan.memory.options == Replicated(reduce="backward"):
            raise CapabilityError(
                "Replicated(reduce='backward') averages inside of the last backward of a rank, while other "
                "stages of a pipeline still wait for its messages",
                hint="leave reduce out, and read gradients in booster.full_gradients(model)",
            )

    def _ranks_of(
        self,
        model: nn.Module,
        look: Look,
        computed: Mapping[str, frozenset[int]],
        calls: Sequence[int],
        placement: Sequence[int],
    ) -> dict[str, frozenset[int]]:
        """Return which ranks hold each parameter, and each buffer of an item, by all its names."""
        everyone = frozenset(placement)
        names: dict[torch.Tensor, list[str]] = {}
        ranks: dict[torch.Tensor, frozenset[int]] = {}
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            names.setdefault(tensor, []).append(name)
        reads = _read_outside(look, calls, last=len(placement) - 1)
        called = None if look.flow is None else {call.item for call in look.flow.calls}
        for item in look.items:
            owners = frozenset(placement[stage] for stage in computed[item.name])
            for tensor in (*item.module.parameters(), *item.module.buffers()):
                is_read = any(name in reads for name in names[tensor])
                if called is not None and item.name not in called and is_read:
                    continue  # nobody but code outside needs it
                ranks[tensor] = ranks.get(tensor, frozenset()) | owners
        for tensor, paths in names.items():
            readers = frozenset(placement[stage] for path in paths for stage in reads.get(path, ()))
            if readers:
                ranks[tensor] = ranks.get(tensor, frozenset()) | readers
        known = {name for paths in names.values() for name in paths}
        for wanted in self.options.everywhere:
            if wanted not in known:
                raise UsageError(
                    f"everywhere names {wanted!r}, which is no parameter of {type(model).__name__}",
                    hint="see named_parameters()",
                )
        found: dict[str, frozenset[int]] = {}
        for tensor, paths in names.items():
            is_loose = isinstance(tensor, nn.Parameter) and tensor not in ranks
            if is_loose or any(path in self.options.everywhere for path in paths):
                ranks[tensor] = everyone
            if tensor in ranks:
                found.update(dict.fromkeys(paths, ranks[tensor]))
        return found


def stages_of(look: Look, options: Pipeline) -> dict[str, int]:
    """Return the stage of each item.

    Args:
        look: What is known of the model.
        options: Number of stages, and how to balance them.

    Raises:
        UsageError: There are too few, or the user's list does not fit.
    """
    items = look.items
    names = [item.name for item in items]
    balance = options.balance
    if isinstance(balance, tuple):
        blocks = [number for number in balance if isinstance(number, int)]
        begins = [name for name in balance if isinstance(name, str)]
        starts = (
            starts_of_blocks([item.is_block for item in items], blocks)
            if blocks
            else starts_of_names(names, begins, options.num_stages)
        )
    else:
        starts = cut_evenly(costs_of(items, balance, look.flow), options.num_stages)
    ends = (*starts[1:], len(items))
    return {
        names[index]: stage
        for stage, (start, stop) in enumerate(zip(starts, ends, strict=True))
        for index in range(start, stop)
    }


def _computed_on(look: Look, stages: Mapping[str, int], calls: Sequence[int]) -> dict[str, frozenset[int]]:
    """Return the stages that compute each item.

    Args:
        look: What is known of the model.
        stages: Stage of each item.
        calls: Stage of each call, where calls are known.

    Raises:
        CapabilityError: Several stages would count batch statistics of one module.
    """
    found: dict[str, set[int]] = {}
    if look.flow is not None:
        for call, stage in zip(look.flow.calls, calls, strict=True):
            found.setdefault(call.item, set()).add(stage)
    for item in look.items:
        counts = any(getattr(module, "track_running_stats", False) for module in item.module.modules())
        if counts and len(found.get(item.name, ())) > 1:
            raise CapabilityError(
                f"{item.name!r} is called on stages {sorted(found[item.name])}, and counts the batches that "
                "it sees, which no stage sees all of",
                hint="use a module without running statistics there, or keep both calls on one stage with "
                "Pipeline(balance=[...])",
            )
    return {item.name: frozenset(found.get(item.name, {stages[item.name]})) for item in look.items}


def _read_outside(look: Look, calls: Sequence[int], *, last: int) -> dict[str, set[int]]:
    """Return which stages have code between modules that reads a parameter, by the parameter's name."""
    found: dict[str, set[int]] = {}
    if look.flow is not None:
        for call, stage in zip(look.flow.calls, calls, strict=True):
            for name in call.parameters:
                found.setdefault(name, set()).add(stage)
        for name in look.flow.parameters:
            found.setdefault(name, set()).add(last)
    return found


def _part(tensor: torch.Tensor, ranks: frozenset[int], layout: MeshLayout) -> Part:
    """Return the part of a tensor that some ranks along the axis hold whole."""
    own = layout.without(AXIS)
    sharers = GroupSpec((AXIS,), (tuple((rank,) for rank in sorted(ranks)),))
    if len(ranks) == 1:
        return whole_part(tensor.shape, own)
    part = whole_part(tensor.shape, layout.product([own, sharers]))
    if not isinstance(tensor, nn.Parameter):
        return part
    return Part(box=part.box, local=part.local, holders=part.holders, sum_over=sharers)
