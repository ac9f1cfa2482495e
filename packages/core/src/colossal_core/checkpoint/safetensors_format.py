"""The safetensors format: eight bytes of length, a JSON header, and the elements of each tensor.

The one idea: a file is planned before it is written, so tensors are streamed into it in pieces of any size,
by several ranks at once; and a header is checked before anything else is read, so a file that is no
safetensors file, or is cut short, is named and not interpreted. The library of the same name streams nothing;
files are the same, readable by it.

Source: https://huggingface.co/docs/safetensors, section Format.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from colossal_core.errors import CheckpointError

__all__ = [
    "ITEM_BYTES",
    "LARGEST_HEADER",
    "Header",
    "Stored",
    "decode_header",
    "encode_header",
    "read_header",
    "unique_names",
]

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
    "C128": 16,
}
"""Bytes of an element by name of its type. ``C128`` has no name in the format: such a tensor is stored as
``F64`` with a last dim of 2, and the manifest says what it is."""

LARGEST_HEADER = 100 << 20
"""Headers above this are refused, as the library does."""


@frozen(kw_only=True)
class Stored:
    """Where one tensor lies in a file.

    Attributes:
        dtype: Name of the element type, a key of :data:`ITEM_BYTES`.
        shape: Shape.
        start: First byte in the file.
        stop: One past the last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@frozen(kw_only=True)
class Header:
    """What the header of a file says.

    Attributes:
        tensors: Tensors by name.
        num_bytes: Bytes before the first tensor.
        file_bytes: Bytes of the whole file.
        metadata: Texts by name.
        raw: The bytes of the header, length included.
    """

    tensors: Mapping[str, Stored]
    num_bytes: int
    file_bytes: int
    metadata: Mapping[str, str] = field(factory=dict)
    raw: bytes = field(default=b"", repr=False)


def encode_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]], *, metadata: Mapping[str, str] | None = None
) -> Header:
    """Plan a file: tensors lie behind each other in the given order.

    Args:
        tensors: ``(name, dtype, shape)`` of each; wider elements first, so that all are aligned.
        metadata: Texts for readers, such as ``{"format": "pt"}``.

    Returns:
        Where each tensor goes, with the bytes to be written first.
    """
    plain: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    position = 0
    for name, dtype, shape in tensors:
        num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        written = (
            {"dtype": "F64", "shape": [*shape, 2]} if dtype == "C128" else {"dtype": dtype, "shape": [*shape]}
        )
        plain[name] = {**written, "data_offsets": [position, position + num_bytes]}
        offsets[name] = (dtype, tuple(shape), position, position + num_bytes)
        position += num_bytes
    text = json.dumps(plain, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    raw = len(text).to_bytes(8, "little") + text
    found = {
        name: Stored(dtype=dtype, shape=shape, start=start + len(raw), stop=stop + len(raw))
        for name, (dtype, shape, start, stop) in offsets.items()
    }
    return Header(
        tensors=found,
        num_bytes=len(raw),
        file_bytes=len(raw) + position,
        metadata=dict(metadata or {}),
        raw=raw,
    )


def read_header(path: Path) -> Header:
    """Read and check the header of a file.

    Raises:
        CheckpointError: The file is missing, cut short, or no safetensors file; names it.
    """
    size, raw = _read_raw(path)
    return decode_header(path, raw, size)


def decode_header(path: Path, raw: bytes, size: int) -> Header:
    """Check the first bytes of a file.

    Args:
        path: The file, for messages.
        raw: Its first bytes: the length and the whole header.
        size: Bytes of the whole file.

    Raises:
        CheckpointError: They are no header, or that of a file of another size.
    """
    text = raw[8:]
    if not text or int.from_bytes(raw[:8], "little") != len(text):
        raise _refusal(path, f"its {size} bytes do not begin with the length of a header")
    try:
        plain = json.loads(text, object_pairs_hook=unique_names)
    except (ValueError, RecursionError) as err:
        raise _refusal(path, f"its header is no JSON ({err})") from err
    if not isinstance(plain, dict):
        raise _refusal(path, "its header is no mapping")
    metadata = plain.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _refusal(path, "its metadata is no mapping of texts")
    start = len(raw)
    tensors = {name: _stored(path, name, entry, start) for name, entry in plain.items()}
    end = start
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if stored.start != end:
            raise _refusal(path, f"tensor {name!r} begins at byte {stored.start}, expected {end}")
        end = stored.stop
    if end != size:
        raise CheckpointError(
            f"{path} has {size} bytes, its header describes {end}",
            hint="the file was cut short or appended to: restore it, or load an older checkpoint",
        )
    return Header(tensors=tensors, num_bytes=start, file_bytes=size, metadata=metadata, raw=raw)


def _read_raw(path: Path) -> tuple[int, bytes]:
    """Return the size of a file and its header, length included; less when it has none."""
    try:
        if not path.is_file() and path.exists():  # opening a pipe could block
            raise _refusal(path, "it is no plain file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            text = file.read(length) if 2 <= length <= min(LARGEST_HEADER, size - 8) else b""
    except OSError as err:
        raise CheckpointError(
            f"cannot read {path}: {err.strerror or err}", hint="check that the file exists and is readable"
        ) from err
    return size, prefix + text


def _stored(path: Path, name: str, entry: Any, base: int) -> Stored:
    """Read one entry of a header."""
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        start, stop = entry["data_offsets"]
        fits = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
        fits = fits and stop - start == math.prod(shape) * ITEM_BYTES[dtype]
    except (KeyError, TypeError, ValueError) as err:
        raise _refusal(path, f"the entry of tensor {name!r} is {entry!r}") from err
    if not fits:
        raise _refusal(path, f"the entry of tensor {name!r} is {entry!r}, whose numbers do not agree")
    return Stored(dtype=dtype, shape=shape, start=start + base, stop=stop + base)


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a mapping of a JSON object, but refuse a name twice, which readers would understand differently.

    Raises:
        ValueError: A name appears twice.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _refusal(path: Path, why: str) -> CheckpointError:
    """Return the error for a file that is not what its name says."""
    return CheckpointError(
        f"{path} is no safetensors file: {why}",
        hint="it was damaged, or is of another kind under this name; pickled files are never read",
    )
