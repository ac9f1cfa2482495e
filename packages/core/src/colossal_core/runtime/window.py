"""The gradient window: from the first accumulation to ``optimizer.step()``.

The one idea: every rank launches the buffers of a *lane* (those that are reduced over the same ranks) in the
order fixed at build, and all of them by ``step()``, which all ranks call. Whether a launch happens early,
inside a backward that is known or predicted to be the last one to touch the buffer, is each rank's own
affair: it changes when a message leaves, never which messages leave or in which order.

# Note [Stale buffers]
A prediction can be wrong: a gradient may arrive, or be cleared by the user, after its
buffer has left. Such late news is kept aside (waiting for the buffer inside backward could deadlock with
collectives of the model itself), and the buffer is *stale* on that rank. The last buffer of a lane never
leaves before ``step()`` and carries a note for each buffer of the lane, which
is 1 where it is stale here. After the sum every rank knows which buffers are stale anywhere, and those are
reduced once more: the first rank of the group keeps the sum that is already there, all others start from
zero, and each adds its late news. Wrong predictions cost traffic, never correctness.

# Note [What None means]
torch skips parameters whose gradient is None: no decay, no momentum, no step count. A flag per parameter says
that this rank touched it; when it is zero everywhere after the sum, the parameter had no gradient on any
rank, and the update skips it exactly as torch does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from attrs import define, field

from colossal_core.errors import UsageError
from colossal_core.runtime.guards import GradientGuard

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from colossal_core.runtime.collectives import Collectives, Pending
    from colossal_core.runtime.flat import FlatBuffer, Slot
    from colossal_core.runtime.mesh import Group

__all__ = ["GradientWindow", "Lane", "Touch"]

PHASE = "gradients"


Shown = Literal["nothing", "guard", "view"]
Change = Literal["cleared", "zeroed", "assigned"]


@define(eq=False)
class Touch:
    """What happened to one parameter's gradient in this window.

    Attributes:
        slot: Its place in the buffer.
        view: Its gradient in the buffer, in the parameter's shape.
        guard: What ``p.grad`` shows while the buffer holds an unreduced gradient.
        shown: What we last let ``p.grad`` show.
        is_live: Whether ``view`` holds a gradient: of this window, or one that the user did not clear after a
            step.
        carried: Factor that a gradient left over from the last step still lacks.
        late: Gradient that arrived after the buffer had left.
        late_change: What the user did to ``p.grad`` after the buffer had left.
        num_touches: How often backward delivered a gradient in this window.
        num_predicted: How often it did in the previous one; None before the first.
    """

    slot: Slot
    view: torch.Tensor
    guard: GradientGuard
    shown: Shown = "nothing"
    is_live: bool = False
    carried: float = 1.0
    late: torch.Tensor | None = None
    late_change: Change | None = None
    num_touches: int = 0
    num_predicted: int | None = None

    def changed_by_user(self) -> Change | None:
        """Tell what the user did to ``p.grad`` since we last set it; None when nothing."""
        gradient = self.slot.parameter.grad
        if gradient is None:
            return None if self.shown == "nothing" else "cleared"
        if gradient is self.view:
            return None
        if gradient is self.guard.tensor:
            return "zeroed" if self.guard.was_zeroed() else None
        return "assigned"

    def take_over(self, change: Change | None) -> None:
        """Bring the buffer in line with what the user did."""
        if change == "cleared":
            self.is_live, self.shown = False, "nothing"
        elif change == "zeroed":
            self.view.zero_()
        elif change == "assigned":
            gradient = self.slot.parameter.grad
            if gradient is not None:
                self.copy_from(gradient)
            self.is_live = True
            self.show_view()
        if change is not None:
            self.carried = 1.0

    def note_change(self, change: Change | None) -> None:
        """Remember what the user did to ``p.grad`` while the buffer is away."""
        if change is None:
            return
        gradient = self.slot.parameter.grad
        self.late = gradient.detach().clone() if change == "assigned" and gradient is not None else None
        self.late_change = "cleared" if change == "assigned" else change

    def fold_in(self) -> None:
        """Bring the buffer, which is back, in line with the late news."""
        if self.late_change == "cleared":
            self.is_live = False
        elif self.late_change == "zeroed":
            self.view.zero_()
        if self.late is not None:
            if self.is_live:
                self.view.add_(self.late)
            else:
                self.view.copy_(self.late)
            self.is_live = True
        self.late, self.late_change = None, None

    def copy_from(self, gradient: torch.Tensor) -> None:
        """Copy a gradient into the buffer.

        Raises:
            UsageError: It is sparse.
        """
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"parameter {self.slot.name!r} has a sparse gradient",
                hint="build the embedding with sparse=False",
            )
        with torch.no_grad():
            self.view.copy_(gradient)

    def show_view(self) -> None:
        """Let ``p.grad`` show the buffer."""
        self.slot.parameter.grad = self.view
        self.shown = "view"

    def show_guard(self) -> None:
        """Let ``p.grad`` show the guard."""
        self.slot.parameter.grad = self.guard.tensor
        self.shown = "guard"

    def show_nothing(self) -> None:
        """Let ``p.grad`` be None."""
        self.slot.parameter.grad = None
        self.shown = "nothing"


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
        is_reduced: Whether :meth:`GradientWindow.finish` ran in this window.
    """

    group: Group
    buffers: Sequence[FlatBuffer]
    touches: Sequence[Sequence[Touch]]
    next: int = 0
    pending: dict[int, Pending] = field(factory=dict)
    stale: set[int] = field(factory=set)
    waiting: list[int] = field(factory=list)
    is_reduced: bool = False


