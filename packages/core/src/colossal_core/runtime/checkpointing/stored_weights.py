"""Directories of weights that others have written: which tensors lie where, before any of them is read.

The one idea: headers and an index are small and say everything, so what is missing, damaged, pickled or leads
out of the directory is refused by name first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from attrs import frozen

from colossal_core.checkpoint.safetensors_format import Stored, read_header
from colossal_core.errors import CheckpointError
from colossal_core.runtime.checkpointing.conversions import Form
from colossal_core.runtime.checkpointing.rows import DTYPES

__all__ = ["StoredWeights", "find_weights"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = (".bin", ".bin.index.json", ".ckpt", ".pt", ".pth")

_CONVERT = (
    "load it with torch.load(path, weights_only=True) in a script of your own, and write the weights with "
    "model.save_pretrained(directory), or with safetensors.torch.save_file(weights, path)"
)


@frozen(kw_only=True)
class StoredWeights:
    """Tensors of a directory, before any of them is read.

    Attributes:
        directory: Where they lie.
        tensors: File and place in it, by name.
    """

    directory: Path
    tensors: Mapping[str, tuple[Path, Stored]]

    def form_of(self, name: str) -> Form:
        """Return dtype and shape of a tensor."""
        stored = self.tensors[name][1]
        return Form(DTYPES[stored.dtype], stored.shape)


def find_weights(path: Path) -> StoredWeights:
    """Return what the headers of a directory's files say; reads no tensor.

    Raises:
        CheckpointError: There are no such files, one is damaged, or an index names what lies elsewhere.
    """
    if path.is_file():
        if path.name.endswith(_PICKLED):
            raise CheckpointError(
                f"{path} is a pickled file, which can run code when it is read", hint=_CONVERT
            )
        return StoredWeights(directory=path.parent, tensors=_tensors_of(path))
    if not path.is_dir():
        raise CheckpointError(
            f"{path} does not exist", hint="pass a directory with model.safetensors, or such a file"
        )
    if (path / SINGLE).exists():
        return StoredWeights(directory=path, tensors=_tensors_of(_checked(path, SINGLE)))
    names = sorted(entry.name for entry in path.iterdir())
    indices = [name for name in names if name.endswith(".safetensors.index.json")]
    if INDEX in indices or len(indices) == 1:
        return _read_index(path, INDEX if INDEX in indices else indices[0])
    files = [name for name in names if name.endswith(".safetensors")]
    if len(files) == 1:
        return StoredWeights(directory=path, tensors=_tensors_of(_checked(path, files[0])))
    if files:
        raise CheckpointError(
            f"{path} holds {len(files)} safetensors files ({', '.join(files[:3])}, ...) and no "
            f"{INDEX} that says which belong together",
            hint="pass the path of one file, or restore the index",
        )
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if pickled:
        raise CheckpointError(
            f"{path} holds pickled weights only ({', '.join(pickled[:3])}), which can run code when read",
            hint=_CONVERT,
        )
    raise CheckpointError(
        f"{path} holds no safetensors file", hint=f"pass a directory with {SINGLE}, or with {INDEX}"
    )


def _read_index(directory: Path, name: str) -> StoredWeights:
    """Return the tensors that an index names."""
    index = _checked(directory, name)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        entries = sorted((str(tensor), file) for tensor, file in weight_map.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise CheckpointError(
            f"{index} is no index of safetensors files: {err!r}", hint="restore the file"
        ) from err
    files: dict[str, Mapping[str, tuple[Path, Stored]]] = {}
    found = {}
    for tensor, file in entries:
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} says that {tensor!r} lies in {file!r}, which is no safetensors file beside it",
                hint="an index names files of its own directory; get it from its source again",
            )
        if file not in files:
            files[file] = _tensors_of(_checked(directory, file))
        if tensor not in files[file]:
            raise CheckpointError(
                f"{directory / file} does not hold {tensor!r}, though {index.name} says so",
                hint="the files are not of one export: get them from their source again",
            )
        found[tensor] = files[file][tensor]
    return StoredWeights(directory=directory, tensors=found)


def _checked(directory: Path, name: str) -> Path:
    """Return the path of a file of a directory, which does not lead elsewhere.

    Links are followed inside the directory, and out of a snapshot of the hub's cache to the blobs beside it,
    of which such a snapshot consists.

    Raises:
        CheckpointError: It is missing, no plain file, or leads elsewhere.
    """
    path = directory / name
    try:
        real, home = path.resolve(strict=True), directory.resolve()
    except OSError as err:
        raise CheckpointError(
            f"cannot open {path}: {err.strerror or err}", hint="get the missing file from its source"
        ) from err
    allowed = [home, *([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])]
    if not any(real.is_relative_to(root) for root in allowed) or not real.is_file():
        raise CheckpointError(
            f"{path} leads to {real}, which is no file of its directory", hint="copy the file there"
        )
    return path


def _tensors_of(path: Path) -> dict[str, tuple[Path, Stored]]:
    """Return the tensors of one file."""
    found = {name: (path, stored) for name, stored in read_header(path).tensors.items()}
    for name, (_, stored) in found.items():
        if stored.dtype not in DTYPES:
            raise CheckpointError(
                f"{path} holds {name!r} in {stored.dtype}, which torch does not know here",
                hint="convert the file to one of " + ", ".join(sorted(DTYPES)),
            )
    return found
