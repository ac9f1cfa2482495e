"""When the parameters of each module unit are there, and when only their shards are.

The one idea: a unit's values live in flat buffers whose storage is resized: to nothing while they are not
needed, and back before they are gathered. Parameter objects, and what autograd saved for backward, stay valid
all the time; only their bytes come and go.

# Note [Two triggers]
In forward, a hook before each module gathers the units of the parameters that it is known to read: those of
its own unit and those that it owns directly, so a parent may read the weights of its children without calling
them; what else is read is found in first passes (see :mod:`colossal_core.runtime.strays`). In backward,
whatever autograd saved of a unit's values is packed as a place in the unit and gathered when it is unpacked.
Nothing depends on hooks that recomputation skips or on outputs of a certain form, and what backward does not
read is not gathered.

# Note [Released]
A released parameter shows NaN in its shape, so code that reads it elsewhere gets poison instead of old
values; writes raise, or are noticed at the next gather. The memory is given back only when no tensor but the
buffer refers to it: reading a view of a freed storage ends the interpreter. Until then the bytes stay, but
the unit counts as released on every rank alike, since whether a gather is due may not depend on one rank's
memory.

# Note [Order of gathers]
All ranks have to gather the same units in the same order, which they do when they run the same modules. A
prefetch follows the order of the last pass, which is the same on all ranks, too; a wrong one costs traffic.
Where backward followed a model's forward directly several times, what it needed first is on its way already
when the next forward ends, so that the loss hides it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from colossal_core.errors import UsageError
from colossal_core.runtime.backward_end import at_end_of_backward, is_in_backward
from colossal_core.runtime.strays import StrayReads
from colossal_core.runtime.units import Home, Kept, Openings, Saved, Unit

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from colossal_core.runtime.collectives import Collectives, Pending
    from colossal_core.runtime.mesh import Group
    from colossal_core.runtime.segments import OwnedRange

__all__ = ["PHASE", "Residency", "Unit", "is_in_backward"]

PHASE = "parameters"


class Residency:
    """Gathers and releases the units of the models of one manager: each for as long as it runs.

    What subclasses may decide otherwise: how values come (:meth:`_fetch`, :meth:`_give_back`), which units go
    when room is needed (:meth:`_make_room`), after a unit's call (:meth:`_left`) and at the end of a pass
    (:meth:`_rest`), and which come ahead (:meth:`_ahead`).
    """

    def __init__(self, collectives: Collectives, groups: Mapping[Any, Group]) -> None:
        """Know no units yet.

        Args:
            collectives: Where gathers go.
            groups: The group of each kind of division, on a channel for what all ranks do at the same place.
        """
        self._collectives = collectives
        self._groups = groups
        self._homes: dict[int, Home] = {}
        self._units: list[Unit] = []
        self._lingering: set[Home] = set()
        self._needs: dict[nn.Module, tuple[Unit, ...]] = {}
        self._handles: list[RemovableHandle] = []
        self._calls: list[nn.Module] = []
        self._pins = 0
        self._packing: torch.autograd.graph.saved_tensors_hooks | None = None
        self._strays = StrayReads(self._borrow)
        self._root: Unit | None = None
        self._previous: Unit | None = None
        self._awaits_end = False
        self._has_failed = False
        self._openings = Openings()
        self._is_early = False

    # --- set-up ---------------------------------------------------------------------------------------------

    def add(self, unit: Unit, held: OwnedRange) -> None:
        """Take over a buffer whose values are all there, and release it."""
        if unit not in self._units:
            self._units.append(unit)
        unit.ranges.append(held)
        home = Home(unit, held, held.buffer.values.untyped_storage())
        for slot in held.buffer.slots:
            home.views[slot] = held.buffer.value_view(slot)
            like = slot.parameter
            scalar = torch.full((), torch.nan, dtype=like.dtype, device=like.device)
            home.guards[slot] = scalar.expand(like.shape)
        home.pointers = [home.guards[slot].data_ptr() for slot in held.buffer.slots]
        home.tag = 1 + len(self._homes) % 250  # exact in every dtype
        self._mark(home, held)
        self._homes[home.storage._cdata] = home
        self._guard(home)
        home.num_references = torch._C._storage_Use_Count(home.storage._cdata)  # noqa: SLF001 - no public name
        self._free(home)

    def remove(self, held: OwnedRange) -> None:
        """Forget a buffer; its unit has to be resident, and its parameters keep the buffer's memory."""
        home = self._homes.pop(held.buffer.values.untyped_storage()._cdata)
        home.unit.ranges.remove(held)
        self._lingering.discard(home)

    def watch(self, module: nn.Module, needs: Iterable[Unit], *, is_unit: bool) -> None:
        """Gather some units before each call of a module.

        Args:
            module: The module.
            needs: The units that it reads.
            is_unit: Whether it is a unit itself, which is released after the call.
        """
        self._needs[module] = tuple(dict.fromkeys(needs))

        def enter(called: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._calls and not is_in_backward():
                self._begin_pass((args, kwargs))
            self._enter(called)

        def leave(called: nn.Module, _args: Any, outputs: Any) -> None:
            self._leave(called, is_unit=is_unit)
            # torch calls hooks so after an error, too; recomputation stops by one when it has what it needs.
            if not self._calls and not is_in_backward():
                if outputs is None:
                    self._fail()
                else:
                    self._open_backward(called)

        self._handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._needs.clear()

    # --- forward --------------------------------------------------------------------------------------------

    def _begin_pass(self, batch: Any) -> None:
        """Hear of the outermost call of a module, with its arguments."""

    def _fail(self) -> None:
        """Hear that the outermost call of a module ended with an error."""

    def _enter(self, module: nn.Module) -> None:
        """Gather what a module reads, and pack what autograd saves from the outermost call on."""
        if not self._calls and not is_in_backward():
            if self._is_early:  # no backward came
                self.release_all()
            self._root = self._previous = None
            self._awaits_end = False
            self._packing = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._packing.__enter__()
            self._strays.begin(module, self._homes.values())
        self._calls.append(module)
        self.ensure(self._needs[module])

    def _leave(self, module: nn.Module, *, is_unit: bool) -> None:
        """Release a unit after its call, and everything after the outermost one."""
        if module not in self._calls:
            return  # another hook raised before ours ran
        while self._calls.pop() is not module:
            pass
        if self._calls:
            for unit in self._needs[module] if is_unit else ():
                self._left(unit)
            return
        self._strays.end()
        if self._packing is not None:
            self._packing.__exit__(None, None, None)
            self._packing = None
            if self._root is not None:
                self._root.before = self._previous
            if self._previous is not None:
                self._previous.after = None
        if not is_in_backward():
            self._rest()

    def ensure(self, units: Iterable[Unit]) -> None:
        """Have units resident, and start to gather the one that was needed next the last time."""
        wanted = tuple(units)
        for unit in wanted:
            if unit.state == "resident":
                continue
            self._hear_of_end(unit)
            self._make_room(wanted)
            self._start(unit)
            if not is_in_backward():
                self._note_order(unit)
            self._ahead(unit)  # before the wait, so that others need not wait for this rank then
            self._finish(unit)

    @contextmanager
    def _borrow(self, unit: Unit) -> Iterator[None]:
        """Have a unit there for one operation, also where no module that runs is known to read it."""
        if any(unit in self._needs[module] for module in self._calls):
            yield
            return
        self._strays.note(self._calls[0])
        self.ensure((unit,))
        try:
            yield
        finally:
            self._left(unit)

    def rerun(self, module: nn.Module) -> None:
        """Gather what a module reads before its forward runs again without its hooks."""
        self.ensure(self._needs.get(module, ()))

    def _note_order(self, unit: Unit) -> None:
        """Remember in which order forward needs units."""
        if unit.is_root:
            self._root = self._root or unit
            return
        if self._previous is not None:
            self._previous.after = unit
        elif self._root is not None:
            self._root.after = unit
        unit.before, self._previous = self._previous, unit

    # --- backward -------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Keep a place in a unit instead of a tensor that lies there, and of any other one only its values.

        A tensor that is packed as itself is never freed when it is the output of the operation that saves it
        and no backward comes.
        """
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return tensor
        home = self._homes.get(tensor.untyped_storage()._cdata)
        if tensor.numel() == 0:
            return tensor
        if home is None:
            return tensor if tensor.is_inference() else Kept(tensor.detach(), tensor._version)
        return Saved.of(tensor, home)

    def _unpack(self, saved: Any) -> Any:
        """Return what was packed, gathering its unit if it is not there.

        Raises:
            UsageError: The parameter was updated since, so that the gradient would be wrong.
        """
        if isinstance(saved, Kept):
            return saved.take()
        if not isinstance(saved, Saved):
            return saved
        saved.check()
        self.ensure((saved.home.unit,))  # also of one that is there: plans follow what backward reads
        return saved.take()

    def _open_backward(self, module: nn.Module) -> None:
        """Start to gather what a backward needs first that will follow the forward which has ended."""
        first = self._openings.forward_ended(module) if torch.is_grad_enabled() else None
        for unit in (first, first and first.before):
            if unit is not None and unit.ranges:
                self._start(unit)
                self._is_early = True

    def _hear_of_end(self, first: Unit) -> None:
        """Inside a backward, which needs a unit first, rest when it ends."""
        if is_in_backward() and not self._awaits_end:
            self._check_early()
            self._openings.backward_began(first)
            self._awaits_end = True
            at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        """Rest, unless the backward ran inside a forward."""
        self._awaits_end = False
        if not self._calls:
            self._rest()

    # --- what stays -----------------------------------------------------------------------------------------

    def _make_room(self, wanted: Collection[Unit]) -> None:
        """Release other units before some come; inside backward, which has left them."""
        for other in self._units if is_in_backward() else ():
            if other not in wanted and other.state == "resident" and not other.is_root:
                self.release(other)

    def _left(self, unit: Unit) -> None:
        """Release a unit after its call."""
        if not unit.is_root:
            self.release(unit)

    def _rest(self) -> None:
        """Release everything at the end of a forward or a backward."""
        self.release_all()

    def _ahead(self, unit: Unit) -> None:
        """Start to gather the unit that was needed after this one the last time."""
        upcoming = unit.before if is_in_backward() else unit.after
        if upcoming is not None:
            self._start(upcoming)

    # --- residency ------------------------------------------------------------------------------------------

    @contextmanager
    def everything(self) -> Iterator[None]:
        """Have all units resident within a context, whatever runs in it; edits of values are kept."""
        if self._pins == 0:
            self._check_early()
            for unit in self._units:
                self._start(unit)
            for unit in self._units:
                self._finish(unit)
        self._pins += 1
        try:
            yield
        finally:
            self._pins -= 1
            if self._pins == 0:
                for held in (held for unit in self._units for held in unit.ranges):
                    self._take_edits(held, suspects_all=True)
                if not self._calls:
                    self.release_all()

    @property
    def parameters(self) -> Iterator[torch.Tensor]:
        """Iterate over the parameters that are divided."""
        return (slot.parameter for home in self._homes.values() for slot in home.buffer.slots)

    def forget(self) -> None:
        """Know no buffers any more: their parameters own memory of their own again."""
        self._homes.clear()
        self._lingering.clear()
        for unit in self._units:
            unit.ranges.clear()
            unit.state = "released"

    def release_all(self) -> None:
        """Release every unit; also one whose gather nobody has waited for."""
        self._check_early()
        for unit in self._units:
            self.release(unit)
        self._free_lingering()

    def _free_lingering(self) -> None:
        """Give memory back that something else, such as a message that ends, held when it was due."""
        for home in list(self._lingering):
            self._free(home)

    def release(self, unit: Unit) -> None:
        """Keep only the shards of a unit, with what the user changed in its values."""
        if unit.state == "released" or self._pins or self._has_failed:
            return
        self._finish(unit)
        unit.state = "released"
        for held in unit.ranges:
            home = self._homes[held.buffer.values.untyped_storage()._cdata]
            self._take_edits(held)
            self._guard(home)
            self._lingering.add(home)
        self._free_lingering()

    def check_guards(self) -> None:
        """Refuse what was written to released parameters.

        Raises:
            UsageError: Naming the parameter.
        """
        for home in self._homes.values():
            if home.unit.state == "released":
                self._check(home)

    def _check_early(self) -> None:
        """Refuse what the user wrote while values were on their way between forward and backward."""
        if self._is_early:
            self._is_early = False
            for home in self._homes.values():
                if home.unit.state == "pending":
                    self._check(home)

    def _start(self, unit: Unit) -> None:
        """Start to gather a unit."""
        if unit.state != "released":
            return
        homes = [self._homes[held.buffer.values.untyped_storage()._cdata] for held in unit.ranges]
        for home in homes:
            self._check(home)
        for home, held in zip(homes, unit.ranges, strict=True):
            self._lingering.discard(home)
            unit.pending.append(self._fetch(held))
        unit.state = "pending"

    def _fetch(self, held: OwnedRange) -> Pending:
        """Start to have the values of one buffer whole."""
        held.buffer.restore_values()
        group = self._groups[held.divided]
        return self._collectives.all_gather(held.buffer.values, held.values, group, phase=PHASE)

    def _give_back(self, held: OwnedRange) -> None:
        """Give the memory of one buffer back."""
        held.buffer.release_values()

    def _finish(self, unit: Unit) -> None:
        """Wait for the gather of a unit, and show its values."""
        if unit.state != "pending":
            return
        self._has_failed = True  # unless it comes to an end
        for pending in unit.pending:
            pending.wait()
        unit.pending.clear()
        homes = [self._homes[held.buffer.values.untyped_storage()._cdata] for held in unit.ranges]
        for home in homes:
            self._check_tag(home)
        self._has_failed = False
        unit.state = "resident"
        for home in homes:
            for slot, view in home.views.items():
                slot.parameter.data = view
            home.buffer.note_versions()

    def _mark(self, home: Home, held: OwnedRange) -> None:
        """Write into the last element of a buffer, which no parameter needs, whose it is."""
        group = self._groups[held.divided]
        if group.size > 1 and group.index == group.size - 1:
            held.values[-1] = home.tag
            held.master[-1] = home.tag

    def _check_tag(self, home: Home) -> None:
        """Refuse values that the last rank gathered for another unit.

        Raises:
            RankMismatchError: Naming the unit.
        """
        is_marked = home.buffer.num_shards > 1 and home.buffer.device.type == "cpu"
        if is_marked and home.buffer.values[-1].item() != home.tag:
            raise self._collectives.fail(
                f"a rank gathered parameters of {home.unit.name!r} while another gathered those of another "
                "unit: they run different modules"
            )

    def _take_edits(self, held: OwnedRange, *, suspects_all: bool = False) -> None:
        """Bring the shard in line with what the user wrote into the values."""
        master = held.master if held.keeps_master else None
        if held.buffer.take_edits(master, held.start, suspects_all=suspects_all):
            values = held.buffer.values[held.start : held.stop]
            if not torch.equal(values, held.values):  # otherwise a version would say that it was written
                held.values.copy_(values)

    def _guard(self, home: Home) -> None:
        """Let parameters show NaN."""
        for slot, guard in home.guards.items():
            slot.parameter.data = guard
        home.versions = home.count_writes()

    def _check(self, home: Home) -> None:
        """Refuse what was written to the released parameters of one buffer.

        Raises:
            UsageError: Naming the parameter.
        """
        pointers = [slot.parameter.data_ptr() for slot in home.buffer.slots]
        if pointers == home.pointers and home.count_writes() == home.versions:
            return
        for slot, version, pointer, own in zip(
            home.buffer.slots, home.versions, pointers, home.pointers, strict=True
        ):
            guard, is_shown = home.guards[slot], pointer == own
            # A version also moves when the values of the shards are new, as after an update.
            is_written = slot.parameter._version != version and not bool(guard.as_strided((), ()).isnan())
            if is_written or not is_shown:
                raise UsageError(
                    f"parameter {slot.name!r} was written while only a shard of it was here; that is lost",
                    hint="edit parameters within booster.full_parameters(model)",
                )
        home.versions = home.count_writes()

    def _free(self, home: Home) -> None:
        """Give the memory of one buffer back, unless something else refers to it."""
        found = torch._C._storage_Use_Count(home.storage._cdata)  # noqa: SLF001 - no public name
        if found <= home.num_references:
            self._lingering.discard(home)
            self._give_back(home.held)


_PLAIN = {torch.Tensor, torch.nn.Parameter}
"""Types whose saved values are packed; subclasses of torch.Tensor have storages of their own kind."""
