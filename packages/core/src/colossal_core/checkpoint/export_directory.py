"""Directories that ``from_pretrained`` reads: planned, filled under hidden names, then put in place at once.

The one idea: every file of an export says in its header that it is one, and which files without a header lie
beside it. So an export knows an earlier one and replaces it. What others save beside weights (tokenizers,
processors, a model card) stays where it is; everything else in a directory is foreign: the export is refused.

Whoever exports calls, in this order: :func:`check_target`, :func:`plan_export`, then for each shard
:func:`write_shard` (one process has all bytes) or :func:`create_shard` (several write at the offsets of
``shard.header``), then :func:`publish_export`; and :func:`clear_export` when something failed.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from colossal_core.checkpoint.safetensors_format import ITEM_BYTES, LARGEST_HEADER, Header, encode_header
from colossal_core.checkpoint.writing import Buffer, sync_directory, write_all
from colossal_core.errors import CheckpointError, UsageError

__all__ = [
    "INDEX_NAME",
    "MAX_SHARD_BYTES",
    "ExportPlan",
    "Shard",
    "TensorSpec",
    "check_target",
    "clear_export",
    "create_shard",
    "plan_export",
    "plan_shards",
    "publish_export",
    "temporary_path",
    "write_shard",
]

INDEX_NAME = "model.safetensors.index.json"
"""Name of the file that says which tensor lies in which shard."""

MAX_SHARD_BYTES = 5_000_000_000
"""Bytes of tensors in one file, unless told otherwise: the largest that the hub takes without extra tools."""

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_TEMPORARY = re.compile(r"\.(?P<file>.+)\.[0-9a-f]{12}\.tmp")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_COMPANION = re.compile(
    r"README\.md|LICENSE(\..+)?|\.gitattributes|added_tokens\.json|chat_template\.(jinja|json)|merges\.txt"
    r"|(preprocessor|processor|video_preprocessor)_config\.json|special_tokens_map\.json"
    r"|(sentencepiece\.bpe|source|spiece|target|tokenizer)\.model|tokenizer(_config)?\.json|vocab\.(json|txt)"
)
"""Files that transformers' tokenizers and processors, and the hub, keep in a directory of weights."""

_SIGN = "colossal_export"
"""Key in the metadata of a file that an export has written; its value lists the files without metadata."""


@frozen(kw_only=True)
class TensorSpec:
    """One tensor as it is to be stored.

    Attributes:
        name: Its name in the file.
        dtype: Name of the element type as in safetensors files.
        shape: Shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@frozen(kw_only=True)
class Shard:
    """One file of an export.

    Attributes:
        file: Its name.
        header: Where each tensor lies, in the order in which they lie, and the bytes before the first.
    """

    file: str
    header: Header


@frozen(kw_only=True)
class ExportPlan:
    """All files of an export.

    Attributes:
        shards: Files of tensors.
        texts: Other files by name: the index, where there is more than one shard, and configurations.
    """

    shards: tuple[Shard, ...]
    texts: Mapping[str, str] = field(factory=dict)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all files, the one that makes the export complete last."""
        shards = tuple(shard.file for shard in self.shards)
        return (*(name for name in self.texts if name != INDEX_NAME), *shards) + (
            (INDEX_NAME,) if INDEX_NAME in self.texts else ()
        )


def plan_shards(specs: Sequence[TensorSpec], max_bytes: int) -> tuple[tuple[TensorSpec, ...], ...]:
    """Divide tensors among files: in order, a new file when the next tensor would not fit any more.

    Args:
        specs: The tensors, each under its one name.
        max_bytes: Bytes of tensors in one file; a larger tensor has a file of its own.

    Returns:
        The tensors of each file, at least one file; wider elements first, so that all are aligned.

    Raises:
        UsageError: ``max_bytes`` is below 1.
    """
    if max_bytes < 1:
        raise UsageError(f"max_bytes={max_bytes!r} leaves no room for a tensor", hint="give at least 1 byte")
    shards: list[list[TensorSpec]] = [[]]
    used = 0
    for spec in specs:
        if shards[-1] and used + spec.num_bytes > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(spec)
        used += spec.num_bytes
    return tuple(
        tuple(sorted(shard, key=lambda spec: ITEM_BYTES[spec.dtype], reverse=True)) for shard in shards
    )


