"""Clipping and non-finite gradients of whole steps: one decision for all ranks, that of plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_core import Booster
from colossal_core.errors import NonFiniteError, UsageError
from colossal_core.runtime.optimizer import BoostedOptimizer
from colossal_testkit import run_ranks, run_ranks_expecting_errors
from colossal_testkit.stories import Awkward, assert_close, batch_of, sgd, tiny_buffers


def boost(**settings: Any) -> tuple[Booster, Awkward, BoostedOptimizer]:
    """Boost the awkward model in many buffers."""
    torch.manual_seed(0)
    model = Awkward()
    booster = Booster(precision="fp64", **settings)
    with tiny_buffers():
        model, optimizer = booster.boost(model, sgd(model))
    return booster, model, optimizer


def run_backward(model: nn.Module, step: int, head: str = "a") -> None:
    """Run one backward on this rank's batch."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model(batch_of(rank, step), head).square().mean().backward()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# --- clipping by hand ------------------------------------------------------------------------------------


def clip_by_hand(
    max_norm: float, norm_type: float
) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Clip by the optimizer's method in each of four steps; return norms, weights and ``grad_norm``."""
    _, model, optimizer = boost()
    norms, after = [], []
    for step in range(4):
        run_backward(model, step, "ab"[(dist.get_rank() + step) % 2])
        norms.append(float(optimizer.clip_grad_norm_(max_norm, norm_type)))
        optimizer.step()
        after.append(float(optimizer.grad_norm))
        optimizer.zero_grad()
    return norms, weights_of(model), after


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("max_norm", [0.01, 1e9])
def test_clipping_by_hand_equals_torch(max_norm: float, norm_type: float) -> None:
    """Any order of the norm, with unused, frozen and tied parameters in two groups, on three ranks."""
    results = run_ranks(clip_by_hand, 3, max_norm, norm_type)

    torch.manual_seed(0)
    model = Awkward()
    optimizer = sgd(model)
    for step in range(4):
        for rank in range(3):
            (model(batch_of(rank, step), "ab"[(rank + step) % 2]).square().mean() / 3).backward()
        euclidean = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        filled = [
            parameter for parameter in model.parameters() if parameter.numel()
        ]  # torch's norm needs that
        norm = float(nn.utils.clip_grad_norm_(filled, max_norm, norm_type))
        for norms, _, after in results:
            assert norms[step] == pytest.approx(norm, rel=1e-10)
            assert after[step] == pytest.approx(euclidean, rel=1e-10)
        optimizer.step()
        optimizer.zero_grad()
    for _, weights, _ in results:
        for name, parameter in model.named_parameters():
            assert_close(weights[name], parameter, name)


def clip_then_change(
    how: str, rank: int
) -> tuple[str, float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Let a gradient arrive or change on one rank between clipping and step; then do a whole step."""
    _, model, optimizer = boost()
    before = weights_of(model)
    run_backward(model, 0)
    optimizer.clip_grad_norm_(0.01)
    message = ""
    try:
        if not dist.is_initialized() or dist.get_rank() == rank:
            if how == "backward":
                run_backward(model, 1, "b")
            elif how == "zero_grad":
                optimizer.zero_grad()
            elif how == "by hand":
                model.zero_grad()
            else:
                model.head_b.bias.grad = torch.ones(3, dtype=torch.float64)
        optimizer.step()
    except UsageError as error:
        message = str(error)
    between = weights_of(model)
    optimizer.zero_grad()
    run_backward(model, 2)
    optimizer.step()
    same = {name: between[name] - before[name] for name in before}
    return message, float(optimizer.grad_norm), same, weights_of(model)


@pytest.mark.parametrize("how", ["backward", "zero_grad", "by hand", "assign"])
def test_gradients_that_change_after_clipping_are_refused_on_every_rank(how: str) -> None:
    """What clipping has not seen cannot be in the step: all ranks raise, update nothing and can go on."""
    results = run_ranks(clip_then_change, 2, how, 1)

    torch.manual_seed(0)
    model = Awkward()
    optimizer = sgd(model)
    for rank in range(2):
        (model(batch_of(rank, 2)).square().mean() / 2).backward()
    optimizer.step()
    for message, _, change, weights in results:
        assert "after clip_grad_norm_() had reduced them" in message
        assert "right before optimizer.step()" in message
        assert all(not difference.any() for difference in change.values())
        for name, parameter in model.named_parameters():
            assert_close(weights[name], parameter, name)


def test_gradients_that_change_after_clipping_are_refused_on_a_lone_rank() -> None:
    """A loop that breaks on two ranks does not work by accident on one."""
    message, _, _, _ = clip_then_change("backward", 0)

    assert "after clip_grad_norm_() had reduced them" in message


def leave_out_a_step(how: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Look at norm or gradients, and leave out the second of three steps; return norms and weights."""
    booster, model, optimizer = boost()
    norms = []
    for step in range(3):
        run_backward(model, step)
        if how == "clip":
            norms.append(float(optimizer.clip_grad_norm_(0.01)))
        else:
            with booster.full_gradients(model) as found:
                norms.append(float(nn.utils.get_total_norm(found.values())))
        if step == 1:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    assert booster.step == 2
    return norms, weights_of(model)


@pytest.mark.parametrize("how", ["clip", "full_gradients"])
def test_a_step_may_be_left_out_after_a_look_at_its_gradients(how: str) -> None:
    """``zero_grad`` on all ranks in place of ``step``: loops do so where a norm is too large."""
    results = run_ranks(leave_out_a_step, 3, how)

    torch.manual_seed(0)
    model = Awkward()
    optimizer = sgd(model)
    for step in range(3):
        for rank in range(3):
            (model(batch_of(rank, step)).square().mean() / 3).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01 if how == "clip" else 1e9))
        for norms, _ in results:
            assert norms[step] == pytest.approx(norm, rel=1e-10)
        if step != 1:
            optimizer.step()
        optimizer.zero_grad()
    for _, weights in results:
        for name, parameter in model.named_parameters():
            assert_close(weights[name], parameter, name)


