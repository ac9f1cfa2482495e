"""Loading, sentence by sentence: what `load`, counters and reports promise.

Each test is named after what is promised and looks at it in its smallest form; the files about the parts
(resume, reshard, export, import, checkpoint layouts, format) look further. Rank functions assert by
themselves.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colossal_core import Booster, CheckpointError, ColossalError, UsageError
from colossal_core.checkpoint import find_complete
from colossal_testkit import run_ranks, run_ranks_expecting_errors

from .keeping import boosted, take_steps, weights_of


def save_some(root: Path, **options: Any) -> list[str]:
    """Save after steps 1, 2 and 3; return what `save` returned."""
    booster, *objects = boosted()
    paths = []
    for _ in range(3):
        take_steps(booster, *objects, 1)
        paths.append(str(booster.save(root, **options)))
    booster.wait_for_save()
    return paths


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


def stop_by_signal(root: Path) -> tuple[Any, list[int]]:
    """Get SIGTERM on rank 1 after two steps; return how the run ended, and its counters."""
    booster, *objects = boosted()
    booster.save_on_signal(root)
    take_steps(booster, *objects, 2)
    if not booster.is_first:
        os.kill(os.getpid(), signal.SIGTERM)
    code: Any = None
    try:
        take_steps(booster, *objects, 3)
    except SystemExit as ended:
        code = ended.code
    return code, [booster.step, booster.samples]


def test_save_on_signal_is_agreed_by_all_ranks_at_the_next_step_then_exit_code_143(tmp_path: Path) -> None:
    """One rank is told, all save the step that follows and leave with the code of SIGTERM."""
    ends = run_ranks(stop_by_signal, 2, tmp_path)

    (_, (step, samples)), _ = ends
    assert ends == [(143, [3, samples])] * 2
    assert step == 3
    assert [step for step, _ in find_complete(tmp_path)] == [3]


def count_and_go_on(root: Path) -> list[tuple[int, int, int]]:
    """Return step, epoch and samples after two steps, and after a load of them."""
    booster, *objects = boosted()
    take_steps(booster, *objects, 2)
    before = booster.step, booster.epoch, booster.samples
    booster.save(root)
    other, *_ = boosted()
    other.load(root)
    return [before, (other.step, other.epoch, other.samples)]


def test_step_epoch_and_samples_count_and_are_restored(tmp_path: Path) -> None:
    """Real steps, and samples of the global batch, the same on every rank."""
    (before, after), other = run_ranks(count_and_go_on, 2, tmp_path)

    assert [before, after] == other
    assert before == after
    assert before[0] == 2
    assert before[2] > 0


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
