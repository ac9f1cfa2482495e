"""Tensors of other stages: their forms, also where torch changes these in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from colossal_core import Booster
from colossal_pipeline import Pipeline
from colossal_pipeline.absent import Absent
from colossal_testkit import run_ranks

CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transpose": lambda tensor: tensor.transpose_(0, 2),
    "squeeze": lambda tensor: tensor.squeeze_(1),
    "unsqueeze": lambda tensor: tensor.unsqueeze_(-1),
    "swapaxes": lambda tensor: tensor.swapaxes_(0, 1),
    "several": lambda tensor: tensor.mul_(2).transpose_(0, 1).squeeze_(0).t_().add_(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_forms_change_in_place_as_those_of_other_tensors(name: str) -> None:
    """The object that user code holds has the new form, and so has what is computed from it."""
    change = CHANGES[name]
    real = torch.zeros(2, 1, 3)
    absent = Absent.like((2, 1, 3), torch.float32, torch.device("cpu"))

    returned, wanted = change(absent), change(real)

    assert returned is absent
    assert (absent.shape, absent.stride()) == (real.shape, real.stride()) == (wanted.shape, wanted.stride())
    assert (absent + 1).shape == real.shape
    assert absent[..., :1].shape == real[..., :1].shape


class Recurrent(nn.Module):
    """A recurrent layer, whose results torch transposes in place, and a layer that reads the last of them."""

    def __init__(self) -> None:
        """Make the layers in fp64."""
        super().__init__()
        self.cells = nn.GRU(3, 4, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 2)
        self.double()

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        """Map ``[n, time, 3]`` to ``[n, 2]``."""
        found: torch.Tensor = self.head(self.cells(series)[0][:, -1])
        return found


def train_recurrent(*, alone: bool) -> list[float]:
    """Return the losses of a few steps."""
    torch.manual_seed(0)
    model: nn.Module = Recurrent()
    booster = Booster(*([] if alone else [Pipeline(degree=2, microbatches=3)]), precision="fp64")
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), 0.1))
    losses = []
    series, targets = torch.sin(torch.arange(105.0)).double().view(7, 5, 3), torch.ones(7, 2).double()
    for _ in range(3):
        losses.append(float(booster.forward_backward(model, (series, targets), nn.functional.mse_loss)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_recurrent_layers_are_exact() -> None:
    """Their results have samples first on the stage that gets them, too."""
    alone, divided = run_ranks(train_recurrent, 1, alone=True), run_ranks(train_recurrent, 2, alone=False)

    for losses in divided:
        assert losses == pytest.approx(alone[0], rel=1e-6)  # losses come in fp32
