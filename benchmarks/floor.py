"""The least that a step of gemini can take: compute, and the same transfers beside it.

The *floor* of a step is one with everything in memory while a thread moves the bytes that gemini moved, with
the same calls. Where an update is mostly reading and writing, no order of the work can reach it: the norm of
all gradients says whether there is an update, so that begins after backward, and before it only what memory
has room for can be read, and after it only that can be written. The *floor in order* keeps to this: forward
and backward run while a thread moves what moves then, and of the reads and of the writes of the update as
many bytes as both memories have free when it begins; then the update runs while a thread moves the rest. It
is still below what can be reached, since it lets reads begin with forward, and writes end with the next one.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import torch

from colossal_core.runtime.arena import Arena
from colossal_gemini.contents import Content, Tier, Tiers
from colossal_gemini.disk import Disk

__all__ = ["Floor", "Moved", "in_order"]

RING = 8
"""Contents that are moved in turn, so that they do not stay in a cache."""

Moved = dict[str, int]
"""Bytes by way: ``"host to disk"``."""


class Floor:
    """A step with everything in memory, while a thread moves bytes."""

    def __init__(self, step: Callable[..., float], num_bytes: int, folder: str) -> None:
        """Build what is moved.

        Args:
            step: Takes a step by its number, and calls what it is given besides before its update.
            num_bytes: That are moved at a time.
            folder: Of the files.
        """
        self.step = step
        self.tiers = Tiers(Arena("device"), Arena("host"), Disk(folder))
        ways = itertools.permutations(self.tiers.ordered, 2)
        self.rings = {
            f"{home.name} to {target.name}": (target, [self._make(home, num_bytes) for _ in range(RING)])
            for home, target in ways
        }

    def _make(self, home: Tier, num_bytes: int) -> Content:
        """Return bytes that live in a tier."""
        content = Content(self.tiers, num_bytes, torch.uint8, home=home, name="bytes of the floor")
        memory = home if isinstance(home, Arena) else self.tiers.host
        content.touch(memory)
        content.tensor_in(memory).fill_(1)
        content.wrote(memory)
        content.settle()
        return content

    def _move(self, moved: Moved) -> None:
        """Move bytes, all ways side by side; what was read is dropped, and what is written is new."""
        counts = {way: round(nbytes / self.rings[way][1][0].nbytes) for way, nbytes in moved.items()}
        for index in range(max(counts.values(), default=0)):
            turn = [self.rings[way] for way, count in counts.items() if index < count]
            for target, ring in turn:
                ring[index % RING].start(target)
            for target, ring in turn:
                ring[index % RING].bring(target)
                ring[index % RING].settle()

    def run(self, number: int, moved: Moved, later: Moved | None = None) -> float:
        """Run a step and return the seconds until both are done.

        Args:
            number: Of the step.
            moved: Bytes that move meanwhile, or, where there are others, before the update.
            later: Bytes that move while the update runs.
        """
        movers = [threading.Thread(target=self._move, args=(some,)) for some in (moved, later or {})]

        def between() -> None:
            if later is not None:
                movers[0].join()
                movers[1].start()

        start = time.perf_counter()
        movers[0].start()
        self.step(number, between)
        if later is not None:
            movers[1].join()
        movers[0].join()
        return time.perf_counter() - start


def in_order(before: Moved, moved: Moved, free: int) -> tuple[Moved, Moved]:
    """Return which bytes can move before an update begins, or after it has ended, and which cannot.

    Args:
        before: What moved before it.
        moved: What moved in the step.
        free: Bytes of memory that nothing takes when it begins: so much can be read before it, and be
            written after it.
    """
    early = dict(before)
    later = {way: nbytes - before.get(way, 0) for way, nbytes in moved.items()}
    for is_read in (True, False):
        room = free
        for way in [way for way in later if way.startswith("disk to ") == is_read]:
            shifted = min(room, later[way])
            early[way], later[way] = early.get(way, 0) + shifted, later[way] - shifted
            room -= shifted
    return early, later