def plan_export(
    specs: Sequence[TensorSpec],
    *,
    max_bytes: int = MAX_SHARD_BYTES,
    configurations: Mapping[str, str] | None = None,
) -> ExportPlan:
    """Plan all files of an export; the same on every rank that is given the same.

    Args:
        specs: The tensors; of tied ones only the first name.
        max_bytes: Bytes of tensors in one file.
        configurations: Texts of files that lie beside, such as ``config.json``, by name.

    Raises:
        UsageError: A tensor has a type that these files have no name for, or a configuration has a name that
            leaves the directory or is that of a file of weights.
    """
    beside = dict(configurations or {})
    for name in beside:
        if not _PLAIN_NAME.fullmatch(name) or _WEIGHTS.fullmatch(name) or name == INDEX_NAME:
            raise UsageError(f"a configuration cannot be exported under the name {name!r}")
    for spec in specs:
        if spec.dtype == "C128":
            raise UsageError(
                f"{spec.name!r} has elements of type complex128, which safetensors files have no name for",
                hint="convert it to complex64 before the export",
            )
    divided = plan_shards(specs, max_bytes)
    metadata = {"format": "pt", _SIGN: json.dumps(sorted(beside))}
    shards = []
    for number, part in enumerate(divided, start=1):
        many = f"model-{number:05}-of-{len(divided):05}.safetensors"
        header = encode_header(((spec.name, spec.dtype, spec.shape) for spec in part), metadata=metadata)
        shards.append(Shard(file=many if len(divided) > 1 else "model.safetensors", header=header))
    texts = beside
    if len(shards) > 1:
        where = {name: shard.file for shard in shards for name in shard.header.tensors}
        index = {
            "metadata": {
                "total_size": sum(spec.num_bytes for spec in specs),
                "total_parameters": sum(math.prod(spec.shape) for spec in specs),
                _SIGN: metadata[_SIGN],
            },
            "weight_map": {name: where[name] for name in sorted(where)},
        }
        texts = {**beside, INDEX_NAME: json.dumps(index, indent=2) + "\n"}
    return ExportPlan(shards=tuple(shards), texts=texts)


def check_target(directory: Path) -> frozenset[str]:
    """Refuse a directory that holds anything but an earlier export; one rank calls it, before it writes.

    A missing or empty directory is fine.

    Returns:
        Names of the files in it: what earlier and interrupted exports have left.

    Raises:
        CheckpointError: It is no directory, cannot be read, or holds foreign files; names them. Files of
            tokenizers and processors are not foreign.
    """
    try:
        ours, foreign = _survey(directory) if os.path.lexists(directory) else (set(), [])
    except OSError as err:
        raise CheckpointError(
            f"cannot export into {directory}: {err.strerror or err}", hint="choose another directory"
        ) from err
    if foreign:
        shown = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" if len(foreign) > 5 else "")
        raise CheckpointError(
            f"{directory} holds files that no export of ours has written: {shown}",
            hint="choose an empty directory or that of an earlier export, or move the files away",
        )
    return frozenset(ours)


def temporary_path(directory: Path, file: str, mark: str) -> Path:
    """Return where a file lies until the export is published.

    Args:
        directory: The target.
        file: Name of the file.
        mark: Twelve hexadecimal digits that no other export has.
    """
    return directory / f".{file}.{mark}.tmp"


def create_shard(directory: Path, shard: Shard, mark: str) -> Path:
    """Make a file of the right size that holds the header, for ranks that write tensors at their offsets.

    Returns:
        Its path, which is hidden until :func:`publish_export`.

    Raises:
        CheckpointError: The disk refuses.
    """
    path = temporary_path(directory, shard.file, mark)
    with _explain(path), _create(path) as file:
        write_all(file.fileno(), shard.header.raw)
        file.truncate(shard.header.file_bytes)
    return path


def write_shard(
    directory: Path, shard: Shard, mark: str, contents: Callable[[str], Iterable[Buffer]]
) -> None:
    """Write a whole file, tensor by tensor.

    Args:
        directory: The target; made when missing.
        shard: The file.
        mark: The mark of this export.
        contents: Returns the bytes of a tensor by name, row-major, in parts of any size.

    Raises:
        CheckpointError: The disk refuses.
    """
    path = temporary_path(directory, shard.file, mark)
    with _explain(path), _create(path) as file:
        write_all(file.fileno(), shard.header.raw)
        for name, stored in shard.header.tensors.items():
            for part in contents(name):
                write_all(file.fileno(), part)
            assert file.tell() == stored.stop, f"{name!r} has other bytes than planned"


