"""Export: files with serial names, whatever the layout, or an error and the earlier export."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colossal_core.boxes import Box
from colossal_core.checkpoint.safetensors_format import Stored
from colossal_core.errors import CheckpointError, ColossalError, UsageError
from colossal_core.runtime.averages import Average
from colossal_core.runtime.booster import Booster
from colossal_core.runtime.checkpointing import exporting
from colossal_core.runtime.checkpointing.exporting import export_model
from colossal_core.runtime.checkpointing.importing import import_model
from colossal_core.runtime.checkpointing.rows import write_box
from colossal_testkit.engine import engine_of
from colossal_testkit.memory import LiveBytes
from colossal_testkit.parity import boost_workload
from colossal_testkit.ranks import run_ranks, run_ranks_expecting_errors

from .strategy_cases import CASES, Case, build, make_registry
from .weight_files import read_weights, same_bits, unique_state, write_weights

LAYOUTS = ("qkv-4-shared-kv", "stages-2-x-vocabulary-2", "experts-2-x-expert-data-2", "features-3", "cube")

each_layout = pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in LAYOUTS], ids=lambda c: c.name
)


class Odd(nn.Module):
    """Everything that is no plain matrix, in tensors of different dtypes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 5]`` to ``[batch, 3]``."""
        outputs: torch.Tensor = self.norm(self.inner(samples)) * self.scale
        return outputs


def boost_odd(seed: int = 0, **settings: Any) -> tuple[Booster, nn.Module, torch.optim.Optimizer]:
    """Return a boosted model of that kind."""
    model = Odd(seed)
    booster = Booster(**settings)
    _, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return booster, model, optimizer


# --- what happens on the ranks ------------------------------------------------------------------------------


def export_case(case: Case, folder: Path) -> int:
    """Export the model of a case; return how many messages that took."""
    booster, work = boost_workload(case.recipe(), (), case.settings, make_registry)
    engine = engine_of(booster)
    with engine.context.collectives.ledger.recording() as transfers:
        assert export_model(engine, work.model, folder) == folder
    return len(transfers)


def train_and_export(folder: Path, precision: str) -> dict[str, torch.Tensor]:
    """Train one step, and export as it is and in bf16; return the masters."""
    booster, model, optimizer = boost_odd(precision=precision)
    model(torch.ones(4, 5) * torch.arange(4).view(4, 1)).square().mean().backward()
    optimizer.step()
    engine = engine_of(booster)
    export_model(engine, model, folder / "masters")
    export_model(engine, model, folder / "narrow", dtype="bf16")
    masters = {
        place.key[1]: place.tensor.clone() for place in engine.manager.places() if place.state == "master"
    }
    return masters or {name: value.detach().clone() for name, value in model.named_parameters()}


def train_and_export_average(folder: Path) -> dict[str, torch.Tensor]:
    """Train one step, and export the average; return what it is on this rank."""
    booster, model, optimizer = boost_odd(precision="bf16")
    average = booster.average(model, decay=0.25)
    model(torch.ones(4, 5) * torch.arange(4).view(4, 1)).square().mean().backward()
    optimizer.step()
    export_model(engine_of(booster), model, folder, average=average)
    return {place.key[1]: place.tensor.clone() for place in average.places()}


def export_two(folder: Path) -> None:
    """Export two models that share a matrix, import into one, and export the other again."""
    first, second = Odd(1), Odd(2)
    second.inner.weight = first.inner.weight
    optimizer = torch.optim.SGD({*first.parameters(), *second.parameters()}, lr=0.5)
    booster = Booster()
    booster.boost(first, second, optimizer)
    engine = engine_of(booster)
    export_model(engine, first, folder / "first")
    export_model(engine, second, folder / "second")
    loss = first(torch.ones(2, 5, requires_grad=True)).sum()
    import_model(engine, second, write_weights(folder / "odd" / "model.safetensors", Odd(3).state_dict()))
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()
    export_model(engine, first, folder / "first again")


def export_somewhere(folders: list[Path]) -> None:
    """Export into a directory that each rank is given."""
    booster, model, _ = boost_odd()
    export_model(engine_of(booster), model, folders[torch.distributed.get_rank()])


def export_on_a_full_disk(folder: Path, failing: int) -> None:
    """Export twice; the second time the disk of one rank is full when it writes."""
    booster, model, _ = boost_odd()
    export_model(engine_of(booster), model, folder)

    def refuse(file: io.FileIO, stored: Stored, box: Box, values: torch.Tensor) -> None:
        if torch.distributed.get_rank() == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_box(file, stored, box, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "write_box", refuse)
        export_model(engine_of(booster), model, folder, dtype="bf16")


def export_as_told(folder: Path, dtypes: list[str]) -> None:
    """Export with a dtype that each rank is given."""
    booster, model, _ = boost_odd()
    export_model(engine_of(booster), model, folder, dtype=dtypes[torch.distributed.get_rank()])


# --- contents -----------------------------------------------------------------------------------------------


@each_layout
def test_export_of_a_cut_model_is_the_serial_one(case: Case, tmp_path: Path) -> None:
    """Whatever a strategy cut, files hold the serial tensors bit for bit, and nothing was communicated."""
    serial = unique_state(build(case.model).model)

    messages = run_ranks(export_case, case.nproc, case, tmp_path / "export")

    found = read_weights(tmp_path / "export")
    assert found.keys() == serial.keys()
    assert all(same_bits(found[name], serial[name]) for name in serial)
    assert messages == [0] * case.nproc


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_export_is_in_the_dtype_of_the_masters(precision: str, tmp_path: Path) -> None:
    """Bits that 16-bit values do not have are in the file, unless another dtype is asked for."""
    masters = run_ranks(train_and_export, 2, tmp_path, precision)[0]

    found, narrow = read_weights(tmp_path / "masters"), read_weights(tmp_path / "narrow")
    assert found.keys() == narrow.keys() == Odd().state_dict().keys()
    assert "hidden" not in found
    for name, master in masters.items():
        assert same_bits(found[name].view(-1), master.view(-1)), name
        assert same_bits(narrow[name].view(-1), master.bfloat16().view(-1)), name
    assert found["mask"].tolist() == narrow["mask"].tolist() == [True, False, True]
    assert found["norm.num_batches_tracked"].dtype == torch.int64
    assert found["nothing"].shape == (0, 4)


def test_averages_are_exported_in_place_of_the_weights(tmp_path: Path) -> None:
    """Every process writes its part of the average; what is not averaged is the model's."""
    averages = run_ranks(train_and_export_average, 2, tmp_path)[0]

    found = read_weights(tmp_path)
    assert found.keys() == Odd().state_dict().keys()
    assert all(same_bits(found[name].view(-1), value.view(-1)) for name, value in averages.items())
    assert averages.keys() == dict(Odd().named_parameters()).keys()
    assert found["norm.num_batches_tracked"] == 1


