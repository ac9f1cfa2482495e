"""Lanes: the buffers of one gradient window that are reduced over the same ranks, in one order.

The one idea: every rank launches the buffers of a lane in the order fixed at build, and all of them by
``step()``, which all ranks call. Whether a launch happens early, inside a backward that is known or predicted
to be the last one to touch the buffer, is each rank's own affair: it changes when a message leaves, never
which messages leave or in which order.

:class:`SummedLane` leaves the whole sum on every rank; managers that shard have lanes of another kind.

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
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, final

import torch

from colossal_core.runtime.touch import Touch

if TYPE_CHECKING:
    from colossal_core.runtime.arrivals import Arrivals
    from colossal_core.runtime.collectives import Collectives, Pending
    from colossal_core.runtime.flat import FlatBuffer
    from colossal_core.runtime.mesh import Group

__all__ = ["NOTES_PER_BUFFER", "PHASE", "AbstractLane", "SummedLane", "Terms"]

PHASE = "gradients"

NOTES_PER_BUFFER = 2
"""Elements that the last buffer of a summed lane has for each of its buffers: whether it is stale, and
whether something that it carried was cleared since."""


@final
class Terms:
    """The terms to which gradients of one window are brought when they arrive, and what else holds for all.

    Attributes:
        guards: Whether ``p.grad`` shows guards until gradients are reduced.
        num_holds: How many contexts say that more backward passes will follow.
        meanwhile: What to do with reduced gradients while waiting for others; they may still change.
    """

    def __init__(self, arrivals: Arrivals, *, guards: bool) -> None:
        """Start a window without a loss scale."""
        self.guards = guards
        self.num_holds = 0
        self.meanwhile: Callable[[torch.Tensor], None] | None = None
        self._arrivals = arrivals
        self._scale: float | None = None

    @property
    def known_scale(self) -> float:
        """Loss scale that the gradients of this window are in; 1.0 before the first one."""
        return 1.0 if self._scale is None else self._scale

    def scale(self) -> float:
        """Return the loss scale of this window, which is that of its first gradient, and fix it."""
        if self._scale is None:
            self._scale = self._arrivals.scale
        return self._scale

    def factor(self, touch: Touch) -> float:
        """Return what a gradient that arrives now is multiplied by to fit the others of this window."""
        return self._arrivals.weight * (self.scale() / self._arrivals.scale) / touch.divisor

    def accumulation_target(self, touch: Touch) -> torch.Tensor | None:
        """Return what autograd shall add to: the buffer, or None so that it hands over its own tensor.

        It may add in place only where nothing has to be done to the gradient on its way.
        """
        if not touch.is_live or touch.is_narrow:
            return None
        as_it_is = self.factor(touch) == 1.0 and not torch.is_grad_enabled()
        return touch.view if as_it_is else None

    def open_next(self) -> None:
        """Forget the scale of the window that closes."""
        self._scale = None


class AbstractLane(ABC):
    """The buffers that are reduced over one group, in launch order.

    Attributes:
        hears_ends: Whether :meth:`end_backward` does anything.
        group: Ranks over which they are reduced, on a channel that nothing else uses.
        buffers: The buffers.
        touches: For each buffer, the touches of its slots.
        next: First buffer that was not launched yet.
        waiting: For each buffer, how many of its parameters are still expected.
        launches_early: Whether buffers may leave from inside backward. Only one lane of a group may: two
            would share its channel in an order that differs from rank to rank.
        is_reduced: Whether :meth:`finish` ran in this window.
        disputed: Parameters whose gradient only some ranks cleared after it had left.
    """

    hears_ends: ClassVar[bool] = False
    group: Group
    buffers: Sequence[FlatBuffer]
    touches: Sequence[Sequence[Touch]]
    next: int
    waiting: list[int]
    launches_early: bool
    is_reduced: bool
    disputed: list[str]

    def _set_up(
        self, group: Group, buffers: Sequence[FlatBuffer], collectives: Collectives, terms: Terms
    ) -> None:
        """Start with untouched buffers, whose gradient memory has its place already."""
        self.group = group
        self.buffers = buffers
        self.touches = [
            [Touch.of(slot, buffer.gradient_view(slot), buffer.early_divisor) for slot in buffer.slots]
            for buffer in buffers
        ]
        self.next = 0
        self.waiting = []
        self.launches_early = terms.guards
        self.is_reduced = False
        self.disputed = []
        self._collectives = collectives
        self._terms = terms
        self.predict()

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups whose channel this lane uses."""
        return (self.group,)

    @property
    def has_arrivals(self) -> bool:
        """Whether backward has delivered a gradient in this window."""
        return any(touch.num_touches for touches in self.touches for touch in touches)

    def predict(self) -> None:
        """Count what each buffer waits for; a buffer with unknown parameters waits for ``step()``."""
        never = 1 + sum(len(touches) for touches in self.touches)
        self.waiting = [
            sum(never if touch.num_predicted is None else int(touch.num_predicted > 0) for touch in touches)
            for touches in self.touches
        ]

    # --- inside backward ------------------------------------------------------------------------------------

    @abstractmethod
    def before_accumulation(self, index: int, touch: Touch) -> None:
        """Put into ``p.grad`` what autograd shall add to, and take note of what the user did to it."""

    @abstractmethod
    def after_accumulation(self, index: int, touch: Touch, *, counts: bool) -> None:
        """Move a new gradient into its buffer and launch what is complete.

        Args:
            index: The buffer.
            touch: The parameter.
            counts: Whether the gradient counts; not that of a sample that stands in for an empty share.
        """

    @abstractmethod
    def receives(self, index: int, touch: Touch) -> bool:
        """Whether a gradient can be put into its buffer now."""

    def end_backward(self) -> None:
        """Take the hint that a backward outside all holds has ended."""
        return

    def release_cleared(self) -> None:
        """Give the memory of gradients back that the user cleared after a step, where that is possible."""
        return

    # --- in step --------------------------------------------------------------------------------------------

    @abstractmethod
    def finish(self) -> bool:
        """Reduce what is not reduced yet; see :meth:`GradientWindow.finish`."""

    @abstractmethod
    def drain(self) -> None:
        """Send and await what has not left; gradients are of no use afterwards."""

    @abstractmethod
    def open_next(self) -> None:
        """Close the window: what was touched predicts the next one."""