def publish_export(directory: Path, plan: ExportPlan, mark: str) -> None:
    """Put a written export in place of an earlier one; one rank calls it when all shards are written.

    Files get their names with the one last that readers begin with: the index, or the single file. An earlier
    export is whole until then, unless both have shards of the same names: then its index goes first, so that
    readers never see a mixture. What an earlier or an interrupted export has left is deleted at the end.

    Raises:
        CheckpointError: A shard is missing or has another size, a foreign file came in between, or the disk
            refuses.
    """
    for shard in plan.shards:
        path = temporary_path(directory, shard.file, mark)
        size = path.stat().st_size if path.is_file() else None
        if size != shard.header.file_bytes:
            found = "is gone" if size is None else f"has {size} bytes, expected {shard.header.file_bytes}"
            raise CheckpointError(
                f"{path} {found} before the export was complete",
                hint="let no other process write into this directory, and export again",
            )
        with _explain(path):
            _sync(path)
    for name, text in plan.texts.items():
        path = temporary_path(directory, name, mark)
        with _explain(path), _create(path) as file:
            write_all(file.fileno(), text.encode())
            os.fsync(file.fileno())
    earlier = check_target(directory)
    with _explain(directory):
        if INDEX_NAME in plan.texts and earlier & {shard.file for shard in plan.shards}:
            (directory / INDEX_NAME).unlink(missing_ok=True)
            sync_directory(directory)
        for name in plan.files:
            temporary_path(directory, name, mark).replace(directory / name)
        sync_directory(directory)
        for name in earlier - set(plan.files):
            (directory / name).unlink(missing_ok=True)


def clear_export(directory: Path, mark: str) -> None:
    """Delete what a failed export has written, and the directory when nothing else is in it."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if _TEMPORARY.fullmatch(path.name) and path.name.endswith(f".{mark}.tmp"):
                path.unlink(missing_ok=True)
        directory.rmdir()  # refused by the system when something is left


def _survey(directory: Path) -> tuple[set[str], list[str]]:
    """Return the names in a directory that exports have written, and the others, sorted."""
    ours: set[str] = set()
    beside: set[str] = set()
    others: list[Path] = []
    for path in directory.iterdir():
        is_plain = path.is_file() and not path.is_symlink()
        listed = _read_sign(path) if is_plain else None
        beside.update(listed or ())
        if listed is not None or (is_plain and _TEMPORARY.fullmatch(path.name)):
            ours.add(path.name)
        elif not (is_plain and _COMPANION.fullmatch(path.name)):
            others.append(path)
    unsigned = {
        path.name for path in others if path.name in beside and path.is_file() and not path.is_symlink()
    }
    return ours | unsigned, sorted(path.name for path in others if path.name not in unsigned)


def _read_sign(path: Path) -> list[str] | None:
    """Return the files without a sign that a file of an export names; None for any other file."""
    try:
        if path.name == INDEX_NAME:
            metadata = json.loads(path.read_text(encoding="utf-8"))["metadata"]
        elif _WEIGHTS.fullmatch(path.name) or _TEMPORARY.fullmatch(path.name):
            metadata = _read_metadata(path)
        else:
            return None
        listed = json.loads(metadata[_SIGN])
    except (ValueError, KeyError, TypeError):
        return None
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else None


def _read_metadata(path: Path) -> Any:
    """Return the metadata of a safetensors file, also of one that is not complete.

    Raises:
        ValueError: It does not begin with a header.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(LARGEST_HEADER, os.fstat(file.fileno()).st_size):
            raise ValueError(length)
        header = json.loads(file.read(length))
    return header["__metadata__"] if isinstance(header, dict) and "__metadata__" in header else {}


@contextlib.contextmanager
def _explain(path: Path) -> Iterator[None]:
    """Turn what the system says about a path into our error, which names the file that it is to become."""
    try:
        yield
    except OSError as err:
        hidden = _TEMPORARY.fullmatch(path.name)
        shown = path.with_name(hidden["file"]) if hidden else path
        raise CheckpointError(
            f"cannot write {shown}: {err.strerror or err}",
            hint="free space or choose another directory; an earlier export is replaced when all is written",
        ) from err


def _create(path: Path) -> io.FileIO:
    """Create a file that does not exist yet, with its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return io.FileIO(path, "xb")


def _sync(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
