"""Guards: what is not the averaged gradient yet reads as NaN and cannot be written."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_core import Booster
from colossal_core.runtime.guards import GradientGuard
from colossal_testkit import run_ranks, run_ranks_expecting_errors

from .stories import Awkward, batch_of, sgd, tiny_buffers


def start(precision: str = "fp64") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Boost the awkward model and run one backward on this rank's batch."""
    torch.manual_seed(0)
    model: nn.Module = Awkward().to(torch.float64 if precision == "fp64" else torch.float32)
    with tiny_buffers():
        model, optimizer = Booster(precision=precision, max_grad_norm=0.05).boost(model, sgd(model))
    run_backward(model)
    return model, optimizer


def run_backward(model: nn.Module, step: int = 0) -> None:
    """Run one backward on this rank's batch."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    dtype = next(model.parameters()).dtype
    model(batch_of(rank, step).to(dtype)).square().mean().backward()


def shown(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a copy of what ``p.grad`` shows."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


# --- before the step -------------------------------------------------------------------------------------


def read_before_step(precision: str) -> list[dict[str, torch.Tensor | None]]:
    """Read gradients in the first window, and in the second, whose buffers leave during backward."""
    model, optimizer = start(precision)
    first = shown(model)
    optimizer.step()
    optimizer.zero_grad()
    run_backward(model, 1)
    second = shown(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = model(batch_of(dist.get_rank(), 2).to(parameters[0].dtype)).square().mean()
    torch.autograd.grad(loss, parameters, allow_unused=True)
    return [first, second, shown(model)]


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_unreduced_gradients_read_as_nan_in_their_shape(precision: str) -> None:
    """Before ``step()`` on two ranks each gradient is NaN, also after autograd was asked for gradients."""
    results = run_ranks(read_before_step, 2, precision)

    touched = {"trunk.weight", "trunk.bias", "norm.weight", "norm.bias", "head_a.weight", "head_a.bias"}
    touched |= {"scale", "shift", "nothing"}
    shapes = {name: parameter.shape for name, parameter in Awkward().named_parameters()}
    for gradients in (gradients for result in results for gradients in result):
        assert {name for name, gradient in gradients.items() if gradient is not None} == touched
        for name, gradient in gradients.items():
            if gradient is not None:
                assert gradient.shape == shapes[name]
                assert gradient.isnan().all(), name


def write_before_step(write: Callable[[nn.Module, torch.optim.Optimizer], object]) -> str:
    """Write gradients before the step; return what torch says."""
    model, optimizer = start("fp32")
    try:
        write(model, optimizer)
    except RuntimeError as error:
        return str(error)
    return "went through"


def clip_norm(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """Clip the way that a plain loop does."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_value(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """Clip each element."""
    nn.utils.clip_grad_value_(model.parameters(), 0.1)


def scale_in_place(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """Multiply one gradient."""
    gradient = model.get_parameter("trunk.weight").grad
    assert gradient is not None
    gradient.mul_(0.5)


def unscale(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let a GradScaler unscale them."""
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


@pytest.mark.parametrize("write", [clip_norm, clip_value, scale_in_place, unscale])
def test_writes_to_unreduced_gradients_raise_at_their_line(
    write: Callable[[nn.Module, torch.optim.Optimizer], object],
) -> None:
    """Clipping, unscaling and scaling by hand fail instead of changing nothing."""
    results = run_ranks(write_before_step, 2, write)

    for message in results:
        assert "single memory location" in message, message


def write_one_element() -> None:
    """Change the gradient of a one-element parameter, which torch lets through, and step."""
    model, optimizer = start()
    gradient = model.get_parameter("shift").grad
    assert gradient is not None
    gradient.mul_(0.5)
    optimizer.step()


def test_write_that_torch_lets_through_is_an_error_in_the_step() -> None:
    """A one-element guard can be written; the step names the parameter and what to use instead."""
    errors = run_ranks_expecting_errors(write_one_element, 2)

    for error in errors:
        assert "'shift' was written before it was reduced" in error.message
        assert "max_grad_norm" in error.hint


