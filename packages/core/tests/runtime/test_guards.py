"""Guards: what is not the averaged gradient yet has its form, and can be neither read nor written."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_core import Booster, UsageError
from colossal_core.runtime.guards import GradientGuard
from colossal_testkit import run_ranks
from colossal_testkit.stories import Awkward, batch_of, sgd, tiny_buffers


def start(precision: str = "fp64") -> tuple[nn.Module, Any]:
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


def shown(model: nn.Module) -> dict[str, torch.Tensor | str | None]:
    """Return a copy of what ``p.grad`` shows, or the message of what forbids that."""
    found: dict[str, torch.Tensor | str | None] = {}
    for name, parameter in model.named_parameters():
        try:
            found[name] = None if parameter.grad is None else parameter.grad.clone()
        except UsageError as error:
            found[name] = str(error)
    return found


# --- before the step -------------------------------------------------------------------------------------


def read_before_step(precision: str) -> list[dict[str, Any]]:
    """Read gradients in the first window, and in the second, whose buffers leave during backward."""
    model, optimizer = start(precision)
    first = shown(model)
    forms = {
        name: (parameter.grad.shape, parameter.grad.dtype == parameter.dtype, parameter.grad.device.type)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    optimizer.step()
    optimizer.zero_grad()
    run_backward(model, 1)
    second = shown(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = model(batch_of(dist.get_rank(), 2).to(parameters[0].dtype)).square().mean()
    torch.autograd.grad(loss, parameters, allow_unused=True)
    return [forms, first, second, shown(model)]


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_unreduced_gradients_have_their_form_and_cannot_be_read(precision: str) -> None:
    """Before ``step()`` on two ranks, also after autograd was asked for gradients."""
    results = run_ranks(read_before_step, 2, precision)

    touched = {"trunk.weight", "trunk.bias", "norm.weight", "norm.bias", "head_a.weight", "head_a.bias"}
    touched |= {"scale", "shift", "nothing"}
    shapes = {name: parameter.shape for name, parameter in Awkward().named_parameters()}
    for forms, *readings in results:
        assert forms == {name: (shapes[name], True, "cpu") for name in touched}
        for gradients in readings:
            assert {name for name, gradient in gradients.items() if gradient is not None} == touched
            assert all(f"the gradient of {name!r}" in gradients[name] for name in touched)


Write = Callable[[nn.Module, torch.optim.Optimizer], object]


def clip_norm(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """Clip the way that a plain loop does."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_value(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """Clip each element."""
    nn.utils.clip_grad_value_(model.parameters(), 0.1)


def read_norm(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """Ask torch for the norm."""
    nn.utils.get_total_norm([value.grad for value in model.parameters() if value.grad is not None])


def gradient_of(model: nn.Module, name: str = "trunk.weight") -> torch.Tensor:
    """Return what one ``p.grad`` shows."""
    gradient = model.get_parameter(name).grad
    assert gradient is not None
    return gradient


def scale_in_place(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """Multiply one gradient."""
    gradient_of(model).mul_(0.5)


def scale_one_element(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """Multiply the gradient of a one-element parameter."""
    gradient_of(model, "shift").mul_(0.5)


def print_numbers(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """Bring a gradient to the host."""
    gradient_of(model).tolist()


def reduce_by_hand(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """Sum a gradient over the ranks, as loops without DDP do."""
    dist.all_reduce(gradient_of(model))


def reduce_data(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """Do so below autograd."""
    dist.all_reduce(gradient_of(model).data)


def broadcast_by_hand(model: nn.Module, _: torch.optim.Optimizer) -> None:
    """Send a gradient to the other ranks."""
    dist.broadcast(gradient_of(model), 0)


def unscale(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let a GradScaler unscale them."""
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


USES: dict[Write, str] = {
    clip_norm: "max_grad_norm",
    clip_value: "max_grad_norm",
    read_norm: "booster.full_gradients",
    scale_in_place: "Replicated(reduce='backward')",
    scale_one_element: "booster.full_gradients",
    print_numbers: "booster.full_gradients",
    reduce_by_hand: "drop this collective",
    reduce_data: "drop this collective",
    broadcast_by_hand: "drop this collective",
    unscale: "precision='fp16'",
}
"""What people do to gradients, and what the message names instead."""


def use_before_step() -> list[str]:
    """Use gradients before the step in every way, and take the step; return the messages."""
    model, optimizer = start("fp32")
    messages = []
    for use in USES:
        try:
            use(model, optimizer)
        except UsageError as error:
            messages.append(str(error))
        else:
            messages.append("went through")
    optimizer.step()
    return [*messages, f"{float(optimizer.grad_norm):.6f}"]


