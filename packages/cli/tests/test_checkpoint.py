"""``colossal checkpoint``."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from colossal_core.boxes import Box
from colossal_testkit.checkpoints import SampleObject, SampleTensor, write_checkpoint

if TYPE_CHECKING:
    from .conftest import Program

_HALVES = (Box((0, 0), (4, 3)), Box((4, 0), (4, 3)))


def _floats(*values: float) -> SampleTensor:
    """Make a tensor of given float32 values."""
    return SampleTensor(dtype="F32", shape=(len(values),), data=struct.pack(f"<{len(values)}f", *values))


@pytest.fixture
def runs(program: Program) -> Path:
    """Return a directory with two complete checkpoints, and a third whose save was interrupted."""
    root = program.directory / "runs"
    for step in (2, 10):
        write_checkpoint(
            root,
            {
                "model": {
                    "layer.weight": SampleTensor.make((8, 3), boxes=_HALVES, aliases=["head.weight"]),
                    "norm.weight": _floats(1.0, float(step)),
                },
                "optimizer": SampleObject(
                    kind="optimizer", tensors={"norm.weight.exp_avg": _floats(0.0, 0.0)}, details={"lr": 0.1}
                ),
            },
            step=step,
            epoch=1,
            samples=100 * step,
            num_ranks=2,
            created="2026-01-01T00:00:00+00:00",
            versions={"torch": "2.13.0"},
            plan={
                "world_size": 2,
                "plan": {"precision": "bf16", "pieces": {"zero:zero1": {"stage": 1}}, "max_grad_norm": None},
            },
            configurations={"model": {"config.json": "{}"}},
        )
    (root / "step-30").mkdir()
    (root / "step-30" / "model-00000-ffffffffffff.safetensors").write_bytes(b"half")
    return root


@pytest.mark.usefixtures("runs")
def test_inspect_shows_what_a_checkpoint_holds(program: Program) -> None:
    """The newest complete one of a root, which is said; or the one that is named."""
    newest = program.run("checkpoint", "inspect", "runs")
    named = program.run("checkpoint", "inspect", "runs/step-2")

    lines = {line.split()[0]: line for line in newest.out.splitlines() if line}
    assert (newest.code, named.code) == (0, 0)
    assert "runs/step-10 is the newest complete checkpoint in runs" in newest.err
    assert lines["step"].split() == ["step", "10"]
    assert lines["samples"].split() == ["samples", "1,000"]
    assert lines["plan"].endswith("world size 2, zero:zero1(stage=1), precision bf16")
    assert lines["by"].endswith("torch 2.13.0")
    assert lines["travels"].endswith("model/config.json")
    assert lines["model"].split() == ["model", "model", "2", "26", "104", "F32"]
    assert lines["optimizer"].split() == ["optimizer", "optimizer", "1", "2", "8", "F32"]
    assert "model-00001-0123456789ab.safetensors" in lines
    assert "layer.weight" not in newest.out
    assert named.err == ""
    assert "step           2" in named.out


def test_inspect_lists_tensors(program: Program, runs: Path) -> None:
    """All of them, or those of a pattern, by any of their names."""
    every = program.run("checkpoint", "inspect", str(runs), "--tensors")
    some = program.run("checkpoint", "inspect", str(runs), "--match", "head*", "--json")

    rows = [line.split() for line in every.out.splitlines() if "weight" in line]
    assert rows == [
        ["model", "layer.weight", "F32", "8", "x", "3", "96", "2", "head.weight"],
        ["model", "norm.weight", "F32", "2", "8", "1"],
        ["optimizer", "norm.weight.exp_avg", "F32", "2", "8", "1"],
    ]
    (tensor,) = json.loads(some.out)["tensors"]
    assert (tensor["object"], tensor["name"], tensor["shape"]) == ("model", "layer.weight", [8, 3])
    assert len(tensor["files"]) == 2


def test_inspect_is_json_for_programs(program: Program, runs: Path) -> None:
    """Everything but the tensors, which have to be asked for."""
    done = program.run("checkpoint", "inspect", "runs", "--json")

    found = json.loads(done.out)
    assert Path(found["directory"]) == Path("runs/step-10")
    assert (found["step"], found["epoch"], found["samples"]) == (10, 1, 1000)
    assert found["objects"]["model"] == {
        "kind": "model",
        "tensors": 2,
        "elements": 26,
        "bytes": 104,
        "dtypes": ["F32"],
    }
    assert found["configurations"] == {"model": ["config.json"]}
    assert sum(found["files"].values()) == sum(
        path.stat().st_size for path in (runs / "step-10").glob("*.safetensors")
    )
    assert "tensors" not in found


def test_verify_says_what_is_damaged(program: Program, runs: Path) -> None:
    """Exit code 1 with file and tensor; a foreign file is only noted."""
    sound = program.run("checkpoint", "verify", "runs")
    (runs / "step-10" / "notes.txt").write_text("mine", encoding="utf-8")
    noted = program.run("checkpoint", "verify", "runs", "--json")
    path = runs / "step-10" / "model-00001-0123456789ab.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    damaged = program.run("checkpoint", "verify", "runs")
    older = program.run("checkpoint", "verify", "runs/step-2")

    assert (sound.code, noted.code, damaged.code, older.code) == (0, 0, 1, 0)
    assert "is sound" in sound.out
    assert json.loads(noted.out)["sound"] is True
    assert [found["severity"] for found in json.loads(noted.out)["problems"]] == ["note"]
    (line,) = (line for line in damaged.out.splitlines() if line.startswith("error"))
    assert path.name in line
    assert "model: layer.weight" in line


@pytest.mark.usefixtures("runs")
def test_diff_shows_tables_and_counts(program: Program) -> None:
    """Exit code 1 when states differ."""
    same = program.run("checkpoint", "diff", "runs", "runs/step-10")
    other = program.run("checkpoint", "diff", "runs/step-2", "runs/step-10")
    plain = program.run("checkpoint", "diff", "runs/step-2", "runs/step-10", "--json")

    lines = [line.split() for line in other.out.splitlines()]
    assert (same.code, other.code, plain.code) == (0, 1, 1)
    assert same.out == "the same state: 3 of 3 tensors in both are the same bit for bit\n"
    assert ["step", "2", "10"] in lines
    assert ["samples", "200", "1000"] in lines
    assert ["model:", "norm.weight", "1", "2", "[1]", "8"] in lines
    assert other.out.endswith("different states: 2 of 3 tensors in both are the same bit for bit\n")
    found = json.loads(plain.out)
    assert found["same"] is False
    assert found["values"][0]["largest"] == 8.0
    assert [item["path"] for item in found["fields"]] == ["step", "samples"]


def test_diff_writes_json_that_is_json(program: Program) -> None:
    """Which has no word for NaN."""
    for name, value in (("a", float("nan")), ("b", 1.0)):
        write_checkpoint(program.directory / name, {"model": {"w": _floats(value)}})

    done = program.run("checkpoint", "diff", "a", "b", "--json")

    assert json.loads(done.out, parse_constant=pytest.fail)["values"][0]["largest"] == "nan"


def test_export_writes_files_for_anybody(program: Program, runs: Path) -> None:
    """Configurations beside; in several files above a size; replaced by the next export."""
    one = program.run("checkpoint", "export", "runs", "out", "--json")
    names = {path.name for path in (program.directory / "out").iterdir()}
    many = program.run("checkpoint", "export", str(runs), "out", "--max-file-size", "0.05KB")

    assert (one.code, many.code) == (0, 0)
    assert names == {"model.safetensors", "config.json"}
    assert json.loads(one.out)["bytes"] == 104
    assert "wrote 2 tensors of 'model', 104 bytes, to out" in many.out
    assert {path.name for path in (program.directory / "out").iterdir()} == {
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }


def test_export_refuses_what_would_be_wrong(program: Program, runs: Path) -> None:
    """Foreign files, a wrong object, a size that is none."""
    program.write("mine/notes.txt", "mine")

    foreign = program.run("checkpoint", "export", "runs", "mine")
    optimizer = program.run("checkpoint", "export", str(runs), "out", "--object", "optimizer")
    size = program.run("checkpoint", "export", "runs", "out", "--max-file-size", "5 sacks")

    assert (foreign.code, "notes.txt" in foreign.err) == (1, True)
    assert (optimizer.code, "is an optimizer" in optimizer.err) == (2, True)
    assert (size.code, "5 sacks" in size.err) == (2, True)


def test_what_is_no_checkpoint_is_told(program: Program, runs: Path) -> None:
    """Missing, incomplete, damaged: exit code 1, with the file; without a directory: 2."""
    (runs / "step-10" / "MANIFEST.json").write_text("{}", encoding="utf-8")

    missing = program.run("checkpoint", "inspect", "nowhere")
    incomplete = program.run("checkpoint", "verify", "runs/step-30")
    damaged = program.run("checkpoint", "inspect", "runs")
    nothing = program.run("checkpoint", "diff", "runs")

    assert (missing.code, "nowhere does not exist" in missing.err) == (1, True)
    assert (incomplete.code, "holds no complete checkpoint" in incomplete.err) == (1, True)
    assert (damaged.code, "MANIFEST.json is no manifest" in damaged.err) == (1, True)
    assert nothing.code == 2