def clip_twice() -> tuple[float, float, float]:
    """Ask for the norm twice, without and with a bound, and change nothing in between."""
    _, model, optimizer = boost()
    run_backward(model, 0)
    model.unused.bias.grad = torch.ones(2, dtype=torch.float64)
    first = float(optimizer.clip_grad_norm_(math.inf))
    second = float(optimizer.clip_grad_norm_(0.01, 1.0))
    optimizer.step()
    return first, second, float(optimizer.grad_norm)


def test_clipping_twice_changes_nothing_but_the_bound() -> None:
    """The second call finds the gradients reduced, also those that were assigned."""
    results = run_ranks(clip_twice, 2)

    for first, second, norm in results:
        assert first == norm
        assert second > first


def clip_twice_over() -> None:
    """Clip by hand although the plan clips."""
    _, model, optimizer = boost(max_grad_norm=1.0)
    run_backward(model, 0)
    optimizer.clip_grad_norm_(0.5)


def test_clipping_by_hand_is_refused_where_the_plan_clips() -> None:
    """Two bounds would be one too many; the message says which to drop."""
    errors = run_ranks_expecting_errors(clip_twice_over, 2, error=UsageError)

    for error in errors:
        assert "max_grad_norm is 1.0" in error.message
        assert "max_grad_norm = None" in error.hint


def change_bound() -> list[float]:
    """Set ``max_grad_norm`` between steps and return the norm of what the update used."""
    _, model, optimizer = boost(max_grad_norm=1e-3)
    used = []
    for bound in (1e-3, 1e-5, None):
        optimizer.max_grad_norm = bound
        run_backward(model, 0)
        optimizer.step()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        used.append(float(nn.utils.get_total_norm(gradients)) / float(optimizer.grad_norm))
        used.append(1.0 if bound is None else bound / float(optimizer.grad_norm))
        optimizer.zero_grad()
    return used


def test_bound_may_change_at_any_time() -> None:
    """``max_grad_norm`` is read at each step; None clips nothing."""
    results = run_ranks(change_bound, 2)

    for used in results:
        assert used[::2] == pytest.approx(used[1::2], rel=1e-4)  # torch adds 1e-6 to the norm


@pytest.mark.parametrize("norm_type", [0.0, -1.0, math.nan])
def test_impossible_orders_are_refused(norm_type: float) -> None:
    """Only positive orders are norms that can be clipped to."""
    _, model, optimizer = boost()
    run_backward(model, 0)

    with pytest.raises(UsageError, match="norm_type is"):
        optimizer.clip_grad_norm_(1.0, norm_type)


def test_norm_without_gradients_is_zero() -> None:
    """A step without backward has a norm of 0 and changes nothing."""
    _, model, optimizer = boost()
    before = weights_of(model)

    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()

    assert norm == 0
    assert norm.dtype == torch.float64
    assert optimizer.grad_norm == 0
    assert all(torch.equal(before[name], value) for name, value in weights_of(model).items())


# --- not finite ------------------------------------------------------------------------------------------


