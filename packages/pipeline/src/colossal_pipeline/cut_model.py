"""A model of which this rank holds some stages.

The one idea: what flows in a model depends on the shapes of a batch and on few things more, so it is found
out once for each of them and kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any, final

import torch
from attrs import define, field
from torch import nn

from colossal_core.errors import UsageError
from colossal_core.runtime.batchnorm import Synchronised
from colossal_core.runtime.swapping import Slot, find_slots, replaced_tensors
from colossal_core.runtime.trees import map_leaves
from colossal_pipeline.absent import Absent
from colossal_pipeline.items import find_items
from colossal_pipeline.reentrant import without_reentrant_checkpoints
from colossal_pipeline.routes import Form, cut_flow
from colossal_pipeline.stages import Stages
from colossal_pipeline.tracing import trace
from colossal_pipeline.transport import Timetable

if TYPE_CHECKING:
    from colossal_core.runtime.batches import Call
    from colossal_core.runtime.context import Context
    from colossal_core.runtime.table import Entry
    from colossal_core.schedule import Action

__all__ = ["CutModel"]

MAX_FORMS = 64
"""Forms that are kept; batches of more different shapes are looked into again."""


@define(eq=False)
class _Look:
    """What a model consists of; steps ask for it often.

    Attributes:
        mark: Addresses of all modules and parameters, which tell whether the model is still the same.
        modules: Its modules.
        absent: The parameters of which this rank has nothing.
        places: Where modules find them.
        parameters: All parameters.
        communicates: Whether modules wait for other ranks in forward.
    """

    mark: list[int]
    modules: tuple[nn.Module, ...]
    absent: Mapping[nn.Parameter, Entry]
    places: Sequence[Slot]
    parameters: tuple[nn.Parameter, ...] = field(init=False)
    communicates: bool = field(init=False)
    _missing: dict[nn.Parameter, torch.Tensor] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        """Count what is asked for."""
        self.parameters = tuple(self.modules[0].parameters())
        self.communicates = any(isinstance(module, Synchronised) for module in self.modules)

    def missing(self) -> Mapping[nn.Parameter, torch.Tensor]:
        """Return tensors without values in place of what is absent; none of them was written."""
        if not self._missing or any(tensor.grad_fn is not None for tensor in self._missing.values()):
            self._missing = {
                parameter: Absent.like(entry.shape, parameter.dtype, parameter.device)
                for parameter, entry in self.absent.items()
            }
        return self._missing


@final
class CutModel:
    """One model under a pipeline.

    Attributes:
        model: The user's model.
        stages: Runs its stages.
        has_compared: Whether ranks were seen to bring the same batch.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Mapping[str, int],
        holders: Mapping[str, frozenset[int]],
        context: Context,
        *,
        keeps_forms: bool = True,
    ) -> None:
        """Know the model; it is cut already.

        Args:
            model: The model.
            stages: Stage of each item.
            holders: For each parameter, by all its names, the stages whose rank holds it.
            context: The parameter table, where outputs go, and how cut layers show serial shapes.
            keeps_forms: Whether what flows depends on shapes only.
        """
        self.has_compared = False
        self._keeps_forms = keeps_forms
        self.model = model
        self.stages: Stages = Stages(model, find_items(model), context.crossing)
        self._stage_of = dict(stages)
        self._num_stages = max(stages.values()) + 1
        self._holders = dict(holders)
        self._table = context.table
        self._views = context.serial_views
        self._look: _Look | None = None
        self._forms: OrderedDict[Hashable, tuple[Form, Any]] = OrderedDict()
        self._timetables: OrderedDict[Hashable, Timetable] = OrderedDict()

    def forms(
        self,
        calls: Sequence[Call],
        criterion: Callable[..., torch.Tensor] | None,
        *,
        trains: bool,
        wants_outputs: bool,
    ) -> list[Form]:
        """Return what flows for each micro-batch of a step, and where it goes.

        Raises:
            ColossalError: The model cannot be cut like this.
        """
        mode = (
            trains,
            wants_outputs,
            self.model.training,
            tuple(parameter.requires_grad for parameter in (self._look or self.look()).parameters),
            _identity(criterion),
        )
        return [
            self._form(call, criterion, mode, trains=trains, wants_outputs=wants_outputs) for call in calls
        ]

    def _form(
        self,
        call: Call,
        criterion: Callable[..., torch.Tensor] | None,
        mode: Hashable,
        *,
        trains: bool,
        wants_outputs: bool,
    ) -> Form:
        """Return what flows for one micro-batch."""
        key = (mode, _describe(call))
        found = self._forms.get(key) if self._keeps_forms else None
        if found is None:
            self.stages.is_running = True
            try:
                flow = trace(
                    self.model,
                    self.stages.items,
                    call,
                    criterion,
                    self._parameters(),
                    trains=trains,
                    wants_outputs=wants_outputs,
                    views=self._views,
                )
            finally:
                self.stages.is_running = False
            routes = cut_flow(flow, self._stage_of, self._num_stages, self._holders)
            # The criterion is kept, since parts of its identity are addresses.
            found = self._forms[key] = (Form(flow, routes), criterion)
            if len(self._forms) > MAX_FORMS:
                self._forms.popitem(last=False)
        self._forms.move_to_end(key)
        return found[0]

    def timetable(
        self,
        placement: Sequence[int],
        forms: Sequence[Form],
        actions: tuple[tuple[Action, ...], ...],
        rank: int,
    ) -> Timetable:
        """Return which letters there are in a step; as :meth:`.Timetable.of`."""
        key = (tuple(forms), actions)
        found = self._timetables.get(key)
        if found is None:
            found = self._timetables[key] = Timetable.of(placement, forms, actions, rank)
            if len(self._timetables) > MAX_FORMS:
                self._timetables.popitem(last=False)
        return found

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let parameters of other ranks look absent, with their shapes, while stages run."""
        look = self._look or self.look()
        missing = replaced_tensors(self.model, look.missing(), places=look.places)
        with missing, without_reentrant_checkpoints():
            yield

    def look(self) -> _Look:
        """Return what the model consists of, found out anew where it has changed; once per step."""
        modules = _modules_of(self.model)
        held = [value for module in modules for value in module._parameters.values()]  # noqa: SLF001 - as torch.func
        flat = [vars(module).get("_flat_weights") for module in modules]  # of recurrent modules
        mark = list(map(id, (*modules, *held, *flat)))
        if self._look is None or self._look.mark != mark:
            absent = {
                parameter: entry
                for parameter in self.model.parameters()
                if (entry := self._table.entry_of(parameter)) is not None and not entry.parts
            }
            self._look = _Look(mark, modules, absent, find_slots(self.model, absent))
        return self._look

    def refuse_calls(self, _model: nn.Module, _args: Any) -> None:
        """Refuse a call of the model by the user; a forward pre-hook.

        Raises:
            UsageError: Always, but while a stage runs.
        """
        if not self.stages.is_running:
            raise UsageError(
                f"this rank holds stages of {type(self.model).__name__} only, so it cannot be called",
                hint="train with loss = booster.forward_backward(model, batch, criterion), and evaluate with "
                "loss, outputs = booster.evaluate(model, batch, criterion, return_outputs=True), "
                "on all ranks",
            )

    def _parameters(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the serial shape and the present dtype of each parameter, by all its names."""
        found = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            entry = self._table.entry_of(parameter)
            shape = tuple(parameter.shape) if entry is None else entry.shape
            found[name] = (shape, parameter.dtype)
        return found


def _modules_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules of a model, itself first; names, which ``model.modules()`` makes, take its time."""
    found = {model: None}
    waiting = [model]
    while waiting:
        for child in waiting.pop()._modules.values():  # noqa: SLF001 - as above
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return tuple(found)


def _identity(criterion: Callable[..., torch.Tensor] | None) -> Hashable:
    """Return what tells criteria apart; a lambda of a loop is the same one each time."""
    if not isinstance(criterion, FunctionType):
        return id(criterion)
    cells = tuple(id(cell.cell_contents) for cell in criterion.__closure__ or ())
    return (criterion.__code__, cells, id(criterion.__defaults__), id(criterion.__globals__))


def _describe(call: Call) -> Hashable:
    """Return what the way of a micro-batch through a model may depend on."""
    found: list[Hashable] = []

    def visit(path: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            found.append((path, tuple(leaf.shape), leaf.dtype, leaf.requires_grad))
        elif isinstance(leaf, bool | int | float | str | bytes | None):
            found.append((path, leaf))
        else:
            found.append((path, type(leaf)))
        return leaf

    map_leaves(visit, (call.args, call.kwargs, call.target))
    return tuple(found)
