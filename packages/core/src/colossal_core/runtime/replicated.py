"""The memory manager ``replicated``: every rank holds everything, and gradients are summed once per window.

The one idea: parameters and gradients live in flat buffers of a few megabytes, so a reduction is one message
without copies and an update is one long vector; buffers leave while backward runs, in the order in which
backward fills them. With a 16-bit precision the update runs on fp32 masters and moments, chunk by chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from attrs import define, evolve, field

from colossal_core.errors import CapabilityError, UsageError
from colossal_core.interfaces import AbstractMemoryManager
from colossal_core.runtime.flat import BufferKind, FlatBuffer, Slot, fill_buffers
from colossal_core.runtime.mesh import GRADIENTS
from colossal_core.runtime.norm import NormPiece, gradient_norm, non_finite_names, norm_pieces
from colossal_core.runtime.segments import OwnedRange, SegmentedOptimizer
from colossal_core.runtime.shared_sums import SharedSum, shared_sums, shares_of
from colossal_core.runtime.table import Entry, Place
from colossal_core.runtime.touch import Touch
from colossal_core.runtime.window import NOTES_PER_BUFFER, GradientWindow

if TYPE_CHECKING:
    from torch import nn

    from colossal_core.pieces import Replicated
    from colossal_core.runtime.context import Context
    from colossal_core.runtime.precision import Precision
    from colossal_core.runtime.table import ParameterTable

__all__ = ["ReplicatedManager"]

BUFFER_BYTES = 8 << 20
"""A buffer is closed at this size. Small enough that most of them leave before backward ends, large enough
that the latency of a message does not count; see benchmarks/replicated.py."""

LAST_BUFFER_BYTES = 1 << 20
"""Wanted bound of the buffer that backward fills last: its message cannot hide behind anything."""


@define(eq=False)
class _Owned:
    """What belongs to one optimizer."""

    window: GradientWindow
    user: torch.optim.Optimizer
    channel: str
    buffers: list[FlatBuffer] = field(factory=list)
    ranges: list[OwnedRange] = field(factory=list)
    driver: SegmentedOptimizer | None = None
    sums: list[SharedSum] = field(factory=list)
    pieces: list[NormPiece] | None = None
    is_summed: bool = False
    is_averaged: bool = False
    grouping: list[list[torch.Tensor]] = field(factory=list)

    @property
    def touches(self) -> list[Touch]:
        """All touches, in launch order."""
        return [touch for _, touches in self.window.touches for touch in touches]


@final
class ReplicatedManager(AbstractMemoryManager):
    """Holds everything on every rank: 16 bytes per parameter with Adam, in fp32 as in bf16."""

    def __init__(self, options: Replicated) -> None:
        """Remember the options; see :class:`colossal_core.Replicated`."""
        self.options = options
        self._owned: list[_Owned] = []

    # --- set-up ---------------------------------------------------------------------------------------------

    def attach(
        self, models: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Optimizer], context: Context
    ) -> None:
        """Move the parameters into flat buffers; see :class:`~.interfaces.AbstractMemoryManager`."""
        self._context = context
        self._dtype_of = context.precision.dtypes(models.values())
        each_backward = self.options.reduce == "backward"
        if each_backward and context.precision.is_narrow:
            raise CapabilityError(
                f"Replicated(reduce='backward') with precision {context.plan.precision!r}: p.grad would show "
                "16-bit gradients, while the update needs them in fp32",
                hint="use precision='fp32', or leave reduce='window' and clip with max_grad_norm",
            )
        guards = context.mesh.layout.world_size > 1 or context.precision.is_narrow
        self._shows_gradients = not guards or each_backward
        for index, optimizer in enumerate(optimizers):
            window = GradientWindow(
                context.collectives,
                context.arrivals,
                guards=not self._shows_gradients,
                after_backward=partial(self._average, index) if each_backward else None,
            )
            owned = _Owned(window, optimizer, f"{GRADIENTS}.{index}")
            self._owned.append(owned)
            self._take(owned)
        taken = {slot.parameter for owned in self._owned for buffer in owned.buffers for slot in buffer.slots}
        for _, parameter in context.table.parameters():
            if parameter not in taken and parameter.dtype != self._dtype_of(parameter):
                parameter.data = parameter.detach().to(self._dtype_of(parameter))

    def _take(self, owned: _Owned) -> None:
        """Take over an optimizer's trainable parameters that are not in buffers yet, and cut its groups."""
        self._context.table.check_groups(owned.user.param_groups)
        known = {slot.parameter for buffer in owned.buffers for slot in buffer.slots}
        grouped = {parameter for group in owned.user.param_groups for parameter in group["params"]}
        fresh = [
            (entry, parameter)
            for entry, parameter in self._context.table.parameters()
            if parameter in grouped and parameter not in known and parameter.requires_grad and entry.parts
        ]
        state = dict(owned.user.state) if owned.driver is None else owned.driver.state_of_parameters()
        if fresh:
            for reduce, buffers in self._lanes(fresh):
                for buffer in buffers:
                    master_dtype = torch.float32 if buffer.kind.dtype.itemsize == 2 else None
                    master = buffer.take_values(master_dtype=master_dtype)
                    buffer.allocate_gradients()
                    values, gradient = buffer.values, buffer.gradients[: buffer.numel]
                    owned.buffers.append(buffer)
                    owned.ranges.append(
                        OwnedRange(
                            buffer, 0, buffer.numel, values, values if master is None else master, gradient
                        )
                    )
                owned.window.add_lane(self._context.mesh.group(reduce, owned.channel), buffers)
            position = {entry.key: index for index, entry in enumerate(self._context.table)}
            ordered = sorted(owned.touches, key=lambda touch: position[touch.slot.entry.key])
            owned.sums = shared_sums(ordered, self._context.mesh, owned.channel)
            layout, rank = self._context.mesh.layout, self._context.mesh.rank
            for buffer, touches in owned.window.touches:
                for touch in touches:
                    touch.shares = shares_of(touch.slot.entry, layout, rank, buffer.late_divisor)
            owned.pieces = None
        if owned.driver is None:
            owned.driver = SegmentedOptimizer(owned.user, owned.ranges)
        else:
            owned.driver.cut(state)
        owned.grouping = _grouping(owned.user)

    def _lanes(self, members: Sequence[tuple[Entry, nn.Parameter]]) -> list[tuple[Any, list[FlatBuffer]]]:
        """Lay out buffers, those of one group together, in the order in which backward fills them."""
        by_kind: dict[BufferKind, list[int]] = {}
        backward = list(reversed(members))
        for index, (entry, parameter) in enumerate(backward):
            kind = BufferKind(dtype=self._dtype_of(parameter), reduce=entry.reduce, divisor=entry.divisor)
            by_kind.setdefault(kind, []).append(index)
        # A message on an accelerator's links needs more bytes before its latency does not count.
        larger = 1 if self._context.mesh.device.type == "cpu" else 4
        lanes: dict[Any, list[tuple[int, BufferKind, list[int]]]] = {}
        for kind, indices in by_kind.items():
            filled = fill_buffers(
                [backward[index][1].numel() for index in indices],
                item_bytes=kind.dtype.itemsize,
                buffer_bytes=larger * BUFFER_BYTES,
                last_bytes=LAST_BUFFER_BYTES,
            )
            for positions in filled:
                chosen = [indices[position] for position in positions]
                lanes.setdefault(kind.reduce, []).append((max(chosen), kind, chosen))
        found = []
        for reduce, plans in lanes.items():
            plans.sort(key=lambda plan: plan[0])
            num_notes = [0] * (len(plans) - 1) + [NOTES_PER_BUFFER * len(plans)]
            buffers = [
                FlatBuffer((backward[i] for i in chosen), kind, num_notes=notes)
                for (_, kind, chosen), notes in zip(plans, num_notes, strict=True)
            ]
            found.append((reduce, buffers))
        return found

    @property
    def shows_gradients(self) -> bool:
        """True on one rank, and with ``reduce="backward"``."""
        return self._shows_gradients

    # --- a step ---------------------------------------------------------------------------------------------

    @contextmanager
    def hold(self, optimizer: int | None = None) -> Iterator[None]:
        """Launch nothing from inside backward within this context."""
        windows = [owned.window for index, owned in enumerate(self._owned) if optimizer in (None, index)]
        for window in windows:
            window.hold()
        try:
            yield
        finally:
            for window in windows:
                window.let_go()

    def finish(self, optimizer: int, *, norm_type: float = 2.0) -> float:
        """Reduce all gradients of an optimizer and return their norm."""
        self.regroup(optimizer)
        owned = self._owned[optimizer]
        if owned.is_averaged and not owned.window.has_arrivals:
            owned.window.take_over()
            return self._norm(owned, norm_type)
        if owned.window.finish():
            owned.window.discard()
            owned.is_summed = False
            raise UsageError(
                "gradients arrived or were changed after clip_grad_norm_() had reduced them; all gradients "
                "of this step are dropped",
                hint="call clip_grad_norm_() after the last backward(), right before optimizer.step()",
            )
        if not owned.is_summed:
            for shared in owned.sums:
                shared.run(self._context.collectives)
            owned.is_summed = True
        if owned.window.after_each_backward:
            self._show_averages(owned)
        return self._norm(owned, norm_type)

    def _norm(self, owned: _Owned, norm_type: float) -> float:
        """Return the norm of reduced gradients."""
        if owned.pieces is None:
            table, rank = self._context.table, self._context.mesh.rank
            pieces = norm_pieces(table, self._gradient_places(owned), rank)
            # Gradients that were divided when they arrived are averages already.
            owned.pieces = [
                evolve(piece, scale=1.0) if piece.tensor.dtype.itemsize > 2 else piece for piece in pieces
            ]
        everyone = self._context.mesh.everyone()
        norm = gradient_norm(owned.pieces, everyone, self._context.collectives, norm_type=norm_type)
        return norm / owned.window.loss_scale

    def _average(self, optimizer: int) -> None:
        """Average what a backward has delivered, as DDP does at its end; ``p.grad`` shows it at once."""
        owned = self._owned[optimizer]
        owned.is_averaged = False
        self.finish(optimizer)

    @staticmethod
    def _show_averages(owned: _Owned) -> None:
        """Show what a backward has left, and open the window for the next one."""
        owned.window.open_next()
        owned.window.show(gradients=True, scale=_factor(1.0))
        owned.is_averaged, owned.is_summed = True, False

    def step(self, optimizer: int, *, scale: float) -> None:
        """Update every parameter that had a gradient on any rank."""
        owned = self._owned[optimizer]
        live = {touch.slot for touch in owned.touches if touch.is_live}
        scale /= owned.window.loss_scale
        self._take_edits(owned)
        if owned.driver is not None:
            owned.driver.step(_factor(scale), live.__contains__)
        for held in owned.ranges:
            held.buffer.note_versions()
        self._close_window(owned, scale, updated=True)

    def skip(self, optimizer: int) -> None:
        """Leave everything as it is and close the window."""
        owned = self._owned[optimizer]
        self._close_window(owned, 1.0 / owned.window.loss_scale, updated=False)

    def _close_window(self, owned: _Owned, scale: float, *, updated: bool) -> None:
        """Open the next window; in fp32 and fp64 ``p.grad`` then shows the averaged, clipped gradient."""
        shows = updated and all(not held.keeps_master for held in owned.ranges)
        factor = _factor(scale)
        owned.window.open_next()
        owned.window.show(gradients=shows, scale=factor)
        owned.is_summed = False

    def regroup(self, optimizer: int) -> None:
        """Hook and guard new parameters before the first backward that reaches them."""
        owned = self._owned[optimizer]
        if not _is_same(_grouping(owned.user), owned.grouping):
            self._take(owned)

    def drop_gradients(self) -> None:
        """Answer what other ranks have sent, and clear everything."""
        for owned in self._owned:
            owned.window.drain()
            owned.window.discard()
            owned.is_summed = False

    def non_finite(self, optimizer: int) -> list[str]:
        """Return the parameters with a non-finite gradient."""
        owned = self._owned[optimizer]
        return non_finite_names(owned.pieces or [], self._gradient_places(owned))

    # --- books ----------------------------------------------------------------------------------------------

    def places(self) -> Iterator[Place]:
        """Publish values, masters, gradients and states."""
        taken = set()
        for owned in self._owned:
            self._take_edits(owned)
            for held in owned.ranges:
                for slot in held.buffer.slots:
                    taken.add(slot.parameter)
                    yield Place(key=slot.entry.key, state="value", tensor=held.values[slot.start : slot.stop])
                    if held.keeps_master:
                        yield Place(
                            key=slot.entry.key, state="master", tensor=held.master[slot.start : slot.stop]
                        )
            yield from self._gradient_places(owned)
            if owned.driver is not None:
                for segment, name, value in owned.driver.tensor_states():
                    yield from _state_places(segment.slots, segment.start, segment.stop, name, value)
                for parameter, name, value in owned.driver.idle_states():
                    entry = self._context.table.entry_of(parameter)
                    if entry is not None and entry.parts:
                        yield Place(key=entry.key, state=name, tensor=value)
        for entry in self._context.table:
            tensor = self._context.table.tensor(entry)
            if entry.parts and tensor not in taken:
                yield Place(key=entry.key, state="value", tensor=tensor.detach())

    def state(self, optimizer: int) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the optimizer's state by parameter; no communication."""
        driver = self._owned[optimizer].driver
        return {} if driver is None else driver.state_of_parameters()

    def counters(self, optimizer: int) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the states that are not shaped like their parameter; no communication."""
        driver = self._owned[optimizer].driver
        return {} if driver is None else driver.counters()

    def load_state(self, optimizer: int, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Replace the optimizer's state."""
        driver = self._owned[optimizer].driver
        if driver is not None:
            driver.cut(state)

    def detach(self) -> None:
        """Give the models back, in the dtype that they compute in, and the user's optimizers their state."""
        for index, owned in enumerate(self._owned):
            gradients: dict[Touch, torch.Tensor] = {}
            for touch in owned.touches:
                touch.take_over(touch.changed_by_user())
                if touch.shown == "view":
                    gradients[touch] = touch.view.detach().clone()
            owned.window.drain()
            owned.window.close()
            for parameter, state in self.state(index).items():
                owned.user.state[parameter] = _narrow(state, parameter)
            for buffer, touches in owned.window.touches:
                for touch in touches:
                    touch.show_nothing()
                    buffer.give_back(touch.slot)
                    touch.slot.parameter.grad = gradients.get(touch)
        self._owned.clear()

    def estimate(
        self, table: ParameterTable, precision: Precision, optimizer_states: int = 2
    ) -> Mapping[str, int]:
        """Return bytes per rank by category: nothing is divided."""
        found = {"values": 0, "gradients": 0, "masters": 0, "states": 0}
        for entry, parameter in table.parameters():
            dtype = precision.dtype_of(entry.name, entry.dtype)
            numel = math.prod(parameter.shape)
            found["values"] += numel * dtype.itemsize
            if not entry.trainable:
                continue
            wide = max(dtype.itemsize, torch.float32.itemsize)
            found["gradients"] += numel * dtype.itemsize
            found["masters"] += numel * wide if dtype.itemsize < wide else 0
            found["states"] += numel * wide * optimizer_states
        return found

    @contextmanager
    def full_gradients(self, optimizer: int) -> Iterator[dict[torch.Tensor, torch.Tensor]]:
        """Show averages in fp32 at least; edits go back into the buffers."""
        owned = self._owned[optimizer]
        self.finish(optimizer)
        factor = _factor(1.0 / owned.window.loss_scale)
        scales = {touch: factor(buffer) for buffer, touches in owned.window.touches for touch in touches}
        live = [touch for touch in scales if touch.is_live]
        wide = [touch.view.to(torch.promote_types(touch.view.dtype, torch.float32)) for touch in live]
        shown: dict[torch.Tensor, torch.Tensor] = {
            touch.slot.parameter: gradient * scales[touch] for touch, gradient in zip(live, wide, strict=True)
        }
        yield shown
        with torch.no_grad():
            for touch in live:
                touch.view.copy_(shown[touch.slot.parameter] / scales[touch])

    @staticmethod
    def _take_edits(owned: _Owned) -> None:
        """Bring buffers and masters in line with what the user wrote into the model."""
        for held in owned.ranges:
            held.buffer.take_edits(held.master if held.keeps_master else None)

    @staticmethod
    def _gradient_places(owned: _Owned) -> list[Place]:
        """Return where the gradients of one optimizer's parameters are."""
        return [
            Place(key=slot.entry.key, state="gradient", tensor=held.gradient[slot.start : slot.stop])
            for held in owned.ranges
            for slot in held.buffer.slots
        ]


def _factor(scale: float) -> Callable[[FlatBuffer], float]:
    """Return the function that tells by what a buffer's summed gradients are multiplied."""
    return lambda buffer: scale / buffer.late_divisor


def _narrow(state: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return a state as torch's own optimizers keep it: moments in the dtype of their parameter."""
    return {
        name: value.to(parameter.dtype)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name != "step"
        else value
        for name, value in state.items()
    }


def _grouping(optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
    """Return which trainable parameters are in which group, to notice when that changes."""
    return [
        [parameter for parameter in group["params"] if parameter.requires_grad]
        for group in optimizer.param_groups
    ]


def _is_same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    """Whether two groupings hold the same objects in the same order."""
    return len(one) == len(other) and all(
        len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
        for a, b in zip(one, other, strict=True)
    )


def _state_places(
    slots: Sequence[Slot], start: int, stop: int, name: str, value: torch.Tensor
) -> Iterator[Place]:
    """Publish one state of a segment, a place for each parameter in it."""
    flat = value.view(-1)
    for slot in slots:
        lo, hi = max(start, slot.start), min(stop, slot.stop)
        yield Place(
            key=slot.entry.key, state=name, tensor=flat[lo - start : hi - start], start=lo - slot.start
        )
