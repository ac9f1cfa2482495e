"""The disk tier: one file of a rank, in which extents hold what exceeds memory.

The one idea: the file has no name. It is unlinked while it is open, so whatever ends the process gives its
space back, and nothing can be mistaken for a checkpoint; it holds nothing that is needed after the run.

# Note [Transfers past the page cache]
Where the file system takes ``O_DIRECT``, bytes go between blocks and the disk without a copy in the page
cache, which would be a hidden tier of memory. That needs memory, offset and length in multiples of 4 KiB.
Extents begin at such offsets and blocks of arenas at such addresses; the end of a block, or other memory,
goes through a bounce buffer of 4 MiB for each thread. Without ``O_DIRECT`` the pages are dropped after each
transfer, and written out before that.

At most three transfers run at a time, as an update needs them: while it computes on one chunk, the next are
read and the last one is written. Each 4 MiB have a checksum, kept in memory, so that what comes back is what
was written.

# Note [Hard limits of files]
Under ``RLIMIT_DATA`` the stacks of the four threads count, 8 MiB each. A state of 644 MiB trains under a
limit of 160 MiB with a host budget of 100 MiB.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import shutil
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, final

from colossal_core.checkpoint.manifest import BLOCK_BYTES
from colossal_core.errors import DiskTierError, MemoryBudgetError
from colossal_gemini.transfers import Transfer, Work

if TYPE_CHECKING:
    import torch

__all__ = ["Disk", "Extent"]

_ALIGNMENT = 4096
_MAX_IN_FLIGHT = 3

_STEP = 16 << 20
"""The file grows by multiples of this many bytes, so that file systems can give contiguous space."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def _align(nbytes: int, to: int = _ALIGNMENT) -> int:
    """Return the next multiple."""
    return -(-nbytes // to) * to


@final
class Extent:
    """A span of the file that one content has to itself.

    Attributes:
        name: For messages.
        start: First byte in the file.
        nbytes: Length, a multiple of 4 KiB.
    """

    def __init__(self, disk: Disk, name: str, start: int, nbytes: int) -> None:
        """Hold a span; made by :meth:`Disk.reserve`."""
        self.name = name
        self.start = start
        self.nbytes = nbytes
        self._disk = disk
        self._checksums: tuple[int, ...] | None = None

    def write(self, source: torch.Tensor) -> Transfer:
        """Begin to write a contiguous tensor of host memory, which stays unchanged until it is finished."""
        return self._disk.submit(self._write_blocks, source)

    def read(self, target: torch.Tensor) -> Transfer:
        """Begin to read what was written last into a contiguous tensor of the same size in host memory."""
        assert self._checksums is not None, f"nothing was written to {self.name!r}"
        return self._disk.submit(self._read_blocks, target)

    def close(self) -> None:
        """Give the span back. No transfer may be in flight."""
        self._disk.take_back(self)

    def _write_blocks(self, source: torch.Tensor) -> None:
        """Write block by block; the checksums count once all is written."""
        memory = _bytes_of(source)
        assert len(memory) <= self.nbytes, f"{len(memory)} bytes do not fit into {self.name!r}"
        self._checksums = None
        checksums = []
        for first in range(0, len(memory), BLOCK_BYTES):
            piece = memory[first : first + BLOCK_BYTES]
            checksums.append(zlib.crc32(piece))
            self._disk.put(piece, self.start + first, self.name)
        self._checksums = tuple(checksums)

    def _read_blocks(self, target: torch.Tensor) -> None:
        """Read block by block, and compare checksums."""
        memory = _bytes_of(target)
        assert self._checksums is not None, f"writing {self.name!r} has failed"
        for index, checksum in enumerate(self._checksums):
            first = index * BLOCK_BYTES
            piece = memory[first : first + BLOCK_BYTES]
            self._disk.take(piece, self.start + first, self.name)
            if zlib.crc32(piece) != checksum:
                start = self.start + first
                raise DiskTierError(
                    f"bytes {start} to {start + len(piece)} of the file for training state in "
                    f"{self._disk.path}, which hold {self.name!r}, are not what was written",
                    hint="load the last checkpoint, and check the disk or name another folder",
                )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, which has to be kept meanwhile."""
    assert tensor.device.type == "cpu", f"files are read to and written from host memory, not {tensor.device}"
    assert tensor.is_contiguous(), "only contiguous memory is transferred"
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


@final
class Disk:
    """A tier of memory in a file.

    Calls are not for several threads at a time; transfers run on threads of their own.

    Attributes:
        name: For messages.
        path: Folder of the file, for messages.
        budget: Most bytes that extents may take, None for no limit.
        used: Bytes of the extents.
        peak: Most of them since the beginning or :meth:`reset_peak`.
        is_direct: Whether transfers go past the page cache.
    """

    def __init__(self, folder: str | Path, *, budget: int | None = None, name: str = "disk") -> None:
        """Make the file, empty.

        Args:
            folder: On a local disk.
            budget: Most bytes that extents may take, None for no limit.
            name: For messages.

        Raises:
            DiskTierError: There is no such folder, or no file can be made in it.
        """
        self.name = name
        self.path = Path(folder)
        self.budget = budget
        self.used = 0
        self.peak = 0
        self._size = 0
        self._free: list[tuple[int, int]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._bounce = threading.local()
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(prefix="colossal-", dir=self.path, buffering=0)  # noqa: SIM115 - closed by close
        except OSError as err:
            message = f"cannot make a file for training state in {self.path}: {err.strerror or err}"
            raise DiskTierError(message, hint="name a folder on a local disk that you may write to") from err
        self._handle = self._file.fileno()
        self.is_direct = self._go_direct()
        if not self.is_direct and sys.platform == "linux":
            os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_RANDOM)  # reading ahead would fill the cache

    def __repr__(self) -> str:
        """Return the folder and what is used."""
        of = "no limit" if self.budget is None else f"{self.budget}"
        return f"<Disk {str(self.path)!r}: {self.used} bytes of {of}>"

    def room(self) -> float:
        """Return how many bytes the budget still allows; the disk may have less."""
        return math.inf if self.budget is None else self.budget - self.used

    def reset_peak(self) -> None:
        """Let ``peak`` begin again at what is used now."""
        self.peak = self.used

    @staticmethod
    def counted(nbytes: int) -> int:
        """Return the bytes that an extent takes."""
        return _align(nbytes)

    def reserve(self, nbytes: int, *, name: str = "") -> Extent:
        """Return a span that the disk has promised to hold.

        Args:
            nbytes: What it is to hold at least.
            name: For messages.

        Raises:
            MemoryBudgetError: The budget does not allow it.
            DiskTierError: The disk is full, or refuses otherwise.
        """
        asked = _align(nbytes)
        if asked > self.room():
            raise MemoryBudgetError(
                f"{self.name}: {name!r} asks for {asked} bytes, {self.used} are used of a budget "
                f"of {self.budget}",
                hint="raise the budget of the disk",
            )
        start = self._find(asked, name)
        self.used += asked
        self.peak = max(self.peak, self.used)
        return Extent(self, name, start, asked)

    def take_back(self, extent: Extent) -> None:
        """Let others have a span."""
        self.used -= extent.nbytes
        if extent.nbytes:
            self._give(extent.start, extent.start + extent.nbytes)

    def submit(self, job: Callable[[torch.Tensor], None], memory: torch.Tensor) -> Transfer:
        """Run a job on a thread of ours, which keeps the memory until it is done."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_MAX_IN_FLIGHT, thread_name_prefix="colossal-disk")
        return Work(self._pool.submit(job, memory))

    def close(self) -> None:
        """End the threads and give the space back; what has not begun is not carried out. Raises nothing."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._file.close()

    # --- space ----------------------------------------------------------------------------------------------

    def _find(self, nbytes: int, name: str) -> int:
        """Return the start of a free span, the first that is long enough; the file grows when none is."""
        if not nbytes:
            return 0
        if not any(stop - start >= nbytes for start, stop in self._free):
            tail = self._free[-1] if self._free and self._free[-1][1] == self._size else (self._size,) * 2
            self._grow(tail[0] + nbytes, name)
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= nbytes:
                self._free[index : index + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                return start
        raise AssertionError(f"no span of {nbytes} bytes in a file of {self._size} that has just grown")

    def _give(self, start: int, stop: int) -> None:
        """Add a free span, joined with its neighbours."""
        spans: list[tuple[int, int]] = []
        for one in sorted([*self._free, (start, stop)]):
            if spans and spans[-1][1] == one[0]:
                spans[-1] = (spans[-1][0], one[1])
            else:
                spans.append(one)
        self._free = spans

    def _grow(self, end: int, name: str) -> None:
        """Have the disk promise bytes up to ``end``, and some more where there are."""
        ends = (_align(end, _STEP), end)
        for size in ends:
            try:
                if sys.platform == "linux":
                    os.posix_fallocate(self._handle, self._size, size - self._size)
                else:
                    os.ftruncate(self._handle, size)
            except OSError as err:
                if err.errno in _FULL and size != ends[-1]:
                    continue
                raise self._refusal("have room for", name, self._size, err) from err
            self._give(self._size, size)
            self._size = size
            return

    # --- transfers: on threads ------------------------------------------------------------------------------

    def _go_direct(self) -> bool:
        """Switch the page cache off and return whether that worked; the first page is a trial."""
        if sys.platform != "linux":
            return False
        import fcntl

        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwrite(self._handle, self._bounce_buffer()[:_ALIGNMENT], 0)
        except OSError:
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags)
            return False
        return True

    def _bounce_buffer(self) -> memoryview:
        """Return aligned memory of one block that this thread has to itself."""
        try:
            buffer: memoryview = self._bounce.buffer
        except AttributeError:
            buffer = self._bounce.buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        return buffer

    def _is_aligned(self, piece: memoryview) -> bool:
        """Return whether a piece can be transferred as it lies."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
        return not self.is_direct or (address % _ALIGNMENT == 0 and len(piece) % _ALIGNMENT == 0)

    def put(self, piece: memoryview, offset: int, name: str) -> None:
        """Write at most a block.

        Raises:
            DiskTierError: The system refuses.
        """
        if not self._is_aligned(piece):
            bounce = self._bounce_buffer()[: _align(len(piece))]
            bounce[: len(piece)] = piece
            piece = bounce
        try:
            self._repeat(lambda rest, at: os.pwrite(self._handle, rest, at), piece, offset)
            if not self.is_direct:
                self._forget(offset, len(piece), is_new=True)
        except OSError as err:
            raise self._refusal("write", name, offset, err) from err

    def take(self, piece: memoryview, offset: int, name: str) -> None:
        """Read at most a block.

        Raises:
            DiskTierError: The system refuses.
        """
        is_aligned = self._is_aligned(piece)
        target = piece if is_aligned else self._bounce_buffer()[: _align(len(piece))]
        try:
            self._repeat(lambda rest, at: os.preadv(self._handle, [rest], at), target, offset)
            if not self.is_direct:
                self._forget(offset, len(piece), is_new=False)
        except OSError as err:
            raise self._refusal("read", name, offset, err) from err
        if not is_aligned:
            piece[:] = target[: len(piece)]

    def _repeat(self, call: Callable[[memoryview, int], int], piece: memoryview, offset: int) -> None:
        """Repeat a call that may do less than asked until all is done. Python repeats what a signal ends."""
        done = 0
        while done < len(piece):
            before = done
            done += call(piece[done:], offset + done)
            if self.is_direct and done < len(piece):
                done -= done % _ALIGNMENT
            if done <= before:
                raise OSError(errno.EIO, f"only {done} of {len(piece)} bytes could be transferred")

    def _forget(self, offset: int, nbytes: int, *, is_new: bool) -> None:
        """Drop pages from the page cache; new ones are written out first, since only clean ones go."""
        if sys.platform == "linux":
            if is_new:
                os.fdatasync(self._handle)
            os.posix_fadvise(self._handle, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def _refusal(self, verb: str, name: str, offset: int, error: OSError) -> DiskTierError:
        """Return the error for what the system refuses."""
        message = (
            f"cannot {verb} {name!r} at byte {offset} of the file for training state in {self.path}: "
            f"{error.strerror or error}"
        )
        if error.errno in _FULL:
            try:
                free = f"{shutil.disk_usage(self.path).free} bytes are free there"
            except OSError:
                free = "the folder is gone"
            message = f"{message}; {free}, and {self.used} bytes are used"
            hint = "free space, raise the limit on file sizes, or name another disk"
            return DiskTierError(message, hint=hint)
        return DiskTierError(message, hint="check the disk, or name another folder; then load a checkpoint")
