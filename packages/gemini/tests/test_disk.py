"""The disk tier: what is read is what was written, past the page cache, and faults are errors with names."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal_core.errors import DiskTierError, MemoryBudgetError
from colossal_core.runtime.arena import Arena
from colossal_gemini.disk import Disk, Extent
from colossal_testkit.programs import run_program

PAGE = 4096
MIB = 1 << 20

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs calls of Linux")


@pytest.fixture(params=["direct", "cached"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Return a disk tier with O_DIRECT where there is one, and one without."""
    if request.param == "cached":
        monkeypatch.setattr(Disk, "_go_direct", lambda _self: False)
    made = Disk(tmp_path)
    yield made
    made.close()


def numbers(numel: int, seed: int = 0) -> torch.Tensor:
    """Return random bytes."""
    return torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def write(disk: Disk, source: torch.Tensor, name: str = "h.0") -> Extent:
    """Write a tensor to an extent of its own."""
    extent = disk.reserve(source.nbytes, name=name)
    extent.write(source).wait()
    return extent


@pytest.mark.parametrize("numel", [1, PAGE, PAGE + 1, 4 * MIB, 4 * MIB + 5, 9 * MIB - 1])
@pytest.mark.parametrize("shift", [0, 1])
def test_what_is_read_is_what_was_written(disk: Disk, numel: int, shift: int) -> None:
    """For all sizes about pages and blocks, and for memory that lies aligned or not."""
    block = Arena("host").reserve(numel + shift, torch.uint8)
    block.acquire()
    source = block.tensor[shift:]
    source.copy_(numbers(numel))

    before, extent, after = write(disk, numbers(77)), write(disk, source), write(disk, numbers(99))
    source.zero_()
    extent.read(source).wait()

    assert torch.equal(source, numbers(numel))
    for other, size in ((before, 77), (after, 99)):
        target = torch.zeros(size, dtype=torch.uint8)
        other.read(target).wait()
        assert torch.equal(target, numbers(size))
    block.close()


def test_an_empty_extent_takes_nothing(disk: Disk) -> None:
    """It is written and read like others."""
    extent = write(disk, torch.empty(0))

    extent.read(torch.empty(0)).wait()

    assert (extent.nbytes, disk.used) == (0, 0)
    extent.close()


@settings(max_examples=40, deadline=None)
@given(
    turns=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6 * PAGE)), max_size=30),
    budget=st.integers(4, 20),
)
def test_extents_never_overlap_and_are_counted(turns: list[tuple[int, int]], budget: int) -> None:
    """Whatever is reserved and given back, within the budget to the byte; space is used again."""
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(folder, budget=budget * PAGE)
        held: dict[int, Extent] = {}
        for slot, nbytes in turns:
            if slot in held:
                held.pop(slot).close()
            elif disk.counted(nbytes) > disk.room():
                with pytest.raises(MemoryBudgetError, match="budget"):
                    disk.reserve(nbytes)
            else:
                held[slot] = disk.reserve(nbytes)
            spans = sorted((one.start, one.start + one.nbytes) for one in held.values() if one.nbytes)
            assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
            assert all(start % PAGE == 0 for start, _ in spans)
            assert disk.used == sum(one.nbytes for one in held.values()) <= disk.peak <= budget * PAGE
        assert disk._size <= 16 * MIB
        disk.close()


def cached_pages(disk: Disk) -> int:
    """Return how many pages of the file are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(disk._handle, disk._size, access=mmap.ACCESS_COPY) as view:
        flags = (ctypes.c_ubyte * (disk._size // PAGE))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(view))
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(disk._size), flags) == 0
        return sum(flag & 1 for flag in flags)


@needs_linux
def test_transfers_leave_nothing_in_the_page_cache(disk: Disk) -> None:
    """The cache would be a tier of memory that no budget knows."""
    block = Arena("host").reserve(8 * MIB, torch.uint8)
    block.acquire()
    block.tensor.fill_(3)

    extent = write(disk, block.tensor)
    written = cached_pages(disk)
    extent.read(block.tensor).wait()

    assert written <= 1  # the page of the trial
    assert cached_pages(disk) <= 1
    block.close()


@needs_linux
def test_local_disks_are_used_directly(tmp_path: Path) -> None:
    """A folder of a file system that takes O_DIRECT gets it; nothing in the folder has a name."""
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        try:
            os.close(os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_DIRECT))
        except OSError:
            pytest.skip("this file system has no O_DIRECT")

    disk = Disk(tmp_path)

    assert disk.is_direct
    assert not list(tmp_path.iterdir())
    disk.close()


@pytest.mark.parametrize("most", [1, 1000, PAGE - 1])
def test_short_transfers_go_on_where_they_ended(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Systems may do less than asked, direct ones a part of a sector more than whole ones."""
    pwrite, preadv = os.pwrite, os.preadv

    def shortened(data: memoryview) -> tuple[memoryview, int]:
        if disk.is_direct:
            return data[:PAGE], min(PAGE + most, len(data))
        return data[:most], min(most, len(data))

    def write_less(handle: int, data: memoryview, offset: int) -> int:
        part, told = shortened(data)
        pwrite(handle, part, offset)
        return told

    def read_less(handle: int, data: list[memoryview], offset: int) -> int:
        part, told = shortened(data[0])
        preadv(handle, [part], offset)
        return told

    monkeypatch.setattr(os, "pwrite", write_less)
    monkeypatch.setattr(os, "preadv", read_less)
    source, target = numbers(3 * PAGE + 7), torch.zeros(3 * PAGE + 7, dtype=torch.uint8)

    write(disk, source).read(target).wait()

    assert torch.equal(source, target)


