"""What ``boost`` gives back, sentence by sentence, as far as no other file is about it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from colossal_core import Booster, UsageError, launch
from colossal_testkit import run_ranks

from .twins import batch_of, make_twins


def boost_everything() -> None:
    """Boost one object of each kind, with None between, and release the model."""
    world = launch()
    model = nn.Linear(4, 3)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    loader: Any = DataLoader(TensorDataset(torch.zeros(5, 4)), batch_size=4)
    criterion = nn.MSELoss()
    booster = Booster()

    found = booster.boost(criterion, None, loader, model, scheduler, optimizer)

    assert found[0] is criterion
    assert found[1] is None
    assert isinstance(found[2], DataLoader)
    assert len(found[2]) == 2
    assert found[3] is model
    assert next(model.parameters()).device == world.device
    assert isinstance(found[4], lr_scheduler.StepLR)
    assert found[4].__dict__ is scheduler.__dict__
    assert isinstance(found[5], torch.optim.Optimizer)
    assert found[5].param_groups is optimizer.param_groups
    assert booster.release(model) is model
    optimizer.step()  # the user's own again


def test_boost_returns_what_it_was_given_in_that_order_and_none_passes_through() -> None:
    """Models, criteria and groups are the user's; ``release`` gives a plain model back."""
    run_ranks(boost_everything, 2)


def look_at_the_optimizer() -> float:
    """Take a clipped step, change the bound, and clip by hand; return a norm."""
    twins = make_twins(max_grad_norm=0.01)
    optimizer = twins.optimizer
    assert (optimizer.loss_scale, optimizer.skipped_steps, optimizer.stepped) == (1.0, 0, False)
    x, y = batch_of(0)
    nn.functional.mse_loss(twins.plain(x), y).backward()
    norm = nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.01)
    nn.functional.mse_loss(twins.model(twins.mine(x)), twins.mine(y)).backward()
    with pytest.raises(UsageError, match=r"max_grad_norm is 0.01"):
        optimizer.clip_grad_norm_(1.0)
    twins.step()
    assert optimizer.stepped
    assert (optimizer.grad_norm.shape, optimizer.grad_norm.dtype) == ((), torch.float64)
    assert float(optimizer.grad_norm) == pytest.approx(float(norm), rel=1e-10)
    optimizer.max_grad_norm = None
    nn.functional.mse_loss(twins.plain(x), y).backward()
    nn.functional.mse_loss(twins.model(twins.mine(x)), twins.mine(y)).backward()
    bound = float(nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.02, norm_type=1.0))
    assert float(optimizer.clip_grad_norm_(0.02, norm_type=1.0)) == pytest.approx(bound, rel=1e-10)
    twins.step()
    assert twins.drift() < 1e-10
    return float(optimizer.grad_norm)


def test_grad_norm_is_0d_fp64_before_clipping_and_max_grad_norm_can_be_set() -> None:
    """``clip_grad_norm_`` raises where ``max_grad_norm`` is set; the norm is the same on all ranks."""
    one, other = run_ranks(look_at_the_optimizer, 2)

    assert one == other


def boost_the_foreign(kind: str) -> None:
    """Boost what another system has taken over, or an optimizer of other parameters."""
    launch()
    model: Any = nn.Sequential(nn.Linear(4, 3))
    objects = [model]
    if kind == "optimizer":
        objects.append(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    else:
        fully_shard(model)
    with pytest.raises(UsageError, match={"optimizer": "none of the models", "FSDP": "FSDP"}[kind]):
        Booster().boost(*objects)


@pytest.mark.parametrize("kind", ["FSDP", "optimizer"])
def test_models_of_fsdp_and_foreign_optimizers_are_refused_on_every_rank(kind: str) -> None:
    """With the reason."""
    run_ranks(boost_the_foreign, 2, kind, timeout_seconds=15)


class Wide(nn.Module):
    """Takes a nested container."""

    def __init__(self) -> None:
        """Build it in fp32."""
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.dtype]:
        """Map ``x`` and say in which dtype it came."""
        return self.inner(batch["x"][0]), batch["x"][0].dtype


def test_fp64_casts_floating_inputs_where_the_model_was_built_in_less() -> None:
    """A model in fp32 takes the data that it took before; integers stay, and outputs leave in fp64."""
    model = Booster(precision="fp64").boost(Wide())

    outputs, seen = model({"x": [torch.ones(2, 4)], "ids": torch.arange(2)})

    assert seen == outputs.dtype == torch.float64
    built_wide = Booster(precision="fp64").boost(Wide().double())
    with pytest.raises(RuntimeError, match="same dtype"):
        built_wide({"x": [torch.ones(2, 4)]})
