"""The gradient window: from the first accumulation to ``optimizer.step()``.

The one idea: hooks on the parameters hand each gradient to the lane of its buffer (see
:mod:`colossal_core.runtime.lanes`), which reduces it over the ranks at the latest in ``step()``. The window
is what the lanes of one optimizer have in common: hooks, the terms to which gradients are brought when they
arrive, and what ``p.grad`` shows.

# Note [What None means]
torch skips parameters whose gradient is None: no decay, no momentum, no step count. A flag per parameter says
that this rank touched it; when it is zero everywhere after the sum, the parameter had no gradient on any
rank, and the update skips it exactly as torch does.

# Note [Open]
Hooks take longer than additions: with eight micro-batches they were 2 % of the time of a step. Where several
backward passes follow each other between which nobody looks (:meth:`~.arrivals.Arrivals.unseen`), the first
one opens the parameters whose gradients need nothing done on their way: autograd adds to the buffer, without
hooks, until the hold ends. Passes in between are not counted, in any window.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

import torch
from attrs import define

from colossal_core.errors import UsageError
from colossal_core.runtime.backward_end import at_end_of_backward
from colossal_core.runtime.lanes import AbstractLane, SummedLane, Terms
from colossal_core.runtime.touch import Touch, Watch

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from colossal_core.runtime.arrivals import Arrivals
    from colossal_core.runtime.collectives import Collectives
    from colossal_core.runtime.flat import FlatBuffer
    from colossal_core.runtime.mesh import Group

__all__ = ["GradientWindow"]


@define(eq=False)
class _Home:
    """Where the gradient of one parameter goes; held by its window, and weakly by the hooks.

    Attributes:
        window: Its window.
        lane: Its lane.
        index: Its buffer.
        touch: What happens to it.
        node: Where autograd accumulates; without somebody who holds it, its hooks are gone.
    """

    window: GradientWindow
    lane: AbstractLane
    index: int
    touch: Touch
    node: torch.autograd.graph.Node
    _handles: tuple[RemovableHandle, ...] = ()

    def hook(self) -> None:
        """Watch the parameter: before and after autograd accumulates into ``p.grad``."""
        # Python's collector does not look into hooks that run after accumulation: what they held, and what
        # holds the parameter in turn, would never be freed.
        reference = weakref.ref(self)

        def before(_: object) -> None:
            found = reference()
            if found is not None:
                found.window.before_accumulation(found)

        def after() -> None:
            found = reference()
            if found is not None:
                found.window.after_accumulation(found)

        self._handles = (
            self.node.register_prehook(before),
            self.touch.slot.parameter.register_post_accumulate_grad_hook(Watch(after)),
        )

    def unhook(self) -> None:
        """Watch it no more; also from inside of a hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = ()


