"""The memory manager ``gemini``: what does not fit lives where there is room, and comes when it is needed.

The one idea: everything that ``zero3`` keeps of a chunk on a rank is a content in a tier. The first step of
its kind brings no more than what runs, and is written down; from then on a plan made of that trace says what
lives where, what stays on the device, and what comes early.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, final

import attrs
import torch

from colossal_core.errors import CapabilityError, UsageError
from colossal_core.runtime.flat import FlatBuffer
from colossal_core.runtime.ranges import OwnedRange
from colossal_core.runtime.unit_manager import AbstractUnitManager
from colossal_gemini.budgeting import budgets_of, make_tiers
from colossal_gemini.contents import Tiers
from colossal_gemini.course import Course, Phase
from colossal_gemini.eviction import Plan, simulate
from colossal_gemini.homes import BlockMemory, ChunkHome, ContentMemory, TieredShard
from colossal_gemini.lane import FrugalLane
from colossal_gemini.placement import Placement, place
from colossal_gemini.recording import Recorder
from colossal_gemini.report import FitReport
from colossal_gemini.residency import TieredResidency
from colossal_gemini.search import cut_unit
from colossal_gemini.sizes import choose_bytes, estimate_table
from colossal_gemini.trace import Chunk, Trace

if TYPE_CHECKING:
    from torch import nn

    from colossal_core.mesh import GroupSpec
    from colossal_core.runtime.buckets import BucketRules
    from colossal_core.runtime.context import Context
    from colossal_core.runtime.flat_manager import Owned
    from colossal_core.runtime.mesh import Group
    from colossal_core.runtime.precision import Precision
    from colossal_core.runtime.shard import Shard
    from colossal_core.runtime.table import Entry, ParameterTable
    from colossal_gemini.costs import Rates
    from colossal_gemini.options import Gemini

__all__ = ["GeminiManager"]

PHASE = "plan"


@final
class GeminiManager(AbstractUnitManager):
    """Keeps values, gradients and optimizer state in tiers, within budgets.

    Attributes:
        options: Budgets.
        tiers: Memories and files, with what is in them and how many bytes went between them.
    """

    _uncompiled = ("Gemini()", "use Zero(stage=2)")
    _moves_buffers_alone = True
    _lane_class = FrugalLane

    def __init__(self, options: Gemini) -> None:
        """Remember the options; see :class:`colossal_gemini.Gemini`."""
        self.options = options
        self._course = Course()
        self._recorder: Recorder | None = None
        self._seen: Trace | None = None
        self._left: set[int] = set()
        self._moved: dict[str, int] = {}
        self._rates: Rates | None = None
        self._placement: Placement | None = None

    # --- set-up ---------------------------------------------------------------------------------------------

    def attach(
        self, models: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer], context: Context
    ) -> None:
        """Divide the parameters' buffers; see :class:`~colossal_core.interfaces.AbstractMemoryManager`."""
        self.tiers: Tiers = make_tiers(self.options, context.mesh.device)
        self._chunk_bytes = choose_bytes(self.options, context.table, context.precision, context.mesh.layout)
        self._numbered = 0
        super().attach(models, optimizers, context)
        self._number_chunks()
        if self.options.trace is not None:
            report = FitReport.load(self.options.trace)
            self._rates = report.rates
            self._expect(report.trace)

    @property
    def plan(self) -> Plan | None:
        """What the steps that were seen last are to do, moment by moment; None before the first one ends."""
        return self._course.plan

    @property
    def placement(self) -> Placement | None:
        """What lives where; None before the first step ends."""
        return self._placement

    @property
    def shows_gradients(self) -> bool:
        """False: gradients leave as they are reduced."""
        return False

    def _shows_guards(self, context: Context) -> bool:
        """Guards show on one rank, too."""
        return True

    def _divides(self, entry: Entry) -> bool:
        """Divide whatever is not summed over other ranks afterwards, on one rank, too."""
        layout = self._context.mesh.layout
        return not any(layout.normalise(part.sum_over).axes for part in entry.parts)

    def _rules(self, keeps_whole: bool) -> BucketRules:  # noqa: FBT001 - as in the class above
        """Cut units into chunks."""

        def cut(sizes: Sequence[int], item_bytes: int) -> Sequence[Sequence[int]]:
            return cut_unit(sizes, value_bytes=item_bytes, chunk_bytes=self._chunk_bytes)

        return attrs.evolve(
            super()._rules(keeps_whole), divides_alone=self._divides, cut=None if keeps_whole else cut
        )

    def _make_residency(self, groups: Mapping[GroupSpec, Group]) -> TieredResidency:
        """Let the plan of a step decide."""
        self._resident = TieredResidency(
            self._context.collectives,
            groups,
            tiers=self.tiers,
            course=self._course,
            everyone=self._context.mesh.everyone(),
            heard=self._hear,
            paused=self._pause_recording,
            failed=self._drop_recording,
        )
        return self._resident

    def _divide_buffer(self, buffer: FlatBuffer, group: Group, divided: GroupSpec) -> OwnedRange:
        """Let one buffer, and what this rank keeps of it, live in tiers."""
        return self._settle(buffer, group, divided, is_trainable=True)

    def _divide_frozen_buffer(self, buffer: FlatBuffer, group: Group, divided: GroupSpec) -> OwnedRange:
        """The same without gradient and master."""
        return self._settle(buffer, group, divided, is_trainable=False)

    def _settle(
        self, buffer: FlatBuffer, group: Group, divided: GroupSpec, *, is_trainable: bool
    ) -> OwnedRange:
        """Give the parts of one buffer their homes."""
        span, dtype = buffer.span_numel, buffer.kind.dtype
        start, stop = group.index * span, (group.index + 1) * span
        name = buffer.kind.unit or buffer.slots[0].entry.model
        is_whole = group.size == 1
        home = ChunkHome(self.tiers, name, span, dtype, is_whole=is_whole, is_trainable=is_trainable)
        device = self.tiers.device
        if is_whole:
            buffer.value_memory = ContentMemory(home.values)
        else:
            buffer.value_memory = BlockMemory(device.reserve(buffer.padded_numel, dtype, name=name))
        master = None
        if home.master is not None:
            home.master.touch(home.worksite)
            master = home.master.tensor_in(home.worksite).zero_()
        buffer.take_values(master=master, start=start)
        if is_whole:
            home.is_lent = True
            home.values.wrote(device, device)
        else:
            home.values.touch(home.worksite)
            home.values.tensor_in(home.worksite).copy_(buffer.values[start:stop])
            home.values.wrote(home.worksite)
        if home.master is not None:
            home.master.wrote(home.worksite)
        gradient = home.values.tensor_in(home.worksite).new_empty(0)
        if home.gradient is not None:
            hear = partial(self._hear_of_gradient, buffer)
            if is_whole:
                buffer.gradient_memory = ContentMemory(home.gradient, hear)
            else:
                block = device.reserve(buffer.message_numel, dtype, name=f"{name} unreduced gradient")
                buffer.gradient_memory = BlockMemory(block, hear)
            buffer.allocate_gradients()
            buffer.release_gradients()
            gradient = home.gradient.tensor_in(home.worksite)
        home.rest()
        values = home.values.tensor_in(home.worksite)
        wide = values if home.master is None else home.master.tensor_in(home.worksite)
        return OwnedRange(buffer, start, stop, values, wide, gradient, divided, home=home)

    def _shard(self, held: OwnedRange) -> Shard:
        """Let reduced gradients leave the device as they arrive."""
        return TieredShard(held, _home_of(held))

    def _take(self, owned: Owned) -> None:
        """Take over parameters, with the states of all others there."""
        with self._all_states(owned):
            super()._take(owned)
        if self._numbered:
            self._number_chunks()

    def _number_chunks(self) -> None:
        """Number the chunks, and forget what was known of steps with others."""
        self._resident.number(self._units.values())
        self._numbered = len(self._resident.units)
        self._course.forget()
        self._placement = None

    # --- what a step does -----------------------------------------------------------------------------------

    def _chunks(self) -> tuple[Chunk, ...]:
        """Describe the chunks, as all ranks know them."""
        found = []
        for index, unit in enumerate(self._resident.units):
            held = unit.ranges[0]
            found.append(
                Chunk(
                    index=index,
                    name=unit.name,
                    numel=held.buffer.padded_numel,
                    used=sum(slot.stop - slot.start for slot in held.buffer.slots),
                    value_bytes=held.buffer.kind.dtype.itemsize,
                    is_trainable=_home_of(held).gradient is not None,
                    is_pinned=unit.is_root,
                )
            )
        return tuple(found)

    def _hear(self, name: str, phase: Phase, chunks: tuple[int, ...]) -> None:
        """Write the first step down."""
        if not self._course.is_new:
            return
        if self._recorder is None:
            blocks, device = self._storages_of_chunks(), self.tiers.device
            self._recorder = Recorder(
                self._chunks(),
                key="the first step of its kind",
                excludes=lambda one: one.untyped_storage()._cdata in blocks,
                device=self._context.mesh.device,
                chunk_bytes=lambda: device.used,
            )
            # A loop that ends with an error leaves a recorder behind, which slows down whatever comes then.
            weakref.finalize(self, self._recorder.cancel)
            self._recorder.begin()
        self._recorder.resume()
        self._recorder.moment(name, phase, chunks)

    def _pause_recording(self) -> None:
        """Leave what runs between passes alone; tensors of the loss are seen when backward reads them."""
        if self._recorder is not None:
            self._recorder.pause()

    def _hear_of_gradient(self, buffer: FlatBuffer, is_coming: bool) -> None:  # noqa: FBT001 - told by position
        """Write down which unreduced gradients have memory.

        One that has left counts until the next one comes, since that is when messages are waited for.
        """
        if self._recorder is None:
            return
        index = self._resident.index_of(self._unit_of(buffer))
        if not is_coming:
            self._left.add(index)
            return
        for left in self._left:
            self._recorder.drop_gradient(left)
        self._left = set()
        self._recorder.hold_gradient(index)

    def _storages_of_chunks(self) -> set[int]:
        """Return the storages that count as chunks."""
        found: set[int] = set()
        for unit in self._resident.units:
            held = unit.ranges[0]
            home = _home_of(held)
            tensors = [held.buffer.values, held.buffer.gradients, *home.tensors()]
            found.update(tensor.untyped_storage()._cdata for tensor in tensors)
        return found

    def _expect(self, trace: Trace) -> None:
        """Plan steps before there is one.

        Raises:
            UsageError: The trace is of another model, precision or number of ranks.
            CapabilityError: It does not fit.
        """
        kinds = [[_kind_of(chunk) for chunk in chunks] for chunks in (trace.chunks, self._chunks())]
        if kinds[0] != kinds[1]:
            raise UsageError(
                f"{self.options.trace} is the trace of {len(kinds[0])} chunks with "
                f"{sum(chunk.used for chunk in trace.chunks)} elements, here are {len(kinds[1])} with "
                f"{sum(chunk.used for chunk in self._chunks())}, or others in kind",
                hint="call fit() and save() again, with the model, the precision, the ranks and the options "
                "of this run",
            )
        self._placement = self._place(trace)
        plan = simulate(trace, self._placement.room, prefetch=self.options.prefetch)
        self._course.expect(trace, plan)

    def _stop_recording(self) -> None:
        """End the moment that runs, before an update takes memory of its own."""
        if self._recorder is not None:
            self._seen = self._recorder.finish()
            self._recorder = None

    def _drop_recording(self) -> None:
        """Forget what was written down of a step that failed."""
        if self._recorder is not None:
            self._recorder.cancel()
            self._recorder = None

    def _learn(self) -> None:
        """Make a plan of what was written down, if all ranks did the same."""
        seen, self._seen = self._seen, None
        if not self._course.is_unknown:
            return
        trace = self._agree(None if self._course.is_lost else seen)
        if trace is None:
            return
        self._course.learn(trace, self._plan(trace))

    def _plan(self, trace: Trace) -> Plan:
        """Plan a step; where the placement that others have leaves no room for it, with another placement.

        Raises:
            CapabilityError: It does not fit.
        """
        if self._placement is not None:
            with suppress(CapabilityError):
                return simulate(trace, self._placement.room, prefetch=self.options.prefetch)
        self._placement = self._place(trace)
        self._course.drop_plans()
        return simulate(trace, self._placement.room, prefetch=self.options.prefetch)

    def _place(self, trace: Trace) -> Placement:
        """Let everything live, and be updated, where that saves most."""
        ranks = max((held.buffer.num_shards for held in self._ranges()), default=1)
        disk = 0 if self.tiers.disk is None else self.tiers.disk.budget
        budgets = budgets_of(self.options, self._context.mesh.device, disk)
        placement = place(trace, budgets, ranks=ranks, rates=self._rates, policy=self.options.placement)
        states = {
            held: owned.driver.states_in(held)
            for owned in self._owned
            for held in owned.ranges
            if owned.driver is not None
        }
        for held, where in zip(self._ranges(), placement.chunks, strict=True):
            home = _home_of(held)
            worksite = self.tiers.device if where.update == "device" else self.tiers.host
            home.work_in(worksite, held, states.get(held, []))
            home.live_in(self.tiers.named(where.value), "value")
            home.live_in(self.tiers.named(where.gradient), "gradient")
            home.live_in(self.tiers.named(where.state), "master")
        for owned in self._owned:
            owned.pieces = None
        return placement

    def _agree(self, trace: Trace | None) -> Trace | None:
        """Return the trace with the most that any rank needs; None where ranks did different things.

        Collective over all ranks.
        """
        everyone = self._context.mesh.everyone()
        if everyone.size == 1:
            return trace
        digest = -1
        if trace is not None:
            text = repr([(moment.phase, moment.needs, moment.gradients) for moment in trace.moments])
            digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
        both = torch.tensor([digest, -digest], dtype=torch.int64, device=everyone.device)
        collectives = self._context.collectives
        collectives.all_reduce(both, everyone, phase=PHASE, op="max").wait()
        if trace is None or int(both[0]) != -int(both[1]):
            return None
        other = torch.tensor([moment.other for moment in trace.moments], device=everyone.device)
        collectives.all_reduce(other, everyone, phase=PHASE, op="max").wait()
        moments = (
            attrs.evolve(moment, other=most)
            for moment, most in zip(trace.moments, other.tolist(), strict=True)
        )
        return attrs.evolve(trace, moments=tuple(moments))

    def _ranges(self) -> Iterator[OwnedRange]:
        """Iterate over all chunks."""
        return (unit.ranges[0] for unit in self._resident.units)

    def step(self, optimizer: int, *, scale: float) -> None:
        """Update, and plan the next step that is like this one."""
        self._stop_recording()
        super().step(optimizer, scale=scale)
        self._end_step(optimizer)

    def skip(self, optimizer: int) -> None:
        """End the step without an update."""
        self._stop_recording()
        super().skip(optimizer)
        self._end_step(optimizer)

    def _end_step(self, optimizer: int) -> None:
        """Learn from this step, and count what it moved."""
        self._moved = {f"{source} to {target}": size for (source, target), size in self.tiers.moved.items()}
        self._learn()
        self.tiers.moved.clear()  # what moved to new homes as well
        self._resident.end_step(optimizer)

    # --- books ----------------------------------------------------------------------------------------------

    @contextmanager
    def _unlimited(self) -> Iterator[None]:
        """Let no budget stand in the way of what the user asks for as a whole."""
        arenas = {self.tiers.device, self.tiers.host}
        budgets = {arena: arena.budget for arena in arenas}
        for arena in arenas:
            arena.budget = None
        try:
            yield
        finally:
            for arena, budget in budgets.items():
                arena.budget = budget

    @contextmanager
    def _all_states(self, owned: Owned) -> Iterator[None]:
        """Have all states of one optimizer at their worksites, whatever the budgets are."""
        with self._unlimited(), ExitStack() as stack:
            for held in owned.ranges:
                if isinstance(held.home, ChunkHome):
                    stack.enter_context(held.home.states_present())
            yield

    def state(self, optimizer: int) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the optimizer's state by parameter, gathered from the ranks that own it; collective."""
        with self._all_states(self._owned[optimizer]):
            return super().state(optimizer)

    def load_state(self, optimizer: int, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Replace the optimizer's state."""
        super().load_state(optimizer, state)
        self._course.forget()

    def detach(self) -> None:
        """Give the models back, whole, in memory of torch's."""
        self._drop_recording()
        homes = [_home_of(held) for held in self._ranges()]
        with self._unlimited():
            super().detach()
        for home in homes:
            home.close()
        self.tiers.close()

    @contextmanager
    def full_parameters(self, model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
        """Gather everything, without budget, and keep edits that are the same on all ranks; collective."""
        with self._unlimited(), super().full_parameters(model) as shown:
            yield shown

    def report(self) -> Mapping[str, Any]:
        """Return what tiers hold, and what the last step moved between them.

        Returns:
            ``tiers``: for each by name its ``budget`` in bytes, None for none, the bytes ``used`` now, and
            their ``peak`` since boost; ``moved``: bytes of the last step by way, ``"host to device"``.
        """
        tiers = {
            tier.name: {"budget": tier.budget, "used": tier.used, "peak": tier.peak}
            for tier in self.tiers.ordered
        }
        return {"tiers": tiers, "moved": dict(self._moved)}

    def estimate(
        self, table: ParameterTable, precision: Precision, optimizer_states: int = 2
    ) -> Mapping[str, int]:
        """Return bytes per rank by category, in all tiers together, padding included."""
        return estimate_table(self.options, table, precision, optimizer_states)


def _kind_of(chunk: Chunk) -> tuple[int, int, int, bool, bool]:
    """Return what a chunk has to have in common with the one of its index in a trace."""
    return (chunk.numel, chunk.used, chunk.value_bytes, chunk.is_trainable, chunk.is_pinned)


def _home_of(held: OwnedRange) -> ChunkHome:
    """Return where a chunk lives."""
    assert isinstance(held.home, ChunkHome)
    return held.home
