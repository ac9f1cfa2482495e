"""Models with BatchNorms of every kind, and runs of them: on shares of ranks, and in one plain process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import frozen
from torch import nn

from colossal_core import Booster
from colossal_testkit import run_ranks

__all__ = [
    "TOLERANCE",
    "HandMadeNorm",
    "Result",
    "Run",
    "Volumes",
    "affine",
    "batch_of",
    "build",
    "channels_last",
    "check",
    "cumulative",
    "frozen_weights",
    "images",
    "not_affine",
    "only_bias",
    "rewritten_norm",
    "sgd",
    "shared_norm",
    "untracked",
    "user_norm",
]

TOLERANCE = 1e-10


# --- models ---------------------------------------------------------------------------------------------


class UserNorm(nn.BatchNorm2d):
    """A BatchNorm of a user, who adds an activation."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalise and activate."""
        return torch.tanh(super().forward(rows))


class RewrittenNorm(nn.BatchNorm2d):
    """A BatchNorm of a library that calls the function itself, as timm's BatchNormAct2d does."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalise and activate."""
        return F.gelu(
            F.batch_norm(
                rows,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.training,
                0.2,
                self.eps,
            )
        )


class HandMadeNorm(nn.BatchNorm2d):
    """A BatchNorm that computes its statistics by hand."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalise."""
        return rows - rows.mean((0, 2, 3), keepdim=True)


def images(norm: nn.Module) -> nn.Module:
    """Return a convolutional network around a norm of 6 channels, and a BatchNorm1d behind it."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        norm,
        nn.Tanh(),
        nn.Conv2d(6, 3, 3, stride=2),
        nn.Flatten(),
        nn.Linear(12, 5),
        nn.BatchNorm1d(5),
        nn.Linear(5, 3),
    )


def affine() -> nn.Module:
    """Return the ordinary network."""
    return images(nn.BatchNorm2d(6))


def not_affine() -> nn.Module:
    """Return one without weights."""
    return images(nn.BatchNorm2d(6, affine=False))


def cumulative() -> nn.Module:
    """Return one whose running statistics are plain means."""
    return images(nn.BatchNorm2d(6, momentum=None))


def untracked() -> nn.Module:
    """Return one without running statistics."""
    return images(nn.BatchNorm2d(6, track_running_stats=False, eps=0.1))


def frozen_weights() -> nn.Module:
    """Return one with a frozen norm, below a frozen convolution: nothing before it needs a gradient."""
    model = images(nn.BatchNorm2d(6))
    for module in list(model.children())[:2]:
        module.requires_grad_(False)
    return model


def only_bias() -> nn.Module:
    """Return one that trains the bias of its norm."""
    norm = nn.BatchNorm2d(6)
    norm.weight.requires_grad_(False)
    return images(norm)


def user_norm() -> nn.Module:
    """Return one with the user's norm."""
    return images(UserNorm(6))


def rewritten_norm() -> nn.Module:
    """Return one with a norm that calls the function."""
    return images(RewrittenNorm(6))


def shared_norm() -> nn.Module:
    """Return one that runs one norm twice, under two names."""
    norm = nn.BatchNorm2d(6)
    return images(nn.Sequential(norm, nn.Tanh(), norm))


def channels_last() -> nn.Module:
    """Return one whose activations have the channels innermost."""
    model: Any = affine()
    inner: nn.Module = model.to(memory_format=torch.channels_last)
    return inner


class Volumes(nn.Module):
    """BatchNorm over volumes and over series."""

    def __init__(self) -> None:
        super().__init__()
        self.volume = nn.BatchNorm3d(2)
        self.series = nn.BatchNorm1d(2)
        self.head = nn.Linear(12, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 2, 6, 6]`` to ``[n, 3]``."""
        volume = self.volume(rows.view(-1, 2, 2, 3, 6)).flatten(2)
        outputs: torch.Tensor = self.head(self.series(torch.tanh(volume)).unfold(2, 6, 6).mean(3).flatten(1))
        return outputs


# --- one run --------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Run:
    """A training run with a share for each rank in each step.

    Attributes:
        build: Makes the model.
        shares: Rows of each rank, in each step; 0 gives the rank one sample of weight 0.
        last_is_frozen: Whether the last step runs with the norms in evaluation mode.
    """

    build: Callable[[], nn.Module]
    shares: Sequence[Sequence[int]]
    last_is_frozen: bool = False

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.shares[0])


@frozen
class Result:
    """What a run leaves.

    Attributes:
        losses: Of each step.
        state: Parameters and buffers at the end.
        evaluation: Outputs of the trained model in evaluation mode.
    """

    losses: list[float]
    state: dict[str, torch.Tensor]
    evaluation: torch.Tensor


def batch_of(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global batch of a step; its mean is far from 0."""
    source = torch.Generator().manual_seed(step)
    inputs = torch.randn(rows, 2, 6, 6, generator=source, dtype=torch.float64) * 2 + 30
    return inputs, torch.randn(rows, 3, generator=source, dtype=torch.float64)


def build(make: Callable[[], nn.Module]) -> Any:
    """Return a model in fp64 whose every parameter is random."""
    torch.manual_seed(3)
    model = make().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def freeze_statistics(model: nn.Module) -> None:
    """Put every norm into evaluation mode."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all runs."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def result_of(model: nn.Module, losses: list[float]) -> Result:
    """Return what a run leaves."""
    model.eval()
    with torch.no_grad():
        outputs = model(batch_of(99, 4)[0])
    state = {name: value.detach().clone().double() for name, value in model.state_dict().items()}
    return Result(losses, state, outputs)


def run_plain(run: Run) -> Result:
    """Train in one process on the global batches."""
    model = build(run.build)
    optimizer = sgd(model)
    losses = []
    for step, shares in enumerate(run.shares):
        if run.last_is_frozen and step == len(run.shares) - 1:
            freeze_statistics(model)
        inputs, target = batch_of(step, sum(shares))
        loss = F.mse_loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return result_of(model, losses)


def run_boosted(run: Run) -> Result:
    """Train on this rank's shares."""
    model = build(run.build)
    booster = Booster(precision="fp64")
    model, optimizer = booster.boost(model, sgd(model))
    losses = []
    for step, shares in enumerate(run.shares):
        if run.last_is_frozen and step == len(run.shares) - 1:
            freeze_statistics(model)
        inputs, target = batch_of(step, sum(shares))
        start, count = sum(shares[: booster.data_rank]), shares[booster.data_rank]
        if count:
            batch = inputs[start : start + count], target[start : start + count]
            loss = booster.forward_backward(model, batch, nn.MSELoss(), weight=float(count))
        else:
            loss = booster.forward_backward(model, (inputs[:1] * 7, target[:1]), nn.MSELoss(), weight=0.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return result_of(model, losses)


def compare(result: Result, wanted: Result, tolerance: float = TOLERANCE) -> None:
    """Compare with the plain run; the reported loss is fp32."""
    assert result.losses == pytest.approx(wanted.losses, rel=1e-6)
    assert result.state.keys() == wanted.state.keys()
    for name, value in wanted.state.items():
        torch.testing.assert_close(result.state[name], value, rtol=tolerance, atol=tolerance, msg=name)
    torch.testing.assert_close(result.evaluation, wanted.evaluation, rtol=tolerance, atol=tolerance)


def check(run: Run) -> None:
    """Train on ranks and in one process, and compare; buffers have the same bits on all ranks."""
    results = run_ranks(run_boosted, run.num_ranks, run)

    compare(results[0], run_plain(run))
    for other in results[1:]:
        assert all(torch.equal(value, results[0].state[name]) for name, value in other.state.items())
