"""fp16: the rules of the scale, the borders of the model, and steps that are skipped by all ranks or by none.

The reference is the same code on one process in fp64; fp16 keeps three decimal digits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from colossal_core import Booster, NonFiniteError, UsageError, launch
from colossal_core.runtime.loss_scale import GROWTH_INTERVAL, LossScale
from colossal_testkit import run_ranks

ROWS, STEPS = 8, 4
TOLERANCE = 4e-3
"""Of weights after four steps of AdamW at a rate of 0.01, which moves each by up to 0.04."""


class Net(nn.Module):
    """A small perceptron that can also compute its own loss."""

    def __init__(self, inputs: int = 6, outputs: int = 3, width: int = 16) -> None:
        """Build it from a fixed seed."""
        super().__init__()
        torch.manual_seed(inputs + outputs)
        self.body = nn.Linear(inputs, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        """Return logits, or a mapping with the loss when there are labels."""
        logits = self.head(torch.tanh(self.body(x)))
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}


def make_batch(step: int, booster: Booster | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows, or all of them without a booster."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(ROWS, 6, generator=generator), torch.randint(0, 3, (ROWS,), generator=generator)
    if booster is None:
        return x.double(), y
    own = slice(booster.data_rank, None, booster.data_degree)
    return x[own], y[own]


def take_steps(form: str, booster: Booster | None, model: Any, optimizer: Any) -> None:
    """Train for a few steps in one of the forms of a loss."""
    for step in range(STEPS):
        x, y = make_batch(step, booster)
        if form == "explicit" and booster is not None:
            booster.backward(F.cross_entropy(model(x), y))
        elif form == "forward_backward" and booster is not None:
            booster.forward_backward(model, (x, y), F.cross_entropy)
        elif form == "inside":
            model(x, labels=y)["loss"].backward()
        elif form == "in_place":
            F.cross_entropy(model(x).mul_(0.5).add_(1.0), y).backward()
        elif form == "two_losses":
            outputs = model(x)
            F.cross_entropy(outputs, y).backward(retain_graph=True)
            outputs.square().mean().backward()
        elif form == "no_border" and booster is not None:
            loss = model.head(model.body(x.half())).float().square().mean()
            booster.backward(loss * 1e-2)
        elif form == "no_border":
            (model.head(model.body(x)).square().mean() * 1e-2).backward()
        elif form == "through_itself":
            F.cross_entropy(model(x + model(x).sum(dim=1, keepdim=True)), y).backward()
        else:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def train(form: str) -> dict[str, torch.Tensor]:
    """Train in fp16 on this rank."""
    launch()
    booster = Booster(precision="fp16")
    plain = Net()
    model, optimizer = booster.boost(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    take_steps(form, booster, model, optimizer)
    assert optimizer.skipped_steps == 0
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "form",
    [
        "plain",
        "explicit",
        "forward_backward",
        "inside",
        "in_place",
        "two_losses",
        "no_border",
        "through_itself",
    ],
)
def test_each_form_of_a_loss_is_right_to_the_accuracy_of_fp16(form: str) -> None:
    """Plain loops, the explicit backward, losses inside the model, in place, several, and on sub-modules."""
    reference = Net().double()

    results = run_ranks(train, 2, form)

    take_steps(form, None, reference, torch.optim.AdamW(reference.parameters(), lr=0.01))
    for weights in results:
        for name, parameter in reference.named_parameters():
            assert (weights[name].double() - parameter).abs().max() < TOLERANCE, name


# --- borders ---


def send_through_inputs() -> list[torch.Tensor]:
    """Return gradients of inputs: of a leaf, and of what another model made (a GAN's generator step)."""
    launch()
    booster = Booster(precision="fp16")
    first, second = Net(6, 6), Net(6, 1)
    one = torch.optim.SGD(first.parameters(), lr=1.0)
    first, second, one = booster.boost(first, second, one)
    x = torch.ones(4, 6, requires_grad=True)
    second(first(x)).mean().backward()
    assert x.grad is not None
    with booster.full_gradients(first) as gradients:
        return [x.grad, gradients["body.weight"].clone()]


def test_gradients_of_inputs_are_not_scaled() -> None:
    """What leaves a model through its inputs is divided again, also into a second model."""
    first, second = Net(6, 6).double(), Net(6, 1).double()
    x = torch.ones(4, 6, dtype=torch.float64, requires_grad=True)
    wanted = torch.autograd.grad(second(first(x)).mean(), [x, first.body.weight])

    for found in run_ranks(send_through_inputs, 2):
        for gradient, plain in zip(found, wanted, strict=True):
            assert torch.allclose(gradient.double(), plain, rtol=2e-2, atol=1e-4)


def penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient penalty of WGAN-GP."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    result: torch.Tensor = (gradient.norm(dim=1) - 1).square().mean()
    return result


def train_with_penalty(how: str) -> dict[str, torch.Tensor]:
    """Take one real step with a loss and a gradient penalty; the first scales may overflow."""
    launch()
    booster = Booster(precision="fp16")
    plain = Net(6, 1)
    model, optimizer = booster.boost(plain, torch.optim.SGD(plain.parameters(), lr=1.0))
    x, _ = make_batch(0, booster)
    for _ in range(4):
        loss = model(x).mean() + penalty(model, x)
        if how == "explicit":
            booster.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.stepped:
            break
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_a_gradient_penalty_is_right_by_the_explicit_backward() -> None:
    """Gradients of gradients get the scale exactly once."""
    reference = Net(6, 1).double()
    x, _ = make_batch(0, None)
    (reference(x).mean() + penalty(reference, x)).backward()
    torch.optim.SGD(reference.parameters(), lr=1.0).step()

    for weights in run_ranks(train_with_penalty, 2, "explicit"):
        for name, parameter in reference.named_parameters():
            assert (weights[name].double() - parameter).abs().max() < 1e-2, name


def test_a_gradient_penalty_by_plain_backward_names_the_explicit_one() -> None:
    """It would mix scaled and unscaled gradients."""
    with pytest.raises(UsageError, match=r"lacks the loss scale of fp16") as caught:
        run_ranks(train_with_penalty, 2, "plain")

    assert "booster.backward(loss)" in caught.value.hint


class Failing:
    """A hook that fails in the first backward."""

    has_failed = False

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        """Fail once."""
        if not self.has_failed:
            self.has_failed = True
            raise ZeroDivisionError
        return gradient


def use_directly(how: str) -> None:
    """Run a plain backward in which a parameter gets a gradient past the border, alone or in part."""
    launch()
    booster = Booster(precision="fp16")
    plain = Net()
    model, _ = booster.boost(plain, torch.optim.SGD(plain.parameters(), lr=1.0))
    x = torch.ones(2, 6)
    kept: list[torch.Tensor] = []
    model.body.register_forward_hook(lambda _, __, output: kept.append(output))
    if how == "a part alone":
        loss = model.body(x.half()).float().sum()
    elif how == "a part":
        loss = model(x).sum() + model.body(x.half()).float().sum()
    elif how == "a penalty":
        loss = model(x).sum() + 0.1 * sum(p.float().square().sum() for p in model.parameters())
    elif how == "an inner result":
        loss = model(x).sum() + kept[0].float().square().sum()
    elif how == "a penalty after an error":
        broken = model(x)
        model.head.weight.register_hook(fail_once := Failing())
        with pytest.raises(ZeroDivisionError):
            broken.sum().backward()
        assert fail_once.has_failed
        loss = model(x).sum() + 0.1 * model.head.weight.float().square().sum()
    else:
        loss = model(x * model.head.bias.float().mean()).sum()
    loss.backward()


@pytest.mark.parametrize(
    "how",
    ["a part alone", "a part", "a penalty", "a penalty after an error", "an inner result", "an input"],
)
def test_a_parameter_that_is_used_past_the_border_names_the_explicit_backward(how: str) -> None:
    """What does not pass the border is not scaled, also where the rest of the same loss is."""
    with pytest.raises(UsageError, match=r"did not pass the border") as caught:
        run_ranks(use_directly, 2, how)

    assert "booster.backward(loss)" in caught.value.hint


# --- skipped steps ---


def overflow_on_one_rank() -> list[tuple[float, int, bool, float, bool]]:
    """Let rank 1 overflow in steps 1 and 2 of five; return what the user sees after each."""
    launch()
    booster = Booster(precision="fp16")
    plain = Net()
    optimizer: Any = torch.optim.AdamW(plain.parameters(), lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = booster.boost(plain, optimizer, scheduler)
    seen = []
    for step in range(5):
        x, y = make_batch(step, booster)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        states = [state["step"].item() for state in optimizer.state.values()]
        weight = 1e9 if booster.data_rank == 1 and step in {1, 2} else 1.0
        (F.cross_entropy(model(x), y) * weight).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        same = same and states == [state["step"].item() for state in optimizer.state.values()]
        seen.append(
            (
                optimizer.loss_scale,
                optimizer.skipped_steps,
                optimizer.stepped,
                scheduler.get_last_lr()[0],
                same,
            )
        )
    return seen


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    """Scale, counters, schedule, weights and moments agree; the second overflow halves the scale."""
    results = run_ranks(overflow_on_one_rank, 3)

    expected = [
        (65536.0, 0, True, 0.05, False),
        (65536.0, 1, False, 0.05, True),
        (32768.0, 2, False, 0.05, True),
        (32768.0, 2, True, 0.025, False),
        (32768.0, 2, True, 0.0125, False),
    ]
    assert results == [expected] * 3


def test_the_scale_follows_its_rules() -> None:
    """Patience for one overflow, then halves; doubles after a clean interval, which refills the patience."""
    scale = LossScale()
    seen = []

    for overflows in (True, True, False, True):
        (scale.note_overflow if overflows else scale.note_clean)()
        seen.append(scale.value)
    for _ in range(GROWTH_INTERVAL):
        scale.note_clean()
    seen.append(scale.value)
    for _ in range(2):
        scale.note_overflow()
        seen.append(scale.value)

    assert seen == [2.0**16, 2.0**15, 2.0**15, 2.0**14, 2.0**15, 2.0**15, 2.0**14]


def test_a_loss_that_overflows_at_any_scale_is_an_error() -> None:
    """Skipping for ever would look like training."""
    scale = LossScale()

    for _ in range(18):
        scale.note_overflow()
    with pytest.raises(NonFiniteError, match="even at a loss scale of 1"):
        scale.note_overflow()

    assert scale.value == 1.0


def test_the_scale_survives_its_state() -> None:
    """What a checkpoint keeps continues the same sequence."""
    scale, other = LossScale(), LossScale()
    scale.note_overflow()
    scale.note_clean()

    other.load_state(scale.state())

    for each in (scale, other):
        each.note_overflow()
    assert scale.state() == other.state()
