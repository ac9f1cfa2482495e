"""The manifest: what is written is read, and what does not hold together is refused."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colossal_core.boxes import Box
from colossal_core.checkpoint import MANIFEST_NAME, Manifest, read_manifest
from colossal_core.errors import CheckpointError
from colossal_testkit.checkpoints import SampleObject, SampleTensor, write_checkpoint

_ROWS = [Box((0, 0), (1, 3)), Box((1, 0), (1, 3))]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a checkpoint with a cut, a tied and an empty tensor."""
    tensors = {
        "z.w": SampleTensor.make((2, 3), boxes=_ROWS, aliases=["head.w"]),
        "a": SampleTensor.make((), dtype="I64"),
        "empty": SampleTensor.make((0, 4)),
    }
    return write_checkpoint(
        tmp_path,
        {"model": SampleObject(tensors=tensors, details={"class": "Net"})},
        num_ranks=2,
        step=7,
        epoch=1,
        samples=70,
        run={"schedulers": []},
        extra={"note": "é"},
        plan={"world_size": 2},
        versions={"python": "3.11"},
        created="2026-01-01T00:00:00+00:00",
        configurations={"model": {"config.json": "{}"}},
    )


def _change(directory: Path, change: Callable[[Any], object]) -> None:
    """Change the content of a manifest by hand, with a checksum that fits."""
    path = directory / MANIFEST_NAME
    outer = json.loads(path.read_text(encoding="utf-8"))
    change(outer["body"])
    text = json.dumps(outer["body"], separators=(",", ":"), sort_keys=True)
    outer["checksum"] = zlib.crc32(text.encode())
    path.write_text(json.dumps(outer), encoding="utf-8")


def test_what_is_written_is_read(directory: Path) -> None:
    """Every attribute, with tensors in the order of the serial object."""
    text = (directory / MANIFEST_NAME).read_text(encoding="utf-8")

    manifest = read_manifest(directory)

    assert manifest.to_json() == text
    assert Manifest.from_json(text, "here") == manifest
    assert [*manifest.objects["model"].tensors] == ["z.w", "a", "empty"]
    assert (manifest.step, manifest.epoch, manifest.samples) == (7, 1, 70)
    assert manifest.objects["model"].tensors["z.w"].aliases == ("head.w",)
    assert manifest.objects["model"].tensors["empty"].pieces == ()


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".hidden", "", "a\\b", "a\0b"])
def test_a_name_that_leaves_the_directory_is_refused(directory: Path, name: str) -> None:
    """Of files of tensors and of configurations alike."""
    (directory.parent / "x").write_bytes(b"secret")

    def point_outside(body: Any) -> None:
        old = next(iter(body["files"]))
        body["files"][name] = body["files"].pop(old)
        for piece in body["objects"]["model"]["tensors"]["z.w"]["pieces"]:
            piece[0] = name if piece[0] == old else piece[0]

    def write_outside(body: Any) -> None:
        body["configurations"]["model"][name] = "text"

    text = (directory / MANIFEST_NAME).read_text(encoding="utf-8")
    for change in (point_outside, write_outside):
        (directory / MANIFEST_NAME).write_text(text, encoding="utf-8")
        _change(directory, change)

        with pytest.raises(CheckpointError, match="no plain name inside the directory") as caught:
            read_manifest(directory)

        assert MANIFEST_NAME in caught.value.message


def _tensor(body: Any) -> Any:
    """Return the cut tensor."""
    return body["objects"]["model"]["tensors"]["z.w"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda body: _tensor(body)["pieces"][0].__setitem__(1, 10**9), "lies at bytes"),
        (lambda body: _tensor(body)["pieces"][0].__setitem__(1, 0), "lies at bytes"),
        (lambda body: _tensor(body)["pieces"][0].__setitem__(2, [5, 0]), "not inside its shape"),
        (lambda body: _tensor(body)["pieces"][0].__setitem__(2, [0]), "not inside its shape"),
        (lambda body: _tensor(body)["pieces"][0].__setitem__(3, [1, 0]), "not inside its shape"),
        (lambda body: _tensor(body)["pieces"][0].__setitem__(3, [1, 2]), "elements"),
        (lambda body: _tensor(body)["pieces"][0].__setitem__(4, []), "checksums"),
        (lambda body: _tensor(body)["pieces"][0].__setitem__(0, "other.safetensors"), "no file of"),
        (lambda body: _tensor(body)["pieces"].pop(), "another number"),
        (lambda body: _tensor(body).update(dtype="F7"), "F7"),
        (lambda body: _tensor(body).update(shape=[2, -3]), "-3"),
        (lambda body: _tensor(body).update(aliases=[1]), "text"),
        (lambda body: body["objects"]["model"]["order"].pop(), "order"),
        (lambda body: body["objects"]["model"].update(kind="code"), "code"),
        (lambda body: body.update(step=True), "True"),
        (lambda body: body.update(objects=[]), "mapping"),
        (lambda body: body.pop("run"), "run"),
        (lambda body: body.update(files={"a.json": [1]}), "IndexError"),
    ],
)
def test_a_manifest_that_does_not_hold_together_is_refused(
    directory: Path, change: Callable[[Any], object], why: str
) -> None:
    """Before a byte is read where it says."""
    _change(directory, change)

    with pytest.raises(CheckpointError, match=why) as caught:
        read_manifest(directory)

    assert MANIFEST_NAME in caught.value.message


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"step":7', '"step":8', "checksum"),
        ('"format":"colossal-checkpoint"', '"format":"other"', "format"),
        ('"version":1', '"version":2', "version 2, this version of colossal-core reads 1"),
        ('{"format"', '{{"format"', "no manifest"),
        ('"step":7', '"step":NaN', "no manifest"),
        ('"step":7', '"step":7,"step":7', "twice"),
    ],
)
def test_a_changed_text_is_noticed(directory: Path, old: str, new: str, why: str) -> None:
    """One digit is enough; a newer version says so instead of being misread."""
    path = directory / MANIFEST_NAME
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")

    with pytest.raises(CheckpointError, match=why):
        read_manifest(directory)


def test_every_flipped_bit_of_a_manifest_is_noticed_or_changes_nothing(directory: Path) -> None:
    """A checksum over one canonical text leaves nothing out but the space around it."""
    path = directory / MANIFEST_NAME
    raw, manifest = path.read_bytes(), read_manifest(directory)

    missed = []
    for position in range(0, len(raw), 3):
        changed = bytearray(raw)
        changed[position] ^= 1 << position % 8
        try:
            found = Manifest.from_json(changed.decode(), "here")
        except (CheckpointError, UnicodeDecodeError):
            continue
        missed.extend([] if found == manifest else [position])

    assert missed == []
