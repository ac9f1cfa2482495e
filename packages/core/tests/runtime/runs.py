"""Runs that are saved and loaded: small loops on one rank, with everything that a run has to keep."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, SequentialLR, StepLR

from colossal_core import Booster

__all__ = ["Run", "Trace", "loader_of", "train"]

NUM_SAMPLES, BATCH = 11, 4


@frozen(kw_only=True)
class Run:
    """What is run, and how far.

    Attributes:
        root: Where checkpoints are.
        steps: Real steps in all.
        save_at: Steps after which it saves; after the last of them it stops.
        precision: As for ``Booster``.
        accumulate: As for ``Booster``.
        asynchronous: As for ``save``.
        dropout: Probability of the dropout in the model.
        optimizer: Name of a recipe of :data:`OPTIMIZERS`.
        scheduler: Name of a recipe of :data:`SCHEDULERS`.
        average: Whether a running average follows.
    """

    root: Path
    steps: int = 7
    save_at: tuple[int, ...] = ()
    precision: str = "fp32"
    accumulate: int = 1
    asynchronous: bool = False
    dropout: float = 0.2
    optimizer: str = "adamw"
    scheduler: str = "step"
    average: bool = True


@frozen
class Trace:
    """What a run leaves behind; equal where two runs are the same run.

    Attributes:
        losses: Loss of each micro-batch.
        weights: Every parameter and buffer at the end.
        moments: State of the optimizer at the end.
        averages: Elements of the running average.
        rates: Learning rate of each group at the end.
        counters: Step, epoch, samples, skipped steps, loss scale.
        drawn: What torch and ``random`` draw next.
    """

    losses: list[float]
    weights: list[torch.Tensor]
    moments: list[torch.Tensor]
    averages: list[torch.Tensor]
    rates: list[float]
    counters: tuple[float, ...]
    drawn: tuple[float, float]


class Tangled(nn.Module):
    """Dropout, statistics, a tied weight, a frozen layer, a 0-d and an unused parameter, odd sizes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 13)
        self.norm = nn.BatchNorm1d(13)
        self.drop = nn.Dropout(dropout)
        self.back = nn.Linear(13, 13, bias=False)
        self.again = nn.Linear(13, 13, bias=False)
        self.again.weight = self.back.weight
        self.leave = nn.Linear(13, 3)
        self.leave.bias.requires_grad = False
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.ones(3))
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.register_buffer("hidden", torch.arange(3.0), persistent=False)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 5]`` to ``[batch, 3]``."""
        inner = self.drop(torch.relu(self.norm(self.enter(samples))))
        outputs: torch.Tensor = self.leave(self.again(torch.tanh(self.back(inner))) * self.scale)
        return outputs


OPTIMIZERS: Mapping[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.02, amsgrad=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.02),
}

SCHEDULERS: Mapping[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "step": lambda optimizer: StepLR(optimizer, 2),
    "cycle": lambda optimizer: OneCycleLR(optimizer, [0.02, 0.01, 0.02], total_steps=12),
    "sequence": lambda optimizer: SequentialLR(
        optimizer,
        [LambdaLR(optimizer, lambda step: (step + 1) / 4), StepLR(optimizer, 3)],
        milestones=[4],
    ),
}


def loader_of(dtype: torch.dtype = torch.float32) -> torch.utils.data.DataLoader[Any]:
    """Return a shuffling loader over the same samples at every call; its last batch is not full."""
    generator = torch.Generator().manual_seed(3)
    samples = torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=dtype)
    targets = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)
    dataset = torch.utils.data.TensorDataset(samples, targets)
    return torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True)


def train(run: Run) -> Trace | None:
    """Train from the newest checkpoint, if there is one; None when it stopped at a save."""
    torch.manual_seed(1)
    random.seed(1)
    dtype = torch.float64 if run.precision == "fp64" else torch.float32
    model = Tangled(run.dropout).to(dtype)
    groups: list[dict[str, Any]] = [
        {"params": [model.enter.weight, model.back.weight, model.unused], "weight_decay": 0.1},
        {"params": [model.enter.bias, model.leave.weight, model.scale, *model.norm.parameters()], "lr": 0.01},
        {"params": [model.empty]},
    ]
    optimizer = OPTIMIZERS[run.optimizer](groups)
    scheduler = SCHEDULERS[run.scheduler](optimizer)
    booster = Booster(precision=run.precision, max_grad_norm=1.0, accumulate=run.accumulate)
    model, optimizer, scheduler, loader = booster.boost(model, optimizer, scheduler, loader_of(dtype))
    average = booster.average(model, 0.9) if run.average else None
    loaded = booster.load(run.root, missing_ok=True)
    losses: list[float] = [] if loaded is None else loaded.extra["losses"]
    while booster.step < run.steps:
        for samples, targets in loader:
            noise = random.random() * run.dropout  # noqa: S311 - a draw that is to be continued
            loss = booster.forward_backward(model, (samples + noise, targets), F.cross_entropy)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            if optimizer.stepped and booster.step in run.save_at:
                booster.save(run.root, extra={"losses": losses}, asynchronous=run.asynchronous)
                if booster.step == run.save_at[-1]:
                    booster.wait_for_save()
                    return None
            if booster.step == run.steps:
                break
    state = optimizer.state
    return Trace(
        losses=losses,
        weights=[tensor.detach().clone() for tensor in model.state_dict().values()],
        moments=[value for values in state.values() for _, value in sorted(values.items())],
        averages=[] if average is None else [place.tensor.clone() for place in average.places()],
        rates=[float(group["lr"]) for group in optimizer.param_groups],
        counters=(
            booster.step,
            booster.epoch,
            booster.samples,
            optimizer.skipped_steps,
            optimizer.loss_scale,
            float(optimizer.grad_norm),
        ),
        drawn=(torch.rand(()).item(), random.random()),  # noqa: S311 - see above
    )
