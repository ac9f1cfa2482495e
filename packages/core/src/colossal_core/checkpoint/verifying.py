"""Reading a whole checkpoint to say what is wrong with it, everything at once.

The one idea: the files are read from their first byte to their last, each once, with a block in memory; what
the manifest, the headers of the files and their bytes say about each other is compared on the way.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from attrs import frozen

from colossal_core.boxes import Box
from colossal_core.checkpoint.directory import MANIFEST_NAME, is_file_of_save, list_files, read_manifest
from colossal_core.checkpoint.manifest import BLOCK_BYTES, FileRecord, Manifest, Piece, TensorRecord
from colossal_core.checkpoint.reading import open_plain, read_at
from colossal_core.checkpoint.safetensors_format import Stored, decode_header
from colossal_core.errors import CheckpointError

__all__ = ["Problem", "verify"]

_MOST_NAMES = 3


@frozen(kw_only=True)
class Problem:
    """Something that is not as it should be.

    Attributes:
        severity: ``"error"`` where a load would fail or give other values, ``"note"`` for what does no harm.
        message: What it is, with numbers.
        file: The file in the directory; empty when it is about none.
        tensor: The tensor, as ``OBJECT: NAME``; empty when it is about none.
    """

    severity: Literal["error", "note"]
    message: str
    file: str = ""
    tensor: str = ""


@frozen(kw_only=True)
class _Part:
    """A piece, with whose it is and how long."""

    owner: str
    tensor: TensorRecord
    piece: Piece

    @property
    def start(self) -> int:
        """First byte in the file."""
        return self.piece.start

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.piece.start + self.piece.box.volume * self.tensor.item_bytes


def verify(directory: Path) -> tuple[Problem, ...]:
    """Check everything that lies in the directory of one checkpoint.

    Args:
        directory: The directory that holds the manifest.

    Returns:
        What was found: errors in the order of the files and then of the tensors, and notes at the end.
    """
    try:
        manifest = read_manifest(directory)
    except CheckpointError as err:
        return (Problem(severity="error", file=MANIFEST_NAME, message=err.message),)
    parts: dict[str, list[_Part]] = {name: [] for name in manifest.files}
    for owner, record in manifest.objects.items():
        for name, tensor in record.tensors.items():
            for piece in tensor.pieces:
                parts[piece.file].append(_Part(owner=f"{owner}: {name}", tensor=tensor, piece=piece))
    found: list[Problem] = []
    for name, record_of_file in manifest.files.items():
        ordered = sorted(parts[name], key=lambda part: part.start)
        found.extend(_verify_file(directory / name, record_of_file, ordered))
    found.extend(_verify_tensors(manifest))
    found.extend(_list_foreign(directory, manifest))
    return tuple(found)


def _verify_file(path: Path, record: FileRecord, parts: Sequence[_Part]) -> Iterator[Problem]:
    """Check one file from its first byte to its last."""
    try:
        handle = open_plain(path)
    except CheckpointError as err:
        yield Problem(severity="error", file=path.name, message=err.message + _tell_owners(parts))
        return
    try:
        size = os.fstat(handle).st_size
        if size != record.num_bytes:
            beyond = [part for part in parts if part.stop > size]
            message = f"it has {size} bytes, the manifest says {record.num_bytes}{_tell_owners(beyond)}"
            yield Problem(severity="error", file=path.name, message=message)
        first = bytearray(min(record.header_bytes, size))
        read_at(handle, 0, memoryview(first))
        if zlib.crc32(first) != record.checksum:
            message = f"its first {record.header_bytes} bytes do not have their checksum"
            yield Problem(severity="error", file=path.name, message=message)
        elif size == record.num_bytes and path.suffix == ".safetensors":
            yield from _compare_header(path, bytes(first), size, parts)
        for part in parts:
            yield from _verify_blocks(handle, path, size, part)
    except OSError as err:
        yield Problem(severity="error", file=path.name, message=f"cannot be read: {err.strerror or err}")
    finally:
        os.close(handle)


def _verify_blocks(handle: int, path: Path, size: int, part: _Part) -> Iterator[Problem]:
    """Check each block of a piece that lies inside the file."""
    for index, checksum in enumerate(part.piece.checksums):
        start = part.start + index * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, part.stop)
        if stop > size:
            return
        block = bytearray(stop - start)
        read_at(handle, start, memoryview(block))
        if zlib.crc32(block) != checksum:
            message = f"bytes {start} to {stop} do not have their checksum"
            yield Problem(severity="error", file=path.name, tensor=part.owner, message=message)


def _compare_header(path: Path, raw: bytes, size: int, parts: Sequence[_Part]) -> Iterator[Problem]:
    """Compare what a file says about its tensors with what the manifest says."""
    try:
        header = decode_header(path, raw, size)
    except CheckpointError as err:
        yield Problem(severity="error", file=path.name, message=err.message)
        return
    stored = sorted(
        (item.start, item.stop, name) for name, item in header.tensors.items() if item.stop > item.start
    )
    position, end = 0, 0
    for part in parts:
        if part.start < end:
            message = f"bytes {part.start} to {min(end, part.stop)} belong to another tensor, too"
            yield Problem(severity="error", file=path.name, tensor=part.owner, message=message)
        while position < len(stored) and stored[position][1] <= part.start:
            position += 1
        if (
            position == len(stored)
            or not stored[position][0] <= part.start < part.stop <= stored[position][1]
        ):
            message = f"bytes {part.start} to {part.stop} are no tensor in the header of the file"
            yield Problem(severity="error", file=path.name, tensor=part.owner, message=message)
        elif not _same_type(header.tensors[stored[position][2]], part):
            name = stored[position][2]
            message = (
                f"it is {header.tensors[name].dtype} as {name!r} in the header of the file, "
                f"{part.tensor.dtype} in the manifest"
            )
            yield Problem(severity="error", file=path.name, tensor=part.owner, message=message)
        end = max(end, part.stop)
    yield from _find_unknown(path, stored, parts)


def _find_unknown(
    path: Path, stored: Sequence[tuple[int, int, str]], parts: Sequence[_Part]
) -> Iterator[Problem]:
    """Name the tensors in a file of which the manifest does not know every byte."""
    position = 0
    for start, stop, name in stored:
        known = start
        while position < len(parts) and parts[position].start < stop:
            if parts[position].start <= known:
                known = max(known, parts[position].stop)
            position += 1
        if known < stop:
            message = (
                f"bytes {known} to {stop}, a part of {name!r} in its header, are unknown to the manifest"
            )
            yield Problem(severity="error", file=path.name, message=message)


def _same_type(stored: Stored, part: _Part) -> bool:
    """Say whether a file and the manifest agree about the elements; the format has no name for complex128."""
    return stored.dtype == ("F64" if part.tensor.dtype == "C128" else part.tensor.dtype)


def _verify_tensors(manifest: Manifest) -> Iterator[Problem]:
    """Check that pieces do not overlap and that each name means one tensor.

    That pieces lie inside their tensor and have as many elements as it, is checked when a manifest is read;
    with no overlap, they cover each element once.
    """
    for owner, record in manifest.objects.items():
        taken: dict[str, str] = {}
        for name, tensor in record.tensors.items():
            overlap = _find_overlap([piece.box for piece in tensor.pieces])
            if overlap is not None:
                first, second = (tensor.pieces[index] for index in overlap)
                message = (
                    f"elements in {first.box.intersect(second.box)} are stored twice, "
                    f"in {first.file!r} at byte {first.start} and in {second.file!r} at byte {second.start}"
                )
                yield Problem(severity="error", tensor=f"{owner}: {name}", message=message)
            for alias in tensor.aliases:
                other = name if alias in record.tensors else taken.get(alias)
                taken[alias] = name
                if other is not None:
                    message = f"its alias {alias!r} is also the name of another tensor"
                    yield Problem(severity="error", tensor=f"{owner}: {name}", message=message)


def _find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return two boxes that have an element in common, or None.

    Along each dim in turn, boxes fall into groups that have no index in common; only those of one group, and
    that along every dim, are compared with each other. For pieces that any plan cuts that is none.
    """
    groups = [[*range(len(boxes))]]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        for axis in range(len(boxes[group[0]].size)):
            parts = _split_group(boxes, group, axis)
            if len(parts) > 1:
                groups.extend(parts)
                break
        else:
            for number, first in enumerate(group):
                for second in group[number + 1 :]:
                    if boxes[first].intersect(boxes[second]) is not None:
                        return first, second
    return None


def _split_group(boxes: Sequence[Box], group: Sequence[int], axis: int) -> list[list[int]]:
    """Divide boxes into groups that have no index along a dim in common."""
    parts: list[list[int]] = []
    end = -1
    for index in sorted(group, key=lambda index: boxes[index].offset[axis]):
        start, length = boxes[index].offset[axis], boxes[index].size[axis]
        if start >= end:
            parts.append([])
        parts[-1].append(index)
        end = max(end, start + length)
    return parts


def _list_foreign(directory: Path, manifest: Manifest) -> Iterator[Problem]:
    """Note what lies in the directory and belongs to no checkpoint."""
    for path in sorted(list_files(directory)):
        if path.name not in manifest.files and path.name != MANIFEST_NAME:
            why = (
                "an interrupted save has left it"
                if is_file_of_save(path.name)
                else "it is no file of a checkpoint"
            )
            yield Problem(severity="note", file=path.name, message=why)


def _tell_owners(parts: Sequence[_Part]) -> str:
    """Return which tensors a file holds parts of."""
    names = [*dict.fromkeys(part.owner for part in parts)]
    if not names:
        return ""
    rest = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"; it holds {', '.join(map(repr, names[:_MOST_NAMES]))}{rest}"
