"""The strategy ``tensor-parallel``: what :mod:`~.planning` decided, proposed and carried out."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, final

import torch
from attrs import evolve
from torch import nn

from colossal_core.boxes import Box
from colossal_core.errors import CapabilityError
from colossal_core.interfaces import AbstractStrategy, Proposal
from colossal_core.mesh import GroupSpec, MeshLayout
from colossal_core.plugins.agreement import explain_disagreement
from colossal_core.runtime.replacement import check_replaceable, replace_module
from colossal_core.runtime.table import Key, Part
from colossal_tensor_parallel.borders import CutBorder, complete
from colossal_tensor_parallel.decisions import Decision, ModelPlan
from colossal_tensor_parallel.draws import Dice
from colossal_tensor_parallel.layers import OfTokens, Works
from colossal_tensor_parallel.planning import plan_model
from colossal_tensor_parallel.products import Entrance
from colossal_tensor_parallel.regions import stand_of, stand_of_unit, works_of
from colossal_tensor_parallel.spans import Split
from colossal_tensor_parallel.tokens import Lot
from colossal_tensor_parallel.tracing import own_parameters
from colossal_tensor_parallel.wires import Wire

if TYPE_CHECKING:
    from colossal_core.interfaces import AbstractBorder
    from colossal_core.plan import Plan
    from colossal_core.plugins import Registered, Registry
    from colossal_core.runtime.context import Context
    from colossal_tensor_parallel.options import TensorParallel

__all__ = ["TensorParallelStrategy"]

LARGE_SHARE = 0.1
"""Part of all matrix elements from which layers that stay whole are a warning."""

_logger = logging.getLogger(__name__)

_MISSING = object()

AXIS = "tensor"
TENSOR = GroupSpec((AXIS,))


@final
class TensorParallelStrategy(AbstractStrategy):
    """Cuts the layers of every model."""

    def __init__(self, options: TensorParallel) -> None:
        """Remember the options; see :class:`~colossal_tensor_parallel.TensorParallel`."""
        self.options = options
        self._policies: tuple[Registered, ...] = ()
        self._plans: weakref.WeakKeyDictionary[nn.Module, ModelPlan] = weakref.WeakKeyDictionary()
        self._entrances: dict[str, Entrance] = {}
        self._dice: dict[str, Dice] = {}
        self._serial: weakref.WeakKeyDictionary[nn.Module, list[tuple[nn.Module, str, Any]]] = (
            weakref.WeakKeyDictionary()
        )

    def connect(self, registry: Registry) -> None:
        """Take the sharding policies that plugins offer."""
        self._policies = registry.records("sharding_policy")

    def propose(self, models: Mapping[str, nn.Module], plan: Plan, layout: MeshLayout, rank: int) -> Proposal:
        """Plan each model and say what this rank will hold; see :class:`~.interfaces.AbstractStrategy`.

        Raises:
            UsageError: A pattern matches nothing or asks for what is wrong, or heads do not divide.
            CapabilityError: Nothing of a model can be cut.
        """
        cuts: dict[Key, tuple[Part, ...]] = {}
        seen: set[torch.Tensor] = set()
        for name, model in models.items():
            made = self._plan(model)
            for decision in made.decisions:
                if decision.split is None:
                    continue
                module = model.get_submodule(decision.name)
                check_replaceable([model], decision.name, module)
                for kind, dim in _cut_dims(decision, module):
                    tensor = module.get_parameter(kind)
                    if tensor not in seen:  # tied ones are cut once
                        seen.add(tensor)
                        parts = _parts(decision.split, tensor.shape, dim, rank, layout)
                        cuts[name, f"{decision.name}.{kind}"] = parts
            for unit in made.units:
                module = model.get_submodule(unit.name)
                check_replaceable([model], unit.name, module)
                for kind, (dim, split) in unit.splits.items():
                    shape = module.get_parameter(kind).shape
                    cuts[name, f"{unit.name}.{kind}"] = _parts(split, shape, dim, rank, layout)
            for piece in () if made.regions is None else made.regions.pieces:
                check_replaceable([model], piece, model.get_submodule(piece))
            for shared in made.shared:
                shape = model.get_parameter(shared).shape
                cuts[name, shared] = (_slab(shape, None, layout.everyone(), TENSOR),)
        return Proposal(cuts=cuts, groups=(TENSOR,))

    def apply(self, models: Mapping[str, nn.Module], proposal: Proposal, context: Context) -> None:
        """Cut the tensors, replace the layers, and scale the integers that count heads.

        Raises:
            RankMismatchError: Ranks planned differently.
        """
        lines = [f"{name}: {line}" for name, model in models.items() for line in self._plan(model).lines()]
        context.agreement.compare("the tensor-parallel plan", lines, explain_disagreement)
        if context.mesh.rank == 0:
            for name, model in models.items():
                _report(name, self._plan(model), model, context)
        for key, parts in proposal.cuts.items():
            _cut(key, parts, context)
        wire = Wire(collectives=context.collectives, group=context.mesh.group(TENSOR))
        if wire.group.size == 1:
            return
        for name, model in models.items():
            self._dice[name] = dice = Dice(wire.group.index)
            self._entrances[name] = Entrance(wire, Lot(wire, dice) if self.options.sequence else None)
            self._rewire(name, model, context)
        context.serial_views.append(self._serial_view)

    def borders(self, models: Mapping[str, nn.Module], context: Context) -> Mapping[str, AbstractBorder]:
        """Return what gathers logits that leave the models."""
        context.crossing.completions.append(complete)
        return {
            name: CutBorder(entrance, self._dice[name], context) for name, entrance in self._entrances.items()
        }

    @contextmanager
    def _serial_view(self, model: nn.Module) -> Iterator[None]:
        """Let a cut model compute as the serial one; see :class:`~colossal_core.runtime.context.Context`."""
        before: list[tuple[dict[str, Any], str, Any]] = []
        for module, name, value in self._serial.get(model, ()):
            state = vars(module)
            before.append((state, name, state.get(name, _MISSING)))
            state[name] = value
        try:
            yield
        finally:
            for state, name, value in reversed(before):
                if value is _MISSING:
                    del state[name]
                else:
                    state[name] = value

    def _plan(self, model: nn.Module) -> ModelPlan:
        """Return the plan of a model, made on first use."""
        if model not in self._plans:
            self._plans[model] = plan_model(
                model,
                self.options.degree,
                self.options.plan,
                sequence=self.options.sequence,
                policies=self._policies,
            )
        return self._plans[model]

    def _rewire(self, name: str, model: nn.Module, context: Context) -> None:
        """Replace the cut layers of a model, and change the integers around them."""
        made = self._plan(model)
        serial = self._serial[model] = []
        rank = self._entrances[name].wire.group.index
        for change in made.attributes:
            module = model.get_submodule(change.module)
            value = vars(module)[change.name]
            setattr(module, change.name, change.values[rank])
            serial.append((module, change.name, value))
            context.undo.append(_restore(module, change.name, value))
        _leave_fast_path(model, made, context)
        divided = set() if made.regions is None else set(made.regions.divided)
        for decision in made.decisions:
            if decision.split is None:
                continue
            module = model.get_submodule(decision.name)
            works = works_of(
                decision,
                module,
                self._entrances[name],
                self._dice[name],
                degree=self.options.degree,
                divides=decision.name in divided,
            )
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                local = module.padding_idx - works.first
                is_here = 0 <= local < module.get_parameter("weight").shape[0]
                context.undo.append(_restore(module, "padding_idx", module.padding_idx))
                serial.append((module, "padding_idx", module.padding_idx))
                vars(module)["padding_idx"] = local if is_here else None
            replacement = replace_module([model], decision.name, module, stand_of(decision), works)
            serial.append((replacement.new, "forward", MethodType(type(module).forward, replacement.new)))
            context.undo.append(replacement.undo)
        entrance = self._entrances[name]
        others = [(unit.name, *stand_of_unit(unit, entrance, self._dice[name])) for unit in made.units]
        pieces = () if made.regions is None else made.regions.pieces
        others += [(piece, OfTokens, Works(entrance=entrance, size=0, name=piece)) for piece in pieces]
        for path, kind, works in others:
            module = model.get_submodule(path)
            replacement = replace_module([model], path, module, kind, works)
            serial.append((replacement.new, "forward", MethodType(type(module).forward, replacement.new)))
            context.undo.append(replacement.undo)


def _leave_fast_path(model: nn.Module, made: ModelPlan, context: Context) -> None:
    """Keep torch's encoders with cut layers from their fast path; see Note [The fast path of encoders].

    It is taken when these attributes say that an encoder layer knows its activation, and that an encoder may
    remove padding for the layers.
    """
    cut = [decision.name for decision in made.decisions if decision.split is not None]
    kinds: dict[type[nn.Module], tuple[str, object]] = {
        nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
        nn.TransformerEncoder: ("use_nested_tensor", False),
    }
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        for kind, (attribute, value) in kinds.items():
            if isinstance(module, kind) and any(layer.startswith(prefix) for layer in cut):
                context.undo.append(_restore(module, attribute, vars(module)[attribute]))
                vars(module)[attribute] = value


def _restore(module: nn.Module, name: str, value: object) -> Any:
    """Return what sets an attribute back."""

    def undo() -> None:
        vars(module)[name] = value

    return undo


def _report(name: str, made: ModelPlan, model: nn.Module, context: Context) -> None:
    """Log which layers stay whole; loudly when they are a good part of the model."""
    kept: dict[str, list[str]] = {}
    num_kept, num_all = 0, 0
    for decision in made.decisions:
        entry = context.table.entry_of(model.get_submodule(decision.name).get_parameter("weight"))
        numel = 0 if entry is None else math.prod(entry.shape)
        num_all += numel
        if decision.split is None:
            num_kept += numel
            kept.setdefault(decision.reason, []).append(decision.name)
    if kept:
        told = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in kept.items())
        level = logging.WARNING if num_kept > LARGE_SHARE * num_all else logging.INFO
        _logger.log(level, "layers of model %r stay whole on every rank: %s", name, told)


# --- parts --------------------------------------------------------------------------------------------------


def _cut_dims(decision: Decision, module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the parameters of a layer that are cut, with the dim."""
    cuts_outputs = decision.cut != "row"
    yield "weight", int(cuts_outputs == (decision.form == "transposed"))
    if cuts_outputs and "bias" in own_parameters(module):
        yield "bias", 0


