"""Directories of checkpoints: finding what is complete, publishing, and clearing up.

The one idea: files of a save carry a mark of that save in their names, and the manifest is replaced as a
whole when everything else is on the disk. Whatever interrupts a save, readers see the checkpoint that was
there before. Only files with names that a save writes are ever deleted, and clearing up is best effort: a
file that cannot be deleted stays, and fails no save.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from colossal_core.checkpoint.manifest import Manifest
from colossal_core.checkpoint.reading import open_plain
from colossal_core.checkpoint.writing import sync_directory, write_text
from colossal_core.errors import CheckpointError

__all__ = [
    "MANIFEST_NAME",
    "clear_save",
    "data_file_name",
    "find_complete",
    "is_file_of_save",
    "list_files",
    "missing_checkpoint",
    "publish",
    "read_manifest",
    "resolve_checkpoint",
    "retain",
    "step_directory",
]

MANIFEST_NAME = "MANIFEST.json"

_STEP = re.compile(r"step-(0|[1-9]\d*)")
_OURS = re.compile(r".+-\d{5}-[0-9a-f]{12}\.(safetensors|json)|\.?MANIFEST\.json(\.\d+\.tmp)?")
"""Names of files that a save writes, temporary ones included."""


def step_directory(root: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies."""
    return root / f"step-{step}"


def data_file_name(name: str, rank: int, mark: str, suffix: str = "safetensors") -> str:
    """Return the name of a file that one rank writes.

    Args:
        name: What it holds, ``"model"`` for example.
        rank: The rank.
        mark: Twelve hexadecimal digits that no other save has.
        suffix: ``"safetensors"`` or ``"json"``.
    """
    return f"{name}-{rank:05}-{mark}.{suffix}"


def is_file_of_save(name: str) -> bool:
    """Say whether a name is one that a save gives to its files, temporary ones included."""
    return _OURS.fullmatch(name) is not None


def find_complete(root: Path) -> list[tuple[int, Path]]:
    """Return the complete checkpoints under a directory, ``(step, directory)``, newest first."""
    return [(step, path) for step, path in _list_steps(root) if (path / MANIFEST_NAME).is_file()]


def _list_steps(root: Path) -> list[tuple[int, Path]]:
    """Return the directories of steps, complete or not, newest first; none where there is no directory."""
    names: list[Path] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names.extend(root.iterdir())
    matches = ((_STEP.fullmatch(path.name), path) for path in names)
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def resolve_checkpoint(path: Path) -> Path | None:
    """Return the directory of one checkpoint: the given one, or the newest complete one below it, or None."""
    if (path / MANIFEST_NAME).is_file():
        return path
    complete = find_complete(path)
    return complete[0][1] if complete else None


def missing_checkpoint(path: Path) -> CheckpointError:
    """Return the error for a directory in which there is no complete checkpoint."""
    if not path.exists():
        what = "does not exist"
    elif not path.is_dir():
        what = "is no directory"
    else:
        incomplete = [entry.name for _, entry in reversed(_list_steps(path))]
        what = "holds no complete checkpoint" + (
            f" ({', '.join(incomplete)} without manifest: interrupted saves)" if incomplete else ""
        )
    return CheckpointError(
        f"{path} {what}", hint="pass the directory that save() was given, or one of its step-N directories"
    )


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of one checkpoint.

    Raises:
        CheckpointError: It is missing, damaged, or of another version.
    """
    path = directory / MANIFEST_NAME
    handle = open_plain(path)
    try:
        with os.fdopen(handle, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as err:
        raise CheckpointError(
            f"cannot read {path}: {err}", hint="load an older checkpoint, or restore this one"
        ) from err
    return Manifest.from_json(text, str(path))


def publish(directory: Path, manifest: Manifest) -> None:
    """Make a checkpoint visible: its manifest is written last, and replaces an older one as a whole.

    Raises:
        CheckpointError: A file that it names has vanished or has another size, or the disk refuses.
    """
    for name, record in manifest.files.items():
        path = directory / name
        size: int | None = None
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            size = path.lstat().st_size
        if size != record.num_bytes:
            found = "is gone" if size is None else f"has {size} bytes, {record.num_bytes} were written"
            raise CheckpointError(
                f"{path} {found} before the checkpoint was complete",
                hint="let no other process clear up in this directory, and save again",
            )
    write_text(directory / MANIFEST_NAME, manifest.to_json())
    with contextlib.suppress(OSError):  # the manifest is there; its directory may belong to someone else
        sync_directory(directory.parent)
    _clear(directory, keep={MANIFEST_NAME, *manifest.files})


def retain(root: Path, keep: int | None, newest: int) -> list[Path]:
    """Delete older checkpoints, and what interrupted saves have left.

    The checkpoint of ``newest`` is never deleted. Complete ones of later steps, which are there when a run
    has gone back to an older checkpoint, do not count and stay. Only files with names that a save writes are
    deleted; a directory that holds others stays, and so does one that is a link.

    Args:
        root: Directory of checkpoints.
        keep: How many complete ones to keep, the newest included; None for all.
        newest: Step of the one that was just published.

    Returns:
        Directories of complete checkpoints that were deleted.
    """
    deleted = []
    older = [(step, path) for step, path in _list_steps(root) if step < newest and not path.is_symlink()]
    complete = [path for _, path in older if (path / MANIFEST_NAME).is_file()]
    surplus = complete[max(keep - 1, 0) :] if keep is not None else []
    for _, path in older:
        if path in surplus and _delete(path / MANIFEST_NAME):
            # From here on it does not exist for readers.
            deleted.append(path)
            _clear(path, keep=set())
        elif path not in complete:
            _clear(path, keep=set())
    return deleted


def clear_save(directory: Path, mark: str) -> None:
    """Delete what a failed save has written; a directory that was made for it goes too."""
    for path in list_files(directory):
        if _OURS.fullmatch(path.name) and f"-{mark}." in path.name:
            _delete(path)
    if not (directory / MANIFEST_NAME).exists():
        _remove_if_empty(directory)


def _clear(directory: Path, keep: set[str]) -> None:
    """Delete the files of saves but for some, and the directory when nothing is left in it."""
    for path in list_files(directory):
        if path.name not in keep and _OURS.fullmatch(path.name):
            _delete(path)
    if not keep:
        _remove_if_empty(directory)


def list_files(directory: Path) -> list[Path]:
    """Return what lies in a directory; nothing when it has vanished or cannot be read."""
    with contextlib.suppress(OSError):
        return [*directory.iterdir()]
    return []


def _delete(path: Path) -> bool:
    """Delete a file; False when the system refuses. One that has vanished counts as deleted."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        return True
    return False


def _remove_if_empty(directory: Path) -> None:
    """Delete a directory that holds nothing; the system refuses for any other, and for a link."""
    with contextlib.suppress(OSError):
        directory.rmdir()
