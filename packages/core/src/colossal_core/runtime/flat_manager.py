"""What memory managers over flat buffers have in common, whether buffers are whole on each rank or divided.

The one idea: parameters and gradients live in flat buffers of a few megabytes, so a reduction is one message
without copies and an update is one long vector; buffers leave while backward runs, in the order in which
backward fills them. Each rank updates the range of each buffer that it owns: all of it, or its shard. With a
16-bit precision the update runs on fp32 masters and moments, chunk by chunk.

A manager says among which ranks the buffer of a parameter is divided (:meth:`AbstractFlatManager._divided`),
and which lane reduces its gradients.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve, field

from colossal_core.errors import UsageError
from colossal_core.interfaces import AbstractMemoryManager
from colossal_core.mesh import GroupSpec
from colossal_core.runtime.buckets import BucketRules, LanePlan, plan_lanes
from colossal_core.runtime.flat import FlatBuffer, Slot
from colossal_core.runtime.grouping import grouping_of, is_same
from colossal_core.runtime.mesh import GRADIENTS
from colossal_core.runtime.norm import EarlySums, NormPiece, gradient_norm, non_finite_names, norm_pieces
from colossal_core.runtime.optimizers import optimizer_spec
from colossal_core.runtime.segments import OwnedRange, SegmentedOptimizer
from colossal_core.runtime.shared_sums import SharedSum, shared_sums, shares_of
from colossal_core.runtime.table import Entry, Place
from colossal_core.runtime.touch import Touch
from colossal_core.runtime.window import GradientWindow

if TYPE_CHECKING:
    from torch import nn

    from colossal_core.runtime.context import Context

__all__ = ["AbstractFlatManager", "Owned", "factor_of"]


@define(eq=False)
class Owned:
    """What belongs to one optimizer.

    Attributes:
        window: Collects the gradients.
        user: The user's optimizer.
        channel: Channel of its groups.
        ranges: The buffers, each with the range that this rank updates.
        driver: Runs the update; None before the first parameters are taken.
        sums: Further sums of gradient shares.
        pieces: What the norm is made of; None when it has to be made anew.
        early: Of which pieces the squares are known.
        is_summed: Whether the further sums ran in this window.
        is_averaged: Whether buffers hold the averages that a backward left.
        grouping: Which parameters are in which group.
    """

    window: GradientWindow
    user: torch.optim.Optimizer
    channel: str
    ranges: list[OwnedRange] = field(factory=list)
    driver: SegmentedOptimizer | None = None
    sums: list[SharedSum] = field(factory=list)
    pieces: list[NormPiece] | None = None
    early: EarlySums = field(factory=EarlySums)
    is_summed: bool = False
    is_averaged: bool = False
    grouping: list[list[torch.Tensor]] = field(factory=list)

    @property
    def touches(self) -> list[Touch]:
        """All touches, in launch order."""
        return [touch for _, touches in self.window.touches for touch in touches]


class AbstractFlatManager(AbstractMemoryManager):
    """Holds trainable parameters and gradients in flat buffers."""

    _context: Context
    _owned: list[Owned]
    _dtype_of: Callable[[torch.Tensor], torch.dtype]

    # --- where managers differ ------------------------------------------------------------------------------

    def _divided(self, entry: Entry) -> GroupSpec:
        """Return the ranks among which the buffer of a parameter is divided; no axes when each holds all."""
        return GroupSpec()

    def _rules(self, keeps_whole: bool) -> BucketRules:  # noqa: FBT001 - its only argument
        """Return how parameters are put into buffers.

        Args:
            keeps_whole: Whether the optimizer needs to see parameters whole.
        """
        layout, rank = self._context.mesh.layout, self._context.mesh.rank
        return BucketRules(
            dtype_of=lambda _, parameter: self._dtype_of(parameter),
            divided=self._divided,
            num_ranks=lambda spec: len(layout.members(spec, rank)),
            keeps_whole=keeps_whole,
            larger=1 if self._context.mesh.device.type == "cpu" else 4,
            device=self._context.mesh.device,
        )

    @abstractmethod
    def _take_lane(self, owned: Owned, plan: LanePlan) -> None:
        """Allocate the buffers of a lane, add their ranges to ``owned.ranges`` and the lane to the window."""

    def _publish(self, owned: Owned, live: Callable[[Any], bool]) -> Callable[[int], None]:
        """Return what makes updated values visible where they are used.

        Args:
            owned: The optimizer that steps.
            live: Whether the parameter of a slot is updated.

        Returns:
            A function that is told how many of ``owned.ranges`` are updated; more from call to call, and all
            of them in the last one, after which values are there.
        """
        return lambda _: None

    # --- set-up ---------------------------------------------------------------------------------------------

    def _attach(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        context: Context,
        *,
        guards: bool,
        averages: bool = False,
    ) -> None:
        """Move the parameters into flat buffers.

        Args:
            models: As for :meth:`~.interfaces.AbstractMemoryManager.attach`.
            optimizers: The same.
            context: The same.
            guards: Whether ``p.grad`` shows guards until gradients are reduced.
            averages: Whether gradients are averaged at the end of every backward.
        """
        self._context = context
        self._owned = []
        self._dtype_of = context.precision.dtypes(models.values())
        for index, optimizer in enumerate(optimizers):
            window = GradientWindow(
                context.collectives,
                context.arrivals,
                guards=guards,
                after_backward=partial(self._average, index) if averages else None,
            )
            owned = Owned(window, optimizer, f"{GRADIENTS}.{index}")
            self._owned.append(owned)
            self._take(owned)
        taken = {
            slot.parameter for owned in self._owned for held in owned.ranges for slot in held.buffer.slots
        }
        for _, parameter in context.table.parameters():
            if parameter not in taken and parameter.dtype != self._dtype_of(parameter):
                parameter.data = parameter.detach().to(self._dtype_of(parameter))

    def _take(self, owned: Owned) -> None:
        """Take over an optimizer's trainable parameters that are not in buffers yet, and cut its groups."""
        table = self._context.table
        table.check_groups(owned.user.param_groups)
        known = {slot.parameter for held in owned.ranges for slot in held.buffer.slots}
        grouped = {parameter for group in owned.user.param_groups for parameter in group["params"]}
        fresh = [
            (entry, parameter)
            for entry, parameter in table.parameters()
            if parameter in grouped and parameter not in known and parameter.requires_grad and entry.parts
        ]
        state = dict(owned.user.state) if owned.driver is None else owned.driver.state_of_parameters()
        if fresh:
            keeps_whole = optimizer_spec(owned.user).shapes == "whole"
            for plan in plan_lanes(fresh, self._rules(keeps_whole)):
                self._take_lane(owned, plan)
            position = {entry.key: index for index, entry in enumerate(table)}
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
        owned.grouping = grouping_of(owned.user)

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
        return self._finish(optimizer, norm_type, clears=False)

    def clear(self, optimizer: int) -> None:
        """Send what the other ranks wait for in :meth:`finish`, and close the window without gradients."""
        owned = self._owned[optimizer]
        if not any(lane.is_reduced for lane in owned.window.lanes):
            owned.window.release_cleared()
            return
        self._finish(optimizer, 2.0, clears=True)
        owned.window.discard()
        owned.is_summed = False

    def _finish(self, optimizer: int, norm_type: float, *, clears: bool) -> float:
        """Reduce, or agree with the other ranks that all of them have cleared what was reduced before."""
        self.regroup(optimizer)
        owned = self._owned[optimizer]
        if owned.is_averaged and not owned.window.has_arrivals:
            owned.window.take_over()
            return self._norm(owned, norm_type)
        can_measure = norm_type == 2.0 and not owned.sums
        owned.window.terms.meanwhile = owned.early.begin((owned.pieces or ()) if can_measure else ())
        if owned.window.finish():
            owned.window.discard()
            owned.is_summed = False
            if self._is_cleared_everywhere(clears=clears):
                return 0.0
            raise UsageError(
                "gradients arrived or were changed after clip_grad_norm_() had reduced them; all gradients "
                "of this step are dropped",
                hint="call clip_grad_norm_() after the last backward(), right before optimizer.step(); to "
                "leave a step out, call optimizer.zero_grad() on all ranks",
            )
        if not owned.is_summed:
            for shared in owned.sums:
                shared.run(self._context.collectives)
            owned.is_summed = True
        if owned.window.after_each_backward:
            self._show_averages(owned)
        return self._norm(owned, norm_type)

    def _is_cleared_everywhere(self, *, clears: bool) -> bool:
        """Agree whether every rank has cleared its gradients, so that nothing is lost."""
        everyone = self._context.mesh.everyone()
        keeps = torch.tensor([0.0 if clears else 1.0], device=everyone.device)
        self._context.collectives.all_reduce(keeps, everyone, phase="norm").wait()
        return not keeps.item()

    def _norm(self, owned: Owned, norm_type: float) -> float:
        """Return the norm of reduced gradients."""
        if owned.pieces is None:
            table, rank = self._context.table, self._context.mesh.rank
            pieces = norm_pieces(table, self._gradient_places(owned), rank)
            # Gradients that were divided when they arrived are averages already.
            owned.pieces = [
                evolve(piece, scale=1.0) if piece.tensor.dtype.itemsize > 2 else piece for piece in pieces
            ]
        everyone, collectives = self._context.mesh.everyone(), self._context.collectives
        norm = gradient_norm(owned.pieces, everyone, collectives, norm_type=norm_type, early=owned.early)
        return norm / owned.window.loss_scale

    def _average(self, optimizer: int) -> None:
        """Average what a backward has delivered, as DDP does at its end; ``p.grad`` shows it at once."""
        owned = self._owned[optimizer]
        owned.is_averaged = False
        self.finish(optimizer)

    @staticmethod
    def _show_averages(owned: Owned) -> None:
        """Show what a backward has left, and open the window for the next one."""
        owned.window.open_next()
        owned.window.show(gradients=True, scale=factor_of(1.0))
        owned.is_averaged, owned.is_summed = True, False

    def step(self, optimizer: int, *, scale: float) -> None:
        """Update every parameter that had a gradient on any rank."""
        owned = self._owned[optimizer]
        live = {touch.slot for touch in owned.touches if touch.is_live}
        scale /= owned.window.loss_scale
        self._take_edits(owned)
        if owned.driver is not None:
            publish = self._publish(owned, live.__contains__)
            owned.driver.step(factor_of(scale), live.__contains__, publish)
            publish(len(owned.ranges))
            torch.autograd.graph.increment_version([slot.parameter for slot in live])
        for held in owned.ranges:
            held.buffer.note_versions()
        self._close_window(owned, scale, updated=True)

    def skip(self, optimizer: int) -> None:
        """Leave everything as it is and close the window."""
        owned = self._owned[optimizer]
        self._close_window(owned, 1.0 / owned.window.loss_scale, updated=False)

    def _close_window(self, owned: Owned, scale: float, *, updated: bool) -> None:
        """Open the next window; in fp32 and fp64 ``p.grad`` then shows the averaged, clipped gradient."""
        # The update scales gradients in place, unless it works on a wider copy of them.
        scaled = {held.buffer for held in owned.ranges if updated and not held.keeps_master}
        lacks = factor_of(scale)
        owned.window.open_next()
        owned.window.show(
            gradients=updated and len(scaled) == len(owned.ranges),
            scale=lambda buffer: 1.0 if buffer in scaled else lacks(buffer),
        )
        owned.is_summed = False

    def regroup(self, optimizer: int) -> None:
        """Hook and guard new parameters before the first backward that reaches them."""
        owned = self._owned[optimizer]
        if not is_same(grouping_of(owned.user), owned.grouping):
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
        taken: set[torch.Tensor] = set()
        for owned in self._owned:
            self._take_edits(owned)
            for held in owned.ranges:
                taken.update(slot.parameter for slot in held.buffer.slots)
                yield from self._value_places(held)
                if held.keeps_master:
                    yield from held.places("master", held.master)
            yield from self._gradient_places(owned)
            if owned.driver is not None:
                for segment, name, value in owned.driver.tensor_states():
                    yield from segment.owned.places(name, value, start=segment.start, slots=segment.slots)
                yield from self._idle_places(owned.driver)
        for entry in self._context.table:
            tensor = self._context.table.tensor(entry)
            if entry.parts and tensor not in taken:
                yield Place(key=entry.key, state="value", tensor=tensor.detach())

    def kept_places(self) -> Iterator[Place]:
        """Publish masters, or values, of the ranges that this rank updates, and whole what nobody updates."""
        taken: set[torch.Tensor] = set()
        for owned in self._owned:
            self._take_edits(owned)
            for held in owned.ranges:
                taken.update(slot.parameter for slot in held.buffer.slots)
                yield from held.places("master" if held.keeps_master else "value", held.master)
        for entry, parameter in self._context.table.parameters():
            if entry.parts and parameter not in taken:
                yield Place(key=entry.key, state="value", tensor=parameter.detach())

    @torch.no_grad()
    def publish_values(self) -> None:
        """Narrow masters into values, and gather those that are divided."""
        for owned in self._owned:
            for held in owned.ranges:
                if held.keeps_master:
                    with held.present("value"), held.present("master"):
                        held.values.copy_(held.master)
            self._publish(owned, lambda _: True)(len(owned.ranges))
            for held in owned.ranges:
                # A backward through a graph from before would use the new values: torch shall refuse it.
                torch.autograd.graph.increment_version([slot.parameter for slot in held.buffer.slots])
                held.buffer.note_versions()

    def _idle_places(self, driver: SegmentedOptimizer) -> Iterator[Place]:
        """Publish the states of parameters that are in no group at present."""
        home: dict[torch.Tensor, tuple[OwnedRange, Slot]] = {
            slot.parameter: (held, slot) for held in driver.owned for slot in held.buffer.slots
        }
        for parameter, name, value in driver.idle_states():
            entry = self._context.table.entry_of(parameter)
            if parameter in home:
                held, slot = home[parameter]
                first, last = slot.within(held.start, held.stop)
                flat = value.view(-1)[first - slot.start : last - slot.start]
                yield from held.places(name, flat, start=first, slots=(slot,))
            elif entry is not None and entry.parts:
                yield Place(key=entry.key, state=name, tensor=value)

    def _value_places(self, held: OwnedRange) -> Iterator[Place]:
        """Publish the values of one buffer, whole."""
        for slot in held.buffer.slots:
            yield Place(key=slot.entry.key, state="value", tensor=held.buffer.values[slot.start : slot.stop])

    @staticmethod
    def _gradient_places(owned: Owned) -> list[Place]:
        """Return where the gradients of one optimizer's parameters are, as far as they have memory."""
        return [
            place
            for held in owned.ranges
            if held.gradient.untyped_storage().nbytes()
            for place in held.places("gradient", held.gradient)
        ]

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
            for buffer, touches in owned.window.touches:
                for touch in touches if not buffer.is_divided else ():
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

    @contextmanager
    def full_gradients(self, optimizer: int) -> Iterator[dict[torch.Tensor, torch.Tensor]]:
        """Show averages in fp32 at least; edits go back into the buffers."""
        owned = self._owned[optimizer]
        self.finish(optimizer)
        factor = factor_of(1.0 / owned.window.loss_scale)
        shown: dict[torch.Tensor, torch.Tensor] = {}
        live = {touch.slot for touch in owned.touches if touch.is_live}
        for held in owned.ranges:
            whole = self._whole_gradient(held)
            for slot in held.buffer.slots:
                if slot in live:
                    gradient = whole[slot.start : slot.stop].view(slot.parameter.shape)
                    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
                    shown[slot.parameter] = wide * factor(held.buffer)
        yield shown
        with torch.no_grad():
            for held in owned.ranges:
                for slot in held.buffer.slots:
                    if slot in live:
                        first, last = slot.within(held.start, held.stop)
                        edited = shown[slot.parameter].reshape(-1)[first - slot.start : last - slot.start]
                        with held.present("gradient"):
                            held.gradient[first - held.start : last - held.start].copy_(
                                edited / factor(held.buffer)
                            )

    def _whole_gradient(self, held: OwnedRange) -> torch.Tensor:
        """Return the reduced gradients of one buffer whole; collective where it is divided."""
        return held.gradient

    def _take_edits(self, owned: Owned) -> None:
        """Bring buffers and masters in line with what the user wrote into the model."""
        for held in owned.ranges:
            held.buffer.take_edits(held.master if held.keeps_master else None, held.start)


def factor_of(scale: float) -> Callable[[FlatBuffer], float]:
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
