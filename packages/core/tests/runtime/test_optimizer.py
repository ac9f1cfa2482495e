"""The optimizer and the schedulers that ``boost`` returns: torch's own manners, on reduced gradients."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

from colossal_core import Booster
from colossal_core.errors import UsageError
from colossal_testkit import run_ranks
from colossal_testkit.stories import Awkward, assert_close, batch_of

Schedule = Callable[[torch.optim.Optimizer], Any]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return Adam in two groups of different rates."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters[:5]}, {"params": parameters[5:], "lr": 0.003}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def boost(**settings: Any) -> tuple[Any, Any]:
    """Boost the awkward model with Adam."""
    torch.manual_seed(0)
    model = Awkward()
    found: tuple[Any, Any] = Booster(precision="fp64", **settings).boost(model, adam(model))
    return found


def run_backward(model: Any, step: int, *, scale: float = 1.0) -> torch.Tensor:
    """Run one backward on this rank's batch and return the loss."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    loss: torch.Tensor = model(batch_of(rank, step), "ab").square().mean() * scale
    loss.backward()
    return loss


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    """Copy the parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


# --- schedulers ------------------------------------------------------------------------------------------


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    """Change rates and momenta of both groups."""
    return lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.02], total_steps=12)


def sequence(optimizer: torch.optim.Optimizer) -> Any:
    """Warm up, then decay."""
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    then = lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    return lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[3])


def by_function(optimizer: torch.optim.Optimizer) -> Any:
    """Use another function for each group."""
    return lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1.0 / (1 + step)])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    """Apply two at once."""
    constant = lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=2)
    return lr_scheduler.ChainedScheduler([constant, lr_scheduler.ExponentialLR(optimizer, 0.8)])


def stairs(optimizer: torch.optim.Optimizer) -> Any:
    """Cut the rate every two steps."""
    return lr_scheduler.StepLR(optimizer, 2, 0.5)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    """Cut the rate when the metric stalls."""
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


SCHEDULES = [one_cycle, sequence, by_function, chained, stairs, plateau]


def follow(optimizer: Any, scheduler: Any) -> list[float]:
    """Step a scheduler as its kind wants, and return rates and momenta of the groups."""
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()
    return [value for group in optimizer.param_groups for value in (group["lr"], *group["betas"])]


def train_scheduled(number: int, when: str) -> tuple[list[list[float]], list[torch.Tensor], Any]:
    """Train eight steps with a scheduler made before or after boost."""
    torch.manual_seed(0)
    model: Any = Awkward()
    optimizer: Any = adam(model)
    schedule = SCHEDULES[number]
    booster = Booster(precision="fp64")
    if when == "before":
        scheduler = schedule(optimizer)
        model, optimizer, scheduler = booster.boost(model, optimizer, scheduler)
    elif when == "not given":
        scheduler = schedule(optimizer)
        model, optimizer = booster.boost(model, optimizer)
    else:
        model, optimizer = booster.boost(model, optimizer)
        scheduler = schedule(optimizer)
    rates = []
    for step in range(8):
        run_backward(model, step)
        optimizer.step()
        rates.append(follow(optimizer, scheduler))
        optimizer.zero_grad()
    state = {key: value for key, value in scheduler.state_dict().items() if key in {"last_epoch", "_last_lr"}}
    return rates, weights_of(model), state


@pytest.mark.parametrize("number", range(len(SCHEDULES)), ids=[schedule.__name__ for schedule in SCHEDULES])
def test_schedulers_made_before_or_after_boost_act_as_in_torch(number: int) -> None:
    """Rates, momenta, weights and the scheduler's own state are those of the plain loop."""
    results = [
        result
        for when in ("before", "after", "not given")
        for result in run_ranks(train_scheduled, 2, number, when)
    ]

    torch.manual_seed(0)
    model = Awkward()
    optimizer = adam(model)
    scheduler = SCHEDULES[number](optimizer)
    wanted = []
    for step in range(8):
        for rank in range(2):
            (model(batch_of(rank, step), "ab").square().mean() / 2).backward()
        optimizer.step()
        wanted.append(follow(optimizer, scheduler))
        optimizer.zero_grad()
    state = {key: value for key, value in scheduler.state_dict().items() if key in {"last_epoch", "_last_lr"}}
    for rates, weights, found in results:
        assert rates == wanted
        assert found == state
        for value, parameter in zip(weights, model.parameters(), strict=True):
            assert_close(value, parameter, "weight")


