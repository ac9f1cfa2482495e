"""Where a step is in its trace, and what follows from that. No torch here.

The one idea: a plan says for each moment who leaves and who comes. As long as a step does what its trace did,
it is followed; a step that does something else is served as the first step was, with nothing more than what
runs, until it ends. So a plan can be wrong, and the numbers cannot.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal, final

import attrs

if TYPE_CHECKING:
    from colossal_gemini.eviction import Plan
    from colossal_gemini.trace import Trace

__all__ = ["Course", "Turn"]

Phase = Literal["forward", "backward"]
Extent = tuple[int, ...]

MAX_PLANS = 32
"""Plans that are kept; the oldest goes first."""


@final
@attrs.frozen(kw_only=True)
class Turn:
    """What one need asks for.

    Attributes:
        is_planned: Whether the plan says so.
        evictions: Chunks that leave before what is needed comes.
        prefetches: Chunks that come while it runs.
        other: Bytes of everything that is no chunk meanwhile.
    """

    is_planned: bool = False
    evictions: tuple[int, ...] = ()
    prefetches: tuple[int, ...] = ()
    other: int = 0


@final
@attrs.frozen(kw_only=True)
class Known:
    """A step that was seen.

    Attributes:
        after: Which optimizer had stepped before it; None for any.
        extents: How large its batches were, pass by pass.
        trace: What it used.
        plan: What follows from that.
    """

    after: int | None
    extents: tuple[Extent, ...]
    trace: Trace
    plan: Plan


@final
class Course:
    """Follows one step after another, each by the plan of one like it.

    Steps are alike when the same optimizer stepped before them, and the batches are no larger: so a loop that
    trains two models in turns has two plans, and the longest batch that was seen stands for shorter ones.

    Attributes:
        is_lost: Whether this step has done something else than the one that it is taken to be like.
        extents: How large the batches of this step are, pass by pass.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.is_lost = False
        self.extents: list[Extent] = []
        self._known: list[Known] = []
        self._like: Known | None = None
        self._after = -1
        self._position = 0

    @property
    def plan(self) -> Plan | None:
        """The plan that was made last."""
        return self._known[-1].plan if self._known else None

    @property
    def is_followed(self) -> bool:
        """Whether the next need is looked up in the plan."""
        return self._like is not None and not self.is_lost

    @property
    def is_unknown(self) -> bool:
        """Whether no step like this one was known when it began; the same on all ranks."""
        return self._like is None and bool(self.extents)

    @property
    def is_new(self) -> bool:
        """Whether there was no step like this one."""
        return self._like is None and not self.is_lost

    def begin_pass(self, extent: Extent | None) -> None:
        """Choose the plan when a step begins, and find out whether it goes on like its trace.

        Args:
            extent: How large the batch is, equal on all ranks; None where that cannot be said.
        """
        if extent is None:
            self.is_lost = True
            return
        number = len(self.extents)
        self.extents.append(extent)
        if number == 0:
            after = {None, self._after}
            likely = [k for k in self._known if k.after in after and _covers(k.extents[0], extent)]
            self._like = min(likely, key=lambda known: known.extents[0][1:], default=None)
        elif self._like is not None:
            seen = self._like.extents
            self.is_lost |= number >= len(seen) or not _covers(seen[number], extent)

    def next(self, phase: Phase, needs: Collection[int]) -> Turn:
        """Return what a need asks for, and go one moment on.

        Args:
            phase: Pass that the need belongs to.
            needs: Chunks.
        """
        if self._like is None or self.is_lost:
            return Turn()
        position, moments = self._position, self._like.trace.moments
        moment = moments[position] if position < len(moments) else None
        if moment is None or (moment.phase, set(moment.needs)) != (phase, set(needs)):
            self.is_lost = True
            return Turn()
        self._position += 1
        stay = self._like.plan.moments[position]
        return Turn(is_planned=True, evictions=stay.evictions, prefetches=stay.prefetches, other=moment.other)

    def expect(self, trace: Trace, plan: Plan) -> None:
        """Take steps to be like one that was traced before there was any."""
        self._known = [Known(after=None, extents=trace.extents, trace=trace, plan=plan)]

    def learn(self, trace: Trace, plan: Plan) -> None:
        """Remember how the step that ends now went."""
        known = Known(after=self._after, extents=tuple(self.extents), trace=trace, plan=plan)
        self._known = [*self._known[-MAX_PLANS + 1 :], known]

    def end(self, optimizer: int) -> None:
        """End a step; what did not go as planned is looked at anew the next time.

        Args:
            optimizer: Which one stepped.
        """
        if self.is_lost and self._like is not None:
            self._known.remove(self._like)
        self._like = None
        self.extents = []
        self._position, self._after = 0, optimizer
        self.is_lost = False

    def drop_plans(self) -> None:
        """Know no plans any more, since state lives elsewhere now; the step that ends can be learned."""
        self._known.clear()

    def forget(self) -> None:
        """Know no plans any more, since there are other chunks now."""
        self._known.clear()
        self._like = None
        self.is_lost = bool(self.extents)


def _covers(seen: Extent, extent: Extent) -> bool:
    """Whether a batch is no larger than one that was seen."""
    same = len(seen) == len(extent) and seen[0] == extent[0]
    return same and all(most >= length for most, length in zip(seen[1:], extent[1:], strict=True))
