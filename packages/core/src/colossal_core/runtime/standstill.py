"""Ranks that wait for each other find out, and raise instead of hanging.

The one idea: a rank whose collective takes long publishes in the rendezvous store where it stands: what it
waits for, and how many operations it has issued on each of its groups. From these notes follows for whom it
waits: the members that have issued less. When that leads around to the rank itself, through ranks that all
stand still, none of them can ever go on. A rank that is only slow publishes nothing, and is waited for.

# Note [Standing still]
Notes are numbered by beats. A rank counts as standing still only when it has published the same place twice
since this rank began to wait, so a note that is out of date never ends a run. A rank that has raised leaves
the reason for all who wait for it.

Not handled: backends whose waits do not block the host, and collectives that were not issued through us.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

from attrs import define, field
from torch._C._distributed_c10d import PrefixStore, Store

from colossal_core.errors import RankMismatchError

if TYPE_CHECKING:
    import torch.distributed as dist

    from colossal_core.runtime.ledger import Ledger
    from colossal_core.runtime.mesh import Group

__all__ = ["Standstill"]

PATIENCE_SECONDS = 5.0
"""How long a collective may take before ranks compare notes. Steps of large models take longer, and then
publish a note now and then, which costs nothing."""

BEAT_SECONDS = 0.5


@define
class _Seen:
    """What this rank has seen of another one since it began to wait.

    Attributes:
        place: Where it stands.
        beats: In how many different notes.
        last_beat: Number of the last one.
    """

    place: Any = None
    beats: int = 0
    last_beat: int = -1


@final
@define(eq=False)
class Standstill:
    """Watches the waits of one rank.

    Attributes:
        rank: This rank.
        ledger: Counts what this rank has issued on each group.
    """

    rank: int
    ledger: Ledger
    _store: Store
    _beat: int = field(default=0, init=False)
    _reason: str = field(default="", init=False)

    @classmethod
    def watch(cls, store: Store | None, rank: int, ledger: Ledger) -> Standstill | None:
        """Watch with a store that all ranks reach; None in a world of one rank."""
        if store is None:
            return None
        number = store.add(f"colossal.standstills.{rank}", 1)
        return cls(rank, ledger, PrefixStore(f"colossal.standstill.{number}", store))

    def wait(self, work: dist.Work, group: Group, number: int, what: str) -> None:
        """Wait for a collective.

        Args:
            work: The collective.
            group: Its members.
            number: How many operations this rank had issued on the group, this one included.
            what: What it is, for people.

        Raises:
            RankMismatchError: This rank and others wait for each other.
        """
        if self._reason:
            raise _error(self._reason)  # nothing that was on its way can arrive any more
        if _wait(work, PATIENCE_SECONDS):
            return
        place = {
            "group": group.name,
            "ranks": list(group.ranks),
            "number": number,
            "what": what,
            "counts": dict(self.ledger.counts),
        }
        seen: dict[int, _Seen] = {}
        while not _wait(work, BEAT_SECONDS):
            self._publish(place)
            reason = self._look(place, seen)
            if reason:
                raise self.fail(reason)
        self._publish(None)

    def fail(self, reason: str) -> RankMismatchError:
        """Let all who wait for this rank know that it cannot go on, and return the error to raise."""
        self._reason = reason
        self._publish({"reason": reason})
        return _error(reason)

    def _publish(self, place: Any) -> None:
        """Say where this rank stands; None when it goes on."""
        self._beat += 1
        self._store.set(f"{self.rank}", json.dumps([self._beat, place]))

    def _look(self, place: Any, seen: dict[int, _Seen]) -> str:
        """Read the notes of all for whom this rank waits, directly or not.

        Returns:
            Why it can never go on: they close a circle, two met with different operations, or one of them has
            raised; else nothing.
        """
        standing: dict[int, Any] = {self.rank: place}
        ahead = [self.rank]
        is_circle = False
        while ahead:
            rank = ahead.pop()
            mine = standing[rank]
            for other in mine["ranks"]:
                theirs = place if other == self.rank else self._read(other, seen)
                if theirs is None or other == rank:
                    continue
                if "reason" in theirs:
                    return str(theirs["reason"])
                is_same_place = (theirs["group"], theirs["number"]) == (mine["group"], mine["number"])
                differs = is_same_place and theirs["what"] != mine["what"]
                if theirs["counts"].get(mine["group"], 0) >= mine["number"] and not differs:
                    continue  # it has done its part
                is_circle = is_circle or differs or other == self.rank
                if other not in standing:
                    standing[other] = theirs
                    ahead.append(other)
        stories = [
            f"rank {rank} waits in {found['what']} over {found['group']}"
            for rank, found in sorted(standing.items())
        ]
        return "; ".join(stories) if is_circle else ""

    def _read(self, rank: int, seen: dict[int, _Seen]) -> Any:
        """Return where another rank stands, once it has said so often enough; None while it may go on."""
        if not self._store.check([f"{rank}"]):
            return None
        beat, place = json.loads(self._store.get(f"{rank}").decode())
        if place is not None and "reason" in place:
            return place
        known = seen.setdefault(rank, _Seen())
        if place != known.place:
            seen[rank] = _Seen(place, 1, beat)
        elif beat != known.last_beat:
            known.beats, known.last_beat = known.beats + 1, beat
        return place if place is not None and seen[rank].beats > 2 else None


def _error(reason: str) -> RankMismatchError:
    """Return the error for a reason."""
    return RankMismatchError(
        f"ranks wait for each other and none can go on: {reason}",
        hint="all ranks have to run the same models and steps equally often; what depends on a rank's own "
        "data, such as generating texts of different lengths, needs parameters that are whole, as within "
        "booster.full_parameters(model)",
    )


def _wait(work: dist.Work, seconds: float) -> bool:
    """Wait for some time; return whether it is done."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True