def test_models_that_share_a_tensor_are_whole(tmp_path: Path) -> None:
    """Each is exported with it, under its own names, and it is imported through either."""
    export_two(tmp_path)

    first, second, again = (read_weights(tmp_path / name) for name in ("first", "second", "first again"))
    imported = Odd(3)
    assert first.keys() == second.keys()
    assert same_bits(first["inner.weight"], second["inner.weight"])
    assert not torch.equal(first["inner.bias"], second["inner.bias"])
    assert same_bits(again["inner.weight"], imported.inner.weight.detach())
    assert same_bits(again["inner.bias"], first["inner.bias"])


def test_export_alone_needs_no_launch(tmp_path: Path) -> None:
    """A lone process exports like many ranks, into a directory whose parents are made."""
    booster, model, _ = boost_odd()

    export_model(engine_of(booster), model, tmp_path / "a" / "b")

    found = read_weights(tmp_path / "a" / "b")
    assert all(same_bits(found[name], value.detach()) for name, value in model.state_dict().items())


def test_large_models_are_divided_with_an_index(tmp_path: Path) -> None:
    """Files stay below the limit; a later export in one file replaces them, and the other way round."""
    booster, model, _ = boost_odd()
    engine = engine_of(booster)

    names = []
    for limit in (40, 1 << 20, 40):
        export_model(engine, model, tmp_path, max_file_bytes=limit)
        names.append(sorted(path.name for path in tmp_path.iterdir()))
        assert read_weights(tmp_path).keys() == model.state_dict().keys()

    assert names[1] == ["model.safetensors"]
    assert names[0] == names[2]
    assert "model.safetensors.index.json" in names[0]
    assert f"model-00002-of-{len(names[0]) - 1:05}.safetensors" in names[0]