def test_boosted_scheduler_is_of_its_kind_and_shares_its_state() -> None:
    """``isinstance`` holds, the class keeps its name, and both objects show one state."""
    torch.manual_seed(0)
    model = Awkward()
    optimizer = adam(model)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)

    model, boosted, followed = Booster(precision="fp64").boost(model, optimizer, scheduler)
    run_backward(model, 0)
    boosted.step()
    followed.step()

    assert followed is not scheduler
    assert isinstance(followed, lr_scheduler.ExponentialLR)
    assert type(followed).__name__ == "ExponentialLR"
    assert followed.last_epoch == scheduler.last_epoch == 1
    assert followed.get_last_lr() == scheduler.get_last_lr() == [0.005, 0.0015]


def skip_some(steps: int) -> dict[str, Any]:
    """Let the first and third step overflow, with a warm-up."""
    torch.manual_seed(0)
    model: Any = Awkward()
    optimizer: Any = adam(model)
    scheduler: Any = lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3)
    booster = Booster(precision="fp64", nonfinite="skip")
    model, optimizer, scheduler = booster.boost(model, optimizer, scheduler)
    rates = [scheduler.get_last_lr()[0]]
    stepped = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(steps):
            run_backward(model, step, scale=math.nan if step in {0, 2} else 1.0)
            optimizer.step()
            stepped.append(optimizer.stepped)
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
            optimizer.zero_grad()
    return {
        "rates": rates,
        "stepped": stepped,
        "skipped": optimizer.skipped_steps,
        "weights": weights_of(model),
    }


def test_schedulers_follow_real_steps_only() -> None:
    """A skipped step costs no warm-up, warns of nothing, and ``get_last_lr`` works at any time."""
    results = run_ranks(skip_some, 2, 5)

    for result in results:
        assert result["stepped"] == [False, True, False, True, True]
        assert result["skipped"] == 2
        assert result["rates"] == pytest.approx([0.0025, 0.0025, 0.005, 0.005, 0.0075, 0.01])


def test_scheduler_of_another_optimizer_stays_the_users() -> None:
    """Only schedulers whose optimizer is boosted along follow its steps."""
    torch.manual_seed(0)
    model = Awkward()
    other = lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), 1)

    _, _, returned = Booster(precision="fp64").boost(model, adam(model), other)

    assert returned is other


# --- step ------------------------------------------------------------------------------------------------


def step_by_closure() -> tuple[list[float], list[torch.Tensor], int]:
    """Let the closure do what the loop does otherwise."""
    model, optimizer = boost()
    losses: list[float] = []
    calls = 0
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            assert torch.is_grad_enabled()
            return run_backward(model, step)

        losses.append(float(optimizer.step(closure).detach()))
    return losses, weights_of(model), calls


def test_closures_are_called_once_and_their_loss_comes_back() -> None:
    """``step(closure)`` computes what the spelled-out loop does."""
    results = run_ranks(step_by_closure, 2)

    model, optimizer = boost()
    del model, optimizer
    torch.manual_seed(0)
    plain = Awkward()
    reference = adam(plain)
    for step in range(3):
        for rank in range(2):
            loss = plain(batch_of(rank, step), "ab").square().mean()
            assert results[rank][0][step] == pytest.approx(float(loss.detach()), rel=1e-10)
            (loss / 2).backward()
        reference.step()
        reference.zero_grad()
    for _, weights, calls in results:
        assert calls == 3
        for value, parameter in zip(weights, plain.parameters(), strict=True):
            assert_close(value, parameter, "weight")


def test_it_is_a_torch_optimizer_over_the_users_groups() -> None:
    """Groups are the user's list, live and in order; what the user changes counts at the next step."""
    torch.manual_seed(0)
    model = Awkward()
    user = adam(model)
    model, optimizer = Booster(precision="fp64").boost(model, user)
    before = weights_of(model)

    optimizer.param_groups[0]["lr"] = 0.0
    user.param_groups[1]["lr"] = 0.0
    run_backward(model, 0)
    optimizer.step()

    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is user.param_groups
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_what_the_optimizer_writes_into_groups_is_seen() -> None:
    """Some optimizers keep counters in their groups; the user's groups show them."""
    torch.manual_seed(0)
    model = Awkward()
    model, optimizer = Booster(precision="fp64").boost(model, Counting(model.parameters()))

    for step in range(3):
        run_backward(model, step)
        optimizer.step()
        optimizer.zero_grad()

    assert optimizer.param_groups[0]["count"] == 3


class Counting(torch.optim.SGD):
    """Counts steps in its group, however many tensors it updates."""

    def __init__(self, params: Any) -> None:
        """Start at 0."""
        super().__init__(params, lr=0.1)
        self.param_groups[0]["count"] = 0

    def step(self, closure: Any = None) -> Any:
        """Count."""
        self.param_groups[0]["count"] += 1
        return super().step(closure)


