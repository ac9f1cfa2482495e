"""Which chunks models compute with, and which have left the device.

The one idea: the base class brings units when they are needed and lets them go at once; here they stay for as
long as the plan of the step says, and come before they are needed where it says so. Before there is a plan,
and whenever a step does something else than the one that was traced, the base class decides.

# Note [Same on all ranks]
Gathers are collective, so who leaves and who comes may not depend on the memory of one rank: it follows from
the plan, which all ranks make of one trace, and from the order in which modules run.

# Note [The root]
What no repeated block holds is there while a forward runs, whose code may read it at any time. A backward
reads what autograd saved, and recomputed modules say what they read, so each chunk of the root comes and goes
by itself then: the embeddings, which no backward reads, take no room beside the head or the blocks. Where
there are no blocks all of it comes at once. A backward that a forward waits for, as for a gradient penalty,
counts as part of the forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, final

import torch

from colossal_core.runtime.collectives import Pending
from colossal_core.runtime.residency import PHASE, Residency, is_in_backward
from colossal_gemini.extents import agree_on_extent, extent_of
from colossal_gemini.homes import ChunkHome

if TYPE_CHECKING:
    from torch import nn

    from colossal_core.runtime.collectives import Collectives
    from colossal_core.runtime.mesh import Group
    from colossal_core.runtime.ranges import OwnedRange
    from colossal_core.runtime.units import Home, Unit
    from colossal_gemini.contents import Tiers
    from colossal_gemini.course import Course, Phase

__all__ = ["TieredResidency"]

PATIENCE_SECONDS = 1.0
"""How long to wait for memory that somebody else refers to: views that users keep do not go by waiting."""

Need = tuple[str, tuple[int, ...]]
"""Pass of the step, and chunks."""


@final
class TieredResidency(Residency):
    """Brings chunks to the device, and lets them stay while there is room."""

    def __init__(
        self,
        collectives: Collectives,
        groups: Mapping[Any, Group],
        *,
        tiers: Tiers,
        course: Course,
        everyone: Group,
        heard: Callable[[str, Phase, tuple[int, ...]], None],
        paused: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        """Know no units yet.

        Args:
            collectives: Where gathers go.
            groups: The group of each kind of division.
            tiers: Where contents can be.
            course: What steps do.
            everyone: All ranks.
            heard: Told the name, the pass and the chunks of each need of a training step, before it is met.
            paused: Told that a forward or a backward is over.
            failed: Told that a forward ended with an error.
        """
        super().__init__(collectives, groups)
        self._tiers = tiers
        self._course = course
        self._heard = heard
        self._paused = paused
        self._failed = failed
        self._agree = agree_on_extent(collectives, everyone)
        self._budget = tiers.device.budget
        tiers.device.reclaim = self._reclaim
        self._trains = False
        self._is_forward = False
        self._last: Need | None = None
        self._index: dict[Unit, int] = {}
        self._siblings: dict[Unit, tuple[Unit, ...]] = {}
        self._has_blocks = False

    @property
    def units(self) -> list[Unit]:
        """Units that hold something, each with one buffer; positions are the indices of chunks."""
        return [unit for unit in self._units if unit.ranges]

    def number(self, groups: Iterable[Iterable[Unit]]) -> None:
        """Take note of all chunks.

        Args:
            groups: Units that are needed together: all buffers of one block.
        """
        self._index = {unit: index for index, unit in enumerate(self.units)}
        self._siblings = {}
        self._has_blocks = not all(unit.is_root for unit in self._index)
        for group in groups:
            members = tuple(unit for unit in group if unit in self._index)
            self._siblings.update(dict.fromkeys(members, members))

    def index_of(self, unit: Unit) -> int:
        """Return the index of the chunk of a unit."""
        return self._index[unit]

    def end_step(self, optimizer: int) -> None:
        """Take what comes next as the beginning of a step."""
        self._last = None
        self._course.end(optimizer)
        self._limit(0)

    def _reclaim(self, num_bytes: int) -> None:
        """Wait for what leaves, and for memory that a message, which has ended, still refers to."""
        self._tiers.leaving.make_room(self._tiers.device, num_bytes)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._lingering and self._tiers.device.room() < num_bytes and time.monotonic() < deadline:
            self._free_lingering()
            time.sleep(1e-4)

    def _limit(self, other: int) -> None:
        """Let chunks have what everything else leaves them."""
        if self._budget is not None:
            self._tiers.device.budget = self._budget - other
            self._tiers.leaving.make_room(self._tiers.device, 0)

    # --- what is needed -------------------------------------------------------------------------------------

    def _begin_pass(self, batch: Any) -> None:
        """Tell training from evaluation, and what is trained on."""
        self._trains = torch.is_grad_enabled()
        if self._trains:
            self._course.begin_pass(self._agree(extent_of(batch)))

    def _enter(self, module: nn.Module) -> None:
        """Tell a forward from what backward runs again."""
        if not self._calls:
            self._is_forward = not is_in_backward()
        super()._enter(module)

    def _leave(self, module: nn.Module, *, is_unit: bool) -> None:
        """Tell of the end of the outermost call."""
        super()._leave(module, is_unit=is_unit)
        self._is_forward = self._is_forward and bool(self._calls)
        if not self._calls and not is_in_backward():
            self._paused()

    def _end_backward(self) -> None:
        """Tell of the end of a backward."""
        super()._end_backward()
        if not self._calls:
            self._paused()

    def _fail(self) -> None:
        """Do not take this step for one like others."""
        self._course.is_lost = True
        self._failed()

    def ensure(self, units: Iterable[Unit]) -> None:
        """Have units and their siblings resident, as the plan says."""
        is_after = self._is_after
        needs = tuple(dict.fromkeys(each for unit in units for each in self._together(unit)))
        if not needs or not self._trains or self._pins:
            super().ensure(needs)
            return
        phase: Phase = "backward" if is_after else "forward"
        chunks = tuple(sorted(self._index[unit] for unit in needs))
        is_here = all(unit.state == "resident" for unit in needs)
        if is_here and self._last == (phase, chunks):
            return
        self._last = (phase, chunks)
        self._heard(needs[0].name, phase, chunks)
        turn = self._course.next(phase, chunks)
        if not turn.is_planned:
            super().ensure(needs)
            return
        self._hear_of_end(needs[0])
        numbered = self.units
        for index in turn.evictions:
            self.release(numbered[index])
        self._limit(turn.other)
        for unit in needs:
            self._start(unit)
        for unit in needs:
            self._finish(unit)
        for index in turn.prefetches:
            self._start(numbered[index])

    def _together(self, unit: Unit) -> tuple[Unit, ...]:
        """Return the units that are needed with one."""
        is_alone = unit.is_root and self._is_after and self._has_blocks
        return (unit,) if is_alone else self._siblings.get(unit, (unit,))

    # --- what stays -----------------------------------------------------------------------------------------

    @property
    def _is_after(self) -> bool:
        """Whether a backward runs that no forward waits for; see Note [The root]."""
        return is_in_backward() and not self._is_forward

    def _make_room(self, wanted: Collection[Unit]) -> None:
        """Release other units of the root, too, where only a backward runs."""
        super()._make_room(wanted)
        for other in self._units if self._is_after else ():
            if other.is_root and other not in wanted and other.state == "resident":
                self.release(other)

    @property
    def _follows(self) -> bool:
        """Whether the plan decides."""
        return self._trains and self._course.is_followed

    def _left(self, unit: Unit) -> None:
        """Let a unit stay after its call where there is a plan."""
        if not self._follows:
            super()._left(unit)

    def _rest(self) -> None:
        """Let everything stay at the end of a pass where there is a plan."""
        if not self._follows:
            super()._rest()

    def _ahead(self, unit: Unit) -> None:
        """Bring nothing early that no plan asks for: there may be no room."""

    def _open_backward(self, module: nn.Module) -> None:
        """Bring nothing early that no plan asks for, either."""

    # --- how values come and go -----------------------------------------------------------------------------

    def _fetch(self, held: OwnedRange) -> Pending:
        """Start to have the values of one chunk on the device."""
        home = _home_of(held)
        if home.is_whole:
            home.is_lent = True
            home.values.start(self._tiers.device)

            def arrive() -> None:
                home.values.bring(self._tiers.device)

            return Pending(None, arrive)
        held.buffer.restore_values()
        shard = held.buffer.values[held.start : held.stop]
        device, copier = self._tiers.device, self._tiers.copier
        with copier.beside(device.device):
            with home.present("value"):
                shard.copy_(held.values, non_blocking=True)
                home.values.lend(copier.mark(device.device))
            if home.worksite is not device:
                self._tiers.count(home.worksite, device, home.values.nbytes)
            return self._collectives.all_gather(
                held.buffer.values, shard, self._groups[held.divided], phase=PHASE
            )

    def _give_back(self, held: OwnedRange) -> None:
        """Give the memory of one chunk on the device back."""
        _home_of(held).is_lent = False
        held.buffer.release_values()

    def _mark(self, home: Home, held: OwnedRange) -> None:
        """Mark a shard at its worksite."""
        with held.present("value"), held.present("master"):
            super()._mark(home, held)

    def _take_edits(self, held: OwnedRange, *, suspects_all: bool = False) -> None:
        """Bring master and shard in line with what the user wrote into the values."""
        if not suspects_all and not held.buffer.has_edits():
            return
        home = _home_of(held)
        if home.is_whole:
            home.values.wrote(self._tiers.device)
        with held.present("value"), held.present("master"):
            super()._take_edits(held, suspects_all=suspects_all)


def _home_of(held: OwnedRange) -> ChunkHome:
    """Return where a chunk lives."""
    assert isinstance(held.home, ChunkHome)
    return held.home
