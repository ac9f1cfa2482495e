"""Contents on their way home, while whoever wrote them goes on.

The one idea: room that a content has only until it is home is needed by nobody before memory is short. So
what is written to files, and copied to the host, is waited for when something else asks for that room, or for
the content itself, and not before: gradients leave while backward goes on, and what an update wrote leaves
while it updates the next chunks, and while the next forward runs. Budgets hold, since room that is still
taken counts.

# Note [Errors of what leaves]
A transfer that fails is noticed where it is waited for. The copy that it was made from stays valid, so
nothing is lost but the step that runs, as when it had been waited for at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from colossal_core.runtime.arena import Arena
    from colossal_gemini.contents import Content

__all__ = ["Leaving"]

MAX_UNLIMITED = 8
"""Contents that may leave at a time where no budget limits what they take: those of two chunks."""


@final
class Leaving:
    """Remembers what leaves, and ends it."""

    def __init__(self) -> None:
        """Remember nothing."""
        self._sources: dict[Content, Arena] = {}

    def source_of(self, content: Content) -> Arena | None:
        """Return the memory that a content leaves, or None."""
        return self._sources.get(content)

    def taken(self, arena: Arena) -> int:
        """Return the bytes of a memory that leave it."""
        return sum(content.nbytes for content, source in self._sources.items() if source is arena)

    def add(self, content: Content, source: Arena) -> None:
        """Take note of a content whose transfer home has begun.

        Args:
            content: The content.
            source: The memory that it leaves.
        """
        self._sources[content] = source
        if source.budget is None:
            while len(self._sources) > MAX_UNLIMITED:
                self._end(next(iter(self._sources)))

    def forget(self, content: Content) -> None:
        """Leave it to somebody else to settle a content."""
        self._sources.pop(content, None)

    def make_room(self, arena: Arena, num_bytes: int) -> None:
        """Wait for the oldest transfers until a memory has room, as far as they take some of it.

        Raises:
            DiskTierError: One of them failed.
        """
        for content, source in tuple(self._sources.items()):
            if arena.room() >= num_bytes:
                return
            is_passed = content.has_room(arena) and content.home is not arena
            if content in self._sources and (source is arena or is_passed):
                self._end(content)

    def _end(self, content: Content) -> None:
        """Wait for one."""
        source = self._sources.pop(content)
        content.bring(content.home)
        content.drop(source)
