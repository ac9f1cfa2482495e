"""One rank's part of a checkpoint, and how the parts of all ranks become a manifest.

The one idea: ranks meet in the directory, not in messages. Each rank writes its files and then, at once, a
small note that says what they hold, or why it failed; when all notes are there, rank 0 joins them. So a part
may be written by a thread while training goes on, and a rank that dies leaves the others nothing to wait for
but time.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from colossal_core.boxes import Box
from colossal_core.checkpoint.directory import data_file_name
from colossal_core.checkpoint.manifest import FileRecord, Kind, Manifest, ObjectRecord, Piece, TensorRecord
from colossal_core.checkpoint.safetensors_format import ITEM_BYTES
from colossal_core.checkpoint.writing import write_tensors, write_text
from colossal_core.errors import CheckpointError, ColossalError
from colossal_core.runtime.checkpointing.shards import Collected, Holding, blocks_of, dtype_name

__all__ = ["ObjectPart", "Part", "join_parts", "random_file_name", "wait_for_parts", "write_part"]

POLL_SECONDS = 0.02
"""Time between two looks for the notes of other ranks; doubled up to a second while nothing comes."""


@frozen(kw_only=True)
class ObjectPart:
    """What one rank writes of one object.

    Attributes:
        name: Name of the object.
        kind: What it is.
        collected: Its tensors as far as this rank knows them; the holdings are those that it writes.
        details: What else belongs to the object.
    """

    name: str
    kind: Kind
    collected: Collected
    details: Mapping[str, Any]


@frozen(kw_only=True)
class Part:
    """What one rank writes of a checkpoint; nothing in it changes while it is written.

    Attributes:
        directory: ``root/step-N``.
        mark: Twelve hexadecimal digits of this save.
        rank: This rank.
        world_size: Number of ranks.
        objects: The objects, in the same order on all ranks.
        random: Random state of this rank, as text.
        head: The manifest without objects and files; the one of rank 0 counts.
    """

    directory: Path
    mark: str
    rank: int
    world_size: int
    objects: Sequence[ObjectPart]
    random: str
    head: Manifest = field(repr=False)


def write_part(part: Part) -> None:
    """Write the files of one rank, and then the note about them.

    Raises:
        ColossalError: The disk refuses; the note says so too.
    """
    note: dict[str, Any] = {"files": {}, "objects": {}, "error": ""}
    try:
        for thing in part.objects:
            note["objects"][thing.name] = _write_object(part, thing, note["files"])
        name = random_file_name(part.rank, part.mark)
        write_text(part.directory / name, part.random)
        raw = part.random.encode()
        note["files"][name] = [len(raw), len(raw), zlib.crc32(raw)]
    except ColossalError as err:
        write_text(_note_path(part, part.rank), json.dumps({"error": err.message}))
        raise
    write_text(_note_path(part, part.rank), json.dumps(note))


def wait_for_parts(part: Part, *, timeout_seconds: float) -> list[dict[str, Any]]:
    """Return the notes of all ranks, in rank order, once they are there.

    Raises:
        CheckpointError: A rank failed, or its note did not come in time.
    """
    deadline, pause = time.monotonic() + timeout_seconds, POLL_SECONDS
    notes: dict[int, dict[str, Any]] = {}
    while True:
        for rank in range(part.world_size):
            path = _note_path(part, rank)
            if rank not in notes and path.is_file():
                notes[rank] = json.loads(path.read_text(encoding="utf-8"))
                if notes[rank]["error"]:
                    raise CheckpointError(
                        f"rank {rank} could not write its part: {notes[rank]['error']}",
                        hint="earlier checkpoints are as they were",
                    )
        if len(notes) == part.world_size:
            return [notes[rank] for rank in range(part.world_size)]
        if time.monotonic() > deadline:
            missing = [rank for rank in range(part.world_size) if rank not in notes]
            raise CheckpointError(
                f"ranks {missing} did not finish their part of {part.directory} "
                f"within {timeout_seconds:.0f} seconds",
                hint="look at their output; earlier checkpoints are as they were",
            )
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def join_parts(head: Manifest, notes: Sequence[Mapping[str, Any]]) -> Manifest:
    """Return the manifest of all parts.

    Raises:
        CheckpointError: Ranks contradict each other about a tensor.
    """
    files: dict[str, FileRecord] = {}
    objects: dict[str, ObjectRecord] = {}
    for note in notes:
        for name, (num_bytes, header_bytes, checksum) in note["files"].items():
            files[name] = FileRecord(num_bytes=num_bytes, header_bytes=header_bytes, checksum=checksum)
        for name, theirs in note["objects"].items():
            known = objects.get(name)
            tensors = dict(known.tensors) if known is not None else {}
            for tensor, plain in theirs["tensors"].items():
                tensors[tensor] = _join(name, tensor, tensors.get(tensor), plain)
            details = theirs["details"] if known is None else _merge(known.details, theirs["details"])
            objects[name] = ObjectRecord(kind=theirs["kind"], tensors=tensors, details=details)
    return evolve(head, files=files, objects=objects)


def random_file_name(rank: int, mark: str) -> str:
    """Return the name of the file that holds the random state of a rank."""
    return data_file_name("random", rank, mark, "json")


def _note_path(part: Part, rank: int) -> Path:
    """Return where a rank leaves its note."""
    return part.directory / data_file_name("part", rank, part.mark, "json")


def _write_object(part: Part, thing: ObjectPart, files: dict[str, list[int]]) -> dict[str, Any]:
    """Write what this rank writes of one object; return what the note says of it."""
    tensors: dict[str, dict[str, Any]] = {
        name: {
            "dtype": dtype_name(spec.dtype, name),
            "shape": [*spec.shape],
            "aliases": [*spec.aliases],
            "pieces": [],
        }
        for name, spec in thing.collected.specs.items()
    }
    # Wider elements first, so that all are aligned in the file.
    holdings = sorted(thing.collected.holdings, key=lambda held: -ITEM_BYTES[tensors[held.name]["dtype"]])
    if holdings:
        entries = [
            (_entry_name(held, thing.collected), tensors[held.name]["dtype"], held.box.size)
            for held in holdings
        ]
        file = data_file_name(thing.name, part.rank, part.mark)
        record, spans = write_tensors(part.directory / file, entries, _contents(holdings, thing.collected))
        files[file] = [record.num_bytes, record.header_bytes, record.checksum]
        for held, (start, checksums) in zip(holdings, spans, strict=True):
            tensors[held.name]["pieces"].append(
                [file, start, [*held.box.offset], [*held.box.size], [*checksums]]
            )
    return {"kind": thing.kind, "details": dict(thing.details), "tensors": tensors}


def _contents(holdings: Sequence[Holding], collected: Collected) -> Iterator[Iterator[memoryview]]:
    """Yield the bytes of each holding, in the dtype that its tensor is kept in."""
    for held in holdings:
        with held.present():
            yield blocks_of(held.view.to(collected.specs[held.name].dtype))


def _entry_name(held: Holding, collected: Collected) -> str:
    """Return the name of a box in its file: the tensor's own where it is all of it."""
    if held.box.size == collected.specs[held.name].shape:
        return held.name
    ranges = ",".join(
        f"{start}:{start + length}" for start, length in zip(held.box.offset, held.box.size, strict=True)
    )
    return f"{held.name}[{ranges}]"


