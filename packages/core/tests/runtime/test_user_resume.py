"""Scripts of users that are interrupted and go on: what they log is what the uninterrupted run logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from colossal_core import Booster
from colossal_core.errors import CheckpointError, UsageError
from colossal_testkit import run_ranks

EPOCHS = 3
NOWHERE = Path("no checkpoint")


def classify(root: Path, start: Path = NOWHERE) -> list[float]:
    """Train a classifier, with what such scripts do after each step and at the end of an epoch.

    A schedule that follows epochs, a look at the first batch of the test set after each step, the whole test
    set after each epoch, and a memory of the best one. Saves in the body of the loop, and after each epoch.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    samples, classes = torch.randn(32, 6), torch.randint(3, (32,))
    loaders = [
        DataLoader(TensorDataset(samples[part], classes[part]), batch_size=8, shuffle=True)
        for part in (slice(22), slice(22, 32))
    ]
    booster = Booster()
    model, optimizer, scheduler, train, test = booster.boost(model, optimizer, scheduler, *loaders)
    loaded = booster.load(start, missing_ok=True)
    kept: dict[str, Any] = {"log": [], "best": 9.0} if loaded is None else loaded.extra
    log: list[float] = kept["log"]
    while booster.epoch < EPOCHS:
        for batch in train:
            log.append(float(booster.forward_backward(model, batch, F.cross_entropy)))
            optimizer.step()
            optimizer.zero_grad()
            for glimpse in test:
                log.append(float(booster.evaluate(model, glimpse, F.cross_entropy)))
                break
            if start == NOWHERE:
                booster.save(root / "body", extra=kept, asynchronous=True)
        scheduler.step()
        losses = [float(booster.evaluate(model, batch, F.cross_entropy)) for batch in test]
        kept["best"] = min(kept["best"], *losses)
        log += [*losses, kept["best"], *scheduler.get_last_lr(), booster.epoch, booster.samples]
        if start == NOWHERE:
            booster.save(root / "end", extra=kept)
    return log


def test_classifier_goes_on_from_every_save(tmp_path: Path) -> None:
    """Inside an epoch, in the body of its last batch, and at its end: the same numbers, bit for bit."""
    whole = run_ranks(classify, 2, tmp_path)[0]

    for start in ("body/step-2", "body/step-3", "body/step-6", "end/step-3"):
        assert run_ranks(classify, 2, tmp_path, tmp_path / start) == [whole] * 2, start


class Adapted(nn.Module):
    """A frozen layer with a small one beside it."""

    def __init__(self, base: nn.Linear) -> None:
        """Freeze it."""
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Add what the small one says."""
        changed: torch.Tensor = self.base(inputs) + self.up(self.down(inputs))
        return changed


def adapt(root: Path, start: Path = NOWHERE, *, unfreezes_first: bool = False) -> list[float]:
    """Train adapters, and the layers beneath from the third step on, which gives the optimizer a group."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(Adapted(nn.Linear(4, 8)), nn.Tanh(), Adapted(nn.Linear(8, 1)))
    mine = [parameter for parameter in model.parameters() if parameter.requires_grad]
    samples = torch.randn(6, 4)
    booster = Booster()
    model, optimizer = booster.boost(model, torch.optim.AdamW(mine, lr=0.02))

    def unfreeze() -> None:
        layers = [model[0].base, model[2].base]
        found = [parameter.requires_grad_() for layer in layers for parameter in layer.parameters()]
        optimizer.add_param_group({"params": found, "lr": 0.01})

    if unfreezes_first:
        unfreeze()
    loaded = booster.load(start, missing_ok=True)
    log: list[float] = [] if loaded is None else loaded.extra
    share = samples[booster.data_rank :: booster.data_degree]
    while booster.step < 5:
        if booster.step == 3 and len(optimizer.param_groups) == 1:
            unfreeze()
        log.append(float(booster.forward_backward(model, (share, share.sum(1, keepdim=True)), F.mse_loss)))
        optimizer.step()
        optimizer.zero_grad()
        if start == NOWHERE:
            booster.save(root, extra=log)
    return log


def test_adapters_go_on_before_and_after_layers_were_unfrozen(tmp_path: Path) -> None:
    """A script has the groups that were saved when it loads; otherwise it is told which."""
    whole = run_ranks(adapt, 2, tmp_path)[0]

    assert run_ranks(adapt, 2, tmp_path, tmp_path / "step-2") == [whole] * 2
    assert run_ranks(adapt, 2, tmp_path, tmp_path / "step-4", unfreezes_first=True) == [whole] * 2
    with pytest.raises(CheckpointError, match=r"add_param_group") as error:
        adapt(tmp_path, tmp_path / "step-4")
    assert "stored with groups of [4, 4] parameters, this one has [4]" in str(error.value)


def grow(width: int = 4) -> tuple[Booster, nn.Module, torch.optim.Optimizer]:
    """Return a boosted model that has taken one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
    booster = Booster()
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    take_step(booster, model, optimizer)
    return booster, model, optimizer


def take_step(booster: Booster, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train on one batch."""
    booster.forward_backward(model, (torch.ones(4, 3), torch.ones(4, 1)), F.mse_loss)
    optimizer.step()
    optimizer.zero_grad()


def fall_back(root: Path) -> tuple[str, int]:
    """Save twice, damage what only rank 1 reads, and load what is whole, as scripts do."""
    booster, model, optimizer = grow()
    older = booster.save(root)
    take_step(booster, model, optimizer)
    newer = booster.save(root)
    if not booster.is_first:
        path = next(newer.glob("random-00001-*"))
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    booster.mean(1.0)
    found = "nothing"
    try:
        loaded = booster.load(root)
    except CheckpointError as error:
        found = str(error)
        loaded = booster.load(older)
    assert loaded is not None
    return found, loaded.step


def test_script_that_catches_a_damaged_checkpoint_does_so_on_every_rank(tmp_path: Path) -> None:
    """Also where another rank met the damage."""
    (other, step), (mine, _) = run_ranks(fall_back, 2, tmp_path)

    assert step == 1
    assert "do not have their checksum" in mine
    assert other == f"rank 1 could not go on: {mine}"


def test_checkpoint_holds_no_checkpoints(tmp_path: Path) -> None:
    """What save() returned is no root: load() would take it, and never those inside."""
    booster = grow()[0]
    path = booster.save(tmp_path)

    for call in (booster.save, booster.save_on_signal):
        with pytest.raises(UsageError, match="step-1 is a checkpoint itself") as error:
            call(path)
        assert error.value.hint == f"save into {tmp_path}, or elsewhere"


def test_report_counts_what_was_loaded(tmp_path: Path) -> None:
    """Of a model of another width the last bias fits, with its two moments."""
    grow()[0].save(tmp_path)

    loaded = grow(width=5)[0].load(tmp_path, strict=False)

    assert loaded is not None
    assert (loaded.report.loaded, len(loaded.report.reshaped)) == (3, 6)
