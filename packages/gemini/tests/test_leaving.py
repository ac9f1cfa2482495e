"""What leaves memory gives its room back when somebody needs it, and loses nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from colossal_core.errors import DiskTierError, MemoryBudgetError
from colossal_core.runtime.arena import Arena
from colossal_gemini.contents import Content, Tiers
from colossal_gemini.disk import Disk
from colossal_gemini.leaving import MAX_UNLIMITED

NUMEL = 1024
SIZE = 4 * NUMEL


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    """Three tiers, with room for two contents on the device and on the host."""
    made = Tiers(Arena("device", budget=2 * SIZE), Arena("host", budget=2 * SIZE), Disk(tmp_path))
    yield made
    made.close()


def leave(tiers: Tiers, number: float, *, arena: Arena | None = None) -> Content:
    """Return a content that lives in files, was written in a memory, and leaves that."""
    assert tiers.disk is not None
    arena = tiers.host if arena is None else arena
    content = Content(tiers, NUMEL, torch.float32, home=tiers.disk, name=f"h.{number:.0f}")
    content.touch(arena)
    content.tensor_in(arena).fill_(number)
    content.wrote(arena)
    content.leave()
    return content


def test_room_comes_back_when_it_is_asked_for(tiers: Tiers) -> None:
    """The oldest goes first, memory never exceeds its budget, and what was written is read again."""
    contents = [leave(tiers, number) for number in range(5)]

    assert [content.is_leaving(tiers.host) for content in contents] == [False, False, False, True, True]
    assert tiers.host.peak == tiers.host.used == 2 * SIZE
    for number, content in enumerate(contents):
        content.bring(tiers.host)
        assert bool((content.tensor_in(tiers.host) == number).all())
        content.settle()
    assert tiers.host.used == 0


def test_what_is_asked_for_where_it_leaves_stays(tiers: Tiers) -> None:
    """It may be written there at once, and nobody takes its memory away."""
    content = leave(tiers, 1)

    content.bring(tiers.host)
    content.tensor_in(tiers.host).fill_(2)
    content.wrote(tiers.host)
    other = leave(tiers, 3)
    with pytest.raises(MemoryBudgetError):
        Content(tiers, 2 * NUMEL, torch.float32, home=tiers.host, name="more").touch(tiers.host)

    assert content.is_valid(tiers.host)
    assert not other.has_room(tiers.host)
    content.settle()
    content.bring(tiers.device)
    assert bool((content.tensor_in(tiers.device) == 2).all())


@pytest.mark.parametrize("reaches", [True, False])
def test_what_is_asked_for_elsewhere_still_leaves(tiers: Tiers, reaches: bool) -> None:  # noqa: FBT001 - a case
    """A copy on the device does not keep the room in host memory."""
    tiers.disk_reaches_device = reaches
    content = leave(tiers, 1)

    content.start(tiers.device)
    content.bring(tiers.device)
    leave(tiers, 2)
    leave(tiers, 3)

    assert not content.has_room(tiers.host)
    assert bool((content.tensor_in(tiers.device) == 1).all())


def test_what_passes_through_host_memory_makes_room_there(tiers: Tiers) -> None:
    """Where files do not reach the device, what leaves it takes host memory for a while."""
    tiers.disk_reaches_device = False
    contents = [leave(tiers, number, arena=tiers.device) for number in range(4)]

    assert tiers.host.peak <= 2 * SIZE
    for content in contents:
        content.settle()
    assert (tiers.device.used, tiers.host.used) == (0, 0)


def test_an_error_shows_where_room_is_waited_for_and_loses_nothing(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy in memory stays valid."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", refuse)
    contents = [leave(tiers, number) for number in (1, 2)]

    with pytest.raises(DiskTierError, match=r"cannot write 'h\.1'"):
        leave(tiers, 3)

    monkeypatch.undo()
    for number, content in enumerate(contents, start=1):
        assert content.is_valid(tiers.host)
        content.settle()
        content.bring(tiers.host)
        assert bool((content.tensor_in(tiers.host) == number).all())
        content.settle()


def test_memory_without_budget_is_not_filled(tiers: Tiers) -> None:
    """A few contents leave at a time."""
    tiers.host.budget = None

    for number in range(2 * MAX_UNLIMITED):
        leave(tiers, number)

    assert tiers.host.peak <= (MAX_UNLIMITED + 1) * SIZE
