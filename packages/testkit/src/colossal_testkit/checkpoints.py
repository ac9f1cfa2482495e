"""Checkpoints without a run: any tensors, cut into any boxes, in any number of files; without torch.

The one idea: what reads checkpoints should not care who wrote them, so a test writes the strangest layout
that the format allows and expects the values that it put in.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from colossal_core.boxes import Box
from colossal_core.checkpoint import manifest as stored
from colossal_core.checkpoint.directory import data_file_name, publish, step_directory
from colossal_core.checkpoint.manifest import FileRecord, Kind, Manifest, ObjectRecord, Piece, TensorRecord
from colossal_core.checkpoint.safetensors_format import ITEM_BYTES
from colossal_core.checkpoint.streaming import copy_strided, list_strides
from colossal_core.checkpoint.writing import write_tensors

__all__ = ["SampleObject", "SampleTensor", "cut_at_random", "write_checkpoint"]


@frozen(kw_only=True)
class SampleTensor:
    """A tensor of a hand-made checkpoint.

    Attributes:
        dtype: Name of the element type as in safetensors files.
        shape: Shape.
        data: Its elements in row-major order.
        boxes: How it is cut; the boxes go to the ranks in turn. None for one whole piece.
        aliases: Further names.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)
    boxes: tuple[Box, ...] | None = None
    aliases: tuple[str, ...] = ()

    @classmethod
    def make(
        cls,
        shape: Sequence[int],
        *,
        dtype: str = "F32",
        seed: int = 0,
        boxes: Sequence[Box] | None = None,
        aliases: Sequence[str] = (),
    ) -> SampleTensor:
        """Make a tensor of random bits.

        Args:
            shape: Shape.
            dtype: Name of the element type.
            seed: Other bits for another seed.
            boxes: How it is cut.
            aliases: Further names.
        """
        data = random.Random(seed).randbytes(math.prod(shape) * ITEM_BYTES[dtype])  # noqa: S311 - not secret
        return cls(
            dtype=dtype,
            shape=tuple(shape),
            data=data,
            boxes=None if boxes is None else tuple(boxes),
            aliases=tuple(aliases),
        )

    def bytes_of(self, box: Box) -> bytes:
        """Return the elements of a box in row-major order."""
        item_bytes = ITEM_BYTES[self.dtype]
        found = bytearray(box.volume * item_bytes)
        strides = list_strides(self.shape)
        start = sum(first * step for first, step in zip(box.offset, strides, strict=True))
        copy_strided(
            found, 0, list_strides(box.size), bytearray(self.data), start, strides, box.size, item_bytes
        )
        return bytes(found)


@frozen(kw_only=True)
class SampleObject:
    """A model, optimizer or average of a hand-made checkpoint.

    Attributes:
        tensors: Its tensors by name.
        kind: What it is.
        details: What else belongs to it.
    """

    tensors: Mapping[str, SampleTensor]
    kind: Kind = "model"
    details: Mapping[str, Any] = field(factory=dict)


def cut_at_random(shape: Sequence[int], num_cuts: int, seed: int) -> tuple[Box, ...]:
    """Cut a shape into boxes as no plan would: one box after the other, along any dim, anywhere.

    Args:
        shape: Shape; one without elements gives no boxes.
        num_cuts: How often to cut; a box of one element is not cut any further.
        seed: Other cuts for another seed.
    """
    chance = random.Random(seed)  # noqa: S311 - not secret
    boxes = [Box((0,) * len(shape), tuple(shape))] if math.prod(shape) else []
    for _ in range(num_cuts if boxes else 0):
        box = boxes.pop(chance.randrange(len(boxes)))
        long = [axis for axis, length in enumerate(box.size) if length > 1]
        if not long:
            boxes.append(box)
            continue
        axis = chance.choice(long)
        at = chance.randrange(1, box.size[axis])
        for start, length in ((0, at), (at, box.size[axis] - at)):
            offset, size = [*box.offset], [*box.size]
            offset[axis] += start
            size[axis] = length
            boxes.append(Box(tuple(offset), tuple(size)))
    chance.shuffle(boxes)
    return tuple(boxes)


def write_checkpoint(
    root: Path,
    objects: Mapping[str, SampleObject | Mapping[str, SampleTensor]],
    *,
    step: int = 1,
    num_ranks: int = 1,
    mark: str = "0123456789ab",
    **fields: Any,
) -> Path:
    """Write a checkpoint as a run of some ranks would.

    Args:
        root: Directory of checkpoints; made when missing.
        objects: Objects by name; a bare mapping is a model.
        step: The step.
        num_ranks: Files of each object.
        mark: Twelve hexadecimal digits that no other save in the directory has.
        **fields: Further attributes of :class:`~colossal_core.checkpoint.Manifest`.

    Returns:
        The directory of the checkpoint.
    """
    directory = step_directory(root, step)
    directory.mkdir(parents=True, exist_ok=True)
    files: dict[str, FileRecord] = {}
    records: dict[str, ObjectRecord] = {}
    for name, given in objects.items():
        sample = given if isinstance(given, SampleObject) else SampleObject(tensors=given)
        pieces: dict[str, list[Piece]] = {tensor: [] for tensor in sample.tensors}
        for rank in range(num_ranks):
            file = data_file_name(name, rank, mark)
            parts = _list_parts(sample, rank, num_ranks)
            if parts:
                files[file] = _write_file(directory / file, sample, parts, pieces)
        records[name] = ObjectRecord(
            kind=sample.kind,
            details=sample.details,
            tensors={
                key: TensorRecord(
                    dtype=tensor.dtype,
                    shape=tensor.shape,
                    pieces=tuple(pieces[key]),
                    aliases=tensor.aliases,
                )
                for key, tensor in sample.tensors.items()
            },
        )
    values: dict[str, Any] = {"epoch": 0, "samples": 0, **fields}
    publish(directory, Manifest(step=step, objects=records, files=files, **values))
    return directory


def _list_parts(sample: SampleObject, rank: int, num_ranks: int) -> list[tuple[str, Box]]:
    """Return what one rank writes of an object, wider elements first."""
    parts = []
    position = 0
    for name, tensor in sample.tensors.items():
        whole = Box((0,) * len(tensor.shape), tensor.shape)
        for box in (whole,) if tensor.boxes is None and whole.volume else tensor.boxes or ():
            if position % num_ranks == rank:
                parts.append((name, box))
            position += 1
    return sorted(parts, key=lambda part: -ITEM_BYTES[sample.tensors[part[0]].dtype])


def _write_file(
    path: Path,
    sample: SampleObject,
    parts: Sequence[tuple[str, Box]],
    pieces: Mapping[str, list[Piece]],
) -> FileRecord:
    """Write the file of one rank, and note where its boxes lie."""
    entries = [(f"{name}{[*box.offset]}", sample.tensors[name].dtype, box.size) for name, box in parts]
    contents = (_divide(sample.tensors[name].bytes_of(box)) for name, box in parts)
    record, spans = write_tensors(path, entries, contents)
    for (name, box), (start, checksums) in zip(parts, spans, strict=True):
        pieces[name].append(Piece(box=box, file=path.name, start=start, checksums=checksums))
    return record


def _divide(data: bytes) -> Iterator[bytes]:
    """Yield blocks; the length is looked up when it is needed, so that a test may shorten it."""
    for start in range(0, len(data), stored.BLOCK_BYTES):
        yield data[start : start + stored.BLOCK_BYTES]
