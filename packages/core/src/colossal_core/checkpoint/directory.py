"""Directories of checkpoints: finding what is complete, publishing, and clearing up.

The one idea: files of a save carry a mark of that save in their names, and the manifest is replaced as a whole when
everything else is on the disk. Whatever interrupts a save, readers see the checkpoint that was there before.
"""

from __future__ import annotations

import re
from pathlib import Path

from colossal_core.checkpoint.manifest import Manifest
from colossal_core.checkpoint.writing import write_text
from colossal_core.errors import CheckpointError

__all__ = [
    "MANIFEST_NAME",
    "data_file_name",
    "find_complete",
    "publish",
    "read_manifest",
    "resolve_checkpoint",
    "retain",
    "step_directory",
]

MANIFEST_NAME = "MANIFEST.json"

_STEP = re.compile(r"step-(\d+)")
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


def find_complete(root: Path) -> list[tuple[int, Path]]:
    """Return the complete checkpoints under a directory, ``(step, directory)``, newest first."""
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        match = _STEP.fullmatch(path.name)
        if match and (path / MANIFEST_NAME).is_file():
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)


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
        incomplete = sorted(entry.name for entry in path.iterdir() if _STEP.fullmatch(entry.name))
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
    try:
        text = path.read_text(encoding="utf-8")
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
        size = path.stat().st_size if path.is_file() else None
        if size != record.num_bytes:
            found = "is gone" if size is None else f"has {size} bytes, {record.num_bytes} were written"
            raise CheckpointError(
                f"{path} {found} before the checkpoint was complete",
                hint="let no other process clear up in this directory, and save again",
            )
    write_text(directory / MANIFEST_NAME, manifest.to_json())
    _clear(directory, keep={MANIFEST_NAME, *manifest.files})


def retain(root: Path, keep: int | None, newest: int) -> list[Path]:
    """Delete older checkpoints, and what interrupted saves have left.

    Only files with names that a save writes are deleted; a directory that holds others stays.

    Args:
        root: Directory of checkpoints.
        keep: How many complete ones to keep; None for all.
        newest: Step of the one that was just published.

    Returns:
        Directories of complete checkpoints that were deleted.
    """
    complete = find_complete(root)
    surplus = [path for _, path in complete[keep:]] if keep is not None else []
    for path in surplus:
        (path / MANIFEST_NAME).unlink(missing_ok=True)  # first: from here on it does not exist for readers
        _clear(path, keep=set())
    kept = {path for _, path in complete} - set(surplus)
    for path in root.iterdir():
        match = _STEP.fullmatch(path.name)
        if match and int(match[1]) < newest and path not in kept:
            _clear(path, keep=set())
    return surplus


def clear_save(directory: Path, mark: str) -> None:
    """Delete what a failed save has written; a directory that was made for it goes too."""
    for path in directory.glob(f"*-{mark}.*"):
        path.unlink(missing_ok=True)
    if not (directory / MANIFEST_NAME).exists():
        _remove_if_empty(directory)


def _clear(directory: Path, keep: set[str]) -> None:
    """Delete the files of saves but for some, and the directory when nothing is left in it."""
    for path in list(directory.iterdir()):
        if path.name not in keep and _OURS.fullmatch(path.name):
            path.unlink(missing_ok=True)
    if not keep:
        _remove_if_empty(directory)


def _remove_if_empty(directory: Path) -> None:
    """Delete a directory that holds nothing."""
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()
