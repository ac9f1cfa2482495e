"""Directories of weights: what is found in them, and what is refused by name before anything is read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from colossal_core.errors import CheckpointError
from colossal_core.runtime.checkpointing.stored_weights import find_weights

from .weight_files import write_shards, write_weights

WEIGHTS = {"a": torch.zeros(3), "b": torch.ones(2, 2)}


def refusal_of(path: Path) -> CheckpointError:
    """Return the error that reading a directory or file ends with."""
    with pytest.raises(CheckpointError) as caught:
        find_weights(path)
    return caught.value


class Trap:
    """A pickle of it leaves a mark when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.mark,))


def test_index_and_files_are_one_set_of_weights(tmp_path: Path) -> None:
    """Tensors are found where the index says; files of the hub's cache are links to blobs beside it."""
    write_shards(tmp_path / "blobs", WEIGHTS)
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", path.name))

    for directory in (tmp_path / "blobs", snapshot):
        found = find_weights(directory)
        assert {name: path.name for name, (path, _) in found.tensors.items()} == {
            "a": "part-0.safetensors",
            "b": "part-1.safetensors",
        }


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "..", 7, "secret.bin"])
def test_index_does_not_lead_elsewhere(file: object, tmp_path: Path) -> None:
    """A name in an index is that of a safetensors file of its own directory."""
    write_weights(tmp_path / "secret.safetensors", WEIGHTS)
    directory = write_shards(tmp_path / "hub", WEIGHTS)
    index = {"weight_map": {"a": "part-0.safetensors", "b": file}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")

    error = refusal_of(directory)

    assert "model.safetensors.index.json" in str(error)
    assert "'b'" in str(error)
    assert repr(file) in str(error)


def test_links_do_not_lead_elsewhere(tmp_path: Path) -> None:
    """A link out of the directory is refused, whatever it is called."""
    write_weights(tmp_path / "secret.safetensors", WEIGHTS)
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")

    assert "secret.safetensors" in str(refusal_of(tmp_path / "hub"))


def test_pickles_are_not_read(tmp_path: Path) -> None:
    """Under the name of a safetensors file, or under their own, they are named and not run."""
    mark = tmp_path / "mark"
    for folder, name in (("a", "model.safetensors"), ("b", "pytorch_model.bin")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(pickle.dumps(Trap(mark)))

    disguised, open_one = refusal_of(tmp_path / "a"), refusal_of(tmp_path / "b")
    named = refusal_of(tmp_path / "b" / "pytorch_model.bin")

    assert "model.safetensors" in str(disguised)
    for error in (open_one, named):
        assert "pytorch_model.bin" in str(error)
        assert "weights_only=True" in error.hint
    assert not mark.exists()


def test_damaged_files_are_named(tmp_path: Path) -> None:
    """A file that was cut short, is missing, or does not hold what the index says."""
    directory = write_shards(tmp_path, WEIGHTS)
    part = directory / "part-1.safetensors"
    whole = part.read_bytes()

    part.write_bytes(whole[:-1])
    assert "part-1.safetensors" in str(refusal_of(directory))
    write_weights(part, {"c": WEIGHTS["b"]})
    assert "part-1.safetensors does not hold 'b'" in str(refusal_of(directory))
    part.unlink()
    assert "part-1.safetensors" in str(refusal_of(directory))
    (directory / "model.safetensors.index.json").write_text("{", encoding="utf-8")
    assert "model.safetensors.index.json" in str(refusal_of(directory))


def test_directories_without_a_choice_are_told_what_to_do(tmp_path: Path) -> None:
    """Nothing, nowhere, and several files without an index."""
    assert "holds no safetensors file" in str(refusal_of(tmp_path))
    assert "does not exist" in str(refusal_of(tmp_path / "gone"))
    write_weights(tmp_path / "a.safetensors", WEIGHTS)
    write_weights(tmp_path / "b.safetensors", WEIGHTS)
    assert "a.safetensors, b.safetensors" in str(refusal_of(tmp_path))