def _parts(split: Split, shape: torch.Size, dim: int, rank: int, layout: MeshLayout) -> tuple[Part, ...]:
    """Return what a rank holds of a cut parameter, one part behind the other along ``dim``."""
    index, degree = layout.coordinates(rank)[AXIS], layout.degree(AXIS)
    alone = layout.without(AXIS)
    found: list[Part] = []
    at = 0
    for number, span in enumerate(split.spans(index, degree)):
        sharers = split.sharers(number, degree)
        shared = GroupSpec((AXIS,), tuple(tuple((place,) for place in block) for block in sharers))
        if sharers:
            part = _slab(shape, (dim, *span), layout.product([alone, shared]), shared, at)
        else:
            part = _slab(shape, (dim, *span), alone, GroupSpec(), at)
        found.append(part)
        at += span[1] - span[0]
    return tuple(found)


def _slab(
    shape: torch.Size,
    cut: tuple[int, int, int] | None,
    holders: GroupSpec,
    sum_over: GroupSpec,
    at: int = 0,
) -> Part:
    """Return the part that is cut to ``(dim, start, stop)``, at an offset of the local tensor."""
    offset, size, local = [0] * len(shape), list(shape), [0] * len(shape)
    if cut is not None:
        dim, start, stop = cut
        offset[dim], size[dim], local[dim] = start, stop - start, at
    return Part(box=Box(tuple(offset), tuple(size)), local=tuple(local), holders=holders, sum_over=sum_over)


def _cut(key: Key, parts: tuple[Part, ...], context: Context) -> None:
    """Cut a tensor in place to parts that an earlier strategy left whole, and write them down."""
    entry = context.table[key]
    if not entry.parts:
        return
    (before,) = entry.parts
    if before.box.size != entry.shape:
        raise CapabilityError(
            f"{entry.kind} {entry.name!r} is cut by another strategy already, to {before.box}",
            hint="leave one of the two strategies out",
        )
    layout = context.mesh.layout
    parts = tuple(
        evolve(
            part,
            holders=layout.intersection([before.holders, part.holders]),
            sum_over=layout.product([before.sum_over, part.sum_over]),
        )
        for part in parts
    )
    tensor = context.table.tensor(entry)
    pieces = [tensor.detach()[part.box.slices] for part in parts]
    if len(pieces) > 1:
        (dim,) = {dim for part in parts for dim, start in enumerate(part.local) if start}
        tensor.data = torch.cat(pieces, dim)
    elif pieces[0].shape != tensor.shape:
        tensor.data = pieces[0].clone(memory_format=torch.contiguous_format)
    context.table.cut(key, parts=parts)
