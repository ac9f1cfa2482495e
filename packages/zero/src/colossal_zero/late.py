"""Values that are still on their way when ``step()`` returns, and waited for where they are read.

The one idea: the start of a forward hides the gathers of what comes later in it. Until the first module that
reads a buffer runs, its parameters show NaN in their shape, so nothing can compute with values of which only
a part has arrived. Waiting is local, so whatever needs the values may ask for them on one rank alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, final

import torch

from colossal_core.errors import UsageError

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from colossal_core.runtime.collectives import Pending
    from colossal_core.runtime.flat import Slot
    from colossal_core.runtime.segments import OwnedRange
    from colossal_core.runtime.table import ParameterTable

__all__ = ["LateValues"]


@final
class LateValues:
    """Gathers that nobody has waited for yet, with the hooks that do."""

    def __init__(self) -> None:
        """Have nothing on its way."""
        self._pending: dict[OwnedRange, Pending] = {}
        self._guards: dict[Slot, torch.Tensor] = {}
        self._versions: dict[Slot, int] = {}
        self._handles: list[RemovableHandle] = []
        self._copied: list[nn.Module] = []

    def send(self, held: OwnedRange, pending: Pending) -> None:
        """Take over a gather that was issued, and let its parameters show NaN until it is waited for."""
        self._pending[held] = pending
        for slot in held.buffer.slots:
            if slot not in self._guards:
                like = slot.parameter
                scalar = torch.full((), torch.nan, dtype=like.dtype, device=like.device)
                self._guards[slot] = scalar.expand(like.shape)
            slot.parameter.data = self._guards[slot]
            self._versions[slot] = slot.parameter._version

    def settle(self, ranges: Iterable[OwnedRange] | None = None) -> None:
        """Wait for some buffers, or for all, and show their values.

        Raises:
            UsageError: A parameter was written meanwhile.
        """
        for held in list(self._pending if ranges is None else ranges):
            pending = self._pending.pop(held, None)
            if pending is None:
                continue
            pending.wait()
            for slot in held.buffer.slots:
                self._check(slot)
                slot.parameter.data = held.buffer.value_view(slot)
            held.buffer.note_versions()

    def watch(
        self, models: Mapping[str, nn.Module], table: ParameterTable, ranges: Iterable[OwnedRange]
    ) -> None:
        """Wait before each module for what it reads: the parameters of its unit, and those that it owns.

        Args:
            models: The models.
            table: Says which unit a parameter belongs to.
            ranges: The buffers.
        """
        self.close()
        home: dict[torch.Tensor, OwnedRange] = {
            slot.parameter: held for held in ranges for slot in held.buffer.slots
        }
        units: dict[tuple[str, str], dict[OwnedRange, None]] = {}
        for entry, parameter in table.parameters():
            if parameter in home:
                units.setdefault((entry.model, entry.unit), {})[home[parameter]] = None
        for name, model in models.items():
            blocks = [unit for owner, unit in units if owner == name and unit]
            for path, module in model.named_modules():
                block = next((b for b in blocks if path == b or path.startswith(f"{b}.")), "")
                read = dict(units.get((name, block), {}))
                read.update((home[p], None) for p in module.parameters(recurse=False) if p in home)
                if read:
                    self._watch_one(module, tuple(read))
            self._handles.append(model.register_state_dict_pre_hook(lambda *_: self.settle()))
            self._let_copy(model)

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for model in self._copied:
            vars(model).pop("__deepcopy__", None)
        self._copied.clear()

    def _watch_one(self, module: nn.Module, read: tuple[OwnedRange, ...]) -> None:
        """Wait before each call of a module."""

        def enter(_module: nn.Module, _args: Any) -> None:
            if self._pending:
                self.settle(read)

        self._handles.append(module.register_forward_pre_hook(enter, prepend=True))

    def _let_copy(self, model: nn.Module) -> None:
        """Wait before a model is copied."""

        def copy_settled(memo: dict[int, Any]) -> Any:
            self.settle()
            hook = vars(model).pop("__deepcopy__")
            try:
                return copy.deepcopy(model, memo)
            finally:
                vars(model)["__deepcopy__"] = hook

        if "__deepcopy__" not in vars(model):
            vars(model)["__deepcopy__"] = copy_settled
            self._copied.append(model)

    def _check(self, slot: Slot) -> None:
        """Refuse what was written to a parameter on its way.

        Raises:
            UsageError: Naming it.
        """
        guard = self._guards[slot]
        is_written = slot.parameter._version != self._versions[slot]
        if slot.parameter.data_ptr() != guard.data_ptr() or (
            is_written and not bool(guard.as_strided((), ()).isnan())
        ):
            raise UsageError(
                f"parameter {slot.name!r} was written while its new values were on their way; that is lost",
                hint="edit parameters within booster.full_parameters(model), or use gather='step'",
            )
