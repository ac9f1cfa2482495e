"""State, sentence by sentence: what saving, loading, exporting, counting and reporting promise.

Each test is named after what is promised and looks at it in its smallest form; the files about the parts
(resume, reshard, export, import, checkpoint layouts, format) look further. Rank functions assert by
themselves.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from colossal_core import Booster, CheckpointError, ColossalError, RankMismatchError, UsageError
from colossal_core.checkpoint import find_complete, read_manifest
from colossal_core.runtime.checkpointing import parts, saving
from colossal_testkit import run_ranks, run_ranks_expecting_errors
from colossal_testkit.engine import engine_of


def boosted(*, width: int = 7, accumulate: int = 1, **settings: Any) -> tuple[Booster, Any, Any, Any]:
    """Return a Booster with a small model, its optimizer and a loader over ten samples in batches of four."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dataset = TensorDataset(torch.randn(10, 5), torch.randn(10, 3))
    booster = Booster(accumulate=accumulate, **settings)
    return (booster, *booster.boost(model, optimizer, DataLoader(dataset, batch_size=4)))


def take_steps(booster: Booster, *objects_and_count: Any) -> None:
    """Take some real steps: of a model and an optimizer, with a loader, so many."""
    model, optimizer, loader, count = objects_and_count
    last = booster.step + count
    while booster.step < last:
        for samples, targets in loader:
            booster.forward_backward(model, (samples, targets), F.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
            if booster.step == last:
                break


def weights_of(model: nn.Module) -> torch.Tensor:
    """Return all parameters in a row."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


# --- save ---------------------------------------------------------------------------------------------------


def save_some(root: Path, **options: Any) -> list[str]:
    """Save after steps 1, 2 and 3; return what `save` returned."""
    booster, *objects = boosted()
    paths = []
    for _ in range(3):
        take_steps(booster, *objects, 1)
        paths.append(str(booster.save(root, **options)))
    booster.wait_for_save()
    return paths


def test_save_writes_root_step_n_and_returns_the_path(tmp_path: Path) -> None:
    """On every rank, with a manifest that says the step."""
    returned = run_ranks(save_some, 2, tmp_path)

    assert returned == [[str(tmp_path / f"step-{step}") for step in (1, 2, 3)]] * 2
    assert [read_manifest(tmp_path / f"step-{step}").step for step in (1, 2, 3)] == [1, 2, 3]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_keep_deletes_older_checkpoints(tmp_path: Path, *, asynchronous: bool) -> None:
    """The newest ones stay; other files in the directory are nobody's business."""
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")

    run_ranks(save_some, 2, tmp_path, keep=2, asynchronous=asynchronous)

    assert [step for step, _ in find_complete(tmp_path)] == [3, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"step-2", "step-3", "notes.txt"}


def save_again(root: Path) -> None:
    """Save one step twice, with other content."""
    booster, model, optimizer, loader = boosted()
    take_steps(booster, model, optimizer, loader, 1)
    booster.save(root, extra="first")
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    booster.save(root, extra="second")
    loaded = booster.load(root)
    assert loaded is not None
    assert loaded.extra == "second"
    assert bool((model[0].weight == 0.5).all())


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    """The second one counts, and nothing of the first is left behind."""
    run_ranks(save_again, 2, tmp_path)

    marks = Counter(path.name[-24:-12] for path in (tmp_path / "step-1").glob("*.safetensors"))
    assert len(marks) == 1


def extra_round_trip(root: Path) -> None:
    """Keep every kind of plain value."""
    booster, *_ = boosted()
    extra: dict[Any, Any] = {
        "numbers": (1, 2.5, float("inf"), True, None),
        3: {"set": {1, 2}},
        "tensor": torch.arange(3, dtype=torch.bfloat16),
        "generator": torch.Generator().manual_seed(4).get_state(),
        "bytes": b"\x00\xff",
    }
    booster.save(root, extra=extra)
    loaded = booster.load(root)
    assert loaded is not None
    found = loaded.extra
    assert found.keys() == extra.keys()
    assert all(found[key] == extra[key] for key in ("numbers", 3, "bytes"))
    assert torch.equal(found["tensor"], extra["tensor"])
    assert found["tensor"].dtype == torch.bfloat16
    assert torch.equal(found["generator"], extra["generator"])


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    """Nested plain values and tensors, with their types."""
    run_ranks(extra_round_trip, 2, tmp_path)


def save_behaviour(root: Path) -> None:
    """Try to keep a function."""
    booster, *_ = boosted()
    booster.save(root, extra={"callbacks": [print]})


def test_extra_that_is_no_data_is_refused_on_every_rank(tmp_path: Path) -> None:
    """It is named by its path, and nothing is left on the disk."""
    errors = run_ranks_expecting_errors(save_behaviour, 2, tmp_path, error=UsageError)

    assert "extra['callbacks'][0] is a builtins.builtin_function_or_method" in str(errors[0])
    assert not list(tmp_path.iterdir())


def train_while_writing(root: Path) -> None:
    """Save beside training, train on at once, and save again; keep what was true at each call."""
    booster, model, optimizer, loader = boosted()
    wanted = {}
    for _ in range(4):
        take_steps(booster, model, optimizer, loader, 1)
        booster.save(root, asynchronous=True)
        wanted[booster.step] = weights_of(model).clone()
        take_steps(booster, model, optimizer, loader, 2)
    booster.wait_for_save()
    for step, weights in wanted.items():
        booster.load(root / f"step-{step}")
        assert torch.equal(weights_of(model), weights)


def test_asynchronous_save_holds_the_state_of_the_call(tmp_path: Path) -> None:
    """Training goes on while it is written; a second save waits for the first."""
    run_ranks(train_while_writing, 2, tmp_path)


def save_and_leave(root: Path) -> None:
    """Start a save and end."""
    booster, *objects = boosted()
    take_steps(booster, *objects, 1)
    booster.save(root, asynchronous=True)


def test_asynchronous_save_is_complete_when_the_process_has_ended(tmp_path: Path) -> None:
    """Without waiting for it by hand."""
    script = tmp_path / "script.py"
    folder = Path(__file__).parent
    script.write_text(
        "from pathlib import Path\n"
        "from runtime.test_contract_state import save_and_leave\n"
        f"save_and_leave(Path({str(tmp_path / 'saved')!r}))\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": str(folder.parent)}

    subprocess.run([sys.executable, script], check=True, env=environment, timeout=25)

    assert [step for step, _ in find_complete(tmp_path / "saved")] == [1]


def fail_in_background(root: Path) -> None:
    """Let the disk of one rank refuse while training goes on."""
    booster, *objects = boosted()
    take_steps(booster, *objects, 1)
    booster.save(root)
    take_steps(booster, *objects, 1)
    with full_disk(is_full=not booster.is_first):
        booster.save(root, asynchronous=True)
        take_steps(booster, *objects, 50)


def full_disk(*, is_full: bool) -> Any:
    """Return a context in which nothing can be written."""
    error = CheckpointError("cannot write 'x': No space left on device", hint="free space")
    return mock.patch.object(parts, "write_tensors", side_effect=error) if is_full else nullcontext()


def test_error_of_an_asynchronous_save_is_raised_at_the_next_step_on_every_rank(tmp_path: Path) -> None:
    """It names the rank and the reason; the earlier checkpoint is as it was."""
    errors = run_ranks_expecting_errors(fail_in_background, 2, tmp_path, error=CheckpointError)

    assert not [str(error) for error in errors if "failed on rank 1" not in str(error)]
    assert all("No space left" in str(error) for error in errors)
    assert [step for step, _ in find_complete(tmp_path)] == [1]
    assert not (tmp_path / "step-2").exists()


def fail_now(root: Path) -> None:
    """Let the disk of one rank refuse."""
    booster, *objects = boosted()
    take_steps(booster, *objects, 1)
    booster.save(root)
    take_steps(booster, *objects, 1)
    with full_disk(is_full=not booster.is_first):
        booster.save(root)


def test_failed_save_raises_on_every_rank_and_leaves_the_older_one(tmp_path: Path) -> None:
    """Nothing of it is left, and it can be tried again."""
    errors = run_ranks_expecting_errors(fail_now, 2, tmp_path)

    assert all("No space left" in str(error) for error in errors)
    assert [step for step, _ in find_complete(tmp_path)] == [1]
    assert not (tmp_path / "step-2").exists()


def save_in_window(root: Path) -> None:
    """Save after one of three micro-batches."""
    booster, model, optimizer, loader = boosted(accumulate=3)
    samples, targets = next(iter(loader))
    booster.forward_backward(model, (samples, targets), F.mse_loss)
    optimizer.step()
    booster.save(root)


def test_save_is_refused_inside_an_accumulation_window(tmp_path: Path) -> None:
    """Its gradients would be lost."""
    errors = run_ranks_expecting_errors(save_in_window, 2, tmp_path, error=UsageError)

    assert "accumulation window" in str(errors[0])


def save_apart(root: Path) -> None:
    """Pass each rank a directory of its own."""
    booster, *_ = boosted()
    booster.save(root / str(booster.world.rank))


def test_save_checks_that_ranks_pass_one_directory(tmp_path: Path) -> None:
    """Both directories are named."""
    errors = run_ranks_expecting_errors(save_apart, 2, tmp_path, error=UsageError)

    assert str(tmp_path / "0") in str(errors[0])
    assert str(tmp_path / "1") in str(errors[0])


def test_save_checks_that_ranks_see_one_directory(tmp_path: Path) -> None:
    """A local disk on each machine would hold a part of a checkpoint each."""
    errors = run_ranks_expecting_errors(see_nothing, 2, tmp_path)

    assert all("does not see" in str(error) for error in errors)
    assert not list(tmp_path.iterdir())


def see_nothing(root: Path) -> None:
    """Let rank 1 see another disk under the same path."""
    booster, *_ = boosted()
    look = saving._see
    with mock.patch.object(saving, "_see", lambda probe, rank: look(probe.with_suffix(".other"), rank)):
        booster.save(root)


def save_alone(root: Path) -> None:
    """Let only rank 0 save, as scripts for other systems do."""
    booster, *_ = boosted()
    if booster.is_first:
        engine_of(booster).agreement._timeout = timedelta(seconds=1)
        booster.save(root)
    else:
        time.sleep(1.5)
        raise UsageError("rank 1 did something else")


def test_save_that_only_rank_0_calls_ends_with_an_error_that_names_the_others(tmp_path: Path) -> None:
    """Not in a wait without end."""
    errors = run_ranks_expecting_errors(save_alone, 2, tmp_path)

    assert isinstance(errors[0], RankMismatchError)
    assert "ranks [1] did not reach 'save'" in str(errors[0])


# --- load ---------------------------------------------------------------------------------------------------


def load_one(root: Path, which: str) -> tuple[int, int, int, Any, int]:
    """Load and return what `load` says."""
    booster, *_ = boosted()
    loaded = booster.load(root / which)
    assert loaded is not None
    assert (booster.step, booster.epoch, booster.samples) == (loaded.step, loaded.epoch, loaded.samples)
    return loaded.step, loaded.epoch, loaded.samples, loaded.extra, len(loaded.report.missing)


def test_load_takes_the_newest_complete_one_or_exactly_the_one_given(tmp_path: Path) -> None:
    """An interrupted save is not complete. Step, epoch and samples are counted and restored."""
    run_ranks(save_some, 2, tmp_path, extra="kept")
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-9" / "model-00000-0123456789ab.safetensors").write_bytes(b"half a file")

    newest = run_ranks(load_one, 2, tmp_path, "")
    given = run_ranks(load_one, 2, tmp_path, "step-2")

    assert newest == [(3, 2, 12, "kept", 0)] * 2
    assert given == [(2, 1, 8, "kept", 0)] * 2


def load_nothing(root: Path) -> bool:
    """Load where there is nothing."""
    booster, *_ = boosted()
    return booster.load(root, missing_ok=True) is None


def test_load_returns_none_with_missing_ok_when_there_is_none(tmp_path: Path) -> None:
    """As at the first start of a run."""
    assert run_ranks(load_nothing, 2, tmp_path / "nowhere") == [True, True]


def load_required(root: Path) -> None:
    """Load what has to be there."""
    booster, *_ = boosted()
    booster.load(root)


def test_load_says_where_there_is_none(tmp_path: Path) -> None:
    """A missing directory, and one with interrupted saves only, on every rank."""
    (tmp_path / "step-9").mkdir()

    missing = run_ranks_expecting_errors(load_required, 2, tmp_path / "nowhere", error=CheckpointError)
    incomplete = run_ranks_expecting_errors(load_required, 2, tmp_path, error=CheckpointError)

    assert "does not exist" in str(missing[1])
    assert "step-9" in str(incomplete[1])


def flip(path: Path, position: int) -> None:
    """Change one byte."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


def test_damage_is_an_error_on_every_rank_that_names_file_and_tensor(tmp_path: Path) -> None:
    """A byte that one rank's disk has changed; the older checkpoint still loads."""
    run_ranks(save_some, 2, tmp_path)
    file = next((tmp_path / "step-3").glob("optimizer-*.safetensors"))
    flip(file, -1)

    errors = run_ranks_expecting_errors(load_required, 2, tmp_path)

    assert all(file.name in str(error) and "exp_avg" in str(error) for error in errors)
    assert run_ranks(load_one, 2, tmp_path, "step-2")[0][0] == 2


def load_wider(root: Path, *, strict: bool) -> tuple[tuple[str, ...], bool]:
    """Load into a model of another width."""
    booster, model, *_ = boosted(width=8)
    before = weights_of(model).clone()
    try:
        loaded = booster.load(root, strict=strict)
    finally:
        assert torch.equal(before[:40], weights_of(model)[:40])
    assert loaded is not None
    return loaded.report.reshaped, bool(torch.equal(before, weights_of(model)))


def test_load_is_strict_by_default_and_changes_nothing_then(tmp_path: Path) -> None:
    """The error lists what does not fit; strict=False loads the rest and reports."""
    run_ranks(save_some, 2, tmp_path)

    errors = run_ranks_expecting_errors(load_wider, 2, tmp_path, strict=True, error=CheckpointError)
    reshaped, is_same = run_ranks(load_wider, 2, tmp_path, strict=False)[0]

    assert "0.weight (7, 5), here (8, 5)" in str(errors[0])
    assert "0.weight (7, 5), here (8, 5)" in reshaped
    assert not is_same  # the last bias fits


def load_into_sgd(root: Path, *, strict: bool) -> str:
    """Load into a run with another optimizer, one more scheduler and an average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    booster = Booster()
    booster.boost(model, optimizer, scheduler)
    booster.average(model, 0.9)
    loaded = booster.load(root, strict=strict)
    assert loaded is not None
    return str(loaded.report)


def test_report_says_what_else_differs(tmp_path: Path) -> None:
    """Another optimizer, schedulers, loaders and averages, all in one error, or in the report."""
    run_ranks(save_some, 2, tmp_path)
    wanted = (
        "optimizer 0 is stored as AdamW, this run has SGD",
        "stored schedulers are [], boosted ones ['StepLR']",
        "positions of 1 loaders are stored, 0 are boosted",
        "average: 0.weight",
    )

    errors = run_ranks_expecting_errors(load_into_sgd, 2, tmp_path, strict=True, error=CheckpointError)
    report = run_ranks(load_into_sgd, 2, tmp_path, strict=False)[0]

    assert all(text in str(errors[0]) and text in report for text in wanted)


# --- reports ------------------------------------------------------------------------------------------------


def read_reports() -> tuple[str, dict[str, Any]]:
    """Take a step; return both reports."""
    booster, *objects = boosted(max_grad_norm=1.0)
    take_steps(booster, *objects, 1)
    return booster.describe(), booster.report()


def test_describe_is_the_effective_plan_with_the_origin_of_each_value() -> None:
    """Line by line."""
    described, _ = run_ranks(read_reports, 2)[0]

    assert "max_grad_norm = 1.0" in described
    assert all(line.endswith(")") for line in described.splitlines())


def test_report_is_memory_by_category_and_traffic_by_group_of_the_last_step() -> None:
    """In bytes, and in words received."""
    _, report = run_ranks(read_reports, 2)[0]
    numel = 5 * 7 + 7 + 7 * 3 + 3

    assert report["memory"]["value"] == 4 * numel
    assert report["memory"]["optimizer state"] == 8 * numel
    assert report["traffic"]["data/gradients.0 gradients"] >= numel


def unboosted_calls(root: Path) -> None:
    """Call everything before boost."""
    booster = Booster()
    model = nn.Linear(2, 2)
    for call in (
        lambda: booster.save(root),
        lambda: booster.load(root),
        lambda: booster.export(model, root),
        lambda: booster.import_weights(model, root),
        lambda: booster.save_on_signal(root),
    ):
        with pytest.raises(ColossalError, match=r"boost\(model, optimizer\) first"):
            call()
    assert (booster.step, booster.epoch, booster.samples) == (0, 0, 0)


def test_calls_before_boost_say_so(tmp_path: Path) -> None:
    """With the next step."""
    run_ranks(unboosted_calls, 1, tmp_path)


def keep_while_shown(root: Path) -> None:
    """Save and export while a model shows its average."""
    booster, model, optimizer, loader = boosted(precision="bf16")
    average = booster.average(model, 0.5)
    take_steps(booster, model, optimizer, loader, 2)
    with average.applied():
        with pytest.raises(UsageError, match="outside"):
            booster.save(root / "run")
        with pytest.raises(UsageError, match=r"average=average"):
            booster.export(model, root / "weights")
    booster.export(model, root / "weights", average=average)
    booster.import_weights(model, root / "weights")
    with booster.full_parameters(model) as shown:
        for place in average.places():
            assert torch.equal(shown[place.key[1]].reshape(-1), place.tensor.bfloat16())


def test_average_is_saved_and_exportable(tmp_path: Path) -> None:
    """By name; while the model shows it, saving and exporting the model would take it for the weights."""
    run_ranks(keep_while_shown, 2, tmp_path)
