"""Writing one safetensors file of a checkpoint: streamed, with checksums, on the disk when it returns."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from colossal_core.checkpoint.manifest import BLOCK_BYTES, FileRecord
from colossal_core.checkpoint.safetensors_format import encode_header
from colossal_core.errors import CheckpointError

__all__ = ["Buffer", "sync_directory", "write_all", "write_tensors", "write_text"]

Buffer = bytes | bytearray | memoryview

Span = tuple[int, tuple[int, ...]]
"""First byte of a tensor in its file, and the checksum of each block."""


def write_tensors(
    path: Path, entries: Sequence[tuple[str, str, Sequence[int]]], contents: Iterable[Iterable[Buffer]]
) -> tuple[FileRecord, list[Span]]:
    """Write a new file.

    Args:
        path: The file; it must not exist yet.
        entries: ``(name, dtype, shape)`` of each tensor, in the order in which they lie.
        contents: For each of them its bytes, in blocks of :data:`BLOCK_BYTES` but for the last.

    Returns:
        What the manifest says of the file, and of each tensor in it.

    Raises:
        CheckpointError: The disk is full, or refuses otherwise; what was written of the file is removed.
    """
    header = encode_header(entries, metadata={"format": "pt"})
    spans: list[Span] = []
    name = "the header"
    try:
        file = io.FileIO(path, "xb")
    except OSError as err:
        raise _refusal(path, f"cannot create {path}", err) from err
    try:
        with file:
            write_all(file.fileno(), header.raw)
            for (name, _, _), blocks in zip(entries, contents, strict=True):
                spans.append((header.tensors[name].start, _write_blocks(file.fileno(), blocks)))
                assert file.tell() == header.tensors[name].stop, f"{name!r} has other bytes than planned"
            os.fsync(file.fileno())
    except BaseException as err:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        if isinstance(err, OSError):
            what = f"cannot write {name!r} to {path}, which has {header.file_bytes} bytes when complete"
            raise _refusal(path, what, err) from err
        raise
    record = FileRecord(
        num_bytes=header.file_bytes, header_bytes=header.num_bytes, checksum=zlib.crc32(header.raw)
    )
    return record, spans


def _write_blocks(handle: int, blocks: Iterable[Buffer]) -> tuple[int, ...]:
    """Write the blocks of a tensor and return their checksums."""
    checksums = []
    for block in blocks:
        checksums.append(zlib.crc32(block))
        write_all(handle, block)
    return tuple(checksums)


def _refusal(path: Path, what: str, error: OSError) -> CheckpointError:
    """Return the error for what the system refuses."""
    where = path.parent
    if error.errno == errno.ENOENT and not where.is_dir():
        return CheckpointError(
            f"{what}: its directory {where} has vanished",
            hint="let no other process clear up in this directory, and save again",
        )
    return CheckpointError(
        f"{what}: {error.strerror or error}",
        hint="free space or choose another directory; earlier checkpoints are as they were",
    )


def write_text(path: Path, text: str) -> None:
    """Write or replace a small file so that readers see the old or the new text, never a part.

    Raises:
        CheckpointError: The disk refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as err:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _refusal(path, f"cannot write {path}", err) from err


def sync_directory(path: Path) -> None:
    """Let new names in a directory survive a power failure, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as err:
        # Some file systems on a network have nothing to do here and say so.
        if err.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EBADF}:
            raise
    finally:
        os.close(handle)


def write_all(handle: int, data: Buffer) -> None:
    """Write all bytes; one call of the system may write fewer."""
    view = memoryview(data)
    view = view.cast("B") if view.nbytes else view[:0]  # an empty view of several dims has no cast
    while view:
        view = view[os.write(handle, view[: 64 * BLOCK_BYTES]) :]
