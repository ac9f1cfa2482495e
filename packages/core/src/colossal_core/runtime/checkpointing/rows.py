"""Boxes of tensors in plain safetensors files: read and written row by row, a block at a time.

The one idea: a box of a tensor is some runs of consecutive elements in the tensor's row-major order, so a
rank reads or writes its own box of a file without touching what lies between.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence

import torch

from colossal_core.boxes import Box, flat_range_boxes
from colossal_core.checkpoint.manifest import BLOCK_BYTES
from colossal_core.checkpoint.safetensors_format import ITEM_BYTES, Stored
from colossal_core.runtime.checkpointing.shards import DTYPE_NAMES, bytes_of

__all__ = ["DTYPES", "inside", "read_box", "row_runs", "split_box", "write_box"]

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""Element types by their names in safetensors files."""


def inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the index expression of a box in what holds another box that contains it."""
    return box.shifted([-start for start in outer.offset]).slices


def row_runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """Yield the runs of consecutive elements ``(start, length)`` of a box in row-major order, ascending.

    Args:
        shape: Shape of the tensor.
        box: A box of it, not empty.
    """
    # Trailing dims that the box spans whole belong to one run.
    dim = len(shape)
    while dim > 0 and box.size[dim - 1] == shape[dim - 1]:
        dim -= 1
    length = math.prod(shape[dim:]) * (box.size[dim - 1] if dim > 0 else 1)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    first = sum(start * step for start, step in zip(box.offset, strides, strict=True))
    outer = box.size[: max(dim - 1, 0)]
    for number in range(math.prod(outer)):
        start, rest = first, number
        for axis in reversed(range(len(outer))):
            rest, index = divmod(rest, outer[axis])
            start += index * strides[axis]
        yield start, length


def split_box(box: Box, item_bytes: int) -> Iterator[Box]:
    """Yield boxes of at most a block that make up a box, in row-major order, cut between rows if possible."""
    per_block = BLOCK_BYTES // item_bytes
    row = math.prod(box.size[1:])
    if 0 < row <= per_block:
        per_block -= per_block % row
    for start in range(0, box.volume, per_block):
        for part, _ in flat_range_boxes(box.size, start, min(start + per_block, box.volume)):
            yield part.shifted(box.offset)


def write_box(file: io.FileIO, stored: Stored, box: Box, values: torch.Tensor) -> None:
    """Write a box of a tensor into a file that has its full size.

    Args:
        file: Open for writing.
        stored: Where the tensor lies in it, and in which dtype.
        box: The box.
        values: Its elements, of its size; cast and brought to the host block by block.

    Raises:
        OSError: The disk refuses.
    """
    item_bytes = ITEM_BYTES[stored.dtype]
    for block in split_box(box, item_bytes):
        part = values[inside(block, box)].detach().to(DTYPES[stored.dtype]).contiguous().cpu()
        left = bytes_of(part)
        for start, length in row_runs(stored.shape, block):
            file.seek(stored.start + start * item_bytes)
            row, left = left[: length * item_bytes], left[length * item_bytes :]
            while row:
                row = row[file.write(row) :]


def read_box(file: io.FileIO, stored: Stored, box: Box) -> torch.Tensor:
    """Read a box of a tensor.

    Args:
        file: Open for reading.
        stored: Where the tensor lies in it.
        box: The box, not empty.

    Returns:
        Its elements in the stored dtype, on the host, contiguous.

    Raises:
        EOFError: The file ends before.
        OSError: The disk refuses.
    """
    item_bytes = ITEM_BYTES[stored.dtype]
    data = bytearray(box.volume * item_bytes)
    left = memoryview(data)
    for start, length in row_runs(stored.shape, box):
        file.seek(stored.start + start * item_bytes)
        row, left = left[: length * item_bytes], left[length * item_bytes :]
        while row:
            count = file.readinto(row)
            if not count:
                raise EOFError(f"it ends at byte {file.tell()}")
            row = row[count:]
    return torch.frombuffer(data, dtype=DTYPES[stored.dtype]).view(box.size)
