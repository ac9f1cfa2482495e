"""Contents: whatever is done with them, a valid copy is what was written last, and room is counted."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from colossal_core.errors import DiskTierError, MemoryBudgetError
from colossal_core.runtime.arena import Arena
from colossal_gemini.contents import Content, Tier, Tiers
from colossal_gemini.disk import Disk

NUMEL = 3072
SIZE = 12288
"""Bytes that a content of ``NUMEL`` fp32 takes: three pages."""

TIER_NAMES = ("device", "host", "disk")
FITTING = {"device": 1, "host": 2, "disk": 1}
"""How many of the two contents of the machine fit into each tier."""


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    """Three tiers without budgets."""
    made = Tiers(Arena("device"), Arena("host"), Disk(tmp_path))
    yield made
    made.close()


def make_content(tiers: Tiers, home: Tier, name: str = "h.0") -> Content:
    """Return an empty content."""
    return Content(tiers, NUMEL, torch.float32, home=home, name=name)


def write(content: Content, tier: Arena, number: float) -> None:
    """Make a content out of one number."""
    content.touch(tier)
    content.tensor_in(tier).fill_(number)
    content.wrote(tier)


def reads(content: Content, tier: Arena, number: float) -> bool:
    """Return whether a copy holds one number all over."""
    return bool((content.tensor_in(tier) == number).all())


# --- the reference model ------------------------------------------------------------------------------------


@attrs.define
class Copies:
    """What a content should know: copies by the names of tiers."""

    home: str
    number: float = 0.0
    valid: set[str] = attrs.field(factory=set)
    room: set[str] = attrs.field(factory=set)
    coming: tuple[str, str] | None = None

    def arrive(self) -> None:
        """Let what is on its way be there."""
        if self.coming:
            self.valid.add(self.coming[1])
            self.coming = None

    def source(self, target: str) -> str:
        """Return where a copy is made from: the nearest tier."""
        order = TIER_NAMES if target != "disk" else TIER_NAMES[::-1]
        return next(name for name in order if name in self.valid)


class ContentMachine(RuleBasedStateMachine):
    """Two contents in tiers of which only one has room for both, beside a model of what they should be."""

    def __init__(self) -> None:
        """Make tiers and contents."""
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.device = Arena("device", budget=FITTING["device"] * SIZE)
        self.host = Arena("host", budget=FITTING["host"] * SIZE)
        self.disk = Disk(self.folder.name, budget=FITTING["disk"] * SIZE)
        self.tiers = Tiers(self.device, self.host, self.disk)
        self.by_name: dict[str, Tier] = dict(zip(TIER_NAMES, self.tiers.ordered, strict=True))
        homes = ("host", "disk")
        self.contents = [make_content(self.tiers, self.by_name[home], f"of {home}") for home in homes]
        self.copies = [Copies(home) for home in homes]
        self.moved: dict[tuple[str, str], int] = {}
        self.written = 0.0

    def teardown(self) -> None:
        """Close everything: nothing is used any more."""
        for content in self.contents:
            content.close()
        assert [tier.used for tier in self.tiers.ordered] == [0, 0, 0]
        self.tiers.close()
        self.folder.cleanup()

    def has_budget(self, name: str) -> bool:
        """Return whether a tier has room for one more content."""
        return sum(name in copies.room for copies in self.copies) < FITTING[name]

    def arena(self, name: str) -> Arena:
        """Return a tier of memory."""
        tier = self.by_name[name]
        assert isinstance(tier, Arena)
        return tier

    def expect_copy(self, copies: Copies, name: str) -> type[Exception] | None:
        """Have a copy made in the model, or return the error that there should be instead."""
        if name in copies.valid or (copies.coming and copies.coming[1] == name):
            return None
        if not copies.valid:
            return RuntimeError
        copies.arrive()
        if name not in copies.room and not self.has_budget(name):
            return MemoryBudgetError
        copies.room.add(name)
        pair = (copies.source(name), name)
        copies.coming = pair
        self.moved[pair] = self.moved.get(pair, 0) + 4 * NUMEL
        return None

    @rule(index=st.integers(0, 1), name=st.sampled_from(TIER_NAMES[:2]), is_written=st.booleans())
    def touch_and_write(self, index: int, name: str, *, is_written: bool) -> None:
        """Write something new in a tier, or only ask for the memory."""
        content, copies = self.contents[index], self.copies[index]
        if copies.coming and name in copies.coming:
            copies.arrive()
        if name not in copies.room and not self.has_budget(name):
            with pytest.raises(MemoryBudgetError):
                content.touch(self.arena(name))
            return
        content.touch(self.arena(name))
        copies.room.add(name)
        if not is_written:
            return
        self.written += 1
        content.tensor_in(self.arena(name)).fill_(self.written)
        content.wrote(self.arena(name))
        copies.number, copies.valid, copies.coming = self.written, {name}, None
        copies.room &= {name, copies.home}

    @rule(index=st.integers(0, 1), name=st.sampled_from(TIER_NAMES))
    def start(self, index: int, name: str) -> None:
        """Begin to have a copy."""
        error = self.expect_copy(self.copies[index], name)
        if error is None:
            self.contents[index].start(self.by_name[name])
        else:
            with pytest.raises(error):
                self.contents[index].start(self.by_name[name])

    @rule(index=st.integers(0, 1), name=st.sampled_from(TIER_NAMES))
    def bring(self, index: int, name: str) -> None:
        """Have a copy."""
        copies = self.copies[index]
        error = self.expect_copy(copies, name)
        if error is None:
            self.contents[index].bring(self.by_name[name])
            if copies.coming and copies.coming[1] == name:
                copies.arrive()
            assert self.contents[index].is_valid(self.by_name[name])
        else:
            with pytest.raises(error):
                self.contents[index].bring(self.by_name[name])

    @rule(index=st.integers(0, 1), name=st.sampled_from(TIER_NAMES[:2]))
    def write_without_asking(self, index: int, name: str) -> None:
        """Announcing what cannot have been written is refused, and changes nothing."""
        copies = self.copies[index]
        if name not in copies.room or (copies.coming and name in copies.coming):
            with pytest.raises(RuntimeError, match=r"wrote\("):
                self.contents[index].wrote(self.arena(name))

    @rule(index=st.integers(0, 1), name=st.sampled_from(TIER_NAMES))
    def drop(self, index: int, name: str) -> None:
        """Drop a copy, unless it is the last."""
        copies = self.copies[index]
        if copies.coming and name in copies.coming:
            copies.arrive()
        if copies.valid == {name}:
            with pytest.raises(RuntimeError, match="would lose the only valid copy"):
                self.contents[index].drop(self.by_name[name])
            return
        self.contents[index].drop(self.by_name[name])
        copies.valid.discard(name)
        copies.room.discard(name)

    @rule(index=st.integers(0, 1), keep=st.sampled_from([None, *TIER_NAMES]))
    def settle(self, index: int, keep: str | None) -> None:
        """Send a content home."""
        content, copies = self.contents[index], self.copies[index]
        copies.arrive()
        kept = None if keep is None else self.by_name[keep]
        error = self.expect_copy(copies, copies.home) if copies.valid else None
        if error is not None:
            with pytest.raises(error):
                content.settle(kept)
            return
        content.settle(kept)
        copies.arrive()
        stays = {keep, copies.home} if copies.valid else {keep}
        copies.valid &= stays
        copies.room &= stays

    @rule(index=st.integers(0, 1), name=st.sampled_from(TIER_NAMES))
    def move_home(self, index: int, name: str) -> None:
        """Let a content live elsewhere."""
        content, copies = self.contents[index], self.copies[index]
        error = self.expect_copy(copies, name) if copies.valid else None
        if error is not None:
            with pytest.raises(error):
                content.move_home(self.by_name[name])
            return
        content.move_home(self.by_name[name])
        copies.arrive()
        if name != copies.home:
            copies.valid.discard(copies.home)
            copies.room.discard(copies.home)
        copies.home = name

    @precondition(lambda self: self.written > 3)
    @rule(index=st.integers(0, 1))
    def discard(self, index: int) -> None:
        """Forget a content."""
        copies = self.copies[index]
        self.contents[index].discard()
        copies.valid, copies.room, copies.coming = set(), set(), None

    @invariant()
    def everything_is_as_in_the_model(self) -> None:
        """Validity, room, counters and the bytes of every copy that can be read."""
        for content, copies in zip(self.contents, self.copies, strict=True):
            for name, tier in self.by_name.items():
                assert content.is_valid(tier) == (name in copies.valid)
                assert content.has_room(tier) == (name in copies.room)
                assert content.is_coming(tier) == (copies.coming is not None and copies.coming[1] == name)
                assert content.room_needed(tier) == (0 if name in copies.room else SIZE)
                if isinstance(tier, Arena) and content.is_valid(tier):
                    assert reads(content, tier, copies.number)
            assert content.is_empty == (not copies.valid)
            assert content.home is self.by_name[copies.home]
        for name, tier in self.by_name.items():
            assert tier.used == SIZE * sum(name in copies.room for copies in self.copies)
            assert tier.used <= tier.peak <= FITTING[name] * SIZE
        assert self.tiers.moved == self.moved


TestContentMachine = ContentMachine.TestCase
TestContentMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# --- cases --------------------------------------------------------------------------------------------------


def test_a_clean_copy_goes_without_a_transfer(tiers: Tiers) -> None:
    """Eviction of what was only read moves no byte."""
    content = make_content(tiers, tiers.host)
    write(content, tiers.host, 1)
    content.bring(tiers.device)
    before = dict(tiers.moved)

    content.drop(tiers.device)

    assert tiers.moved == before == {("host", "device"): 4 * NUMEL}
    assert tiers.device.used == 0
    content.close()


def test_a_copy_on_its_way_is_stale_once_something_new_was_written(tiers: Tiers) -> None:
    """A write back that was begun before an update does not count as one of what the update wrote."""
    assert tiers.disk is not None
    content = make_content(tiers, tiers.disk)
    write(content, tiers.host, 1)
    content.start(tiers.disk)

    write(content, tiers.device, 2)
    assert not content.is_coming(tiers.disk)
    content.settle()
    content.bring(tiers.host)

    assert reads(content, tiers.host, 2)
    content.close()


def test_an_update_reads_once_and_writes_once(tiers: Tiers) -> None:
    """What lives in a file is moved twice by an update in place in host memory."""
    assert tiers.disk is not None
    content = make_content(tiers, tiers.disk)
    write(content, tiers.host, 1)
    content.settle()
    tiers.moved.clear()

    content.start(tiers.host)
    content.bring(tiers.host)
    content.tensor_in(tiers.host).add_(1)
    content.wrote(tiers.host)
    content.start(tiers.disk)
    content.settle()

    assert tiers.moved == {("disk", "host"): 4 * NUMEL, ("host", "disk"): 4 * NUMEL}
    assert (tiers.host.used, tiers.disk.used) == (0, SIZE)
    content.bring(tiers.host)
    assert reads(content, tiers.host, 2)
    content.close()


def test_copies_between_files_and_a_device_of_its_own_go_through_host_memory(tiers: Tiers) -> None:
    """Both ways; host memory is free again afterwards."""
    assert tiers.disk is not None
    tiers.disk_reaches_device = False
    content = make_content(tiers, tiers.disk)
    write(content, tiers.device, 1)

    content.settle()
    assert (tiers.device.used, tiers.host.used) == (0, 0)
    content.start(tiers.device)
    assert content.is_coming(tiers.host)
    content.bring(tiers.device)

    assert reads(content, tiers.device, 1)
    assert tiers.host.used == 0
    size = 4 * NUMEL
    names = (("device", "host"), ("host", "disk"), ("disk", "host"), ("host", "device"))
    assert tiers.moved == dict.fromkeys(names, size)
    content.close()


def test_device_and_host_may_be_one_tier() -> None:
    """On a machine without accelerator nothing is copied between them."""
    tiers = Tiers(Arena("host"))
    content = make_content(tiers, tiers.host)
    write(content, tiers.device, 1)

    content.bring(tiers.host)
    content.settle()

    assert tiers.ordered == (tiers.device,)
    assert reads(content, tiers.host, 1)
    assert not tiers.moved
    assert tiers.host.room() == math.inf
    tiers.close()


def test_views_of_a_content_outlive_its_travels(tiers: Tiers) -> None:
    """A parameter that is a view of a copy works each time that the copy is there."""
    content = make_content(tiers, tiers.host)
    parameter = torch.nn.Parameter(content.tensor_in(tiers.device)[:6].view(2, 3))
    for number in (1.0, 2.0):
        write(content, tiers.host, number)
        content.bring(tiers.device)

        loss = (parameter * 3).sum()
        content.drop(tiers.device)
        content.bring(tiers.device)
        loss.backward()

        assert float(loss.detach()) == 18 * number
    content.close()


def test_a_failed_read_leaves_the_other_copies_and_the_room(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes when it is waited for; the content can be read again when the disk can."""
    assert tiers.disk is not None
    content = make_content(tiers, tiers.disk)
    write(content, tiers.host, 1)
    content.settle()

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("os.preadv", fail)
        content.start(tiers.host)
        with pytest.raises(DiskTierError, match=r"cannot read 'h\.0'"):
            content.bring(tiers.host)
    assert tiers.host.used == 0
    content.bring(tiers.host)

    assert reads(content, tiers.host, 1)
    content.close()


def test_a_failed_write_loses_nothing_and_can_be_closed(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory stays valid when the disk refuses, whatever waits for it; closing raises nothing."""
    assert tiers.disk is not None
    content = make_content(tiers, tiers.disk)
    write(content, tiers.host, 1)

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", fail)
    content.start(tiers.disk)
    with pytest.raises(DiskTierError, match="No space left"):
        content.settle()
    with pytest.raises(DiskTierError, match="No space left"):
        content.settle()

    assert reads(content, tiers.host, 1)
    content.start(tiers.disk)
    content.close()
    assert (tiers.host.used, tiers.disk.used) == (0, 0)


def test_what_is_refused_says_the_state(tiers: Tiers) -> None:
    """The name, where copies are and what was asked."""
    content = make_content(tiers, tiers.host)

    with pytest.raises(
        RuntimeError, match=r"nothing to bring to device: <Content 'h\.0': home host, valid in"
    ):
        content.bring(tiers.device)
    write(content, tiers.host, 1)
    content.start(tiers.device)

    with pytest.raises(RuntimeError, match=r"in transfer: .* on its way to device"):
        content.wrote(tiers.device)
    content.close()