def _join(owner: str, name: str, known: TensorRecord | None, plain: Mapping[str, Any]) -> TensorRecord:
    """Add the pieces of one rank to a tensor."""
    found = TensorRecord(
        dtype=plain["dtype"],
        shape=tuple(plain["shape"]),
        aliases=tuple(plain["aliases"]),
        pieces=tuple(
            Piece(file=file, start=start, box=Box(tuple(offset), tuple(size)), checksums=tuple(checksums))
            for file, start, offset, size, checksums in plain["pieces"]
        ),
    )
    if known is None:
        return found
    if (known.dtype, known.shape, known.aliases) != (found.dtype, found.shape, found.aliases):
        raise CheckpointError(
            f"ranks know tensor {name!r} of {owner} as {known.dtype} {known.shape} and as "
            f"{found.dtype} {found.shape}",
            hint="report this with your plan: a piece publishes places that contradict each other",
        )
    return evolve(known, pieces=known.pieces + found.pieces)


def _merge(known: Any, other: Any) -> Any:
    """Return two details as one: mappings are joined, of anything else the first rank's counts."""
    if not (isinstance(known, Mapping) and isinstance(other, Mapping)):
        return known
    joined = dict(known)
    for key, value in other.items():
        joined[key] = _merge(known[key], value) if key in known else value
    return joined
