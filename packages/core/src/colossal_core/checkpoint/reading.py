"""Reading boxes of tensors from a checkpoint: whole blocks, checked, and no others.

The one idea: a wanted box meets the pieces of a tensor in common boxes; of each piece those blocks are read
that hold elements of the common box, so a rank reads what it needs whoever wrote it.
"""

from __future__ import annotations

import math
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, final

from attrs import frozen

from colossal_core.boxes import Box, flat_range_boxes
from colossal_core.checkpoint.manifest import BLOCK_BYTES, FileRecord, Manifest, Piece, TensorRecord
from colossal_core.errors import CheckpointError

__all__ = ["Block", "BlockReader", "find_blocks", "open_checked", "open_plain", "read_at"]

MAX_OPEN_FILES = 64
"""Files that a reader holds open; a checkpoint of many ranks has more than a process may open."""

_HINT = "restore the file, or load an older checkpoint"


@frozen(kw_only=True, eq=False)
class Block:
    """A run of consecutive elements of a piece.

    Attributes:
        piece: The piece.
        first: Position of its first element in the row-major order of the piece's box.
        data: Their bytes.
        item_bytes: Bytes of one element.
    """

    piece: Piece
    first: int
    data: bytearray
    item_bytes: int

    def boxes(self) -> Iterator[tuple[Box, int]]:
        """Yield ``(box, position)``: boxes of the tensor, and where each begins in the block, in elements."""
        size, offset = self.piece.box.size, self.piece.box.offset
        for box, first in flat_range_boxes(size, self.first, self.first + len(self.data) // self.item_bytes):
            yield box.shifted(offset), first - self.first


@final
class BlockReader:
    """Reads blocks of one checkpoint; a context that closes its files.

    Attributes:
        bytes_read: Bytes of blocks read so far.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        """Open nothing yet.

        Args:
            directory: Where the manifest lies.
            manifest: What it says.
        """
        self.directory = directory
        self.bytes_read = 0
        self._manifest = manifest
        self._handles: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        while self._handles:
            os.close(self._handles.popitem()[1])

    def read(self, name: str, tensor: TensorRecord, wanted: Box) -> Iterator[Block]:
        """Yield the blocks that hold elements of a box, each once.

        Args:
            name: Name of the tensor, for messages.
            tensor: The tensor.
            wanted: The box in its index space.

        Raises:
            CheckpointError: A file is missing or cut short, or a block is damaged; names file and tensor.
        """
        yield from self.read_boxes(name, tensor, [wanted])

    def read_boxes(self, name: str, tensor: TensorRecord, wanted: Sequence[Box]) -> Iterator[Block]:
        """Yield the blocks that hold elements of any of some boxes, each once; otherwise as :meth:`read`."""
        for piece in tensor.pieces:
            back = [-start for start in piece.box.offset]
            common = [box for box in map(piece.box.intersect, wanted) if box is not None]
            inside = [box.shifted(back) for box in common]
            needed = {n for box in inside for n in find_blocks(piece.box.size, box, tensor.item_bytes)}
            for index in sorted(needed):
                yield self.read_block(name, tensor, piece, index)

    def read_all(self, name: str, tensor: TensorRecord) -> Iterator[Block]:
        """Yield all blocks of a tensor, piece by piece; a tensor without elements has none."""
        yield from self.read(name, tensor, Box((0,) * len(tensor.shape), tensor.shape))

    def read_block(self, name: str, tensor: TensorRecord, piece: Piece, index: int) -> Block:
        """Read and check one block of a piece.

        Args:
            name: Name of the tensor, for messages.
            tensor: The tensor.
            piece: One of its pieces.
            index: Number of the block in the piece.

        Raises:
            CheckpointError: The file is missing or cut short, or the block is damaged.
        """
        first = index * BLOCK_BYTES
        data = bytearray(min(BLOCK_BYTES, piece.box.volume * tensor.item_bytes - first))
        path = self.directory / piece.file
        start, stop = piece.start + first, piece.start + first + len(data)
        handle = self.open(piece.file)
        try:
            found = read_at(handle, start, memoryview(data))
        except OSError as err:
            raise CheckpointError(
                f"cannot read {name!r} from {path}: {err.strerror or err}",
                hint="check the disk, or load an older checkpoint",
            ) from err
        self.bytes_read += found
        if found < len(data):
            raise CheckpointError(
                f"{path} ends at byte {start + found}, where a part of {name!r} has bytes {start} to {stop}",
                hint=_HINT,
            )
        if zlib.crc32(data) != piece.checksums[index]:
            raise CheckpointError(
                f"{path} is damaged: bytes {start} to {stop}, which hold a part of {name!r}, "
                "do not have their checksum",
                hint=_HINT,
            )
        return Block(piece=piece, first=first // tensor.item_bytes, data=data, item_bytes=tensor.item_bytes)

    def open(self, file: str) -> int:
        """Return a handle of a file whose size and header are those of the manifest.

        The handle is good until the next call for another file.

        Raises:
            CheckpointError: They are not.
        """
        handle = self._handles.pop(file, None)
        if handle is None:
            if len(self._handles) >= MAX_OPEN_FILES:
                oldest = next(iter(self._handles))
                os.close(self._handles.pop(oldest))
            handle = open_checked(self.directory / file, self._manifest.files[file])
        self._handles[file] = handle
        return handle


def open_checked(path: Path, record: FileRecord) -> int:
    """Open a file of a checkpoint, which is a plain file of the recorded size that begins as recorded.

    Raises:
        CheckpointError: It is not; names the file.
    """
    handle = open_plain(path)
    try:
        problem = _find_problem(handle, record)
    except OSError as err:
        os.close(handle)
        raise CheckpointError(f"cannot read {path}: {err.strerror or err}", hint=_HINT) from err
    if problem:
        os.close(handle)
        raise CheckpointError(f"{path} is damaged: {problem}", hint=_HINT)
    return handle


def open_plain(path: Path) -> int:
    """Open a file for reading that is no link, which could lead anywhere, and no pipe, which could block.

    Raises:
        CheckpointError: It is one, or is missing, or cannot be opened; names the file.
    """
    # Systems without these names have no links or pipes among files either.
    flags = ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
    try:
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a symbolic link; files of a checkpoint are plain files in its directory",
                hint="copy the file that it points to into its place",
            )
        handle = os.open(path, os.O_RDONLY | sum(vars(os).get(flag, 0) for flag in flags))
    except OSError as err:
        raise CheckpointError(f"cannot open {path}: {err.strerror or err}", hint=_HINT) from err
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(f"{path} is no plain file", hint=_HINT)
    return handle


def _find_problem(handle: int, record: FileRecord) -> str:
    """Return what is wrong with the size or the first bytes of an open file, or an empty string."""
    size = os.fstat(handle).st_size
    if size != record.num_bytes:
        return f"it has {size} bytes, the manifest says {record.num_bytes}"
    first = bytearray(record.header_bytes)
    if read_at(handle, 0, memoryview(first)) < len(first) or zlib.crc32(first) != record.checksum:
        return f"its first {record.header_bytes} bytes do not have their checksum"
    return ""


def read_at(handle: int, start: int, view: memoryview) -> int:
    """Fill a buffer from a position in a file.

    Returns:
        Bytes read; fewer than asked for where the file ends.
    """
    found = 0
    if "preadv" in vars(os):
        while found < len(view) and (count := os.preadv(handle, [view[found:]], start + found)):
            found += count
        return found
    os.lseek(handle, start, os.SEEK_SET)
    with open(handle, "rb", buffering=0, closefd=False) as file:
        while found < len(view) and (count := file.readinto(view[found:])):
            found += count
    return found


def find_blocks(size: Sequence[int], inside: Box, item_bytes: int) -> Iterator[int]:
    """Yield the numbers of the blocks of a piece that hold elements of a box, ascending.

    Args:
        size: Size of the piece.
        inside: The box, relative to the piece.
        item_bytes: Bytes of one element.
    """
    per_block = BLOCK_BYTES // item_bytes
    last = -1
    # Gaps that are too short to hold a block make no difference, and there may be millions of them.
    for start, stop in _runs(size, inside, most_gap=per_block - 1):
        for index in range(max(start // per_block, last + 1), (stop - 1) // per_block + 1):
            last = index
            yield index


def _runs(size: Sequence[int], inside: Box, *, most_gap: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the runs of consecutive elements ``[start, stop)`` of a box in a row-major order, ascending.

    Args:
        size: Shape of what the order is of.
        inside: The box in it, not empty.
        most_gap: Runs with at most this many other elements between them are yielded as one.
    """
    strides = [math.prod(size[axis + 1 :]) for axis in range(len(size))]
    dim, run = len(size), 1
    while dim > 0 and (inside.size[dim - 1] == 1 or strides[dim - 1] - run <= most_gap):
        dim -= 1
        run += (inside.size[dim] - 1) * strides[dim]
    base = sum(start * step for start, step in zip(inside.offset, strides, strict=True))
    outer = inside.size[:dim]
    for number in range(math.prod(outer)):
        start, rest = base, number
        for axis in reversed(range(dim)):
            rest, index = divmod(rest, outer[axis])
            start += index * strides[axis]
        yield start, start + run
