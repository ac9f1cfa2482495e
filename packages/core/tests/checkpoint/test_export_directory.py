"""Directories of exports: an earlier one is replaced as a whole, foreign files are never touched."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from colossal_core.checkpoint.export_directory import (
    INDEX_NAME,
    ExportPlan,
    TensorSpec,
    check_target,
    clear_export,
    create_shard,
    plan_export,
    plan_shards,
    publish_export,
    temporary_path,
    write_shard,
)
from colossal_core.checkpoint.safetensors_format import read_header
from colossal_core.errors import CheckpointError, UsageError

_SPECS = [TensorSpec(name=f"t{number}", dtype="F32", shape=(number,)) for number in range(1, 5)]
_BOTH = {"config.json": "{}", "generation_config.json": "{}"}


def _write(target: Path, *, mark: str = "0" * 12, max_bytes: int = 1000) -> None:
    """Write the shards of an export, hidden."""
    check_target(target)
    for shard in _plan(max_bytes).shards:
        write_shard(target, shard, mark, lambda name: [bytes(4)] * int(name[1:]))


def _plan(max_bytes: int = 1000, configurations: dict[str, str] | None = None) -> ExportPlan:
    """Plan the export of four small tensors."""
    return plan_export(_SPECS, max_bytes=max_bytes, configurations=configurations)


def _export(
    target: Path, max_bytes: int = 1000, value: float = 0.0, configurations: dict[str, str] | None = None
) -> None:
    """Export from the first byte to the last name."""
    plan = _plan(max_bytes, configurations)
    check_target(target)
    for shard in plan.shards:
        write_shard(target, shard, "0" * 12, lambda name: [struct.pack("<f", value)] * int(name[1:]))
    publish_export(target, plan, "0" * 12)


def _names(target: Path) -> set[str]:
    """Return what lies in a directory."""
    return {path.name for path in target.iterdir()}


def test_tensors_are_divided_in_order_and_aligned() -> None:
    """A tensor above the limit has a file of its own; wider elements come first in each."""
    specs = [
        TensorSpec(name="a", dtype="F16", shape=(3,)),
        TensorSpec(name="b", dtype="F64", shape=(1,)),
        TensorSpec(name="c", dtype="F32", shape=(100,)),
        TensorSpec(name="d", dtype="F32", shape=()),
    ]

    divided = [[spec.name for spec in shard] for shard in plan_shards(specs, 14)]

    assert divided == [["b", "a"], ["c"], ["d"]]
    assert plan_shards([], 14) == ((),)
    with pytest.raises(UsageError, match="max_bytes=0"):
        plan_shards(specs, 0)


def test_an_index_names_the_file_of_each_tensor(tmp_path: Path) -> None:
    """As from_pretrained expects it."""
    _export(tmp_path, max_bytes=12, configurations=_BOTH)

    index = json.loads((tmp_path / INDEX_NAME).read_text(encoding="utf-8"))

    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert index["weight_map"] == {"t1": shards[0], "t2": shards[0], "t3": shards[1], "t4": shards[2]}
    assert index["metadata"]["total_size"] == 40
    assert _names(tmp_path) == {*_BOTH, *shards, INDEX_NAME}
    assert read_header(tmp_path / shards[0]).metadata["format"] == "pt"


@pytest.mark.parametrize("first", [12, 20, 1000])
@pytest.mark.parametrize("second", [12, 20, 1000])
def test_an_earlier_export_is_replaced(tmp_path: Path, first: int, second: int) -> None:
    """Whatever files it had: nothing of it is left."""
    _export(tmp_path, max_bytes=first, configurations=_BOTH)
    _export(tmp_path, max_bytes=second, value=1.0, configurations={"config.json": "{}"})

    plan = _plan(second, {"config.json": "{}"})
    assert _names(tmp_path) == set(plan.files)
    for shard in plan.shards:
        data = (tmp_path / shard.file).read_bytes()[shard.header.num_bytes :]
        assert set(struct.unpack(f"<{len(data) // 4}f", data)) == {1.0}


def test_foreign_files_are_refused_and_kept(tmp_path: Path) -> None:
    """Notes, weights and configurations of others, folders, links: also beside an earlier export."""
    _export(tmp_path, configurations=_BOTH)
    (tmp_path / "model.safetensors").rename(tmp_path.parent / "elsewhere")
    foreign = {
        "notes.txt": b"mine",
        "model-00001-of-00001.safetensors": struct.pack("<Q", 2) + b"{}",
        "pytorch_model.bin": b"PK",
    }
    for name, content in foreign.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.safetensors").symlink_to(tmp_path.parent / "elsewhere")

    with pytest.raises(CheckpointError, match="no export of ours has written") as caught:
        check_target(tmp_path)

    assert "and 2 more" in caught.value.message
    assert _names(tmp_path) == {*foreign, "folder", "model.safetensors", *_BOTH}


def test_files_of_tokenizers_stay_beside_an_export(tmp_path: Path) -> None:
    """They are saved into the same directory: no export takes them for foreign, or deletes them."""
    companions = {
        "tokenizer.json",
        "tokenizer_config.json",
        "preprocessor_config.json",
        "README.md",
        "vocab.txt",
    }
    for name in companions:
        (tmp_path / name).write_text(name, encoding="utf-8")

    for configurations in (_BOTH, {}):
        _export(tmp_path, configurations=configurations)

    assert _names(tmp_path) == {*companions, "model.safetensors"}
    assert all((tmp_path / name).read_text(encoding="utf-8") == name for name in companions)


def test_a_place_that_cannot_be_written_is_named_as_the_user_knows_it(tmp_path: Path) -> None:
    """Not by the hidden name that a file has on its way."""
    (tmp_path / "file").write_text("", encoding="utf-8")

    with pytest.raises(CheckpointError, match="cannot write") as caught:
        _export(tmp_path / "file" / "inner")

    assert str(tmp_path / "file" / "inner" / "model.safetensors") in caught.value.message
    assert ".tmp" not in caught.value.message


def test_a_directory_of_someone_elses_weights_is_foreign(tmp_path: Path) -> None:
    """A download is not to be lost because its files have the same names."""
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")

    with pytest.raises(CheckpointError, match=r"config\.json, model\.safetensors"):
        check_target(tmp_path)


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    """A file; a missing or empty one is fine."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")

    assert check_target(tmp_path / "missing") == frozenset()
    for name in ("file", "dangling"):
        with pytest.raises(CheckpointError, match=name):
            check_target(tmp_path / name)


