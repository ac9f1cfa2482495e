"""Where the parts of one chunk live, and how they come to where they are worked on.

The one idea: a chunk is a range of a flat buffer whose master, values, gradient and optimizer states are
contents in tiers. Their tensors stay the same objects, so the optimizer, the norm and checkpoints use them as
if they were always there; whoever does says so before, by :meth:`ChunkHome.present`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, final

import torch
from attrs import define

from colossal_core.errors import MemoryBudgetError
from colossal_core.runtime.ranges import OwnedRange, RangeHome, Segment, State
from colossal_core.runtime.shard import Shard
from colossal_core.states import is_like
from colossal_gemini.contents import Content

if TYPE_CHECKING:
    from colossal_core.runtime.arena import Arena, Block
    from colossal_core.runtime.flat import Slot
    from colossal_gemini.contents import Tier, Tiers

__all__ = ["BlockMemory", "ChunkHome", "ContentMemory", "TieredShard"]


def _hear_nothing(_: bool) -> None:  # noqa: FBT001 - as it is called
    """Tell nobody."""


@final
@define(eq=False)
class BlockMemory:
    """Memory of a flat buffer that lies in a block of an arena.

    Attributes:
        block: The block.
        heard: Told before there is memory and after it is gone, by whether there will be some.
    """

    block: Block
    heard: Callable[[bool], None] = _hear_nothing

    @property
    def tensor(self) -> torch.Tensor:
        """The memory, 1-D."""
        return self.block.tensor

    def acquire(self) -> None:
        """Hold the block."""
        if not self.block.is_held:
            self.heard(True)
            self.block.acquire()

    def release(self) -> None:
        """Give the block back."""
        if self.block.is_held:
            self.block.release()
            self.heard(False)

    @property
    def is_held(self) -> bool:
        """Whether there is memory."""
        return self.block.is_held


@final
@define(eq=False)
class ContentMemory:
    """Memory of a flat buffer that is the copy of a content on the device: the only rank holds all of it.

    Attributes:
        content: The content.
        heard: Told before there is memory and after it is gone, by whether there will be some.
    """

    content: Content
    heard: Callable[[bool], None] = _hear_nothing

    @property
    def tensor(self) -> torch.Tensor:
        """The memory, 1-D."""
        return self.content.shown

    def acquire(self) -> None:
        """Have memory."""
        self.heard(True)
        self.content.touch(self.content.tiers.device)

    def release(self) -> None:
        """Give the memory back, unless the content lives there; what was not written there is lost."""
        self.content.leave()
        self.heard(False)

    @property
    def is_held(self) -> bool:
        """Whether there is memory."""
        device = self.content.tiers.device
        return self.content.has_room(device) and not self.content.is_leaving(device)


@final
class ChunkHome(RangeHome):
    """The contents of one chunk.

    Attributes:
        tiers: Where they can be.
        worksite: The memory in which the update runs.
        is_whole: Whether this rank's shard is all of the chunk, so that models compute with a copy of it.
        is_lent: Whether a model, or somebody who took a view from it, refers to that copy.
        values: This rank's shard of the values.
        gradient: That of the reduced gradient; None for frozen parameters.
        master: That of the masters; None where values are wide enough.
        sums: That of gradients which are added up, at the worksite meanwhile; None for frozen parameters.
        arrival: A gradient on the device that is added to sums; None for frozen parameters.
    """

    def __init__(
        self,
        tiers: Tiers,
        name: str,
        numel: int,
        dtype: torch.dtype,
        *,
        is_whole: bool,
        is_trainable: bool,
    ) -> None:
        """Let everything live in the last tier, and the update run on the host.

        Args:
            tiers: Where contents can be.
            name: Of the chunk, for messages.
            numel: Elements of the shard.
            dtype: Of the values.
            is_whole: Whether the shard is all of the chunk.
            is_trainable: Whether it has a gradient, and masters beside 16-bit values.
        """
        self.tiers = tiers
        self.name = name
        self.worksite: Arena = tiers.host
        self.is_whole = is_whole
        self.is_lent = False
        self._where: dict[str, Tier] = {}
        self.values = self._content("values", numel, dtype)
        self.gradient = self._content("gradient", numel, dtype) if is_trainable else None
        wide = torch.promote_types(dtype, torch.float32)
        self.master = self._content("master", numel, wide) if is_trainable and wide != dtype else None
        self.sums = self._content("sums", numel, wide) if is_trainable else None
        self.arrival = self._content("arrival", numel, dtype) if is_trainable else None
        self._states: dict[int, tuple[str, Content]] = {}
        self._users: Counter[Content] = Counter()
        self._gradient_version = -1

    # --- what an update needs -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to bring everything to the worksite, as far as there is room."""
        with suppress(MemoryBudgetError):
            for content in self._all():
                content.start(self.worksite)

    def bring(self) -> None:
        """Have everything at the worksite."""
        for content in self._all():
            if not content.is_empty:
                content.bring(self.worksite)
        self._gradient_version = self._version(self.gradient)

    def put(self, states: Sequence[tuple[Segment, State]]) -> None:
        """Keep what was updated."""
        is_kept = self._version(self.gradient) == self._gradient_version
        for content in self._all():
            if content.is_valid(self.worksite) and not (is_kept and content is self.gradient):
                content.wrote(self.worksite, self._kept(content))
        self.keep(states)
        for content in self._all():
            if self._users[content] == 0:
                content.leave(self._kept(content))

    def keep(self, states: Sequence[tuple[Segment, State]]) -> None:
        """Move states into contents, and forget those that are not used any more."""
        used: set[int] = set()
        for segment, state in states:
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and is_like(name, value, segment.leaf):
                    if _storage_of(value) not in self._states:
                        state[name] = self._adopt(name, value)
                    used.add(_storage_of(state[name]))
        for key in self._states.keys() - used:
            self._states.pop(key)[1].close()

    def _adopt(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return an equal tensor whose memory is that of a new content."""
        content = self._content(name, value.numel(), value.dtype)
        content.touch(self.worksite)
        flat = content.tensor_in(self.worksite)
        flat.copy_(value.reshape(-1))
        content.wrote(self.worksite)
        self._states[_storage_of(flat)] = (name, content)
        self._settle(content)
        return flat.view(value.shape)

    # --- what others need -----------------------------------------------------------------------------------

    @contextmanager
    def present(self, state: str) -> Iterator[None]:
        """Have contents at the worksite; what is written there meanwhile is kept."""
        contents = self._of(state)
        for content in contents:
            self._users[content] += 1
            if content.is_empty:
                content.touch(self.worksite)
                content.tensor_in(self.worksite).zero_()
                content.wrote(self.worksite)
            content.bring(self.worksite)
        before = [self._version(content) for content in contents]
        try:
            yield
        finally:
            for content, version in zip(contents, before, strict=True):
                if self._version(content) != version:
                    content.wrote(self.worksite, self._kept(content))
                self._users[content] -= 1
                self._settle(content)

    def work_in(self, worksite: Arena, held: OwnedRange, states: Sequence[tuple[Segment, State]]) -> None:
        """Let the update run in another memory: what it works on are tensors there from now on.

        Args:
            worksite: The memory.
            held: The range of this chunk.
            states: All segments of the range, with their states.
        """
        if worksite is self.worksite:
            return
        self.worksite = worksite
        for content in self._all():
            if not content.is_empty:
                content.bring(worksite)  # views of memory on accelerators can only be taken while it is there
        held.values = self.values.tensor_in(worksite)
        held.master = held.values if self.master is None else self.master.tensor_in(worksite)
        if self.gradient is not None:
            held.gradient = self.gradient.tensor_in(worksite)
        known, self._states = self._states, {}
        for segment, state in states:
            segment.leaf.data = segment.slice_of(held.master).view(segment.leaf.shape)
            for name, value in state.items():
                found = known.get(_storage_of(value)) if isinstance(value, torch.Tensor) else None
                if found is not None:
                    flat = found[1].tensor_in(worksite)
                    state[name] = flat.as_strided(value.size(), value.stride(), value.storage_offset())
                    self._states[_storage_of(flat)] = found
        self.rest()

    def live_in(self, tier: Tier, state: str) -> None:
        """Let one kind of contents live in a tier from now on.

        Args:
            tier: The tier.
            state: ``"value"``, ``"gradient"`` or ``"master"``, which stands for optimizer states as well.
        """
        self._where[state] = tier
        contents = self._of(state)
        if state == "master":
            contents = [content for _, content in self._states.values()] + (contents if self.master else [])
        for content in contents:
            content.move_home(tier)
            self._settle(content)

    def rest(self) -> None:
        """Let everything be where it lives."""
        for content in self._all():
            if not content.is_empty:
                self._settle(content)

    @contextmanager
    def states_present(self) -> Iterator[None]:
        """Have the optimizer states at the worksite."""
        with ExitStack() as stack:
            for name in {name for name, _ in self._states.values()}:
                stack.enter_context(self.present(name))
            yield

    def tensors(self) -> Iterator[torch.Tensor]:
        """Iterate over the memory of all contents, in all tiers of memory, whether it is there or not."""
        for content in (*self._all(), *self._passing()):
            for tier in (self.tiers.device, self.tiers.host):
                yield content.tensor_in(tier)

    def close(self) -> None:
        """Give all memory back."""
        for content in (*self._all(), *self._passing()):
            content.close()
        self._states.clear()

    # --- internals ------------------------------------------------------------------------------------------

    def _content(self, name: str, numel: int, dtype: torch.dtype) -> Content:
        """Make a content that lives where its kind does."""
        kind = {"values": "value", "gradient": "gradient"}.get(name, "master")
        home = self._where.get(kind, self.tiers.last)
        return Content(self.tiers, numel, dtype, home=home, name=f"{self.name} {name}")

    def _all(self) -> list[Content]:
        """Return all contents, those first that are needed first."""
        fixed = [content for content in (self.gradient, self.master, self.values) if content is not None]
        return fixed + [content for _, content in self._states.values()]

    def _passing(self) -> list[Content]:
        """Return the contents that no update needs."""
        return [content for content in (self.sums, self.arrival) if content is not None]

    def _version(self, content: Content | None) -> int:
        """Return how often a content was written at the worksite, as torch counts."""
        return -1 if content is None else content.tensor_in(self.worksite)._version

    def _of(self, state: str) -> list[Content]:
        """Return the contents that one state of a place lies in."""
        if state == "value":
            return [self.values]
        if state == "gradient":
            return [] if self.gradient is None else [self.gradient]
        if state == "master":
            return [self.values if self.master is None else self.master]
        return [content for name, content in self._states.values() if name == state]

    def _kept(self, content: Content) -> Tier | None:
        """Return the device for values whose memory there is referred to, whatever is in it."""
        return self.tiers.device if self.is_whole and self.is_lent and content is self.values else None

    def _settle(self, content: Content) -> None:
        """Have no more copies than its home, and that on the device which models compute with."""
        if self._users[content] == 0:
            content.settle(self._kept(content))


def _storage_of(tensor: torch.Tensor) -> int:
    """Return what tells the storage of a tensor from others."""
    return int(tensor.untyped_storage()._cdata)


@final
class TieredShard(Shard):
    """This rank's part of the reduced gradients of one chunk, which leaves the device as it arrives.

    What several rounds leave adds up where the update runs, within the budget of that memory.
    """

    def __init__(self, held: OwnedRange, home: ChunkHome) -> None:
        """Take a range whose gradient lives in a tier."""
        super().__init__(held.buffer, held.start, held.gradient, is_inside=False)
        assert home.gradient is not None
        assert home.sums is not None
        assert home.arrival is not None
        self._held = held
        self._home = home
        self._content, self._sums, self._arrival = home.gradient, home.sums, home.arrival
        self._device = home.tiers.device

    def receive(self) -> torch.Tensor:
        """Return memory on the device; besides what earlier rounds left, when there was one."""
        first, later = (content.tensor_in(self._device) for content in (self._content, self._arrival))
        if not (self.has_result or self.is_awaited):
            self.is_awaited = True
            self._content.touch(self._device)
            return first
        if self._arrival.has_room(self._device):  # this rank is more than a round ahead of another
            return torch.empty_like(later)
        self._arrival.touch(self._device)
        return later

    def take(self, result: torch.Tensor) -> None:
        """Let the first result live where gradients do, and add later ones."""
        if result is self._content.tensor_in(self._device):
            self._content.wrote(self._device)
            self._content.leave()
            self.has_result, self.is_awaited = True, False
            return
        self.keep()
        if self.total is not None:
            self.total.add_(result.to(self.total.device))
        if result is self._arrival.tensor_in(self._device):
            self._arrival.discard()

    def restore(self) -> None:
        """Memory comes with what is in it."""

    def release(self) -> None:
        """Nobody needs what is there."""
        self._content.discard()

    def keep(self) -> None:
        """Let what is there be added to."""
        if not self.has_result or self.total is not None:
            return
        worksite = self._home.worksite
        is_apart = worksite is not self._device  # where one rank has its unreduced gradients
        if is_apart and self._is_wide and self._content.home is worksite:
            self._content.settle()
            self.total = self._held.gradient
            return
        self._sums.touch(worksite)
        self.total = self._sums.tensor_in(worksite)
        with self._home.present("gradient"):
            self.total.copy_(self._held.gradient)

    def settle(self) -> None:
        """Bring the total of several rounds into the gradient."""
        if self.total is self._held.gradient:
            self._content.wrote(self._home.worksite)
        elif self.total is not None:
            with self._home.present("gradient"):
                self._held.gradient.copy_(self.total)
        elif self._content.home is self._home.worksite and self._content.is_leaving(self._device):
            self._content.settle()  # it may be read there now
        self._sums.discard()
        self.total, self.has_result = None, False

    @property
    def _is_wide(self) -> bool:
        """Whether gradients are as wide as sums."""
        return self._sums.dtype == self._content.dtype

    def part_of(self, slot: Slot) -> torch.Tensor:
        """Return what this rank holds of a parameter in the total of several rounds; may be empty."""
        if self.total is None:
            self.has_result = True
            self.keep()
        return super().part_of(slot)
