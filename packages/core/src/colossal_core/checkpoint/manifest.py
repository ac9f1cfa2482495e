"""The manifest of a checkpoint: which boxes of which tensors lie where, and what else a run needs to go on.

The one idea: tensors carry the names of the serial objects and are described by boxes in their global index
space, so a manifest says nothing about the plan that wrote it that a reader would have to know.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen

from colossal_core.boxes import Box
from colossal_core.checkpoint.safetensors_format import ITEM_BYTES, unique_names
from colossal_core.errors import CheckpointError

__all__ = ["BLOCK_BYTES", "FileRecord", "Manifest", "ObjectRecord", "Piece", "TensorRecord"]

FORMAT = "colossal-checkpoint"
VERSION = 1

BLOCK_BYTES = 4 << 20
"""Bytes that share a checksum. What a rank reads is whole blocks, since only those can be checked."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Kind = Literal["model", "optimizer", "average"]


@frozen(kw_only=True)
class Piece:
    """A box of a tensor in a file: its elements in row-major order.

    Attributes:
        box: The box in the global index space.
        file: Name of the file, in the directory of the manifest.
        start: First byte in the file.
        checksums: CRC-32 of each :data:`BLOCK_BYTES` bytes of the piece; the last block may be shorter.
    """

    box: Box
    file: str
    start: int
    checksums: tuple[int, ...]


@frozen(kw_only=True)
class TensorRecord:
    """One tensor of a serial object.

    Attributes:
        dtype: Name of the element type as in safetensors files.
        shape: Global shape.
        pieces: Boxes that cover each element once.
        aliases: Further names of the same tensor (tied weights).
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    aliases: tuple[str, ...] = ()

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.item_bytes


@frozen(kw_only=True)
class ObjectRecord:
    """One model, optimizer or average.

    Attributes:
        kind: What it is.
        tensors: Its tensors by name: serial names, and ``NAME.STATE`` for those of optimizers.
        details: What else belongs to it: settings of parameter groups, step counts, the decay of an average.
    """

    kind: Kind
    tensors: Mapping[str, TensorRecord]
    details: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        num_bytes: Its size.
        header_bytes: Bytes before the first tensor; all of it for a file that holds no tensors.
        checksum: CRC-32 of those.
    """

    num_bytes: int
    header_bytes: int
    checksum: int


