"""Contents: what one flat buffer holds, wherever copies of it are.

The one idea: a content is one tensor with copies in tiers, and the only thing that is remembered about them
is which are *valid*, that is equal to what was written last. A valid copy that is not the only one is
dropped without a transfer; everything else (eviction, prefetch, write back) is made of the operations of
:class:`Content`.

# Note [Life of a content]
A content has a *home*, the tier where it stays while nobody needs it. It is empty at first::

    touch(device) ... write the tensor ... wrote(device)      valid: device; home has room, stale
    settle()                                                  valid: home
    start(device) ... compute ... bring(device)               valid: home, device
    drop(device)                                              valid: home            (no transfer)
    bring(host), update in place, wrote(host)                 valid: host
    start(disk) ... go on with the next ... settle()          valid: disk, its home
    discard()                                                 empty; nobody needs what it held

Room, once a home has it, stays until the content is empty or moves: what was brought away can always come
back. A tier that is no home has room only while its copy is valid, touched, or on its way.

What need not be home at once leaves (:mod:`colossal_gemini.leaving`); who needs it before it has arrived
finds it where it was, and whoever is short of memory waits for it.

Between files and a device whose memory files do not reach, a copy goes through host memory, and is dropped
there once it has arrived, unless that is its home.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NoReturn, final

from attrs import frozen

from colossal_core.errors import ColossalError
from colossal_core.runtime.arena import Arena, Block
from colossal_gemini.disk import Disk, Extent
from colossal_gemini.leaving import Leaving
from colossal_gemini.transfers import Copier, Transfer

if TYPE_CHECKING:
    import torch

__all__ = ["Content", "Tier", "Tiers"]

Tier = Arena | Disk
"""A place for contents; two are the same tier when they are the same object."""


@final
class Tiers:
    """The tiers of one rank, fastest first, and how many bytes went between them.

    Attributes:
        device: Memory of the device that computes.
        host: Memory of the host; the same as ``device`` where that is what computes.
        disk: Files, or None.
        ordered: Each tier once, fastest first.
        moved: Bytes by the names of the tiers from and to which they were moved.
        copier: What copies between memories.
        leaving: Contents on their way home.
        disk_reaches_device: Whether files are read to and written from the device directly.
    """

    def __init__(self, device: Arena, host: Arena | None = None, disk: Disk | None = None) -> None:
        """Take the tiers; they are closed with this.

        Args:
            device: Memory of the device that computes.
            host: Memory of the host, if it is another.
            disk: Files, if there are any.
        """
        self.device = device
        self.host = device if host is None else host
        self.disk = disk
        found: list[Tier] = [self.device, self.host]
        if disk is not None:
            found.append(disk)
        self.ordered = tuple(dict.fromkeys(found))
        self.moved: dict[tuple[str, str], int] = {}
        self.copier = Copier()
        self.leaving = Leaving()
        for arena in (self.device, self.host):
            arena.reclaim = partial(self.leaving.make_room, arena)
        self.disk_reaches_device = self.device.device.type == "cpu"
        assert len({tier.name for tier in self.ordered}) == len(self.ordered), "tiers have different names"
        assert self.host.device.type == "cpu", f"host memory is not on {self.host.device}"

    def named(self, name: str) -> Tier:
        """Return the tier that is the ``"device"``, the ``"host"`` or the ``"disk"``."""
        if name == "disk":
            assert self.disk is not None
            return self.disk
        return self.device if name == "device" else self.host

    @property
    def last(self) -> Tier:
        """The slowest tier, which has most room."""
        return self.ordered[-1]

    def count(self, source: Tier, target: Tier, nbytes: int) -> None:
        """Note bytes that are moved."""
        pair = (source.name, target.name)
        self.moved[pair] = self.moved.get(pair, 0) + nbytes

    def close(self) -> None:
        """Close all tiers. Raises nothing, and waits for what is in flight."""
        self.copier.close()
        if self.disk is not None:
            self.disk.close()
        self.device.close()
        self.host.close()


@frozen(kw_only=True)
class _Pending:
    """A copy on its way."""

    source: Tier
    target: Tier
    transfer: Transfer


@final
class Content:
    """What one flat buffer holds: values, gradients or a state of an optimizer; see Note [Life of a content].

    Operations raise RuntimeError with the state when they would lose what was written, or show what was not;
    that is a fault of the caller. Errors of tiers (no room, no disk) leave every valid copy valid.

    Attributes:
        name: For messages: ``"transformer.h.3 master"``.
        numel: Elements.
        dtype: Their type.
        nbytes: Bytes that a transfer moves.
        home: Where it stays while nobody needs it.
        tiers: Where copies can be.
    """

    def __init__(self, tiers: Tiers, numel: int, dtype: torch.dtype, *, home: Tier, name: str) -> None:
        """Begin empty, without room anywhere.

        Args:
            tiers: Where copies can be.
            numel: Elements.
            dtype: Their type.
            home: One of the tiers.
            name: For messages.
        """
        assert home in tiers.ordered, f"{home!r} is none of the tiers"
        self.name = name
        self.numel = numel
        self.dtype = dtype
        self.nbytes = numel * dtype.itemsize
        self.home = home
        self.tiers = tiers
        self._valid: set[Tier] = set()
        self._blocks: dict[Arena, Block] = {}
        self._extent: Extent | None = None
        self._pending: _Pending | None = None
        self._shown: torch.Tensor | None = None
        self._last: Transfer | None = None
        self._stopover: Arena | None = None

    def __repr__(self) -> str:
        """Return the name and what is where."""
        where = ", ".join(tier.name for tier in self.tiers.ordered if tier in self._valid) or "nowhere"
        held = ", ".join(tier.name for tier in self.tiers.ordered if self.has_room(tier)) or "nowhere"
        way = f", on its way to {self._pending.target.name}" if self._pending else ""
        return f"<Content {self.name!r}: home {self.home.name}, valid in {where}, with room in {held}{way}>"

    # --- what is where --------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written, or what was is not needed any more."""
        return not self._valid

    def is_valid(self, tier: Tier) -> bool:
        """Return whether the copy in a tier is what was written last; one on its way is not yet."""
        return tier in self._valid

    def is_coming(self, tier: Tier) -> bool:
        """Return whether a copy is on its way to a tier."""
        return self._pending is not None and self._pending.target is tier

    def has_room(self, tier: Tier) -> bool:
        """Return whether the content takes room of a tier, whatever is in it."""
        if isinstance(tier, Disk):
            return self._extent is not None
        return tier in self._blocks and self._blocks[tier].is_held

    def room_needed(self, tier: Tier) -> int:
        """Return the bytes that :meth:`bring` or :meth:`touch` would take from the budget of a tier."""
        if self.has_room(tier):
            return 0
        return tier.counted(self.nbytes) if isinstance(tier, Disk) else self._block(tier).nbytes

    def tensor_in(self, tier: Arena) -> torch.Tensor:
        """Return the memory in a tier, ``[numel]``: the same tensor for as long as the content lives.

        It may be read while :meth:`is_valid`, and written between :meth:`touch` or :meth:`bring` and
        :meth:`wrote`. Otherwise there may be no memory behind it, and touching it ends the process.
        """
        return self._block(tier).tensor

    @property
    def shown(self) -> torch.Tensor:
        """The memory on the device as models see it: who refers to it does not refer to :meth:`tensor_in`.

        So it can be told whether anybody holds a view from the model, whatever else the memory is used for.
        """
        if self._shown is None:
            self._shown = self._block(self.tiers.device).alias()
        return self._shown

    # --- operations -----------------------------------------------------------------------------------------

    def start(self, tier: Tier) -> None:
        """Begin to have a valid copy in a tier, while something else runs; :meth:`bring` waits for it.

        Takes the room at once. The copy that it is made from must not be written meanwhile. Nothing happens
        if there is a valid copy or one is on its way. Where the way is through host memory, this begins its
        first half, and the second when called again.

        Raises:
            MemoryBudgetError: The tier has no room.
            DiskTierError: The disk has none, or an earlier transfer of this content has failed.
        """
        self._stay(tier)
        if tier not in self._valid and not self.is_coming(tier):
            self._launch(self._next_hop(tier), is_waited_for=False)

    def bring(self, tier: Tier) -> None:
        """Have a valid copy in a tier; the same errors as :meth:`start`."""
        if self.is_leaving(tier) and self._pending is not None:
            self._complete()  # who brings it may write to it
        self._stay(tier)
        while tier not in self._valid:
            if not self.is_coming(tier):
                self._launch(self._next_hop(tier), is_waited_for=True)
            self._complete()
        if tier is self.tiers.host:
            self._finish_last()
        stopover, self._stopover = self._stopover, None
        if stopover not in (None, tier, self.home) and stopover in self._valid:
            self.drop(stopover)

    def touch(self, tier: Arena) -> None:
        """Have memory in a tier to write to. What is in it is undefined, unless there is a valid copy.

        Raises:
            MemoryBudgetError: The tier has no room.
        """
        self._stay(tier)
        if self._pending is not None and tier in (self._pending.source, self._pending.target):
            self._complete()
        self._finish_last()
        self._take_room(tier)

    def wrote(self, tier: Arena, keep: Tier | None = None) -> None:
        """Make what is in a tier the content. Copies elsewhere are stale; home and ``keep`` keep room."""
        if not self.has_room(tier):
            self._refuse(f"wrote({tier.name}) without memory there")
        if self._pending is not None and tier in (self._pending.source, self._pending.target):
            self._refuse(f"wrote({tier.name}) while that memory is in transfer")
        self._abandon()
        self._stay()
        self._valid = {tier}
        for other in self.tiers.ordered:
            if other is not tier and other is not self.home and other is not keep:
                self._give_room(other)

    def drop(self, tier: Tier) -> None:
        """Give the room in a tier back. Waits for a transfer from or to it."""
        if self._pending is not None and tier in (self._pending.source, self._pending.target):
            self._complete()
        if self._valid == {tier}:
            self._refuse(f"drop({tier.name}) would lose the only valid copy")
        self._valid.discard(tier)
        self._give_room(tier)

    def settle(self, keep: Tier | None = None) -> None:
        """Have the home valid, by a transfer if it is not, and no copy elsewhere, but for one in ``keep``.

        A content that is empty gives all room back but that in ``keep``.

        Raises:
            DiskTierError: It could not be written; the copies are as they were.
        """
        self._stay()
        if self._pending is not None:
            self._complete()
        if self._valid:
            self.bring(self.home)
        for tier in self.tiers.ordered:
            if tier is not keep and (tier is not self.home or not self._valid):
                self._valid.discard(tier)
                self._give_room(tier)

    def leave(self, keep: Tier | None = None) -> None:
        """Begin to settle; the room is given back when somebody needs it, or at the next :meth:`settle`.

        Raises:
            DiskTierError: The disk has no room, or an earlier transfer of this content has failed.
        """
        if len(self._valid) != 1 or self.home in self._valid:
            self.settle(keep)
            return
        (source,) = self._valid
        self.start(self.home)
        if source is not keep and isinstance(source, Arena):
            self.tiers.leaving.add(self, source)

    def is_leaving(self, tier: Tier) -> bool:
        """Return whether it is on its way home from a tier, and nobody has asked for it there since."""
        return self.tiers.leaving.source_of(self) is tier

    def _stay(self, tier: Tier | None = None) -> None:
        """Leave a tier no more, or none where none is given: somebody asks for it there, or settles it."""
        if tier is None or self.is_leaving(tier):
            self.tiers.leaving.forget(self)

    def move_home(self, tier: Tier) -> None:
        """Live in another tier from now on; what is valid is brought there, and the old home's room goes.

        Raises:
            MemoryBudgetError: The tier has no room; the home is what it was.
            DiskTierError: The disk has none, or refuses; the same.
        """
        if self._valid:
            self.bring(tier)
        if self._pending is not None:
            self._complete()
        old, self.home = self.home, tier
        if old is not tier:
            self._valid.discard(old)
            self._give_room(old)

    def discard(self) -> None:
        """Be empty, and give all room back: nobody needs what was written."""
        self._stay()
        self._abandon()
        self._valid.clear()
        for tier in self.tiers.ordered:
            self._give_room(tier)

    def close(self) -> None:
        """Give everything back. Raises nothing, and waits for what is in flight; may be called again."""
        self.discard()
        for block in self._blocks.values():
            block.close()
        self._blocks.clear()
        self._shown = None

    # --- room -----------------------------------------------------------------------------------------------

    def _block(self, arena: Arena) -> Block:
        """Return the block in a memory, which is reserved at the first need."""
        if arena not in self._blocks:
            assert arena in self.tiers.ordered, f"{arena!r} is none of the tiers"
            self._blocks[arena] = arena.reserve(self.numel, self.dtype, name=self.name)
        return self._blocks[arena]

    def _take_room(self, tier: Tier) -> None:
        """Have room in a tier."""
        if self.has_room(tier):
            return
        if isinstance(tier, Disk):
            self._extent = tier.reserve(self.nbytes, name=self.name)
        else:
            self._block(tier).acquire()

    def _give_room(self, tier: Tier) -> None:
        """Give the room in a tier back, if there is any."""
        if isinstance(tier, Disk):
            if self._extent is not None:
                self._extent.close()
                self._extent = None
        elif self.has_room(tier):
            self._finish_last()
            self._blocks[tier].release()

    # --- transfers ------------------------------------------------------------------------------------------

    def _next_hop(self, target: Tier) -> Tier:
        """Return where a copy goes next on its way to a tier; see Note [Life of a content]."""
        if not self._valid:
            self._refuse(f"there is nothing to bring to {target.name}")
        if self._pending is not None:
            self._complete()
        ends = {self._source(target), target}
        crosses = self.tiers.device in ends and any(isinstance(end, Disk) for end in ends)
        if not crosses or self.tiers.disk_reaches_device:
            return target
        self._stopover = self.tiers.host
        return self.tiers.host

    def _source(self, target: Tier) -> Tier:
        """Return which valid copy is nearest to a tier."""
        order = self.tiers.ordered if isinstance(target, Arena) else reversed(self.tiers.ordered)
        return next(tier for tier in order if tier in self._valid)

    def _launch(self, target: Tier, *, is_waited_for: bool) -> None:
        """Take the room and begin a transfer, or carry it out where nothing is gained by a thread."""
        source = self._source(target)
        self._take_room(target)
        transfer = self._begin(source, target, is_waited_for=is_waited_for)
        self.tiers.count(source, target, self.nbytes)
        if transfer is None:
            self._valid.add(target)
        else:
            self._pending = _Pending(source=source, target=target, transfer=transfer)

    def _begin(self, source: Tier, target: Tier, *, is_waited_for: bool) -> Transfer | None:
        """Begin a transfer; None when it is done already."""
        if isinstance(target, Disk):
            assert self._extent is not None
            assert isinstance(source, Arena)
            return self._extent.write(self._block(source).tensor)
        if isinstance(source, Disk):
            assert self._extent is not None
            return self._extent.read(self._block(target).tensor)
        ends = (self._block(source).tensor, self._block(target).tensor)
        if is_waited_for and self.tiers.copier.copies_now(*ends):
            return None
        return self.tiers.copier.start(*ends)

    def _complete(self) -> None:
        """Let what is computed next wait for what is on its way, if anything is, and make it valid."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.transfer.wait()
        except ColossalError:
            if pending.target is not self.home:
                self._give_room(pending.target)
            raise
        self._last = pending.transfer
        self._valid.add(pending.target)

    def lend(self, transfer: Transfer | None) -> None:
        """Let memory on the host stay as it is until somebody else's transfer from it has finished."""
        self._finish_last()
        self._last = transfer

    def _finish_last(self) -> None:
        """Wait here until the last transfer that was waited for has let go of its source, too."""
        last, self._last = self._last, None
        if last is not None:
            last.finish()

    def _abandon(self) -> None:
        """Wait for what is on its way, if anything is, and forget it, however it went."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.transfer.finish()
            if pending.target is not self.home:
                self._give_room(pending.target)

    def _refuse(self, what: str) -> NoReturn:
        """Raise for a call that only a fault of the caller can make."""
        raise RuntimeError(f"{what}: {self!r}")