def test_uses_of_unreduced_gradients_raise_at_their_line() -> None:
    """Clipping, unscaling, reading and collectives fail with what replaces them, and harm nothing."""
    results = run_ranks(use_before_step, 2)

    for *messages, norm in results:
        for (use, hint), message in zip(USES.items(), messages, strict=True):
            assert "is not reduced over the ranks before optimizer.step()" in message, use
            assert hint in message, use
        assert norm == results[0][-1]


def read_one_of_two() -> str:
    """Read an unreduced gradient of the second of two models."""
    nets = nn.Linear(2, 2), nn.Linear(2, 2)
    _, model, _ = Booster().boost(*nets, sgd(nn.ModuleList(nets)))
    model(torch.ones(2, 2)).sum().backward()
    with pytest.raises(UsageError) as caught:
        model.weight.grad.norm()
    return str(caught.value)


def test_guards_name_the_model_where_there_are_several() -> None:
    """Two models may have the same names of parameters."""
    for message in run_ranks(read_one_of_two, 2):
        assert "the gradient of 'model_1.weight'" in message


def zero_before_step(how: str) -> list[torch.Tensor]:
    """Zero gradients in place between two backward passes, in one of the ways that loops have."""
    torch.manual_seed(0)
    model: Any = Awkward()
    with tiny_buffers():
        model, optimizer = Booster(precision="fp64").boost(model, sgd(model))
    for step in range(3):
        run_backward(model, 10 + step)
        if how == "zero_grad":
            optimizer.zero_grad(set_to_none=False)
        elif how == "model":
            model.zero_grad(set_to_none=False)
        for parameter in model.parameters():
            if parameter.grad is not None and how == "data":
                parameter.grad.data.zero_()
            elif parameter.grad is not None and how == "zeros":
                parameter.grad = torch.zeros_like(parameter.grad)
            elif parameter.grad is not None and how == "fill":
                parameter.grad.detach_().fill_(0.0)
        run_backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach().clone() for value in model.parameters()]


@pytest.mark.parametrize("how", ["zero_grad", "model", "data", "zeros", "fill"])
def test_zeroing_unreduced_gradients_clears_them(how: str) -> None:
    """Each way of zeroing in place drops what was there, also through ``.data``, as in torch."""
    results = run_ranks(zero_before_step, 2, how)

    torch.manual_seed(0)
    model = Awkward()
    optimizer = sgd(model)
    for step in range(3):
        for rank in range(2):
            (model(batch_of(rank, step)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in results:
        for value, wanted in zip(weights, model.parameters(), strict=True):
            assert torch.allclose(value, wanted, rtol=1e-10, atol=1e-10)


# --- after the step --------------------------------------------------------------------------------------


def read_after_step(precision: str) -> list[dict[str, Any]]:
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
        assert all(gradient is None or isinstance(gradient, str) for gradient in stepped.values())
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
def test_guard_has_the_form_of_a_gradient_and_no_memory(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Shape, dtype and device are the parameter's; what needs no numbers works, the rest is refused."""
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = guard = GradientGuard(parameter, "name").tensor

    assert parameter.grad is guard
    assert (guard.shape, guard.dtype, guard.device) == (shape, dtype, parameter.device)
    assert guard.untyped_storage().nbytes() == 0
    assert "gradient of 'name', not reduced yet" in repr(guard)
    assert guard.to(parameter.device) is guard
    assert torch.zeros_like(guard).shape == shape
    for use in (guard.isnan, guard.sum, guard.clone, guard.numpy, lambda: guard + 1, lambda: guard.fill_(1)):
        with pytest.raises(UsageError, match="the gradient of 'name'"):
            use()
    with pytest.raises(UsageError, match="pickle"):
        pickle.dumps(guard)


@pytest.mark.parametrize("shape", [(), (1,), (2, 5)])
def test_guard_notices_zeroing_once(shape: tuple[int, ...]) -> None:
    """Zeroing counts as clearing, until the guard was asked."""
    guard = GradientGuard(nn.Parameter(torch.zeros(shape)), "name")
    assert not guard.was_zeroed()

    guard.tensor.zero_()

    assert guard.was_zeroed()
    assert not guard.was_zeroed()
    assert guard.is_shown_by(guard.tensor.detach())
    assert not guard.is_shown_by(torch.zeros(shape))