def test_export_holds_a_block_at_a_time(tmp_path: Path) -> None:
    """What is converted on the way out is never more than a block, whatever a tensor has."""
    model = nn.Linear(3000, 2000, bias=False)
    booster = Booster()
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with LiveBytes(include_existing=True) as live:
        held = live.current().total_bytes
        export_model(engine_of(booster), model, tmp_path, dtype="fp64")

    assert read_weights(tmp_path)["weight"].dtype == torch.float64
    assert live.peak().total_bytes - held <= 8 << 20 < model.weight.nbytes


# --- refusals -----------------------------------------------------------------------------------------------


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    """A directory with anything but an export is refused on every rank, and not touched."""
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")

    errors = run_ranks_expecting_errors(export_somewhere, 2, [tmp_path, tmp_path])

    assert all("notes.txt" in str(error) for error in errors)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_ranks_with_directories_of_their_own_are_told(tmp_path: Path) -> None:
    """A directory that is not shared would leave half of a model on each machine."""
    folders = [tmp_path / "a", tmp_path / "b"]

    errors = run_ranks_expecting_errors(export_somewhere, 2, folders)

    assert all("rank 1 cannot open" in str(error) and "share" in str(error) for error in errors)
    assert not any(folder.exists() for folder in folders)


@pytest.mark.parametrize("failing", [0, 1])
def test_full_disk_leaves_the_earlier_export(failing: int, tmp_path: Path) -> None:
    """One rank that cannot write ends the export on all, which name the file; the earlier one is whole."""
    errors = run_ranks_expecting_errors(export_on_a_full_disk, 2, tmp_path, failing)

    assert all("No space left" in str(error) and "model.safetensors" in str(error) for error in errors)
    assert isinstance(errors[failing], CheckpointError)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found = read_weights(tmp_path)
    assert all(same_bits(found[name], value) for name, value in Odd().state_dict().items())


def test_ranks_that_ask_for_different_files_are_told(tmp_path: Path) -> None:
    """Offsets would differ, so nothing is written."""
    errors = run_ranks_expecting_errors(export_as_told, 2, tmp_path / "export", ["fp32", "bf16"])

    assert all("F32" in str(error) and "BF16" in str(error) for error in errors)
    assert not (tmp_path / "export").exists()


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    """A model of somebody else, and a dtype that holds no weights, are refused before anything is made."""
    booster, model, _ = boost_odd()
    engine = engine_of(booster)

    with pytest.raises(UsageError, match="was not boosted"):
        export_model(engine, nn.Linear(1, 1), tmp_path / "export")
    with pytest.raises(UsageError, match="'int8'"):
        export_model(engine, model, tmp_path / "export", dtype="int8")
    other = Average(list, 0.5, lambda: None)
    with pytest.raises(UsageError, match="not one of model"):
        export_model(engine, model, tmp_path / "export", average=other)
    with pytest.raises(ColossalError, match="max_bytes"):
        export_model(engine, model, tmp_path / "export", max_file_bytes=0)
    assert not (tmp_path / "export").exists()