# --- after the step --------------------------------------------------------------------------------------


def read_after_step(precision: str) -> list[dict[str, torch.Tensor | None]]:
    """Return what gradients show after a step, and after clearing them."""
    model, optimizer = start(precision)
    optimizer.step()
    stepped = shown(model)
    optimizer.zero_grad()
    return [stepped, shown(model)]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-12), ("fp32", 1e-6)])
def test_gradients_after_the_step_are_averaged_and_clipped(precision: str, tolerance: float) -> None:
    """In fp32 and fp64 ``p.grad`` shows after the step what torch would show."""
    results = run_ranks(read_after_step, 2, precision)

    torch.manual_seed(0)
    model = Awkward().to(torch.float64 if precision == "fp64" else torch.float32)
    dtype = next(model.parameters()).dtype
    for rank in range(2):
        (model(batch_of(rank, 0).to(dtype)).square().mean() / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    for stepped, cleared in results:
        for name, parameter in model.named_parameters():
            found = stepped[name]
            assert (found is None) == (parameter.grad is None), name
            if found is not None and parameter.grad is not None:
                assert torch.allclose(found, parameter.grad, rtol=tolerance, atol=tolerance), name
        assert all(gradient is None for gradient in cleared.values())


def test_gradients_stay_guarded_after_a_bf16_step() -> None:
    """With masters the buffers hold sums in bf16, not what the update used, so they stay hidden."""
    results = run_ranks(read_after_step, 2, "bf16")

    for stepped, cleared in results:
        assert all(gradient is None or gradient.isnan().all() for gradient in stepped.values())
        assert stepped["trunk.weight"] is not None
        assert all(gradient is None for gradient in cleared.values())


# --- one rank --------------------------------------------------------------------------------------------


def test_gradients_of_a_lone_rank_are_torchs_own() -> None:
    """On one rank clipping, scaling and reading gradients by hand work as in torch."""
    model, optimizer = start("fp64")
    torch.manual_seed(0)
    plain = Awkward()
    reference = sgd(plain)
    run_backward(plain)

    for one, chosen in ((model, optimizer), (plain, reference)):
        nn.utils.clip_grad_norm_(one.parameters(), 0.02)
        for parameter in one.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        chosen.step()

    for (name, found), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12), name


def train_with_scaler(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Train three steps with a GradScaler, the second of which overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        loss = model(batch_of(0, step).float()).square().mean()
        scaler.scale(loss * (math.inf if step == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_grad_scaler_is_honoured_on_a_lone_rank() -> None:
    """The scaler unscales, clips and skips as it does with the plain optimizer."""
    torch.manual_seed(0)
    model = Awkward().float()
    torch.manual_seed(0)
    plain = Awkward().float()
    model, optimizer = Booster().boost(model, sgd(model))

    found = train_with_scaler(model, optimizer)

    for one, other in zip(found, train_with_scaler(plain, sgd(plain)), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)


# --- the guard itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_guard_looks_like_a_gradient_and_holds_one_element(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Shape and dtype are the parameter's, values are NaN, and memory is one element whatever the shape."""
    guard = GradientGuard(nn.Parameter(torch.zeros(shape, dtype=dtype)), "name")

    assert guard.tensor.shape == shape
    assert guard.tensor.dtype == dtype
    assert guard.tensor.isnan().all()
    assert guard.tensor.untyped_storage().nbytes() == dtype.itemsize
    assert not guard.was_zeroed()


@pytest.mark.parametrize("shape", [(), (1,), (2, 5)])
def test_guard_notices_zeroing_once(shape: tuple[int, ...]) -> None:
    """``zero_`` goes through in torch, counts as clearing, and the guard reads NaN again."""
    guard = GradientGuard(nn.Parameter(torch.zeros(shape)), "name")

    guard.tensor.zero_()

    assert guard.was_zeroed()
    assert not guard.was_zeroed()
    assert guard.tensor.isnan().all()