def test_hooks_of_the_user_run_once_a_step() -> None:
    """Hooks registered before boost see every step of the boosted optimizer, and none of the inner one."""
    torch.manual_seed(0)
    model = Awkward()
    user = adam(model)
    calls: list[str] = []
    user.register_step_pre_hook(lambda *_: calls.append("before"))
    user.register_step_post_hook(lambda *_: calls.append("after"))
    model, optimizer = Booster(precision="fp64").boost(model, user)
    optimizer.register_step_post_hook(lambda *_: calls.append("later"))

    run_backward(model, 0)
    optimizer.step()

    assert calls == ["before", "after", "later"]


def test_old_optimizer_refuses_to_step() -> None:
    """It holds nothing that could be updated; stepping it would do nothing in silence."""
    torch.manual_seed(0)
    model = Awkward()
    user = adam(model)
    model, _ = Booster(precision="fp64").boost(model, user)
    run_backward(model, 0)

    with pytest.raises(UsageError, match="no longer updates anything"):
        user.step()


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused_with_what_to_use_instead(copies: Callable[[Any], Any]) -> None:
    """A copy would share or lose what belongs to this process."""
    _, optimizer = boost()

    with pytest.raises(UsageError, match="state_dict"):
        copies(optimizer)


def test_state_dict_survives_torch_save() -> None:
    """What is saved loads with ``weights_only``, into a boosted optimizer that goes on exactly."""
    model, optimizer = boost()
    for step in range(2):
        run_backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)

    saved = torch.load(file, weights_only=True)
    again, resumed = boost()
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for one, chosen in ((model, optimizer), (again, resumed)):
        run_backward(one, 2)
        chosen.step()

    assert all(torch.equal(old, new) for old, new in zip(model.parameters(), again.parameters(), strict=True))


def test_state_of_other_groups_is_refused() -> None:
    """The message shows both counts."""
    _, optimizer = boost()
    saved = torch.optim.AdamW(Awkward().parameters()).state_dict()

    with pytest.raises(
        UsageError, match=r"groups of \[15\] parameters, this optimizer has groups of \[5, 10\]"
    ):
        optimizer.load_state_dict(saved)


def step_without_backward() -> tuple[float, bool, list[torch.Tensor]]:
    """Step three times without any gradient."""
    model, optimizer = boost()
    for _ in range(3):
        optimizer.step()
    return float(optimizer.grad_norm), optimizer.stepped, weights_of(model)


def test_steps_without_gradients_change_nothing() -> None:
    """As in torch, where every gradient is None; they count as steps of norm 0."""
    results = run_ranks(step_without_backward, 2)

    torch.manual_seed(0)
    for norm, stepped, weights in results:
        assert norm == 0
        assert stepped
        torch.manual_seed(0)
        assert all(
            torch.equal(one, other) for one, other in zip(weights, Awkward().parameters(), strict=True)
        )


def test_what_it_shows_before_the_first_step() -> None:
    """No norm yet, nothing stepped, nothing skipped, no loss scale."""
    _, optimizer = boost(max_grad_norm=0.5)

    assert optimizer.grad_norm.isnan()
    assert optimizer.grad_norm.dtype == torch.float64
    assert optimizer.grad_norm.shape == ()
    assert not optimizer.stepped
    assert optimizer.skipped_steps == 0
    assert optimizer.loss_scale == 1.0
    assert optimizer.max_grad_norm == 0.5


# --- gradients from before boost -------------------------------------------------------------------------


def boost_between_backward_and_step(precision: str) -> list[torch.Tensor]:
    """Run one backward before boost and one after, then step."""
    torch.manual_seed(0)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    model: Any = Awkward().to(dtype)
    model(batch_of(dist.get_rank(), 0).to(dtype)).square().mean().backward()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = Booster(precision=precision).boost(model, optimizer)
    model(batch_of(dist.get_rank(), 1).to(dtype), "b").square().mean().backward()
    optimizer.step()
    return [parameter.detach().double() for parameter in model.parameters()]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-10), ("fp32", 1e-6), ("bf16", 1e-2)])
def test_gradients_from_before_boost_count(precision: str, tolerance: float) -> None:
    """What ``p.grad`` held at boost is part of the first step, averaged like the rest."""
    results = run_ranks(boost_between_backward_and_step, 2, precision)

    torch.manual_seed(0)
    model = Awkward()
    for rank in range(2):
        (model(batch_of(rank, 0)).square().mean() / 2).backward()
        (model(batch_of(rank, 1), "b").square().mean() / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for weights in results:
        for value, parameter in zip(weights, model.parameters(), strict=True):
            assert_close(value, parameter, "weight", tolerance)
