"""Directories: what interrupted saves leave is invisible, and nothing foreign is ever deleted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from colossal_core.checkpoint import MANIFEST_NAME, find_complete, read_manifest, resolve_checkpoint
from colossal_core.checkpoint.directory import (
    clear_save,
    data_file_name,
    missing_checkpoint,
    publish,
    retain,
    step_directory,
)
from colossal_core.errors import CheckpointError
from colossal_testkit.checkpoints import SampleTensor, write_checkpoint


def _save(root: Path, step: int, mark: str = "0123456789ab") -> Path:
    """Write a small checkpoint."""
    return write_checkpoint(root, {"model": {"w": SampleTensor.make((4,), seed=step)}}, step=step, mark=mark)


def _interrupt(root: Path, step: int, mark: str = "bbbbbbbbbbbb") -> Path:
    """Leave what a save that was killed before its manifest leaves."""
    directory = step_directory(root, step)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / data_file_name("model", 0, mark)).write_bytes(b"half a file")
    (directory / ".MANIFEST.json.4711.tmp").write_text("{", encoding="utf-8")
    return directory


def _names(directory: Path) -> set[str]:
    """Return what lies in a directory."""
    return {path.name for path in directory.iterdir()}


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    """By number and not by name; what an interrupted save has left does not exist."""
    for step in (9, 10, 100):
        _save(tmp_path, step)
    _interrupt(tmp_path, 200)
    (tmp_path / "step-0300").mkdir()
    (tmp_path / "step-0300" / MANIFEST_NAME).write_text("{}", encoding="utf-8")

    assert [step for step, _ in find_complete(tmp_path)] == [100, 10, 9]
    assert resolve_checkpoint(tmp_path) == tmp_path / "step-100"
    assert resolve_checkpoint(tmp_path / "step-9") == tmp_path / "step-9"
    assert resolve_checkpoint(tmp_path / "step-200") is None
    assert find_complete(tmp_path / "nowhere") == []


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    """A wrong path, a file, and interrupted saves are three different things."""
    _interrupt(tmp_path / "runs", 10)
    _interrupt(tmp_path / "runs", 9)
    (tmp_path / "file").write_text("", encoding="utf-8")

    texts = [missing_checkpoint(tmp_path / name).message for name in ("nowhere", "file", "runs")]

    assert "does not exist" in texts[0]
    assert "is no directory" in texts[1]
    assert "step-9, step-10 without manifest: interrupted saves" in texts[2]


def test_a_second_save_of_a_step_replaces_the_first_as_a_whole(tmp_path: Path) -> None:
    """Until the manifest is replaced, readers see the first; afterwards its files are gone."""
    directory = _save(tmp_path, 1)
    first = read_manifest(directory)
    _interrupt(tmp_path, 1, mark="cccccccccccc")

    seen = read_manifest(directory)
    _save(tmp_path, 1, mark="dddddddddddd")

    assert seen == first
    assert _names(directory) == {MANIFEST_NAME, data_file_name("model", 0, "dddddddddddd")}


def test_a_save_whose_file_was_taken_away_is_not_published(tmp_path: Path) -> None:
    """Two writers in one directory: the one that comes second learns that its files are gone."""
    directory = _save(tmp_path, 1)
    manifest = read_manifest(directory)
    path = directory / next(iter(manifest.files))
    (directory / MANIFEST_NAME).unlink()

    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match=r"bytes, .* were written") as longer:
        publish(directory, manifest)
    path.unlink()
    with pytest.raises(CheckpointError, match="is gone") as gone:
        publish(directory, manifest)

    assert path.name in longer.value.message
    assert "no other process" in gone.value.hint
    assert not (directory / MANIFEST_NAME).exists()


def test_publishing_into_a_vanished_directory_is_an_error_of_ours(tmp_path: Path) -> None:
    """Somebody has cleaned up."""
    directory = _save(tmp_path, 1)
    manifest = read_manifest(directory)
    shutil.rmtree(directory)

    with pytest.raises(CheckpointError, match="is gone"):
        publish(directory, manifest)
    clear_save(directory, "0123456789ab")


def test_retention_keeps_the_newest_and_clears_up(tmp_path: Path) -> None:
    """Older ones beyond `keep` go, and what interrupted saves before the newest have left."""
    for step in (1, 2, 3, 4):
        _save(tmp_path, step)
    _interrupt(tmp_path, 0)
    _interrupt(tmp_path, 5)

    deleted = retain(tmp_path, 2, 4)

    assert sorted(path.name for path in deleted) == ["step-1", "step-2"]
    assert _names(tmp_path) == {"step-3", "step-4", "step-5"}


def test_retention_never_takes_what_was_just_written(tmp_path: Path) -> None:
    """A run that went back to an older checkpoint has newer ones beside it, which do not count."""
    for step in (1, 2, 90, 100):
        _save(tmp_path, step)

    deleted = retain(tmp_path, 1, 2)
    kept = retain(tmp_path, None, 100)

    assert [path.name for path in deleted] == ["step-1"]
    assert kept == []
    assert [step for step, _ in find_complete(tmp_path)] == [100, 90, 2]


def test_foreign_files_and_links_are_left_alone(tmp_path: Path) -> None:
    """Also when a checkpoint around them goes."""
    root, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    linked = _save(elsewhere, 1)
    root.mkdir()
    (root / "step-1").symlink_to(linked)
    for step in (2, 3):
        _save(root, step)
    (root / "step-2" / "notes.txt").write_text("mine", encoding="utf-8")
    (root / "step-2" / "model.safetensors").write_bytes(b"mine")
    (root / "step-2" / "model-00000-0123456789ab.json").mkdir()
    (root / "readme.txt").write_text("mine", encoding="utf-8")

    deleted = retain(root, 1, 3)

    assert [path.name for path in deleted] == ["step-2"]
    assert _names(root / "step-2") == {"notes.txt", "model.safetensors", "model-00000-0123456789ab.json"}
    assert find_complete(elsewhere) == [(1, linked)]
    assert (root / "readme.txt").exists()


def test_what_cannot_be_deleted_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clearing up is best effort: it fails no save, and leaves no half checkpoint that looks complete."""
    for step in (1, 2):
        _save(tmp_path, step)
    before = _names(tmp_path / "step-1")

    def refuse(path: Path, **_options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        deleted = retain(tmp_path, 1, 2)
        _save(tmp_path, 2, mark="eeeeeeeeeeee")

    assert deleted == []
    assert _names(tmp_path / "step-1") == before
    assert read_manifest(tmp_path / "step-2").files.keys() == {data_file_name("model", 0, "eeeeeeeeeeee")}


def test_a_failed_save_takes_its_own_files_with_it(tmp_path: Path) -> None:
    """And the directory, unless something else is in it."""
    _interrupt(tmp_path, 1)
    (tmp_path / "step-1" / ".MANIFEST.json.4711.tmp").unlink()
    kept = _interrupt(tmp_path, 2)

    clear_save(tmp_path / "step-1", "bbbbbbbbbbbb")
    clear_save(kept, "ffffffffffff")

    assert _names(tmp_path) == {"step-2"}
    assert data_file_name("model", 0, "bbbbbbbbbbbb") in _names(kept)


def test_a_manifest_that_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    """A link leads out of the directory, a pipe would block, bytes are no text."""
    directory = _save(tmp_path, 1)
    path = directory / MANIFEST_NAME
    path.rename(tmp_path / "elsewhere.json")

    path.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match="symbolic link"):
        read_manifest(directory)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="no plain file"):
        read_manifest(directory)
    path.unlink()
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="cannot read"):
        read_manifest(directory)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot open"):
        read_manifest(directory)
