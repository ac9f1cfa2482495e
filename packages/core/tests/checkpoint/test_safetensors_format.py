"""The files: readable by the library of the same name, and refused when they are something else."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from colossal_core.checkpoint.safetensors_format import ITEM_BYTES, encode_header, read_header
from colossal_core.checkpoint.writing import write_tensors
from colossal_core.errors import CheckpointError


def _write(path: Path, header: Any, data: bytes = b"") -> Path:
    """Write a file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_the_library_reads_our_files(tmp_path: Path) -> None:
    """Every type that both know, with names in any script, 0-d and empty tensors."""
    path = tmp_path / "a.safetensors"
    given = {
        "großes.w": torch.randn(3, 5, dtype=torch.float64),
        "w": torch.randn(7),
        "scalar": torch.tensor(4, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "half": torch.randn(5).bfloat16(),
        "flag": torch.tensor([True, False, True]),
    }
    names = {torch.float64: "F64", torch.float32: "F32", torch.int64: "I64", torch.bfloat16: "BF16"}
    entries = [(name, names.get(value.dtype, "BOOL"), tuple(value.shape)) for name, value in given.items()]
    blocks = [[bytes(value.view(-1).view(torch.uint8).tolist())] for value in given.values()]

    write_tensors(path, entries, blocks)
    found = safetensors.torch.load_file(path)

    assert set(found) == set(given)
    assert all(torch.equal(found[name], value) for name, value in given.items())


def test_we_read_the_librarys_files(tmp_path: Path) -> None:
    """Header, positions and metadata."""
    pytest.importorskip("numpy")  # which the library writes tensors with
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"a": torch.arange(6).view(2, 3), "b": torch.ones(4)}, path, {"format": "pt"})

    header = read_header(path)

    assert header.metadata == {"format": "pt"}
    assert {name: (item.dtype, item.shape) for name, item in header.tensors.items()} == {
        "a": ("I64", (2, 3)),
        "b": ("F32", (4,)),
    }
    start, stop = header.tensors["a"].start, header.tensors["a"].stop
    assert path.read_bytes()[start:stop] == struct.pack("<6q", *range(6))


def test_a_planned_header_is_the_one_that_is_read(tmp_path: Path) -> None:
    """Complex128, which the format has no name for, lies as pairs of float64."""
    entries = [(dtype, dtype, (3, 2)) for dtype in sorted(ITEM_BYTES, key=lambda name: -ITEM_BYTES[name])]
    planned = encode_header(entries, metadata={"format": "pt"})
    path = tmp_path / "a.safetensors"
    path.write_bytes(planned.raw + bytes(planned.file_bytes - planned.num_bytes))

    found = read_header(path)

    assert found.raw == planned.raw
    assert len(planned.raw) % 8 == 0
    assert all(item.start % ITEM_BYTES[item.dtype] == 0 for item in found.tensors.values())
    assert (found.tensors["C128"].dtype, found.tensors["C128"].shape) == ("F64", (3, 2, 2))
    assert planned.tensors["C128"].dtype == "C128"


def test_a_pickle_under_the_name_of_a_file_is_not_run(tmp_path: Path) -> None:
    """Neither bare nor as torch writes it."""
    marker = tmp_path / "marker"
    bare, zipped = tmp_path / "bare.safetensors", tmp_path / "zipped.safetensors"
    bare.write_bytes(pickle.dumps(_Runs(str(marker))))
    buffer = io.BytesIO()
    torch.save({"w": _Runs(str(marker))}, buffer)
    zipped.write_bytes(buffer.getvalue())

    for path in (bare, zipped):
        with pytest.raises(CheckpointError, match=f"{path.name} is no safetensors file"):
            read_header(path)

    assert not marker.exists()


class _Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: str) -> None:
        """Remember which."""
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        """Ask whoever unpickles this to open a file for writing."""
        return open, (self.marker, "w")


_ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        (b"", b"", "do not begin"),
        (b"\xff\xfe" * 40, b"", "no JSON"),
        (b"[" * 40000, b"", "no JSON"),
        ([], b"", "no mapping"),
        ({"__metadata__": {"a": 1}}, b"", "metadata"),
        (b'{"a": 1, "a": 2}', b"", "twice"),
        ({"a": _ENTRY}, b"", "8 bytes|describes"),
        ({"a": _ENTRY}, bytes(9), "describes"),
        ({"a": _ENTRY, "b": _ENTRY}, bytes(8), "begins at byte"),
        ({"a": {**_ENTRY, "data_offsets": [1, 9]}}, bytes(9), "begins at byte"),
        ({"a": {**_ENTRY, "data_offsets": [8, 0]}}, bytes(8), "entry"),
        ({"a": {**_ENTRY, "data_offsets": [0, 4]}}, bytes(4), "do not agree"),
        ({"a": {**_ENTRY, "shape": [-1, -2]}}, bytes(8), "do not agree"),
        ({"a": {**_ENTRY, "shape": [2.0]}}, bytes(8), "do not agree"),
        ({"a": {**_ENTRY, "dtype": "F4"}}, bytes(8), "entry"),
        ({"a": {**_ENTRY, "dtype": ["F32"]}}, bytes(8), "entry"),
        ({"a": [1, 2]}, bytes(8), "entry"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(
    tmp_path: Path, header: Any, data: bytes, why: str
) -> None:
    """Nothing is interpreted before all of it has been checked."""
    path = _write(tmp_path / "a.safetensors", header, data)

    with pytest.raises(CheckpointError, match=why) as caught:
        read_header(path)

    assert "a.safetensors" in caught.value.message


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    """A pipe would block whoever opens it; a length beyond the file is no length."""
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "short.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")

    for name in ("pipe", "short", "missing"):
        with pytest.raises(CheckpointError, match=f"{name}.safetensors"):
            read_header(tmp_path / f"{name}.safetensors")