@final
class GradientWindow:
    """Collects gradients of one optimizer's parameters in flat buffers and reduces each once per window.

    Owns the hooks on the parameters. While a window is open on more than one rank, ``p.grad`` shows a guard;
    after :meth:`finish` and :meth:`show` it shows the reduced gradient, or a guard where no rank has
    it whole.

    Attributes:
        terms: What holds for all its gradients.
        lanes: The lanes, in the order in which they are finished.
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
        self.terms = Terms(arrivals, guards=guards)
        self.lanes: list[AbstractLane] = []
        self._collectives = collectives
        self._arrivals = arrivals
        self._after_backward = after_backward
        self._hears_ends = after_backward is not None
        self._awaits_end = False
        self._homes: list[_Home] = []
        self._open: list[_Home] = []

    def add_summed_lane(self, group: Group, buffers: Sequence[FlatBuffer]) -> None:
        """Hook the parameters of some buffers, whose sums end up whole on every rank of a group.

        Args:
            group: Ranks over which they are summed.
            buffers: As for :class:`~.lanes.SummedLane`.
        """
        waits_for_others = self.terms.guards or self._after_backward is not None
        self.add_lane(
            SummedLane(group, buffers, self._collectives, self.terms, waits_for_others=waits_for_others)
        )

    def add_lane(self, lane: AbstractLane) -> None:
        """Hook the parameters of a lane."""
        taken = [group for other in self.lanes for group in other.groups]
        lane.launches_early = lane.launches_early and all(
            group is not other for group in lane.groups for other in taken
        )
        self.lanes.append(lane)
        self._hears_ends = self._hears_ends or lane.hears_ends
        for index, touches in enumerate(lane.touches):
            for touch in touches:
                # Not a hook on the tensor: that one runs in torch.autograd.grad too, where nothing is
                # accumulated.
                node = torch.autograd.graph.get_gradient_edge(touch.slot.parameter).node
                home = _Home(self, lane, index, touch, node)
                home.hook()
                self._homes.append(home)

    def hold(self) -> None:
        """Launch nothing from inside backward until :meth:`let_go`: more backward passes will follow."""
        self.terms.num_holds += 1

    def let_go(self) -> None:
        """End one :meth:`hold`."""
        self.terms.num_holds -= 1
        for home in self._open:
            if self.terms.guards:
                home.touch.show_guard()
            home.hook()
        self._open.clear()

    def close(self) -> None:
        """Remove all hooks; ``p.grad`` keeps what it shows."""
        for home in self._homes:
            home.unhook()
        self._homes.clear()
        self._open.clear()

    @property
    def after_each_backward(self) -> bool:
        """Whether gradients are reduced at the end of every backward."""
        return self._after_backward is not None

    @property
    def has_arrivals(self) -> bool:
        """Whether backward has delivered a gradient in this window."""
        return any(lane.has_arrivals for lane in self.lanes)

    @property
    def loss_scale(self) -> float:
        """Loss scale that the gradients of this window are in; 1.0 before the first one."""
        return self.terms.known_scale

    @property
    def touches(self) -> list[tuple[FlatBuffer, Sequence[Touch]]]:
        """Buffers with the touches of their slots, in launch order."""
        return [pair for lane in self.lanes for pair in zip(lane.buffers, lane.touches, strict=True)]

    def finish(self) -> bool:
        """Reduce everything that is not reduced yet; collective over each lane's group.

        Afterwards the buffers, or this rank's shards of them, hold sums over the group, zero where no rank
        had a gradient, and ``touch.is_live`` says, equally on all its ranks, whether any rank had one.

        Returns:
            Whether an earlier ``finish`` of the same window no longer holds, because gradients arrived or
            were changed since on any rank; they are not in the sums.

        Raises:
            UsageError: Only some ranks cleared a gradient after it had left; on every rank of the lane, with
                all gradients cleared. See Note [Withdrawn gradients].
        """
        outdated = [lane.finish() for lane in self.lanes]
        disputed = [name for lane in self.lanes for name in lane.disputed]
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
        for lane in self.lanes:
            lane.drain()

    def discard(self) -> None:
        """Clear all gradients and close the window, after an error that every rank raises."""
        for _, touches in self.touches:
            for touch in touches:
                touch.is_live = False
                touch.show_nothing()
        self.open_next()

    def release_cleared(self) -> None:
        """Give the memory of gradients back that the user cleared after a step."""
        for lane in self.lanes:
            lane.release_cleared()

    def open_next(self) -> None:
        """Close the window: what was touched predicts the next one. Gradients stay until they are cleared."""
        for lane in self.lanes:
            lane.open_next()
        self.terms.open_next()
        self._awaits_end = False

    def show(self, *, gradients: bool, scale: Callable[[FlatBuffer], float]) -> None:
        """Let ``p.grad`` show reduced gradients, or guards where buffers do not hold what torch would show.

        Args:
            gradients: Whether the buffers hold the gradients as torch would show them after the step.
            scale: Factor that the gradients of a buffer still lack otherwise.
        """
        for buffer, touches in self.touches:
            lacks = 1.0 if gradients else scale(buffer)
            for touch in touches:
                if not touch.is_live:
                    touch.show_nothing()
                elif not self.terms.guards or (gradients and not buffer.is_divided):
                    touch.show_view()
                else:
                    touch.show_guard()
                touch.carried = lacks

    # --- inside backward ------------------------------------------------------------------------------------

    def before_accumulation(self, home: _Home) -> None:
        """Check that a gradient may arrive, and let its lane say what autograd shall add to."""
        self._arrivals.check(home.touch.slot.name, home.touch.slot.parameter)
        home.lane.before_accumulation(home.index, home.touch)

    def after_accumulation(self, home: _Home) -> None:
        """Hand a new gradient to its lane, and ask to hear of the end of this backward."""
        if self._hears_ends and not self._awaits_end:
            self._awaits_end = True
            at_end_of_backward(self._end_backward)
        home.lane.after_accumulation(home.index, home.touch, counts=self._arrivals.weight != 0.0)
        if self._stays_open(home):
            home.touch.show_view()
            home.unhook()
            self._open.append(home)

    def _stays_open(self, home: _Home) -> bool:
        """Tell whether autograd may add to the buffer by itself until the hold ends; see Note [Open]."""
        touch, parameter = home.touch, home.touch.slot.parameter
        return (
            self.terms.num_holds > 0
            and self._arrivals.are_unseen
            and home.lane.receives(home.index, touch)
            and self.terms.accumulation_target(touch) is not None
            and len(parameter._post_accumulate_grad_hooks or ()) == 1  # noqa: SLF001 - torch has no getter
        )

    def _end_backward(self) -> None:
        """Let lanes and manager reduce what this backward left, unless more passes are known to follow."""
        self._awaits_end = False
        if self.terms.num_holds:
            return
        for lane in self.lanes:
            lane.end_backward()
        if self._after_backward is not None:
            self._after_backward()
