"""Ranks that wait for each other find out, and raise instead of hanging.

The one idea: a rank whose collective takes long publishes in the rendezvous store where it stands: what it
waits for, and how many operations it has issued on each of its groups. From these notes follows for whom it
waits: the members that have issued less. When that leads around to the rank itself, through ranks that all
stand still, none of them can ever go on. A rank that is only slow publishes nothing, and is waited for.

# Note [Standing still]
Notes are numbered by beats. A rank counts as standing still only when it has published the same place twice
since this rank began to wait, so a note that is out of date never ends a run. A rank that has raised leaves
the reason for all who wait for it.

# Note [Waits that cannot be given up]
gloo lets the wait for a collective be given up and taken up again. A wait for a message between two ranks
that is given up ends all communication of its group. So that wait has no end, and a thread beside it compares
notes; when it finds that no rank can go on, it ends the wait by exactly that.

Not handled: backends whose waits do not block the host, and collectives that were not issued through us.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

from attrs import define, field
from torch._C._distributed_c10d import PrefixStore, Store

from colossal_core.errors import RankMismatchError

if TYPE_CHECKING:
    import torch.distributed as dist

    from colossal_core.runtime.ledger import Ledger
    from colossal_core.runtime.mesh import Group

__all__ = ["Messages", "Standstill"]

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
class Messages:
    """Messages between two ranks that belong together; backends do not tell whether they have arrived.

    Attributes:
        works: Those that arrive here, then those that leave.
    """

    works: Sequence[dist.Work]

    def is_completed(self) -> bool:
        """Return False: only :meth:`wait` finds out."""
        return False

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self.works:
            work.wait()

    def give_up(self) -> None:
        """End the wait of another thread, and all communication of the group."""
        for work in self.works:
            with suppress(RuntimeError):
                work.wait(timedelta(milliseconds=1))


@define(eq=False)
class _Stay:
    """A wait that another thread has to look after.

    Attributes:
        messages: What is waited for.
        place: Where that is.
        since: When it began.
        seen: What was seen of other ranks since.
    """

    messages: Messages
    place: Any
    since: float = field(factory=time.monotonic)
    seen: dict[int, _Seen] = field(factory=dict)


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
    _stay: _Stay | None = field(default=None, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)
    _is_attended: bool = field(default=False, init=False)

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
        self.check()
        with self._explaining(group):
            if _wait(work, PATIENCE_SECONDS):
                return
            place = self._place(group, number, what)
            seen: dict[int, _Seen] = {}
            while not _wait(work, BEAT_SECONDS):
                self._publish(place)
                reason = self._look(place, seen)
                if reason:
                    raise self.fail(reason)
            self._publish(None)

    def wait_for_messages(self, messages: Messages, group: Group, number: int, what: str) -> None:
        """Wait for messages between two ranks; see Note [Waits that cannot be given up].

        Args:
            messages: What to wait for.
            group: All ranks that exchange some.
            number: As for :meth:`wait`.
            what: The same.

        Raises:
            RankMismatchError: This rank and others wait for each other.
        """
        self.check()
        if not self._is_attended:
            self._is_attended = True
            threading.Thread(target=_attend, args=(weakref.ref(self),), daemon=True).start()
        stay = _Stay(messages, self._place(group, number, what))
        self._stay = stay
        try:
            with self._explaining(group):
                messages.wait()
        finally:
            self._stay = None
            if time.monotonic() - stay.since > PATIENCE_SECONDS:
                with self._lock:
                    self._publish({"reason": self._reason} if self._reason else None)

    def check(self) -> None:
        """Refuse to go on where ranks did different things: nothing that is on its way can arrive any more.

        Raises:
            RankMismatchError: With the reason.
        """
        if self._reason:
            raise _error(self._reason)

    @contextmanager
    def _explaining(self, group: Group) -> Iterator[None]:
        """Give the reason when communication ends because a member, or another thread, has ended it."""
        try:
            yield
        except RuntimeError as err:
            for rank in group.ranks if not self._reason else ():
                if self._store.check([f"{rank}"]):
                    _, place = json.loads(self._store.get(f"{rank}").decode())
                    self._reason = self._reason or (place or {}).get("reason", "")
            if self._reason:
                raise _error(self._reason) from err
            raise

    def attend(self) -> None:
        """Compare notes for a wait of the other thread, if it has lasted for long."""
        stay = self._stay
        if stay is None or time.monotonic() - stay.since < PATIENCE_SECONDS:
            return
        with self._lock:
            if self._stay is not stay:
                return
            self._publish(stay.place)
            reason = self._look(stay.place, stay.seen)
            if reason:
                self.fail(reason)
                stay.messages.give_up()

    def _place(self, group: Group, number: int, what: str) -> dict[str, Any]:
        """Describe where this rank stands."""
        return {
            "group": group.name,
            "ranks": list(group.ranks),
            "number": number,
            "what": what,
            "counts": dict(self.ledger.counts),
        }

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


def _attend(found: weakref.ref[Standstill]) -> None:
    """Look after the waits of a rank for as long as anybody watches them."""
    while True:
        time.sleep(BEAT_SECONDS)
        standstill = found()
        if standstill is None:
            return
        standstill.attend()
        del standstill


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