def spoil(value: float, rank: int, nonfinite: str | None) -> dict[str, Any]:
    """Let one rank's gradient of one parameter be not finite in step 1 of 3, with a scheduler."""
    torch.manual_seed(0)
    model = Awkward()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with tiny_buffers():
        booster = Booster(precision="fp64", nonfinite=nonfinite, max_grad_norm=0.05)
        model, optimizer, scheduler = booster.boost(model, optimizer, scheduler)
    errors, moved = [], []
    for step in range(3):
        spoiled = torch.zeros(7, 5, dtype=torch.float64)
        spoiled[3, 2] = value if step == 1 and dist.get_rank() == rank else 0.0
        hook = model.trunk.weight.register_hook(spoiled.add)
        run_backward(model, step)
        hook.remove()
        before = weights_of(model)
        try:
            optimizer.step()
        except NonFiniteError as error:
            errors.append(str(error))
        moved.append(
            [name for name, value in weights_of(model).items() if not torch.equal(value, before[name])]
        )
        stepped = optimizer.stepped
        scheduler.step()
        optimizer.zero_grad()
        assert stepped == (step != 1)
    return {
        "errors": errors,
        "moved": moved,
        "weights": weights_of(model),
        "lr": scheduler.get_last_lr(),
        "skipped": optimizer.skipped_steps,
        "norm": float(optimizer.grad_norm),
        "steps": booster.step,
        "count": float(optimizer.state_dict()["state"][0]["step"]),
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("nonfinite", [None, "skip"])
def test_one_bad_element_on_one_rank_is_a_decision_of_all(value: float, nonfinite: str | None) -> None:
    """All ranks raise or skip before anything is updated, the scheduler waits, and the next step is right."""
    results = run_ranks(spoil, 2, value, 1, nonfinite)

    torch.manual_seed(0)
    model = Awkward()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in (0, 2):
        for rank in range(2):
            (model(batch_of(rank, step)).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    for result in results:
        assert len(result["errors"]) == (0 if nonfinite == "skip" else 1)
        for error in result["errors"]:
            assert "'trunk.weight'" in error
            assert "nothing was updated" in error
            assert "step 1" in error
            assert "nonfinite='skip'" in error
        assert result["moved"][1] == []
        assert result["lr"] == scheduler.get_last_lr()
        assert result["skipped"] == 1
        assert result["steps"] == 2
        assert result["count"] == 2
        for name, parameter in model.named_parameters():
            assert_close(result["weights"][name], parameter, name)


def sum_large_gradients(dtype: str) -> tuple[str, float]:
    """Let each rank's gradient be finite, and the sum over ranks beyond the range of 32-bit exponents."""
    model = nn.Linear(3, 2)
    booster = Booster(precision=dtype)
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-30))
    model.bias.grad = torch.full((2,), 3e38, dtype=model.bias.dtype)
    try:
        optimizer.step()
    except NonFiniteError as error:
        return str(error), 0.0
    return "", float(optimizer.grad_norm)


def test_a_sum_beyond_the_range_of_fp32_is_no_overflow_when_the_mean_is_none() -> None:
    """Gradients are divided when they arrive, so only the mean has to fit."""
    for message, norm in run_ranks(sum_large_gradients, 2, "fp32"):
        assert message == ""
        assert norm == pytest.approx(3e38 * 2**0.5, rel=1e-6)


def test_overflow_of_the_sum_is_found() -> None:
    """In 16 bit infinity may come from adding what is finite on every rank."""
    for message, _ in run_ranks(sum_large_gradients, 2, "bf16"):
        assert "'bias'" in message


def clip_what_is_not_finite(norm_type: float) -> tuple[float, str]:
    """Ask for a norm of any order of a gradient that is infinite on rank 1, and step."""
    _, model, optimizer = boost()
    run_backward(model, 0)
    if dist.get_rank() == 1:
        model.scale.grad = torch.tensor(math.inf, dtype=torch.float64)
    norm = float(optimizer.clip_grad_norm_(1.0, norm_type))
    try:
        optimizer.step()
    except NonFiniteError as error:
        return norm, str(error)
    return norm, ""


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_clipping_by_hand_tells_of_infinity_in_any_order(norm_type: float) -> None:
    """The norm itself is not finite on any rank, and the step raises as it would without clipping."""
    for norm, message in run_ranks(clip_what_is_not_finite, 2, norm_type):
        assert not math.isfinite(norm)
        assert "'scale'" in message


def keep_after_skip(precision: str) -> tuple[list[float], list[torch.Tensor]]:
    """Skip a step, keep its gradients, replace the bad one, and step again."""
    torch.manual_seed(0)
    model = Awkward().to(torch.float64 if precision == "fp64" else torch.float32)
    with tiny_buffers():
        booster = Booster(precision=precision, nonfinite="skip")
        model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    dtype = next(model.parameters()).dtype
    for step in range(2):
        model(batch_of(dist.get_rank(), step).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(batch_of(dist.get_rank(), 2).to(dtype)).square().mean().backward()
    model.shift.grad = torch.full((1,), math.inf if dist.get_rank() == 0 else 1.0, dtype=dtype)
    optimizer.step()
    skipped = optimizer.stepped
    model.shift.grad = torch.ones(1, dtype=dtype)
    optimizer.step()
    return [float(skipped), float(optimizer.grad_norm)], [p.detach().double() for p in model.parameters()]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-10), ("bf16", 0.02)])
def test_gradients_that_are_kept_after_a_skipped_step_are_still_the_mean(
    precision: str, tolerance: float
) -> None:
    """A step without update leaves sums in the buffers; the next one, without backward, averages them."""
    results = run_ranks(keep_after_skip, 2, precision)

    torch.manual_seed(0)
    model = Awkward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norm = math.nan
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (model(batch_of(rank, step)).square().mean() / 2).backward()
        if step == 2:
            model.shift.grad = torch.ones(1, dtype=torch.float64)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), math.inf))
        optimizer.step()
    for (stepped, found), weights in results:
        assert not stepped
        assert found == pytest.approx(norm, rel=tolerance)
        for value, parameter in zip(weights, model.parameters(), strict=True):
            assert_close(value, parameter, "weight", tolerance)
