"""Lanes whose sums are divided: a reduce-scatter leaves each rank its shard of every buffer.

The one idea: a window is a series of *rounds*. In each round every rank sends every buffer once, in the order
fixed at build, and then a closing message; results of later rounds add to the shard. So a gradient that
arrives after its buffer has left needs no special treatment: it starts another round.

# Note [Closing a round]
The closing message of a round is one small sum of integers. For each parameter it counts the ranks that had a
gradient in this round (zero everywhere in all rounds means None), those that cleared what they had sent so
far, and those that keep it; and it counts the ranks that start another round. While any does, all others join
with zeros, so ranks may call backward a different number of times. It leaves when the next backward starts,
or reaches a buffer that has left, or in ``step()``.

Nothing is waited for inside backward, since that could deadlock with collectives of the model itself, or
with those that a rank with fewer passes calls before its step. Where rounds begin and end, and what is added
to what in which order, follows from what the user does, never from how fast messages are: so a run has the
same bits each time, and ranks which do the same agree about what was cleared in which round.

# Note [Memory of a round]
A message owns the memory that it was sent from until it has come back. When the next round reaches the same
buffer before, that round gets fresh memory, which costs a rank as many gradients as it is rounds ahead; so a
rank that is far ahead gives the others some time at the end of its backward, but does not insist.

A lane that reduces every backward gives the memory of a buffer's unreduced gradients back as soon as its
result is there, by resizing the storage: the views of it stay valid objects, which nobody reads meanwhile.
A lane that reduces once per window keeps that memory, and its shards are parts of it. What the user has
cleared after a step is given back until backward needs it on accelerators only: new pages of host memory cost
more than a message.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from colossal_core.runtime.lanes import PHASE, AbstractLane, Terms
from colossal_core.runtime.shard import Message, Shard

if TYPE_CHECKING:
    from colossal_core.runtime.collectives import Collectives
    from colossal_core.runtime.mesh import Group
    from colossal_core.runtime.touch import Change, Touch

__all__ = ["ScatteredLane", "Shard"]

_BITS = 15
"""Bits of one count in a closing message: four counts of up to 32767 ranks fit into 63 bits."""

MAX_ROUNDS_AHEAD = 2
"""How many rounds a rank may be ahead of the others before it gives them time."""

PATIENCE_SECONDS = 0.5
"""How long it does so, once per window: ranks that run fewer passes answer in ``step()`` only."""

KEEPS_CLEARED = {"cpu"}
"""Kinds of devices whose memory is not given back between windows: a page fault takes 1.7 us (two cores of a
virtual machine, November 2026), so new memory for 30M bf16 gradients would take 25 ms of each step."""

MAX_MESSAGES = 4
"""How many buffers may be on their way when ``step()`` sends many: each has its memory twice, as sent and as
received."""


class ScatteredLane(AbstractLane):
    """A lane whose sums are divided among the ranks of its group."""

    hears_ends = True

    def __init__(
        self,
        group: Group,
        shards: Sequence[Shard],
        collectives: Collectives,
        terms: Terms,
        *,
        everyone: Group,
        copies: Group,
        each_backward: bool,
    ) -> None:
        """Take buffers with gradient memory.

        Args:
            group: Ranks among which the buffers are divided.
            shards: This rank's part of each buffer, in launch order.
            collectives: Where reductions go.
            terms: Of the window.
            everyone: Ranks over which gradients are summed: those of ``group``, times those of ``copies``.
            copies: Ranks that hold the same shard.
            each_backward: Whether every backward is reduced as a round of its own, and the memory of
                unreduced gradients given back; otherwise backward passes of a window add up before.
        """
        self._shards = shards
        self._everyone = everyone
        self._copies = copies
        self._each_backward = each_backward
        self._on_their_way: deque[Message] = deque()
        self._busy: set[int] = set()
        self._lent: set[int] = set()
        self._places = [shard.buffer.gradients for shard in shards]
        self._is_patient = True
        self._flags: set[Touch] = set()
        self._held: set[Touch] = set()
        self._kept: set[Touch] = set()
        self._reduced: set[Touch] = set()
        self._begun = False
        self._is_first_round = True
        self._has_arrivals = False
        self._has_ended = False
        self._arrived: list[Shard] = []
        self._num_owed = 0
        self._is_outdated = False
        self._goes_on = False
        self._set_up(group, [shard.buffer for shard in shards], collectives, terms)
        self._all = [touch for touches in self.touches for touch in touches]
        for shard in shards:  # no memory before there are gradients
            shard.release()
            shard.buffer.release_gradients()

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups whose channel this lane uses."""
        return (self.group, self._everyone, self._copies)

    @property
    def has_arrivals(self) -> bool:
        """Whether backward has delivered a gradient in this window."""
        return self._has_arrivals

    # --- inside backward ------------------------------------------------------------------------------------

    def before_accumulation(self, index: int, touch: Touch) -> None:
        """Take note of what the user did, and start a new round where this gradient needs one."""
        self._begin()
        self._observe(touch)
        if self._on_their_way:
            self._collect_done()
        if self._has_ended:
            self._has_ended = False
            self._num_owed += 1
            self._count_anew()
        elif self._num_owed == 0 and (index < self.next or touch.withdraws):
            self._num_owed = 1
        while self._num_owed and self._may_launch:
            self._close()
        target = None
        if self.receives(index, touch):
            self._fold(index, touch)
            target = self._terms.accumulation_target(touch)
        touch.slot.parameter.grad = target

    def after_accumulation(self, index: int, touch: Touch, *, counts: bool) -> None:
        """Move a new gradient into the buffer and launch what is complete."""
        touch.num_touches += 1
        self._has_arrivals = True
        gradient = touch.slot.parameter.grad
        receives = self.receives(index, touch)
        if not counts:  # as if this rank had not run backward
            touch.show_again()
        elif gradient is None:  # another hook has cleared it again
            self._note(touch, None)
        elif self.is_reduced:
            self._is_outdated = True
            touch.show_guard()
        elif receives:
            self._make_room(index)
            touch.add(gradient, self._terms.factor(touch))
            touch.show_guard()
        else:
            touch.add_late(gradient.detach(), self._terms.factor(touch))
            touch.show_guard()
        if receives and touch.num_touches == touch.num_predicted:
            self.waiting[index] -= 1
            self._launch_ready()

    def receives(self, index: int, touch: Touch) -> bool:
        """Whether a gradient can be put into its buffer now."""
        is_open = index >= self.next and self._num_owed == 0
        return is_open and not touch.withdraws and not self.is_reduced

    def end_backward(self) -> None:
        """Send what this backward left, where every backward is a round.

        A backward inside another one, which a reentrant checkpoint runs, ends as well: as long as parameters
        are missing that came the time before, it is not over.
        """
        has_begun = any(touch.num_touches for touch in self._all)
        if self._each_backward and has_begun and self._may_launch and self._is_over():
            self._has_ended = True
            self._collect_done()
            while self.next < len(self.buffers):
                self._launch_next()
            self._give_others_time()

    def _is_over(self) -> bool:
        """Whether this backward has delivered all that it will, at what may be its end."""
        return all(touch.num_touches >= (touch.num_predicted or 0) for touch in self._all)

    # --- in step --------------------------------------------------------------------------------------------

    def finish(self) -> bool:
        """Close rounds until no rank starts another one."""
        if self.is_reduced:
            changed = [touch for touch in self._all if touch.changed_by_user() is not None]
            note = torch.tensor([float(self._is_outdated or bool(changed))], device=self.buffers[0].device)
            self._collectives.all_reduce(note, self._everyone, phase=PHASE).wait()
            return bool(note.item() > 0)
        self._begin()
        self._goes_on = True
        while self._goes_on:
            self._close(waits=True)
            while self._on_their_way:
                self._use_wait()
                self._collect_first()
        for shard in self._shards:
            shard.settle()
        self._add_copies()
        for touch in self._all:
            touch.is_live = touch in self._reduced
        self.is_reduced = True
        return False

    def _add_copies(self) -> None:
        """Sum the shards over the ranks that hold copies."""
        if self._copies.size == 1:
            return
        sums = [
            self._collectives.all_reduce(shard.gradient, self._copies, phase=PHASE) for shard in self._shards
        ]
        for pending in sums:
            pending.wait()

    def drain(self) -> None:
        """Send and await what has not left."""
        if not self.is_reduced:
            self.finish()

    def open_next(self) -> None:
        """Close the window: what was touched predicts the next one."""
        for touch in self._all:
            num_most = max(touch.num_most, touch.num_touches)
            if self._has_arrivals:  # waiting for what came the time before costs less than a round
                touch.num_predicted, touch.num_before = max(num_most, touch.num_before), num_most
            touch.num_touches = touch.num_most = 0
            touch.late, touch.wide = None, None
            touch.was_sent = touch.withdraws = False
        for index, shard in enumerate(self._shards):
            shard.settle()
            if not self._each_backward and shard.buffer.gradients is not self._places[index]:
                self._move(index, self._places[index])
        self._is_patient = True
        self._flags.clear()
        self._held.clear()
        self._kept.clear()
        self._reduced.clear()
        self._arrived.clear()
        self._begun = self._has_arrivals = self._has_ended = self._is_outdated = False
        self._num_owed = 0
        self._is_first_round = True
        self.next, self.is_reduced = 0, False
        self.disputed.clear()
        self.predict()

    def release_cleared(self) -> None:
        """Give the memory of gradients back that the user cleared after a step."""
        if self._begun or self.buffers[0].device.type in KEEPS_CLEARED:
            return
        for shard, touches in zip(self._shards, self.touches, strict=True):
            if all(touch.is_cleared for touch in touches):
                shard.release()

    # --- what arrives ---------------------------------------------------------------------------------------

    @property
    def _may_launch(self) -> bool:
        """Whether messages may leave from inside backward now."""
        return self.launches_early and not self.is_reduced and self._terms.num_holds == 0

    def _begin(self) -> None:
        """Open the window: keep the gradients of the last step that the user did not clear."""
        if self._begun:
            return
        self._begun = True
        scale = self._terms.scale()
        for shard, touches in zip(self._shards, self.touches, strict=True):
            changes = {touch: touch.changed_by_user() for touch in touches}
            held = {touch for touch in touches if touch.is_live}
            kept = {touch for touch in held if changes[touch] is None}
            self._held |= held
            self._kept |= kept
            if kept:
                shard.has_result = True
                shard.keep()
            for touch in touches:
                touch.is_live = False
                if touch in kept:
                    touch.was_sent = True
                    self._reduced.add(touch)
                    # The sums that follow are divided once more, and those over copies come to this as well.
                    carried = 1.0 if touch.carried is None else touch.carried
                    shard.part_of(touch.slot).mul_(
                        carried * scale * shard.buffer.late_divisor / self._copies.size
                    )
                elif kept:
                    shard.part_of(touch.slot).zero_()
                touch.carried = None
                self._take(touch, changes[touch])

    def _observe(self, touch: Touch) -> None:
        """Take note of what the user did to ``p.grad`` since it was last looked at."""
        self._take(touch, touch.changed_by_user())

    def _take(self, touch: Touch, change: Change | None) -> None:
        """Bring what this rank has of a parameter in line with what the user did."""
        if change == "cleared":
            self._note(touch, None)
        elif change == "zeroed":
            self._note(touch, touch.view.new_zeros(()).expand(touch.view.shape))
        elif change == "assigned":
            self._note(touch, touch.take_assigned(self._terms.scale()))

    @staticmethod
    def _note(touch: Touch, gradient: torch.Tensor | None) -> None:
        """Replace what this rank brings for a parameter, and withdraw what it has sent."""
        touch.withdraws = touch.withdraws or touch.was_sent
        touch.is_live, touch.wide, touch.late = False, None, gradient
        if gradient is None:
            touch.show_nothing()
        else:
            touch.show_guard()

    def _make_room(self, index: int) -> None:
        """Make sure that there is memory for unreduced gradients which no message uses."""
        buffer, place = self.buffers[index], self._places[index]
        if index in self._busy and index in self._lent:
            self._move(index, torch.empty_like(place))
        elif index in self._busy:
            buffer.restore_gradients()
            self._move(index, place)
        self._busy.discard(index)
        if buffer.gradients is place:
            self._shards[index].keep()
            buffer.restore_gradients()

    def _take_back(self, index: int, content: torch.Tensor) -> None:
        """Have the memory again that a message was sent from."""
        buffer, place = self.buffers[index], self._places[index]
        if content is not place:  # a buffer whose last message it was stays busy, and moves to its place then
            content.untyped_storage().resize_(0)
            return
        self._lent.discard(index)
        if buffer.gradients is place:
            self._busy.discard(index)
        if self._each_backward:
            buffer.release_gradients()

    def _move(self, index: int, memory: torch.Tensor) -> None:
        """Let unreduced gradients of one buffer be in other memory from here on."""
        buffer = self.buffers[index]
        buffer.gradients = memory
        for touch in self.touches[index]:
            touch.view.data = buffer.gradient_view(touch.slot)

    def _fold(self, index: int, touch: Touch) -> None:
        """Put what was kept aside into the buffer."""
        late, touch.late = touch.late, None
        if late is not None:
            self._make_room(index)
            touch.add(late, 1.0)

    # --- rounds ---------------------------------------------------------------------------------------------

    def _launch_ready(self) -> None:
        """Launch, in order, every complete buffer."""
        while (
            self._may_launch
            and (self._each_backward or self._is_first_round)
            and self.next < len(self.buffers)
            and self.waiting[self.next] == 0
        ):
            self._launch_next()

    def _launch_next(self) -> None:
        """Bring the next buffer in line with what the user did to ``p.grad``, and send it."""
        index = self.next
        buffer, shard = self.buffers[index], self._shards[index]
        self._make_room(index)
        for touch in self.touches[index]:
            self._observe(touch)
            if not touch.withdraws and self._num_owed == 0:
                self._fold(index, touch)
            touch.narrow()
            if touch.is_live:
                self._flags.add(touch)
                touch.was_sent, touch.is_live = True, False
            else:
                touch.view.zero_()
        output = shard.receive()
        pending = self._collectives.reduce_scatter(output, buffer.gradients, self.group, phase=PHASE)
        self._on_their_way.append(Message(index, pending, output, buffer.gradients))
        self._busy.add(index)
        if buffer.gradients is self._places[index]:
            self._lent.add(index)
        self.next += 1

    def _close(self, *, waits: bool = False) -> None:
        """Send what the round still lacks and its closing message, and open the next; see the notes above.

        Args:
            waits: Whether to wait for earlier messages when many are on their way.
        """
        while self.next < len(self.buffers):
            while waits and len(self._on_their_way) >= MAX_MESSAGES:
                self._collect_first()
            self._launch_next()
        counts = []
        for touch in self._all:
            self._observe(touch)
            keeps = touch.was_sent and not touch.withdraws
            count = int(touch in self._flags) | int(keeps) << _BITS
            counts.append(count | touch.withdraws << 2 * _BITS | (touch in self._kept) << 3 * _BITS)
            touch.was_sent, touch.withdraws = keeps, False
        starts_another = self._num_owed > 0 or any(touch.late is not None for touch in self._all)
        message = torch.tensor([*counts, int(starts_another)], device=self.buffers[0].device)
        pending = self._collectives.all_reduce(message, self._everyone, phase=PHASE)
        self._on_their_way.append(Message(None, pending, message, message, self._is_first_round))
        self._flags.clear()
        self._is_first_round = False
        self._num_owed = max(self._num_owed - 1, 0)
        self.next = 0
        self.predict()

    def _count_anew(self) -> None:
        """Count gradients from here on for the next round, which has begun even if the last is still open."""
        for touch in self._all:
            touch.num_most, touch.num_touches = max(touch.num_most, touch.num_touches), 0

    # --- what comes back ------------------------------------------------------------------------------------

    def _collect_done(self) -> None:
        """Process what has come back; changes no numbers, and gives memory back early."""
        while self._on_their_way and self._on_their_way[0].pending.is_done():
            self._collect_first()

    def _give_others_time(self) -> None:
        """Wait a little when this rank is far ahead; see Note [Memory of a round]."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._is_patient and self._num_ahead > MAX_ROUNDS_AHEAD:
            time.sleep(1e-3)
            self._collect_done()
            self._is_patient = time.monotonic() < deadline

    @property
    def _num_ahead(self) -> int:
        """Rounds that this rank has closed and others have not."""
        return sum(message.index is None for message in self._on_their_way)

    def _use_wait(self) -> None:
        """Do something useful until the oldest message is there."""
        meanwhile = self._terms.meanwhile
        while meanwhile and self._arrived and not self._on_their_way[0].pending.is_done():
            meanwhile(self._arrived.pop(0).gradient)

    def _collect_first(self) -> None:
        """Wait for the oldest message, and process it."""
        message = self._on_their_way.popleft()
        message.pending.wait()
        if message.index is None:
            self._read_closing(message)
            return
        shard = self._shards[message.index]
        shard.take(message.result)
        if shard.total is None and self._copies.size == 1:
            self._arrived.append(shard)
        self._take_back(message.index, message.content)

    def _read_closing(self, message: Message) -> None:
        """Learn what all ranks had, kept and withdrew."""
        *counts, others = message.result.tolist()
        mask = (1 << _BITS) - 1
        position = 0
        for shard, touches in zip(self._shards, self.touches, strict=True):
            for touch in touches:
                count = counts[position]
                flags, keeps = count & mask, count >> _BITS & mask
                withdrawn, carried = count >> 2 * _BITS & mask, count >> 3 * _BITS
                position += 1
                if flags:
                    self._reduced.add(touch)
                is_held = message.is_first and touch in self._held
                if (withdrawn and keeps) or (is_held and 0 < carried < self._everyone.size):
                    self.disputed.append(touch.slot.name)
                elif withdrawn:
                    self._reduced.discard(touch)
                    shard.part_of(touch.slot).zero_()
        self._goes_on = others > 0