def test_an_interrupted_export_leaves_the_earlier_one_and_is_cleared_up_by_the_next(tmp_path: Path) -> None:
    """Killed while it wrote: only hidden files are there, and they are no reason to refuse."""
    _export(tmp_path, value=1.0, configurations=_BOTH)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    _write(tmp_path, mark="f" * 12, max_bytes=12)

    during = {path.name: path.read_bytes() for path in tmp_path.iterdir() if not path.name.startswith(".")}
    _export(tmp_path, configurations=_BOTH)

    assert during == before
    assert _names(tmp_path) == set(before)


def test_an_export_interrupted_between_names_is_replaced_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of the same names: readers find no index rather than a mixture, and the next knows all files."""
    _export(tmp_path, max_bytes=12, value=1.0, configurations=_BOTH)
    replace, calls = Path.replace, []

    def fail_at_third(path: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == 4:
            raise OSError(5, "Input/output error")
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail_at_third)
        with pytest.raises(CheckpointError, match="Input/output error"):
            _export(tmp_path, max_bytes=12, configurations=_BOTH)
    between = _names(tmp_path)
    clear_export(tmp_path, "0" * 12)
    _export(tmp_path, max_bytes=12, configurations=_BOTH)

    assert INDEX_NAME not in between
    assert _names(tmp_path) == set(_plan(12, _BOTH).files)


def test_a_foreign_file_that_comes_in_between_stops_the_export(tmp_path: Path) -> None:
    """Nothing is put in place beside it."""
    _write(tmp_path)
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")

    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        publish_export(tmp_path, _plan(), "0" * 12)
    clear_export(tmp_path, "0" * 12)

    assert _names(tmp_path) == {"notes.txt"}


def test_shards_that_several_write_are_made_beforehand(tmp_path: Path) -> None:
    """Of the right size, with the header; one that is missing or short is named."""
    target = tmp_path / "made" / "here"
    (shard,) = _plan().shards

    path = create_shard(target, shard, "0" * 12)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(CheckpointError, match=f"has {size - 1} bytes, expected {size}"):
        publish_export(target, _plan(), "0" * 12)
    path.unlink()
    with pytest.raises(CheckpointError, match="is gone before"):
        publish_export(target, _plan(), "0" * 12)
    clear_export(target, "0" * 12)

    assert path == temporary_path(target, shard.file, "0" * 12)
    assert size == shard.header.file_bytes
    assert not target.exists()


@pytest.mark.parametrize("name", ["../config.json", "/x", "model.safetensors", INDEX_NAME, ".hidden", ""])
def test_a_configuration_cannot_leave_the_directory_or_hide_weights(name: str) -> None:
    """Its name comes from a file that others wrote."""
    with pytest.raises(UsageError, match="cannot be exported under the name"):
        _plan(configurations={name: "{}"})


def test_a_type_without_a_name_in_the_format_is_refused() -> None:
    """Readers would see pairs of numbers."""
    with pytest.raises(UsageError, match="'w' has elements of type complex128"):
        plan_export([TensorSpec(name="w", dtype="C128", shape=(2,))])