class GradientWindow:
    """Collects gradients of one optimizer's parameters in flat buffers and reduces each once per window.

    Owns the hooks on the parameters. While a window is open on more than one rank, ``p.grad`` shows a guard;
    after :meth:`finish` and :meth:`show` it shows the reduced gradient.
    """

    def __init__(self, collectives: Collectives, *, guards: bool) -> None:
        """Watch nothing yet; see :meth:`add_lane`.

        Args:
            collectives: Where reductions go.
            guards: Whether ``p.grad`` shows guards until :meth:`finish`; False only in a world of one rank,
                where gradients are torch's own at any time.
        """
        self._collectives = collectives
        self._guards = guards
        self._handles: list[RemovableHandle] = []
        self._lanes: list[Lane] = []
        self._holds = 0

    def add_lane(self, group: Group, buffers: Sequence[FlatBuffer]) -> None:
        """Hook the parameters of some buffers.

        Args:
            group: Ranks over which they are summed.
            buffers: In launch order, gradient memory allocated; the last one has a note for each.
        """
        lane = Lane(group, buffers, [[_touch(buffer, slot) for slot in buffer.slots] for buffer in buffers])
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
        """
        outdated = [self._finish(lane) for lane in self._lanes]
        return any(outdated)

    def open_next(self) -> None:
        """Close the window: what was touched predicts the next one. Gradients stay until they are cleared."""
        for lane in self._lanes:
            for touches in lane.touches:
                for touch in touches:
                    touch.num_predicted, touch.num_touches = touch.num_touches, 0
            lane.next, lane.is_reduced = 0, False
            lane.stale.clear()
            for touches in lane.touches:
                for touch in touches:
                    touch.late, touch.late_change = None, None
            self._predict(lane)

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

        def before(_: torch.Tensor) -> None:
            self._before_accumulation(lane, index, touch)

        def after(_: torch.Tensor) -> None:
            self._after_accumulation(lane, index, touch)

        self._handles.append(parameter.register_hook(before))
        self._handles.append(parameter.register_post_accumulate_grad_hook(after))

    def _before_accumulation(self, lane: Lane, index: int, touch: Touch) -> None:
        """Put into ``p.grad`` what autograd shall add to: the view, or None so that it hands over its own."""
        change = touch.changed_by_user()
        if index < lane.next:
            touch.note_change(change)
            touch.slot.parameter.grad = touch.late
            return
        touch.take_over(change)
        if touch.carried != 1.0:
            touch.view.mul_(touch.carried)
            touch.carried = 1.0
        touch.slot.parameter.grad = touch.view if touch.is_live else None

    def _after_accumulation(self, lane: Lane, index: int, touch: Touch) -> None:
        """Move a new gradient into the buffer and launch what is complete."""
        gradient = touch.slot.parameter.grad
        touch.num_touches += 1
        if index < lane.next:
            touch.late = gradient
            lane.stale.add(index)
            touch.show_guard()
            return
        if gradient is not None and gradient is not touch.view:
            touch.copy_from(gradient)
        touch.is_live = True
        if not self._guards:
            touch.show_view()
            return
        touch.show_guard()
        if touch.num_touches == touch.num_predicted:
            lane.waiting[index] -= 1
            if self._holds == 0:
                self._launch_ready(lane)

    def _launch_ready(self, lane: Lane) -> None:
        """Launch, in order, every complete buffer but the last."""
        while lane.next < len(lane.buffers) - 1 and lane.waiting[lane.next] == 0:
            self._launch(lane, lane.next)
            lane.next += 1

    # --- reduction ------------------------------------------------------------------------------------------

    def _finish(self, lane: Lane) -> bool:
        """Reduce one lane; see :meth:`finish`."""
        for index, touches in enumerate(lane.touches):
            for touch in touches:
                change = touch.changed_by_user()
                if change is None:
                    continue
                if index < lane.next:
                    touch.note_change(change)
                    lane.stale.add(index)
                else:
                    touch.take_over(change)
        if not self._guards:
            for buffer, touches in zip(lane.buffers, lane.touches, strict=True):
                self._mark(buffer, touches)
            return False
        if lane.is_reduced:
            return self._is_stale_anywhere(lane)
        while lane.next < len(lane.buffers):
            self._launch(lane, lane.next)
            lane.next += 1
        self._wait(lane)
        notes = self._read_tails(lane)
        stale = [index for index, note in enumerate(notes[-len(lane.buffers) :]) if note > 0]
        if stale:
            self._reduce_again(lane, stale)
            notes = self._read_tails(lane)
        position = 0
        for touches in lane.touches:
            for touch in touches:
                touch.is_live = notes[position + touch.slot.index] > 0
            position += len(touches)
        lane.is_reduced = True
        return False

    def _is_stale_anywhere(self, lane: Lane) -> bool:
        """Agree whether anything changed on any rank since the lane was reduced."""
        note = torch.tensor([float(bool(lane.stale))], device=lane.buffers[-1].device)
        self._collectives.all_reduce(note, lane.group, phase=PHASE).wait()
        return bool(note.item() > 0)

    def _launch(self, lane: Lane, index: int) -> None:
        """Send one buffer with its flags, and in the last one the notes."""
        buffer = lane.buffers[index]
        self._mark(buffer, lane.touches[index])
        if buffer.num_notes:
            notes = [float(other in lane.stale) for other in range(len(lane.buffers))]
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

    def _reduce_again(self, lane: Lane, stale: Sequence[int]) -> None:
        """Sum the buffers that are stale on any rank once more; see Note [Stale buffers]."""
        for index in stale:
            buffer, touches = lane.buffers[index], lane.touches[index]
            for touch, flag in zip(touches, buffer.tail.tolist(), strict=False):
                touch.is_live = flag > 0
            if lane.group.index != 0:
                buffer.gradients.zero_()
            for touch in touches:
                touch.fold_in()
        lane.stale.clear()
        for index in stale:
            self._launch(lane, index)
        self._wait(lane)

    @staticmethod
    def _read_tails(lane: Lane) -> list[float]:
        """Read all flags and notes of a lane with one copy to the host."""
        tails = torch.cat([buffer.tail for buffer in lane.buffers])
        return [float(note) for note in tails.tolist()]

    # --- bookkeeping ----------------------------------------------------------------------------------------

    @staticmethod
    def _predict(lane: Lane) -> None:
        """Count what each buffer waits for; a buffer with unknown parameters waits for ``step()``."""
        never = 1 + sum(len(touches) for touches in lane.touches)
        lane.waiting = [
            sum(never if touch.num_predicted is None else int(touch.num_predicted > 0) for touch in touches)
            for touches in lane.touches
        ]


def _touch(buffer: FlatBuffer, slot: Slot) -> Touch:
    """Return the record of an untouched slot."""
    return Touch(slot, buffer.gradient_view(slot), GradientGuard(slot.parameter, slot.name))
