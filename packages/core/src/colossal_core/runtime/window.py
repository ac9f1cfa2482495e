"""The gradient window: from the first accumulation to ``optimizer.step()``.

The one idea: every rank launches the buffers of a *lane* (those that are reduced over the same ranks) in the
order fixed at build, and all of them by ``step()``, which all ranks call. Whether a launch happens early,
inside a backward that is known or predicted to be the last one to touch the buffer, is each rank's own
affair: it changes when a message leaves, never which messages leave or in which order.

# Note [Stale buffers]
A prediction can be wrong: a gradient may arrive, or be cleared by the user, after its
buffer has left. Such late news is kept aside (waiting for the buffer inside backward could deadlock with
collectives of the model itself), and the buffer is *stale* on that rank. The last buffer of a lane never
leaves before ``step()`` and carries notes for each buffer of the lane, which
are 1 where it is stale here. After the sum every rank knows which buffers are stale anywhere, and those are
reduced once more: the first rank of the group keeps the sum that is already there, all others start from
zero, and each adds its late news. Wrong predictions cost traffic, never correctness.

# Note [Withdrawn gradients]
A gradient that was cleared after it had left is in a sum that cannot be undone. When all ranks that had
sent one cleared it, which is what a loop does that clears gradients between two backward passes, the sum
counts for nothing and is dropped. When only some of them did, what the others sent is lost in it, and every
rank raises. Notes say that there is something to agree on; one more small message, only then, settles it
for each parameter.

# Note [What None means]
torch skips parameters whose gradient is None: no decay, no momentum, no step count. A flag per parameter says
that this rank touched it; when it is zero everywhere after the sum, the parameter had no gradient on any
rank, and the update skips it exactly as torch does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import define, field

from colossal_core.errors import UsageError
from colossal_core.runtime.backward_end import at_end_of_backward
from colossal_core.runtime.touch import Touch, Watch

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from colossal_core.runtime.arrivals import Arrivals
    from colossal_core.runtime.collectives import Collectives, Pending
    from colossal_core.runtime.flat import FlatBuffer
    from colossal_core.runtime.mesh import Group

__all__ = ["NOTES_PER_BUFFER", "GradientWindow", "Lane"]

PHASE = "gradients"

NOTES_PER_BUFFER = 2
"""Elements that the last buffer of a lane has for each of its buffers: whether it is stale, and whether
something that it carried was cleared since."""


@define(eq=False)
class Lane:
    """The buffers that are reduced over one group, in launch order.

    Attributes:
        group: Ranks over which they are summed, on a channel that nothing else uses.
        buffers: The buffers; the last one has a note for each.
        touches: For each buffer, the touches of its slots.
        next: First buffer that was not launched in this window.
        pending: Reductions in flight, by buffer.
        stale: Buffers that have left and changed since on this rank.
        waiting: For each buffer, how many of its parameters are still expected.
        launches_early: Whether buffers may leave from inside backward. Only one lane of a group may: two
            would share its channel in an order that differs from rank to rank.
        is_reduced: Whether :meth:`GradientWindow.finish` ran in this window.
        disputed: Parameters whose gradient only some ranks cleared after it had left.
    """

    group: Group
    buffers: Sequence[FlatBuffer]
    touches: Sequence[Sequence[Touch]]
    next: int = 0
    pending: dict[int, Pending] = field(factory=dict)
    stale: set[int] = field(factory=set)
    waiting: list[int] = field(factory=list)
    launches_early: bool = True
    is_reduced: bool = False
    disputed: list[str] = field(factory=list)


@define(eq=False)
class _Home:
    """Where the gradient of one parameter goes; held by its window, and weakly by the hooks."""

    window: GradientWindow
    lane: Lane
    index: int
    touch: Touch


class GradientWindow:
    """Collects gradients of one optimizer's parameters in flat buffers and reduces each once per window.

    Owns the hooks on the parameters. While a window is open on more than one rank, ``p.grad`` shows a guard;
    after :meth:`finish` and :meth:`show` it shows the reduced gradient.
    """

    def __init__(
        self,
        collectives: Collectives,
        arrivals: Arrivals,
        *,
        guards: bool,
        after_backward: Callable[[], None] | None = None,
    ) -> None:
        """Watch nothing yet; see :meth:`add_lane`.

        Args:
            collectives: Where reductions go.
            arrivals: Weight and scale of the gradients that arrive.
            guards: Whether ``p.grad`` shows guards until :meth:`finish`; False only in a world of one rank
                without 16-bit gradients, where they are torch's own at any time, and with
                ``after_backward``.
            after_backward: Called at the end of every backward outside :meth:`hold`; reduces the gradients.
        """
        self._collectives = collectives
        self._arrivals = arrivals
        self._after_backward = after_backward
        self._awaits_end = False
        self._scale: float | None = None
        self._guards = guards
        self._handles: list[RemovableHandle] = []
        self._nodes: list[torch.autograd.graph.Node] = []
        self._homes: list[_Home] = []
        self._lanes: list[Lane] = []
        self._holds = 0

    def add_lane(self, group: Group, buffers: Sequence[FlatBuffer]) -> None:
        """Hook the parameters of some buffers.

        Args:
            group: Ranks over which they are summed.
            buffers: In launch order, gradient memory allocated; the last one has :data:`NOTES_PER_BUFFER`
                notes for each.
        """
        records = [
            [Touch.of(slot, buffer.gradient_view(slot), buffer.early_divisor) for slot in buffer.slots]
            for buffer in buffers
        ]
        lane = Lane(group, buffers, records)
        waits_for_others = self._guards or self._after_backward is not None
        lane.launches_early = waits_for_others and all(group is not other.group for other in self._lanes)
        self._lanes.append(lane)
        for index, touches in enumerate(lane.touches):
            for touch in touches:
                self._hook(lane, index, touch)
        self._predict(lane)

    def hold(self) -> None:
        """Launch nothing from inside backward until :meth:`let_go`: more backward passes will follow."""
        self._holds += 1

    def let_go(self) -> None:
        """End one :meth:`hold`."""
        self._holds -= 1

    def close(self) -> None:
        """Remove all hooks; ``p.grad`` keeps what it shows."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()
        self._homes.clear()

    @property
    def after_each_backward(self) -> bool:
        """Whether gradients are reduced at the end of every backward."""
        return self._after_backward is not None

    @property
    def has_arrivals(self) -> bool:
        """Whether backward has delivered a gradient in this window."""
        return any(touch.num_touches for _, touches in self.touches for touch in touches)

    @property
    def loss_scale(self) -> float:
        """Loss scale that the gradients of this window are in; 1.0 before the first one."""
        return 1.0 if self._scale is None else self._scale

    @property
    def touches(self) -> list[tuple[FlatBuffer, Sequence[Touch]]]:
        """Buffers with the touches of their slots, in launch order."""
        return [pair for lane in self._lanes for pair in zip(lane.buffers, lane.touches, strict=True)]

    def finish(self) -> bool:
        """Reduce everything that is not reduced yet; collective over each lane's group.

        Afterwards ``buffer.gradients`` holds sums over the group, zero where no rank had a gradient, and
        ``touch.is_live`` says, equally on all its ranks, whether any rank had one.

        Returns:
            Whether an earlier ``finish`` of the same window no longer holds, because gradients arrived or
            were changed since on any rank; they are not in the sums.

        Raises:
            UsageError: Only some ranks cleared a gradient after it had left; on every rank of the lane, with
                all gradients cleared. See Note [Withdrawn gradients].
        """
        outdated = [self._finish(lane) for lane in self._lanes]
        disputed = [name for lane in self._lanes for name in lane.disputed]
        if disputed:
            self.discard()
            names = ", ".join(map(repr, disputed[:3])) + (" and others" if len(disputed) > 3 else "")
            raise UsageError(
                f"the gradients of {names} were cleared on some ranks only, after backward had sent them; "
                "all gradients of this step are dropped",
                hint="clear them on all ranks, or run backward in booster.no_sync() where that may happen",
            )
        return any(outdated)

    def take_over(self) -> None:
        """Bring buffers that hold averages in line with what the user did to ``p.grad``."""
        for _, touches in self.touches:
            for touch in touches:
                touch.take_over(touch.changed_by_user())
                if not touch.is_live:
                    touch.view.zero_()

    def drain(self) -> None:
        """Send and await what has not left, so that no message of another rank stays unanswered.

        Collective; what gradients hold afterwards is of no use.
        """
        for lane in self._lanes:
            while lane.next < len(lane.buffers):
                self._launch_next(lane)
            self._wait(lane)

    def discard(self) -> None:
        """Clear all gradients and close the window, after an error that every rank raises."""
        for lane in self._lanes:
            for touches in lane.touches:
                for touch in touches:
                    touch.is_live = False
                    touch.show_nothing()
        self.open_next()

    def open_next(self) -> None:
        """Close the window: what was touched predicts the next one. Gradients stay until they are cleared."""
        for lane in self._lanes:
            for touches in lane.touches:
                for touch in touches:
                    touch.num_predicted, touch.num_touches = touch.num_touches, 0
                    touch.late, touch.late_change = None, None
            lane.next, lane.is_reduced = 0, False
            lane.stale.clear()
            lane.disputed.clear()
            self._predict(lane)
        self._scale = None

    def show(self, *, gradients: bool, scale: Callable[[FlatBuffer], float]) -> None:
        """Let ``p.grad`` show reduced gradients, or guards where buffers do not hold what torch would show.

        Args:
            gradients: Whether the buffers hold the gradients as torch would show them after the step.
            scale: Factor that the gradients of a buffer still lack otherwise.
        """
        for buffer, touches in self.touches:
            for touch in touches:
                if not touch.is_live:
                    touch.show_nothing()
                elif gradients or not self._guards:
                    touch.show_view()
                else:
                    touch.show_guard()
                touch.carried = 1.0 if gradients else scale(buffer)

    # --- inside backward ------------------------------------------------------------------------------------

    def _hook(self, lane: Lane, index: int, touch: Touch) -> None:
        """Watch one parameter: before and after autograd accumulates into ``p.grad``."""
        parameter = touch.slot.parameter
        # Not a hook on the tensor: that one runs in torch.autograd.grad too, where nothing is accumulated.
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        # Python's collector does not look into hooks that run after accumulation: what they held, and what
        # holds the parameter in turn, would never be freed.
        home = _Home(self, lane, index, touch)
        reference = weakref.ref(home)

        def before(_: object) -> None:
            found = reference()
            if found is not None:
                found.window.before_accumulation(found.lane, found.index, found.touch)

        def after() -> None:
            found = reference()
            if found is not None:
                found.window.after_accumulation(found.lane, found.index, found.touch)

        self._homes.append(home)
        self._nodes.append(node)
        self._handles.append(node.register_prehook(before))
        self._handles.append(parameter.register_post_accumulate_grad_hook(Watch(after)))

    def before_accumulation(self, lane: Lane, index: int, touch: Touch) -> None:
        """Put into ``p.grad`` what autograd shall add to: the view, or None so that it hands over its own."""
        self._arrivals.check(touch.slot.name)
        change = touch.changed_by_user()
        if index < lane.next:
            touch.note_change(change, self._window_scale())
            touch.slot.parameter.grad = None
            return
        touch.take_over(change)
        touch.settle(self._window_scale())
        # Autograd may add in place only where nothing has to be done to the gradient on its way.
        as_it_is = not touch.is_narrow and self._factor(touch) == 1.0 and not torch.is_grad_enabled()
        adds_in_place = touch.is_live and as_it_is
        touch.slot.parameter.grad = touch.view if adds_in_place else None

    def after_accumulation(self, lane: Lane, index: int, touch: Touch) -> None:
        """Move a new gradient into the buffer and launch what is complete."""
        touch.num_touches += 1
        if self._after_backward is not None and not self._awaits_end:
            self._awaits_end = True
            at_end_of_backward(self._end_backward)
        gradient = touch.slot.parameter.grad
        has_left = index < lane.next
        counts = self._arrivals.weight != 0.0
        if counts and (has_left or lane.is_reduced):
            lane.stale.add(index)
        if not counts:  # of a sample that stands in for an empty share: as if this rank had not run backward
            touch.show_again()
        elif gradient is None:  # another hook has cleared it again
            if has_left:
                touch.note_change("cleared", self._window_scale())
            else:
                touch.take_over("cleared")
        elif has_left:
            touch.add_late(gradient.detach(), self._factor(touch))
            touch.show_guard()
        else:
            touch.add(gradient, self._factor(touch))
            if self._guards:
                touch.show_guard()
            else:
                touch.show_view()
        if not has_left and touch.num_touches == touch.num_predicted:
            lane.waiting[index] -= 1
            if self._holds == 0 and lane.launches_early:
                self._launch_ready(lane)

    def _end_backward(self) -> None:
        """Let the manager reduce what this backward delivered, unless more passes are known to follow."""
        self._awaits_end = False
        if self._after_backward is not None and self._holds == 0:
            self._after_backward()

    def _launch_ready(self, lane: Lane) -> None:
        """Launch, in order, every complete buffer but the last."""
        while lane.next < len(lane.buffers) - 1 and lane.waiting[lane.next] == 0:
            self._launch_next(lane)

    # --- reduction ------------------------------------------------------------------------------------------

    def _finish(self, lane: Lane) -> bool:
        """Reduce one lane; see :meth:`finish`."""
        for index, touches in enumerate(lane.touches):
            for touch in touches:
                if index < lane.next or lane.is_reduced:
                    change = touch.changed_by_user()
                    touch.note_change(change, self._window_scale())
                    if change is not None:
                        lane.stale.add(index)
        if lane.is_reduced:
            return self._is_stale_anywhere(lane)
        while lane.next < len(lane.buffers):
            self._launch_next(lane)
        self._wait(lane)
        notes = self._read_tails(lane)
        count = len(lane.buffers)
        stale = [index for index, note in enumerate(notes[-2 * count : -count]) if note > 0]
        if stale:
            withdrawn = self._agree_on_withdrawals(
                lane, [index for index, note in enumerate(notes[-count:]) if note > 0]
            )
            self._reduce_again(lane, stale, withdrawn)
            notes = self._read_tails(lane)
        position = 0
        for touches in lane.touches:
            for touch in touches:
                touch.is_live = notes[position + touch.slot.index] > 0
            position += len(touches)
        lane.is_reduced = True
        if not self._guards and self._after_backward is None:
            lane.next = 0  # there is nothing to wait for: gradients stay torch's own
        return False

    def _is_stale_anywhere(self, lane: Lane) -> bool:
        """Agree whether anything changed on any rank since the lane was reduced."""
        note = torch.tensor([float(bool(lane.stale))], device=lane.buffers[-1].device)
        self._collectives.all_reduce(note, lane.group, phase=PHASE).wait()
        return bool(note.item() > 0)

    def _launch_next(self, lane: Lane) -> None:
        """Bring the next buffer in line with what the user did to ``p.grad``, guard it, and send it."""
        for touch in lane.touches[lane.next]:
            touch.take_over(touch.changed_by_user())
            touch.settle(self._window_scale())
            touch.narrow()
            touch.was_sent = touch.is_live
            if touch.is_live and self._guards:
                touch.show_guard()
        self._launch(lane, lane.next)
        lane.next += 1

    def _launch(self, lane: Lane, index: int) -> None:
        """Send one buffer with its flags, and in the last one the notes."""
        buffer = lane.buffers[index]
        self._mark(buffer, lane.touches[index])
        if buffer.num_notes:
            notes = [float(other in lane.stale) for other in range(len(lane.buffers))]
            notes += [float(any(touch.is_withdrawn for touch in touches)) for touches in lane.touches]
            buffer.tail[len(buffer.slots) :].copy_(torch.tensor(notes))
        lane.pending[index] = self._collectives.all_reduce(buffer.gradients, lane.group, phase=PHASE)

    def _mark(self, buffer: FlatBuffer, touches: Sequence[Touch]) -> None:
        """Write the flags, and zeros where this rank has no gradient."""
        for touch in touches:
            if not touch.is_live:
                touch.view.zero_()
        flags = torch.tensor([float(touch.is_live) for touch in touches])
        buffer.tail[: len(touches)].copy_(flags)

    def _wait(self, lane: Lane) -> None:
        """Wait for everything that was launched."""
        for pending in lane.pending.values():
            pending.wait()
        lane.pending.clear()

    def _agree_on_withdrawals(self, lane: Lane, indices: Sequence[int]) -> set[Touch]:
        """Return what all its senders cleared after it had left; see Note [Withdrawn gradients]."""
        touches = [touch for index in indices for touch in lane.touches[index]]
        if not touches:
            return set()
        cleared = [float(touch.is_withdrawn) for touch in touches]
        kept = [float(touch.was_sent and not touch.is_withdrawn) for touch in touches]
        message = torch.tensor([cleared, kept], device=lane.buffers[-1].device)
        self._collectives.all_reduce(message, lane.group, phase=PHASE).wait()
        withdrawn = {touch for touch, count in zip(touches, message[0].tolist(), strict=True) if count > 0}
        for touch, count in zip(touches, message[1].tolist(), strict=True):
            if touch in withdrawn and count > 0:
                lane.disputed.append(touch.slot.name)
        return withdrawn

    def _reduce_again(self, lane: Lane, stale: Sequence[int], withdrawn: set[Touch]) -> None:
        """Sum the buffers that are stale on any rank once more; see Note [Stale buffers]."""
        for index in stale:
            buffer, touches = lane.buffers[index], lane.touches[index]
            flags = buffer.tail.tolist()
            if lane.group.index != 0:
                buffer.gradients.zero_()
            for touch, flag in zip(touches, flags, strict=False):
                touch.fold_in(keeps=flag > 0 and touch not in withdrawn)
        lane.stale.clear()
        for index in stale:
            self._launch(lane, index)
        self._wait(lane)

    @staticmethod
    def _read_tails(lane: Lane) -> list[float]:
        """Read all flags and notes of a lane with one copy to the host."""
        tails = torch.cat([buffer.tail for buffer in lane.buffers])
        return [float(note) for note in tails.tolist()]

    # --- terms ----------------------------------------------------------------------------------------------

    def _window_scale(self) -> float:
        """Return the loss scale of this window; that of its first gradient."""
        if self._scale is None:
            self._scale = self._arrivals.scale
        return self._scale

    def _factor(self, touch: Touch) -> float:
        """Return what a gradient that arrives now is multiplied by to fit the others of this window."""
        return self._arrivals.weight * (self._window_scale() / self._arrivals.scale) / touch.divisor

    # --- bookkeeping ----------------------------------------------------------------------------------------

    @staticmethod
    def _predict(lane: Lane) -> None:
        """Count what each buffer waits for; a buffer with unknown parameters waits for ``step()``."""
        never = 1 + sum(len(touches) for touches in lane.touches)
        lane.waiting = [
            sum(never if touch.num_predicted is None else int(touch.num_predicted > 0) for touch in touches)
            for touches in lane.touches
        ]
