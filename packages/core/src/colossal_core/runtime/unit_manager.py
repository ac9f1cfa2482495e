"""What memory managers have in common that bring parameters module unit by module unit while they are needed.

The one idea: gradients and the update are those of the divided managers, with buffers of each module unit by
themselves; what is added is when values are there (see :mod:`colossal_core.runtime.residency`). Frozen
parameters lie in buffers of their own, which no optimizer updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from colossal_core.runtime.buckets import BucketRules, plan_lanes
from colossal_core.runtime.copies import refuse_copies
from colossal_core.runtime.divided_manager import AbstractDividedManager, refuse_compiled
from colossal_core.runtime.mesh import PARAMETERS
from colossal_core.runtime.residency import Residency, Unit
from colossal_core.runtime.segments import OwnedRange
from colossal_core.runtime.table import Place

if TYPE_CHECKING:
    import torch
    from torch import nn

    from colossal_core.mesh import GroupSpec
    from colossal_core.runtime.context import Context
    from colossal_core.runtime.flat import FlatBuffer
    from colossal_core.runtime.flat_manager import Owned
    from colossal_core.runtime.mesh import Group
    from colossal_core.runtime.table import Entry

__all__ = ["AbstractUnitManager"]

UnitKey = tuple[str, str]


class AbstractUnitManager(AbstractDividedManager):
    """Divides values, gradients and optimizer state; holds whole values only of the units that run."""

    # --- where managers differ ------------------------------------------------------------------------------

    _uncompiled: tuple[str, str] = ("this memory manager", "use another one")
    """What cannot serve compiled models, and what to do instead, for messages."""

    _moves_buffers_alone: bool = False
    """Whether each buffer of a unit comes and goes by itself."""

    def _divides(self, entry: Entry) -> bool:
        """Whether the shard of a parameter is kept apart from it."""
        return bool(self._divided(entry).axes)

    def _make_residency(self, groups: Mapping[GroupSpec, Group]) -> Residency:
        """Return what decides when the values of units are there.

        Args:
            groups: The group of each kind of division.
        """
        return Residency(self._context.collectives, groups)

    # --- set-up ---------------------------------------------------------------------------------------------

    def attach(
        self, models: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer], context: Context
    ) -> None:
        """Divide the parameters' buffers; see :class:`~colossal_core.interfaces.AbstractMemoryManager`.

        Raises:
            CapabilityError: A model is compiled.
        """
        refuse_compiled(models, *self._uncompiled)
        self._context = context
        mesh = context.mesh
        groups = {spec: mesh.group(spec, PARAMETERS) for spec in self.groups(context.table)}
        self._residency = self._make_residency(groups)
        self._units: dict[UnitKey, list[Unit]] = {}
        self._unit_by_buffer: dict[FlatBuffer, Unit] = {}
        self._frozen: list[OwnedRange] = []
        self._models = dict(models)
        super().attach(models, optimizers, context)
        self._take_frozen()
        self._watch_modules()
        context.before_rerun.append(self._residency.rerun)
        self._refusals = [
            handle
            for model in models.values()
            for handle in refuse_copies(model, set(self._residency.parameters), "only shards of parameters")
        ]

    def _rules(self, keeps_whole: bool) -> BucketRules:  # noqa: FBT001 - as in the class above
        """Give each unit a buffer of its own."""
        return attrs.evolve(super()._rules(keeps_whole), by_unit=True)

    def _keep_values(self, buffer: FlatBuffer, start: int) -> torch.Tensor:
        """Copy this rank's shard out of the buffer."""
        return buffer.values[start : start + buffer.span_numel].clone()

    def _take(self, owned: Owned) -> None:
        """Take over trainable parameters, also such that were frozen until now."""
        thawed = {parameter for group in owned.user.param_groups for parameter in group["params"]}
        moves = [
            held
            for held in self._frozen
            if any(s.parameter in thawed and s.parameter.requires_grad for s in held.buffer.slots)
        ]
        if moves:
            with self._residency.everything():
                for held in moves:
                    self._residency.remove(held)
                    self._frozen.remove(held)
                    for slot in held.buffer.slots:
                        held.buffer.give_back(slot)
        super()._take(owned)
        if moves:
            self._take_frozen()
            self._residency.close()
            self._watch_modules()

    def _divide(self, buffer: FlatBuffer, group: Group, divided: GroupSpec) -> OwnedRange:
        """Allocate a buffer and this rank's shards, and release the values."""
        held = self._divide_buffer(buffer, group, divided)
        self._residency.add(self._unit_of(buffer), held)
        return held

    def _divide_buffer(self, buffer: FlatBuffer, group: Group, divided: GroupSpec) -> OwnedRange:
        """Allocate a buffer, with all values there, and this rank's shards."""
        return super()._divide(buffer, group, divided)

    def _take_frozen(self) -> None:
        """Divide the parameters that no optimizer updates."""
        taken = {
            slot.parameter for owned in self._owned for held in owned.ranges for slot in held.buffer.slots
        }
        taken |= {slot.parameter for held in self._frozen for slot in held.buffer.slots}
        members = [
            (entry, parameter)
            for entry, parameter in self._context.table.parameters()
            if parameter not in taken
            and entry.parts
            and self._divides(entry)
            and (parameter.is_floating_point() or parameter.is_complex())
        ]
        for plan in plan_lanes(members, self._rules(keeps_whole=False)):
            group = self._context.mesh.group(plan.divided)
            for buffer in plan.buffers:
                held = self._divide_frozen_buffer(buffer, group, plan.divided)
                self._frozen.append(held)
                self._residency.add(self._unit_of(buffer), held)

    def _divide_frozen_buffer(self, buffer: FlatBuffer, group: Group, divided: GroupSpec) -> OwnedRange:
        """Allocate one buffer without gradients, and what this rank keeps of it."""
        buffer.take_values()
        start = group.index * buffer.span_numel
        values = self._keep_values(buffer, start)
        nothing = values.new_empty(0)
        return OwnedRange(buffer, start, start + buffer.span_numel, values, values, nothing, divided)

    def _unit_of(self, buffer: FlatBuffer) -> Unit:
        """Return the unit of a buffer, whose parameters are all of one."""
        if buffer not in self._unit_by_buffer:
            entry = buffer.slots[0].entry
            units = self._units.setdefault((entry.model, entry.unit), [])
            if not units or self._moves_buffers_alone:
                units.append(Unit(entry.unit or entry.model, is_root=not entry.unit))
            self._unit_by_buffer[buffer] = units[-1]
        return self._unit_by_buffer[buffer]

    def _watch_modules(self) -> None:
        """Gather what modules read before they run: their own unit, and what they own of others."""
        divided = {
            slot.parameter: self._unit_of(held.buffer)
            for ranges in (*(owned.ranges for owned in self._owned), self._frozen)
            for held in ranges
            if held.buffer.is_divided
            for slot in held.buffer.slots
        }
        for name, model in self._models.items():
            blocks = {key[1]: units for key, units in self._units.items() if key[0] == name}
            for path, module in model.named_modules():
                own = next((u for block, u in blocks.items() if _is_inside(path, block)), blocks.get("", []))
                read = [divided[p] for p in module.parameters(recurse=False) if p in divided]
                needs = [unit for unit in (*own, *read) if unit.ranges]
                if needs and next(module.parameters(), None) is not None:
                    self._residency.watch(module, needs, is_unit=path in blocks and path != "")

    # --- a step ---------------------------------------------------------------------------------------------

    def _take_edits(self, owned: Owned) -> None:
        """Refuse what was written to released parameters; edits of present ones were taken at release."""
        self._residency.release_all()
        self._residency.check_guards()
        for held in owned.ranges:
            if not held.buffer.is_divided:
                held.buffer.take_edits(held.master if held.keeps_master else None, held.start)

    def _publish(self, owned: Owned, live: Callable[[Any], bool]) -> Callable[[int], None]:
        """Leave it to the next forward to gather."""
        return lambda _: None

    # --- books ----------------------------------------------------------------------------------------------

    def places(self) -> Iterator[Place]:
        """Publish values, masters, gradients and states, and the values of frozen parameters."""
        yield from self._divide_frozen(super().places())

    def kept_places(self) -> Iterator[Place]:
        """Publish masters, or values, of the shards of this rank."""
        yield from self._divide_frozen(super().kept_places())

    def _divide_frozen(self, places: Iterator[Place]) -> Iterator[Place]:
        """Put the shards of frozen parameters in place of what shows NaN."""
        frozen = {slot.entry.key for held in self._frozen for slot in held.buffer.slots}
        yield from (place for place in places if place.key not in frozen or place.state != "value")
        for held in self._frozen:
            yield from held.places("value", held.values)

    def _value_places(self, held: OwnedRange) -> Iterator[Place]:
        """Publish the shard of the values of one buffer."""
        if held.buffer.is_divided:
            yield from held.places("value", held.values)
        else:
            yield from super()._value_places(held)

    @contextmanager
    def full_parameters(self, model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
        """Gather everything, and keep edits that are the same on all ranks; collective."""
        with self._residency.everything():
            yield {name: parameter.detach() for name, parameter in model.named_parameters()}

    def detach(self) -> None:
        """Give the models back, whole, in the dtype that they compute in."""
        with self._residency.everything():
            for held in self._frozen:
                for slot in held.buffer.slots:
                    held.buffer.give_back(slot)
            super().detach()
            self._residency.forget()
        self._residency.close()
        self._context.before_rerun.remove(self._residency.rerun)
        for handle in self._refusals:
            handle.remove()


def _is_inside(path: str, block: str) -> bool:
    """Whether a module is a block or lies in it."""
    return bool(block) and (path == block or path.startswith(f"{block}."))