@final
class SummedLane(AbstractLane):
    """A lane whose sums end up whole on every rank: one all-reduce for each buffer.

    Flags, and in the last buffer the notes, travel behind the gradients in the same messages.
    """

    def __init__(
        self,
        group: Group,
        buffers: Sequence[FlatBuffer],
        collectives: Collectives,
        terms: Terms,
        *,
        waits_for_others: bool,
    ) -> None:
        """Take buffers with gradient memory; the last has :data:`NOTES_PER_BUFFER` notes for each.

        Args:
            group: Ranks over which they are summed.
            buffers: In launch order.
            collectives: Where reductions go.
            terms: Of the window.
            waits_for_others: Whether there is anything to wait for; False where gradients stay torch's own.
        """
        self._set_up(group, buffers, collectives, terms)
        self.launches_early = self._waits_for_others = waits_for_others
        self._pending: dict[int, Pending] = {}
        self._stale: set[int] = set()

    def before_accumulation(self, index: int, touch: Touch) -> None:
        """Put into ``p.grad`` what autograd shall add to: the view, or None so that it hands over its own."""
        change = touch.changed_by_user()
        if index < self.next:
            touch.note_change(change, self._terms.scale())
            touch.slot.parameter.grad = None
            return
        touch.take_over(change)
        touch.settle(self._terms.scale())
        touch.slot.parameter.grad = self._terms.accumulation_target(touch)

    def after_accumulation(self, index: int, touch: Touch, *, counts: bool) -> None:
        """Move a new gradient into the buffer and launch what is complete."""
        touch.num_touches += 1
        gradient = touch.slot.parameter.grad
        has_left = index < self.next
        if counts and (has_left or self.is_reduced):
            self._stale.add(index)
        if not counts:  # as if this rank had not run backward
            touch.show_again()
        elif gradient is None:  # another hook has cleared it again
            if has_left:
                touch.note_change("cleared", self._terms.scale())
            else:
                touch.take_over("cleared")
        elif has_left:
            touch.add_late(gradient.detach(), self._terms.factor(touch))
            touch.show_guard()
        else:
            touch.add(gradient, self._terms.factor(touch))
            if self._terms.guards:
                touch.show_guard()
            else:
                touch.show_view()
        if not has_left and touch.num_touches == touch.num_predicted:
            self.waiting[index] -= 1
            if self._terms.num_holds == 0 and self.launches_early:
                self._launch_ready()

    def receives(self, index: int, touch: Touch) -> bool:
        """Whether a gradient can be put into its buffer now."""
        del touch
        return index >= self.next and not self.is_reduced

    def finish(self) -> bool:
        """Reduce everything, and what is stale on any rank once more."""
        for index, touches in enumerate(self.touches):
            for touch in touches:
                if index < self.next or self.is_reduced:
                    change = touch.changed_by_user()
                    touch.note_change(change, self._terms.scale())
                    if change is not None:
                        self._stale.add(index)
        if self.is_reduced:
            return self._is_stale_anywhere()
        while self.next < len(self.buffers):
            self._launch_next()
        self._wait()
        notes = self._read_tails()
        count = len(self.buffers)
        stale = [index for index, note in enumerate(notes[-2 * count : -count]) if note > 0]
        if stale:
            withdrawn = self._agree_on_withdrawals(
                [index for index, note in enumerate(notes[-count:]) if note > 0]
            )
            self._reduce_again(stale, withdrawn)
            notes = self._read_tails()
        position = 0
        for touches in self.touches:
            for touch in touches:
                touch.is_live = notes[position + touch.slot.index] > 0
            position += len(touches)
        self.is_reduced = True
        if not self._waits_for_others:
            self.next = 0  # there is nothing to wait for: gradients stay torch's own
        return False

    def drain(self) -> None:
        """Send and await what has not left."""
        while self.next < len(self.buffers):
            self._launch_next()
        self._wait()

    def open_next(self) -> None:
        """Close the window: what was touched predicts the next one."""
        for touches in self.touches:
            for touch in touches:
                touch.num_predicted, touch.num_touches = touch.num_touches, 0
                touch.late, touch.late_change = None, None
        self.next, self.is_reduced = 0, False
        self._stale.clear()
        self.disputed.clear()
        self.predict()

    # --- reduction ------------------------------------------------------------------------------------------

    def _launch_ready(self) -> None:
        """Launch, in order, every complete buffer but the last."""
        while self.next < len(self.buffers) - 1 and self.waiting[self.next] == 0:
            self._launch_next()

    def _is_stale_anywhere(self) -> bool:
        """Agree whether anything changed on any rank since the lane was reduced."""
        note = torch.tensor([float(bool(self._stale))], device=self.buffers[-1].device)
        self._collectives.all_reduce(note, self.group, phase=PHASE).wait()
        return bool(note.item() > 0)

    def _launch_next(self) -> None:
        """Bring the next buffer in line with what the user did to ``p.grad``, guard it, and send it."""
        for touch in self.touches[self.next]:
            touch.take_over(touch.changed_by_user())
            touch.settle(self._terms.scale())
            touch.narrow()
            touch.was_sent = touch.is_live
            if touch.is_live and self._terms.guards:
                touch.show_guard()
        self._launch(self.next)
        self.next += 1

    def _launch(self, index: int) -> None:
        """Send one buffer with its flags, and in the last one the notes."""
        buffer = self.buffers[index]
        self._mark(buffer, self.touches[index])
        if buffer.num_notes:
            notes = [float(other in self._stale) for other in range(len(self.buffers))]
            notes += [float(any(touch.is_withdrawn for touch in touches)) for touches in self.touches]
            buffer.tail[len(buffer.slots) :].copy_(torch.tensor(notes))
        self._pending[index] = self._collectives.all_reduce(buffer.gradients, self.group, phase=PHASE)

    @staticmethod
    def _mark(buffer: FlatBuffer, touches: Sequence[Touch]) -> None:
        """Write the flags, and zeros where this rank has no gradient."""
        for touch in touches:
            if not touch.is_live:
                touch.view.zero_()
        flags = torch.tensor([float(touch.is_live) for touch in touches])
        buffer.tail[: len(touches)].copy_(flags)

    def _wait(self) -> None:
        """Wait for everything that was launched."""
        for pending in self._pending.values():
            pending.wait()
        self._pending.clear()

    def _agree_on_withdrawals(self, indices: Sequence[int]) -> set[Touch]:
        """Return what all its senders cleared after it had left; see Note [Withdrawn gradients]."""
        touches = [touch for index in indices for touch in self.touches[index]]
        if not touches:
            return set()
        cleared = [float(touch.is_withdrawn) for touch in touches]
        kept = [float(touch.was_sent and not touch.is_withdrawn) for touch in touches]
        message = torch.tensor([cleared, kept], device=self.buffers[-1].device)
        self._collectives.all_reduce(message, self.group, phase=PHASE).wait()
        withdrawn = {touch for touch, count in zip(touches, message[0].tolist(), strict=True) if count > 0}
        for touch, count in zip(touches, message[1].tolist(), strict=True):
            if touch in withdrawn and count > 0:
                self.disputed.append(touch.slot.name)
        return withdrawn

    def _reduce_again(self, stale: Sequence[int], withdrawn: set[Touch]) -> None:
        """Sum the buffers that are stale on any rank once more; see Note [Stale buffers]."""
        for index in stale:
            buffer, touches = self.buffers[index], self.touches[index]
            flags = buffer.tail.tolist()
            if self.group.index != 0:
                buffer.gradients.zero_()
            for touch, flag in zip(touches, flags, strict=False):
                touch.fold_in(keeps=flag > 0 and touch not in withdrawn)
        self._stale.clear()
        for index in stale:
            self._launch(index)
        self._wait()

    def _read_tails(self) -> list[float]:
        """Read all flags and notes with one copy to the host."""
        tails = torch.cat([buffer.tail for buffer in self.buffers])
        return [float(note) for note in tails.tolist()]