# --- faults -------------------------------------------------------------------------------------------------


def test_transfers_that_make_no_progress_are_errors(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that answers 0 for ever does not hang the run."""
    extent = write(disk, numbers(100))
    monkeypatch.setattr(os, "preadv", lambda *_: 0)

    with pytest.raises(DiskTierError, match=r"cannot read 'h\.0' at byte 0 .* only 0 of"):
        extent.read(torch.zeros(100, dtype=torch.uint8)).wait()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_refused_write_names_file_offset_and_content(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The error comes to who waits, each time; other extents are as they were, and writing works later."""
    first, second = write(disk, numbers(100), "h.0"), disk.reserve(100, name="h.1")

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        transfer = second.write(numbers(100))
        with pytest.raises(DiskTierError):
            transfer.wait()
        with pytest.raises(DiskTierError) as caught:
            transfer.wait()
        transfer.finish()

    assert caught.value.code == "C061"
    assert f"'h.1' at byte {second.start} of the file for training state in {disk.path}" in str(caught.value)
    assert os.strerror(code) in str(caught.value)
    assert ("bytes are free there" in str(caught.value)) == (code != errno.EIO)
    for extent in (first, second):
        if extent is second:
            extent.write(numbers(100)).wait()
        target = torch.zeros(100, dtype=torch.uint8)
        extent.read(target).wait()
        assert torch.equal(target, numbers(100))


def test_a_full_disk_is_an_error_when_space_is_reserved(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is promised that is not there; what fits exactly is promised, also less than a step."""
    limit = 5 * PAGE

    def promise(_handle: int, offset: int, length: int) -> None:
        if offset + length > limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", promise)
    monkeypatch.setattr(os, "ftruncate", lambda handle, size: promise(handle, 0, size))

    extent = disk.reserve(limit, name="h.0")
    with pytest.raises(
        DiskTierError, match=r"cannot have room for 'h\.1' .* No space left on device; .* free"
    ):
        disk.reserve(1, name="h.1")
    extent.close()

    assert disk.reserve(limit).start == 0


def test_a_flipped_bit_is_noticed(disk: Disk) -> None:
    """The error names the bytes and whose they are; blocks before it do not matter."""
    source = numbers(9 * MIB)
    write(disk, numbers(1))
    extent = write(disk, source, "h.3 master")
    at = extent.start + 5 * MIB // PAGE * PAGE
    page = mmap.mmap(-1, PAGE)
    os.preadv(disk._handle, [page], at)
    page[17] ^= 4
    os.pwrite(disk._handle, page, at)

    with pytest.raises(DiskTierError) as caught:
        extent.read(torch.zeros_like(source)).wait()

    start = extent.start + 4 * MIB
    assert f"bytes {start} to {start + 4 * MIB} of the file" in str(caught.value)
    assert "'h.3 master', are not what was written" in str(caught.value)
    assert "load the last checkpoint" in caught.value.hint


def test_a_folder_that_is_not_there_is_an_error_at_once(tmp_path: Path) -> None:
    """It names the folder and what to do."""
    with pytest.raises(DiskTierError, match=r"cannot make a file .*gone: No such file") as caught:
        Disk(tmp_path / "gone")

    assert "name a folder" in caught.value.hint


def test_a_folder_that_vanishes_takes_nothing_with_it(tmp_path: Path) -> None:
    """The file has no name, so it stays for as long as the run."""
    folder = tmp_path / "fast"
    folder.mkdir()
    disk = Disk(folder)
    extent = write(disk, numbers(5000))

    folder.rmdir()
    target = torch.zeros(5000, dtype=torch.uint8)
    extent.read(target).wait()

    assert torch.equal(target, numbers(5000))
    disk.close()


def test_closing_ends_what_runs_and_drops_what_waits(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three transfers run at a time; the fourth never begins, and who waits for it is told."""
    entered, go_on, most = threading.Semaphore(0), threading.Event(), []
    pwrite = os.pwrite

    def slow(handle: int, data: memoryview, offset: int) -> int:
        most.append(threading.current_thread().name)
        entered.release()
        go_on.wait(10)
        return pwrite(handle, data, offset)

    extents = [disk.reserve(PAGE, name=f"h.{number}") for number in range(4)]
    monkeypatch.setattr(os, "pwrite", slow)
    transfers = [extent.write(numbers(PAGE)) for extent in extents]
    for _ in range(3):
        assert entered.acquire(timeout=10)
    closing = threading.Thread(target=disk.close)
    closing.start()
    time.sleep(0.05)
    assert len(most) == 3
    go_on.set()
    closing.join(10)

    assert not closing.is_alive()
    for transfer in transfers[:3]:
        transfer.wait()
    with pytest.raises(DiskTierError, match="has been closed"):
        transfers[3].wait()
    transfers[3].finish()


@needs_linux
def test_limits_are_errors_and_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    """A limit on file sizes is named; killing the process right after a write leaves the folder empty."""
    done = run_program(
        """
        import os, resource, signal, sys, torch
        from colossal_core.errors import DiskTierError
        from colossal_gemini.disk import Disk

        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        disk = Disk(sys.argv[1])
        extent = disk.reserve(1 << 20, name="h.0")
        extent.write(torch.ones(1 << 20, dtype=torch.uint8)).wait()
        try:
            disk.reserve(1, name="h.1")
        except DiskTierError as err:
            print(err, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        str(tmp_path),
    )

    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "cannot have room for 'h.1' at byte 1048576" in done.stdout
    assert "File too large" in done.stdout
    assert not list(tmp_path.iterdir())
