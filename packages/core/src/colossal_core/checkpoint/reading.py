"""Reading boxes of tensors from a checkpoint: whole blocks, checked, and no others.

The one idea: a wanted box meets the pieces of a tensor in common boxes; of each piece those blocks are read that
hold elements of the common box, so a rank reads what it needs whoever wrote it.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, final

from attrs import frozen

from colossal_core.boxes import Box, flat_range_boxes
from colossal_core.checkpoint.manifest import BLOCK_BYTES, FileRecord, Manifest, Piece, TensorRecord
from colossal_core.errors import CheckpointError

__all__ = ["Block", "BlockReader"]


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
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def read(self, name: str, tensor: TensorRecord, wanted: Sequence[Box]) -> Iterator[Block]:
        """Yield the blocks that hold elements of some boxes, each once.

        Args:
            name: Name of the tensor, for messages.
            tensor: The tensor.
            wanted: The boxes in its index space.

        Raises:
            CheckpointError: A file is missing or cut short, or a block is damaged; names file and tensor.
        """
        for piece in tensor.pieces:
            back = [-start for start in piece.box.offset]
            common = [piece.box.intersect(box) for box in wanted]
            inside = [box.shifted(back) for box in common if box is not None]
            needed = {
                index for box in inside for index in _blocks_of(piece.box.size, box, tensor.item_bytes)
            }
            for index in sorted(needed):
                yield self._read_block(name, tensor, piece, index)

    def read_all(self, name: str, tensor: TensorRecord) -> Iterator[Block]:
        """Yield all blocks of a tensor, piece by piece; a tensor without elements has none."""
        yield from self.read(name, tensor, [Box((0,) * len(tensor.shape), tensor.shape)])

    def open(self, file: str) -> int:
        """Return a handle of a file whose size and header are those of the manifest.

        Raises:
            CheckpointError: They are not.
        """
        if file not in self._handles:
            self._handles[file] = open_checked(self.directory / file, self._manifest.files[file])
        return self._handles[file]

    def _read_block(self, name: str, tensor: TensorRecord, piece: Piece, index: int) -> Block:
        """Read and check one block."""
        start = index * BLOCK_BYTES
        length = min(BLOCK_BYTES, piece.box.volume * tensor.item_bytes - start)
        data = bytearray(length)
        path = self.directory / piece.file
        handle = self.open(piece.file)
        try:
            os.lseek(handle, piece.start + start, os.SEEK_SET)
            with open(handle, "rb", buffering=0, closefd=False) as file:
                view = memoryview(data)
                while view and (count := file.readinto(view)):
                    view = view[count:]
        except OSError as err:
            raise CheckpointError(
                f"cannot read {name!r} from {path}: {err.strerror or err}",
                hint="check the disk, or load an older checkpoint",
            ) from err
        self.bytes_read += length
        if zlib.crc32(data) != piece.checksums[index]:
            raise CheckpointError(
                f"{path} is damaged: bytes {piece.start + start} to {piece.start + start + length}, which hold "
                f"a part of {name!r}, do not have their checksum",
                hint="restore the file, or load an older checkpoint",
            )
        return Block(piece=piece, first=start // tensor.item_bytes, data=data, item_bytes=tensor.item_bytes)


def open_checked(path: Path, record: FileRecord) -> int:
    """Open a file of a checkpoint, which is a plain file of the recorded size that begins as recorded.

    Raises:
        CheckpointError: It is not; names the file.
    """
    hint = "restore the file, or load an older checkpoint"
    try:
        # A link could lead outside the directory, whatever its name says.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
    except OSError as err:
        raise CheckpointError(f"cannot open {path}: {err.strerror or err}", hint=hint) from err
    size = os.fstat(handle).st_size
    problem = ""
    if size != record.num_bytes:
        problem = f"it has {size} bytes, the manifest says {record.num_bytes}"
    elif zlib.crc32(os.read(handle, record.header_bytes)) != record.checksum:
        problem = f"its first {record.header_bytes} bytes do not have their checksum"
    if problem:
        os.close(handle)
        raise CheckpointError(f"{path} is damaged: {problem}", hint=hint)
    return handle


def _blocks_of(size: Sequence[int], inside: Box, item_bytes: int) -> Iterator[int]:
    """Yield the numbers of the blocks of a piece that hold elements of a box, ascending.

    Args:
        size: Size of the piece.
        inside: The box, relative to the piece.
        item_bytes: Bytes of one element.
    """
    per_block = BLOCK_BYTES // item_bytes
    last = -1
    for start, stop in _runs(size, inside):
        for index in range(max(start // per_block, last + 1), (stop - 1) // per_block + 1):
            last = index
            yield index


def _runs(size: Sequence[int], inside: Box) -> Iterator[tuple[int, int]]:
    """Yield the runs of consecutive elements ``[start, stop)`` of a box in a row-major order, ascending.

    Args:
        size: Shape of what the order is of.
        inside: The box in it, not empty.
    """
    # Trailing dims that the box spans whole belong to one run.
    dim = len(size)
    while dim > 0 and inside.size[dim - 1] == size[dim - 1]:
        dim -= 1
    run = math.prod(size[dim:]) * (inside.size[dim - 1] if dim > 0 else 1)
    strides = [math.prod(size[axis + 1 :]) for axis in range(len(size))]
    base = sum(start * step for start, step in zip(inside.offset, strides, strict=True))
    outer = inside.size[: max(dim - 1, 0)]
    for number in range(math.prod(outer)):
        start, rest = base, number
        for axis in reversed(range(len(outer))):
            rest, index = divmod(rest, outer[axis])
            start += index * strides[axis]
        yield start, start + run
