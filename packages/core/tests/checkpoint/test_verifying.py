"""Each kind of damage is named by file and tensor, and found by whoever reads the damaged part."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from colossal_core.boxes import Box
from colossal_core.checkpoint import MANIFEST_NAME, BlockReader, Manifest, read_manifest
from colossal_core.checkpoint.verifying import Problem, _find_overlap, verify
from colossal_core.errors import CheckpointError
from colossal_testkit.checkpoints import SampleObject, SampleTensor, cut_at_random, write_checkpoint

pytestmark = pytest.mark.usefixtures("small_blocks")

_FIRST, _SECOND = (f"model-0000{rank}-0123456789ab.safetensors" for rank in (0, 1))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a checkpoint of two ranks: `w` is cut by rows, `b` lies behind its first half."""
    halves = [Box((0, 0), (5, 8)), Box((5, 0), (5, 8))]
    return write_checkpoint(
        tmp_path,
        {
            "model": {
                "w": SampleTensor.make((10, 8), boxes=halves, aliases=["tied"]),
                "b": SampleTensor.make((7,), dtype="BF16", seed=1),
            },
            "optimizer": SampleObject(
                kind="optimizer", tensors={"w.exp_avg": SampleTensor.make((3,), dtype="C128")}
            ),
        },
        num_ranks=2,
    )