@frozen(kw_only=True)
class Manifest:
    """Everything that a reader needs to know before it reads a tensor.

    Attributes:
        step: Real steps taken.
        epoch: Epoch that the run is in.
        samples: Samples that the run has seen.
        objects: Models, optimizers and averages by name.
        files: Files by name.
        run: Schedulers, loaders, loss scale and whatever else the run needs to go on, packed.
        extra: What the user gave to ``save``, packed.
        plan: The plan that wrote it, and its world size.
        versions: Versions of python, torch and the packages.
        created: Time of writing, ISO 8601 in UTC.
        configurations: Texts of files that travel along (``config.json`` of a transformers model), by model
            and name.
    """

    step: int
    epoch: int
    samples: int
    objects: Mapping[str, ObjectRecord]
    files: Mapping[str, FileRecord]
    run: Mapping[str, Any] = field(factory=dict)
    extra: Any = None
    plan: Mapping[str, Any] = field(factory=dict)
    versions: Mapping[str, str] = field(factory=dict)
    created: str = ""
    configurations: Mapping[str, Mapping[str, str]] = field(factory=dict)

    def to_json(self) -> str:
        """Return the text of the manifest file."""
        body = {
            "step": self.step,
            "epoch": self.epoch,
            "samples": self.samples,
            "created": self.created,
            "versions": dict(self.versions),
            "plan": dict(self.plan),
            "files": {
                name: [file.num_bytes, file.header_bytes, file.checksum] for name, file in self.files.items()
            },
            "objects": {name: _object_to_plain(record) for name, record in self.objects.items()},
            "run": dict(self.run),
            "extra": self.extra,
            "configurations": {model: dict(texts) for model, texts in self.configurations.items()},
        }
        text = _canonical(body)
        # The body is spelled out once: re-reading gives the same canonical text, and so the same checksum.
        checksum = zlib.crc32(text.encode())
        return f'{{"format":"{FORMAT}","version":{VERSION},"checksum":{checksum},"body":{text}}}\n'

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Read and check the text of a manifest file.

        Args:
            text: The text.
            where: The file, for messages.

        Raises:
            CheckpointError: It is damaged, of another format or version, or names what lies outside its
                directory.
        """
        try:
            body = _open_envelope(json.loads(text, object_pairs_hook=unique_names), where)
            found = cls(
                step=_count(body["step"]),
                epoch=_count(body["epoch"]),
                samples=_count(body["samples"]),
                objects={
                    name: _object_from_plain(plain) for name, plain in _mapping(body["objects"]).items()
                },
                files={
                    name: FileRecord(
                        num_bytes=_count(plain[0]), header_bytes=_count(plain[1]), checksum=_count(plain[2])
                    )
                    for name, plain in _mapping(body["files"]).items()
                },
                run=_mapping(body["run"]),
                extra=body["extra"],
                plan=_mapping(body["plan"]),
                versions=_mapping(body["versions"]),
                created=_text(body["created"]),
                configurations={
                    model: {name: _text(text) for name, text in _mapping(texts).items()}
                    for model, texts in _mapping(body["configurations"]).items()
                },
            )
            found._check()
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as err:
            what = str(err) if isinstance(err, ValueError) else repr(err)
            raise CheckpointError(
                f"{where} is no manifest of a checkpoint: {what}",
                hint="it was damaged or changed; load an older checkpoint",
            ) from err
        return found

    def _check(self) -> None:
        """Refuse names that leave the directory, ranges that leave their file, boxes that leave their tensor.

        That the boxes of a tensor cover each element *once* is not checked here, only that they have as many
        elements; ``verify`` does.

        Raises:
            ValueError: As said.
        """
        for name in (*self.files, *(name for texts in self.configurations.values() for name in texts)):
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(f"file name {name!r} is no plain name inside the directory")
        for owner, record in self.objects.items():
            for name, tensor in record.tensors.items():
                self._check_tensor(f"{owner}: {name}", tensor)

    def _check_tensor(self, name: str, tensor: TensorRecord) -> None:
        """Check one tensor; see :meth:`_check`."""
        whole, volume = Box((0,) * len(tensor.shape), tensor.shape), 0
        for piece in tensor.pieces:
            fits = len(piece.box.offset) == len(piece.box.size) == len(tensor.shape)
            if not fits or piece.box.volume == 0 or piece.box.intersect(whole) != piece.box:
                raise ValueError(f"{piece.box} of {name!r} is not inside its shape {tensor.shape}")
            volume += piece.box.volume
            num_bytes = piece.box.volume * tensor.item_bytes
            file = self.files.get(piece.file)
            if file is None:
                raise ValueError(f"{name!r} lies in {piece.file!r}, which is no file of the checkpoint")
            if piece.start < file.header_bytes or piece.start + num_bytes > file.num_bytes:
                raise ValueError(
                    f"{name!r} lies at bytes {piece.start} to {piece.start + num_bytes} of {piece.file!r}, "
                    f"which has {file.num_bytes}"
                )
            if len(piece.checksums) != math.ceil(num_bytes / BLOCK_BYTES):
                raise ValueError(f"{name!r} has {len(piece.checksums)} checksums for {num_bytes} bytes")
        if volume != math.prod(tensor.shape):
            raise ValueError(
                f"the pieces of {name!r} have {volume} elements, its shape {tensor.shape} another number"
            )


def _open_envelope(outer: Any, where: str) -> Mapping[str, Any]:
    """Check what stands around the content of a manifest, and return the content.

    Raises:
        CheckpointError: It has another version.
        ValueError: It is of another format, or was changed.
    """
    if _mapping(outer)["format"] != FORMAT:
        raise ValueError(f"its format is {outer['format']!r}, expected {FORMAT!r}")
    if outer["version"] != VERSION:
        raise CheckpointError(
            f"{where} has version {outer['version']!r}, this version of colossal-core reads {VERSION}",
            hint="load it with the version of colossal-core that wrote it, or a newer one",
        )
    body = _mapping(outer["body"])
    if zlib.crc32(_canonical(body).encode()) != outer["checksum"]:
        raise ValueError("its checksum does not fit its content")
    return body


def _canonical(body: Any) -> str:
    """Return the one text of a plain value."""
    return json.dumps(body, separators=(",", ":"), sort_keys=True, allow_nan=False)


def _object_to_plain(record: ObjectRecord) -> dict[str, Any]:
    """Return an object as JSON knows it; a piece is ``[file, start, offset, size, checksums]``."""
    tensors = {
        name: {
            "dtype": tensor.dtype,
            "shape": [*tensor.shape],
            "aliases": [*tensor.aliases],
            "pieces": [
                [piece.file, piece.start, [*piece.box.offset], [*piece.box.size], [*piece.checksums]]
                for piece in tensor.pieces
            ],
        }
        for name, tensor in record.tensors.items()
    }
    return {"kind": record.kind, "details": dict(record.details), "tensors": tensors, "order": [*tensors]}


def _object_from_plain(plain: Mapping[str, Any]) -> ObjectRecord:
    """Read what :func:`_object_to_plain` returned; tensors keep the order of the serial object."""
    if plain["kind"] not in {"model", "optimizer", "average"}:
        raise ValueError(f"an object of kind {plain['kind']!r}")
    tensors: dict[str, TensorRecord] = {}
    if sorted(plain["order"]) != sorted(plain["tensors"]):
        raise ValueError("the order of its tensors does not name each of them once")
    for name in plain["order"]:
        entry = plain["tensors"][name]
        if entry["dtype"] not in ITEM_BYTES:
            raise ValueError(f"{name!r} has elements of type {entry['dtype']!r}")
        pieces = tuple(
            Piece(
                file=file,
                start=_count(start),
                box=Box(tuple(map(_count, offset)), tuple(map(_count, size))),
                checksums=tuple(map(_count, checksums)),
            )
            for file, start, offset, size, checksums in entry["pieces"]
        )
        shape = tuple(map(_count, entry["shape"]))
        tensors[name] = TensorRecord(
            dtype=entry["dtype"], shape=shape, pieces=pieces, aliases=tuple(map(_text, entry["aliases"]))
        )
    return ObjectRecord(kind=plain["kind"], tensors=tensors, details=_mapping(plain["details"]))


def _mapping(value: Any) -> dict[str, Any]:
    """Return a mapping of names.

    Raises:
        ValueError: It is something else.
    """
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} where a mapping is expected")
    return value


def _text(value: Any) -> str:
    """Return a text.

    Raises:
        ValueError: It is something else.
    """
    if not isinstance(value, str):
        raise ValueError(f"{value!r} where a text is expected")
    return value


def _count(value: Any) -> int:
    """Return an integer of at least 0.

    Raises:
        ValueError: It is something else.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} where a number of at least 0 is expected")
    return value
