"""A small run to be kept: model, optimizer and loader, and some steps of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from colossal_core import Booster

__all__ = ["boosted", "take_steps", "weights_of"]


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