def _publish(directory: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Write the manifest anew, as a faulty writer might."""
    manifest = change(read_manifest(directory))
    (directory / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")


def _load(directory: Path) -> None:
    """Read everything as a loader does."""
    manifest = read_manifest(directory)
    with BlockReader(directory, manifest) as reader:
        for record in manifest.objects.values():
            for name, tensor in record.tensors.items():
                for _ in reader.read_all(name, tensor):
                    pass


def _errors(directory: Path) -> list[tuple[str, str]]:
    """Return file and tensor of each error."""
    return [(found.file, found.tensor) for found in verify(directory) if found.severity == "error"]


def test_a_sound_checkpoint_has_no_problems(directory: Path) -> None:
    """Every type and layout that the builder can write."""
    tensors = {
        str(seed): SampleTensor.make(
            (4, 3, 5), dtype=dtype, seed=seed, boxes=cut_at_random((4, 3, 5), 9, seed)
        )
        for seed, dtype in enumerate(("F64", "C128", "F32", "BF16", "F8_E4M3", "BOOL"))
    }
    random = write_checkpoint(directory.parent, {"model": tensors}, num_ranks=3, step=2)

    assert verify(directory) == ()
    assert verify(random) == ()


def test_a_flipped_byte_is_named_with_its_tensor(directory: Path) -> None:
    """Anywhere in a file: in the header it is the file that is named, behind it the tensor too."""
    path = directory / _SECOND
    raw = path.read_bytes()
    header_bytes = read_manifest(directory).files[_SECOND].header_bytes

    for position in range(0, len(raw), 5):
        changed = bytearray(raw)
        changed[position] ^= 0x10
        path.write_bytes(changed)

        found = _errors(directory)

        tensor = "" if position < header_bytes else "model: w"
        assert found == [(_SECOND, tensor)]
        with pytest.raises(CheckpointError, match=_SECOND):
            _load(directory)


def test_what_is_cut_short_missing_or_longer_is_named(directory: Path) -> None:
    """By verify all at once, by a loader the first that it needs."""
    path, moved, spare = directory / _FIRST, directory.parent / "moved", directory.parent / "spare"
    raw = path.read_bytes()
    replacements: list[Callable[[], object]] = [
        lambda: path.write_bytes(raw[:-3]),
        lambda: path.write_bytes(raw + b"more"),
        lambda: path.write_bytes(b""),
        lambda: None,
        path.mkdir,
        lambda: os.mkfifo(path),
        lambda: path.symlink_to(moved),
    ]
    for replace in replacements:
        shutil.copytree(directory, spare)
        path.rename(moved)
        replace()

        problems = verify(directory)

        assert {found.file for found in problems} == {_FIRST}
        with pytest.raises(CheckpointError, match=_FIRST):
            _load(directory)
        shutil.rmtree(directory)
        spare.rename(directory)


def test_a_file_that_is_cut_while_it_is_open_is_named(directory: Path) -> None:
    """A reader that has checked the size already meets the end of the file."""
    manifest = read_manifest(directory)
    with BlockReader(directory, manifest) as reader:
        reader.open(_FIRST)
        os.truncate(directory / _FIRST, manifest.files[_FIRST].num_bytes - 100)

        with pytest.raises(CheckpointError, match=rf"{_FIRST} ends at byte .* 'w'"):
            [*reader.read_all("w", manifest.objects["model"].tensors["w"])]


def test_a_pickle_is_never_run(directory: Path) -> None:
    """Neither as a file of tensors nor as the manifest."""
    marker = directory.parent / "marker"
    code = pickle.dumps(_Runs(str(marker)))
    (directory / _FIRST).write_bytes(code)

    assert verify(directory)[0].file == _FIRST
    with pytest.raises(CheckpointError, match=_FIRST):
        _load(directory)
    (directory / MANIFEST_NAME).write_bytes(code)
    assert verify(directory)[0].file == MANIFEST_NAME
    with pytest.raises(CheckpointError, match=MANIFEST_NAME):
        _load(directory)
    assert not marker.exists()


class _Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: str) -> None:
        """Remember which."""
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        """Ask whoever unpickles this to open a file for writing."""
        return open, (self.marker, "w")


def _evolve_w(manifest: Manifest, **changes: Any) -> Manifest:
    """Change the record of `w`."""
    model = manifest.objects["model"]
    tensors = {**model.tensors, "w": attrs.evolve(model.tensors["w"], **changes)}
    return attrs.evolve(manifest, objects={**manifest.objects, "model": attrs.evolve(model, tensors=tensors)})


def test_headers_and_manifest_have_to_agree(directory: Path) -> None:
    """A piece that lies somewhere else in its file, one of another type, one that the manifest leaves out."""
    original = read_manifest(directory)
    w = original.objects["model"].tensors["w"]

    _publish(directory, lambda manifest: _evolve_w(manifest, dtype="I32"))
    other_type = verify(directory)
    shifted = tuple(attrs.evolve(piece, start=piece.start + 4) for piece in w.pieces[:1])
    _publish(directory, lambda _: _evolve_w(original, pieces=(*shifted, *w.pieces[1:])))
    moved = verify(directory)
    only_b = attrs.evolve(original.objects["model"], tensors={"b": original.objects["model"].tensors["b"]})
    _publish(directory, lambda _: attrs.evolve(original, objects={**original.objects, "model": only_b}))
    unknown = verify(directory)

    assert [(found.file, found.tensor) for found in other_type] == [
        (_FIRST, "model: w"),
        (_SECOND, "model: w"),
    ]
    assert "it is F32 as" in other_type[0].message
    assert "I32 in the manifest" in other_type[0].message
    assert "are no tensor in the header of the file" in moved[0].message
    assert moved[0].tensor == "model: w"
    assert "belong to another tensor, too" in moved[1].message
    assert moved[1].tensor == "model: b"
    assert [found.file for found in unknown] == [_FIRST, _SECOND]
    assert "unknown to the manifest" in unknown[0].message


def test_pieces_cover_each_element_once(directory: Path) -> None:
    """As many elements as the tensor are not enough."""
    pieces = read_manifest(directory).objects["model"].tensors["w"].pieces
    twice = tuple(attrs.evolve(piece, box=Box((2, 0), (5, 8))) for piece in pieces)

    _publish(directory, lambda manifest: _evolve_w(manifest, pieces=twice))
    problems = verify(directory)

    assert [found.tensor for found in problems] == ["model: w"]
    assert "stored twice" in problems[0].message
    assert _FIRST in problems[0].message


def test_a_name_means_one_tensor(directory: Path) -> None:
    """An alias that is another tensor's name would be loaded from either."""
    _publish(directory, lambda manifest: _evolve_w(manifest, aliases=("b", "x", "x")))

    assert [found.tensor for found in verify(directory)] == ["model: w", "model: w"]


def test_foreign_files_are_notes(directory: Path) -> None:
    """They do no harm; what an interrupted save has left is told apart."""
    (directory / "notes.txt").write_text("mine", encoding="utf-8")
    (directory / "model-00000-bbbbbbbbbbbb.safetensors").write_bytes(b"half")

    problems = verify(directory)

    assert [(found.severity, found.file) for found in problems] == [
        ("note", "model-00000-bbbbbbbbbbbb.safetensors"),
        ("note", "notes.txt"),
    ]
    assert "interrupted save" in problems[0].message


def test_a_missing_manifest_is_the_one_problem(tmp_path: Path) -> None:
    """Nothing else can be said."""
    (problem,) = verify(tmp_path)

    assert isinstance(problem, Problem)
    assert (problem.severity, problem.file) == ("error", MANIFEST_NAME)


def test_overlaps_among_many_boxes_are_found_quickly() -> None:
    """Cuts of any kind, with and without one box too many; tens of thousands of boxes in a moment."""
    for seed in range(60):
        boxes = [*cut_at_random((6, 5, 4), 12, seed)]
        extra = Box((seed % 6, seed % 5, seed % 4), (1, 1, 1))

        assert _find_overlap(boxes) is None
        found = _find_overlap([*boxes, extra])
        assert found is not None
        assert len(boxes) in found

    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1))]
    assert _find_overlap([*pinwheel, Box((1, 1), (1, 1))]) is None
    assert _find_overlap([Box((), ()), Box((), ())]) == (0, 1)
    began = time.monotonic()
    assert _find_overlap([Box((row, column), (1, 1)) for row in range(150) for column in range(150)]) is None
    assert time.monotonic() - began < 10
