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
from torch import nn

from colossal_core.errors import UsageError
from colossal_core.runtime.swapping import replaced_tensors
from colossal_core.runtime.trees import map_leaves
from colossal_pipeline.absent import Absent
from colossal_pipeline.items import find_items
from colossal_pipeline.routes import Form, cut_flow
from colossal_pipeline.stages import Stages
from colossal_pipeline.tracing import trace

if TYPE_CHECKING:
    from colossal_core.runtime.batches import Call
    from colossal_core.runtime.context import Context

__all__ = ["CutModel"]

MAX_FORMS = 64
"""Forms that are kept; batches of more different shapes are looked into again."""


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
        self.stages: Stages = Stages(model, find_items(model), stages, context.crossing)
        self._stage_of = dict(stages)
        self._num_stages = max(stages.values()) + 1
        self._holders = dict(holders)
        self._table = context.table
        self._views = context.serial_views
        self._forms: OrderedDict[Hashable, tuple[Form, Any]] = OrderedDict()

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
            tuple(parameter.requires_grad for parameter in self.model.parameters()),
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

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let parameters of other ranks look absent, with their shapes, while stages run."""
        missing: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in self.model.parameters():
            entry = self._table.entry_of(parameter)
            if entry is not None and not entry.parts:
                missing[parameter] = Absent.like(entry.shape, parameter.dtype, parameter.device)
        with replaced_tensors(self.model, missing):
            yield

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
