"""Gradients that nobody clears after a step: the next window adds to what torch would show there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colossal_core import Booster
from colossal_testkit import run_ranks

BOUND = 0.25
"""As a power of two it scales gradients exactly once the norm is one, too."""


def keep_gradients(keep_float32: tuple[str, ...]) -> dict[str, float]:
    """Take two windows that clip and clear nothing; return by how much each gradient has grown."""
    torch.manual_seed(0)
    booster = Booster(precision="bf16", keep_float32=keep_float32)
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model, optimizer = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.0))
    rows = torch.randn(4, 4)
    found = []
    for _ in range(2):
        booster.backward(model(rows).square().mean())
        with booster.full_gradients(model) as gradients:
            found.append({name: value.clone() for name, value in gradients.items()})
        norm = float(optimizer.clip_grad_norm_(1e9))
        optimizer.clip_grad_norm_(BOUND * norm)
        optimizer.step()
    first, second = found
    return {name: float(second[name].norm() / first[name].norm()) for name in first}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("keep_float32", [(), ("1",)])
def test_kept_gradients_are_clipped_once_in_every_dtype(
    keep_float32: tuple[str, ...], num_ranks: int
) -> None:
    """A buffer in fp32 beside one in bf16 is scaled in place by the update, and only there."""
    growths = run_ranks(keep_gradients, num_ranks, keep_float32)[0]

    assert growths == pytest.approx(dict.fromkeys(growths, 1 + BOUND), rel=0.02)
