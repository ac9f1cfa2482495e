"""Exports of a checkpoint without a run: the values of the serial model, in files that anybody reads."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch

from colossal_core.checkpoint.export_directory import INDEX_NAME
from colossal_core.checkpoint.exporting import export_object
from colossal_core.errors import CapabilityError, CheckpointError, UnknownNameError, UsageError
from colossal_testkit.checkpoints import SampleObject, SampleTensor, cut_at_random, write_checkpoint

pytestmark = pytest.mark.usefixtures("small_blocks")


def _floats(*values: float) -> SampleTensor:
    """Make a tensor of given float32 values."""
    return SampleTensor(dtype="F32", shape=(len(values),), data=struct.pack(f"<{len(values)}f", *values))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a checkpoint with a model in pieces, its optimizer and its average."""
    model = {
        "embed.w": SampleTensor.make(
            (12, 5), dtype="F64", boxes=cut_at_random((12, 5), 9, 1), aliases=["head.w"]
        ),
        "norm.w": SampleTensor.make((7,), dtype="BF16", boxes=cut_at_random((7,), 2, 2)),
        "count": SampleTensor.make((), dtype="I64"),
        "empty": SampleTensor.make((0, 3)),
    }
    average = SampleObject(
        kind="average", tensors={"norm.w": _floats(*range(7))}, details={"model": "model", "decay": 0.9}
    )
    optimizer = SampleObject(kind="optimizer", tensors={"norm.w.exp_avg": _floats(1.0)})
    return write_checkpoint(
        tmp_path / "runs",
        {"model": model, "average": average, "optimizer": optimizer},
        num_ranks=3,
        configurations={"model": {"config.json": '{"a": 1}'}},
    )


def _sample() -> dict[str, SampleTensor]:
    """Return the values of the model."""
    return {
        "embed.w": SampleTensor.make((12, 5), dtype="F64"),
        "norm.w": SampleTensor.make((7,), dtype="BF16"),
        "count": SampleTensor.make((), dtype="I64"),
        "empty": SampleTensor.make((0, 3)),
    }


def _load(target: Path) -> dict[str, torch.Tensor]:
    """Read all files of an export with the library."""
    found: dict[str, torch.Tensor] = {}
    for path in target.glob("*.safetensors"):
        found |= safetensors.torch.load_file(path)
    return found


@pytest.mark.parametrize("max_bytes", [1, 100, 10**9])
def test_an_export_is_the_serial_model(directory: Path, tmp_path: Path, max_bytes: int) -> None:
    """Stored types, tied weights once, configurations beside; one file or many."""
    target = tmp_path / "out"

    done = export_object(directory, target, max_bytes=max_bytes)
    found = _load(target)

    assert set(found) == {"embed.w", "norm.w", "count", "empty"}
    for name, sample in _sample().items():
        assert bytes(found[name].reshape(-1).view(torch.uint8).tolist()) == sample.data
        assert tuple(found[name].shape) == sample.shape
    assert (target / "config.json").read_text(encoding="utf-8") == '{"a": 1}'
    assert set(done.files) == {path.name for path in target.iterdir()}
    assert (done.name, done.num_tensors, INDEX_NAME in done.files) == ("model", 4, max_bytes < 1000)


def test_an_average_is_completed_from_its_model(directory: Path, tmp_path: Path) -> None:
    """What is not averaged, buffers for example, comes from there, and so do configurations."""
    done = export_object(directory, tmp_path / "out", name="average")
    found = _load(tmp_path / "out")

    assert found["norm.w"].tolist() == [float(n) for n in range(7)]
    assert "count" in found
    assert "config.json" in done.files


def test_the_object_has_to_be_clear(directory: Path, tmp_path: Path) -> None:
    """One model is meant without a name; anything else is said."""
    two = write_checkpoint(
        tmp_path / "two", {"generator": {"w": _floats(1.0)}, "critic": {"w": _floats(1.0)}}
    )
    none = write_checkpoint(tmp_path / "none", {})

    for source, name, error, text in (
        (two, "", UsageError, "2 models: critic, generator"),
        (none, "", UsageError, "0 models"),
        (two, "critics", UnknownNameError, "did you mean 'critic'"),
        (directory, "optimizer", UsageError, "is an optimizer"),
    ):
        with pytest.raises(error) as caught:
            export_object(source, tmp_path / "out", name=name)

        assert text in str(caught.value)
        assert source is not two or name or "--object NAME" in str(caught.value)
    assert export_object(two, tmp_path / "out", name="critic").num_tensors == 1


def test_names_that_the_hub_stores_differently_need_the_classes(tmp_path: Path) -> None:
    """Of the model itself and of its average."""
    objects = {
        "model": SampleObject(tensors={"w": _floats(1.0)}, details={"hub": {"needs_conversion": True}}),
        "average": SampleObject(
            kind="average", tensors={"w": _floats(1.0)}, details={"model": "model", "hub": {}}
        ),
    }
    directory = write_checkpoint(tmp_path / "runs", objects)

    for name in ("", "average"):
        with pytest.raises(CapabilityError, match="another form") as caught:
            export_object(directory, tmp_path / "out", name=name)

        assert "booster.export" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_names_in_files_are_those_of_the_hub(tmp_path: Path) -> None:
    """Renamed, under several names, or left out; averages follow their model."""
    names = {"w": ["encoder.w"], "head": ["head", "tied"], "cache": []}
    tensors = {"w": _floats(1.0), "head": _floats(2.0), "cache": _floats(3.0), "same": _floats(4.0)}
    objects = {
        "model": SampleObject(tensors=tensors, details={"hub": {"needs_conversion": False, "names": names}}),
        "average": SampleObject(kind="average", tensors={"w": _floats(5.0)}, details={"model": "model"}),
    }
    directory = write_checkpoint(tmp_path / "runs", objects)

    export_object(directory, tmp_path / "out")
    export_object(directory, tmp_path / "averaged", name="average")

    wanted = {"encoder.w": 1.0, "head": 2.0, "tied": 2.0, "same": 4.0}
    assert {name: float(tensor) for name, tensor in _load(tmp_path / "out").items()} == wanted
    averaged = {name: float(tensor) for name, tensor in _load(tmp_path / "averaged").items()}
    assert averaged == {**wanted, "encoder.w": 5.0}


def test_damage_leaves_the_earlier_export(directory: Path, tmp_path: Path) -> None:
    """What was written until then is cleared up."""
    target = tmp_path / "out"
    export_object(directory, target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    path = max(directory.glob("model-*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")

    with pytest.raises(CheckpointError, match=path.name):
        export_object(directory, target)

    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_a_checkpoint_is_no_target(directory: Path) -> None:
    """Exporting into it would put its files among others."""
    with pytest.raises(CheckpointError, match="no export of ours has written"):
        export_object(directory, directory)
