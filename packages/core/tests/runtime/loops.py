"""Loops with several losses, models and optimizers, written once for plain torch and for boosted objects.

A loop takes the rows of a global batch, or this rank's equal share of them; every loss is a mean over rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from attrs import field, frozen
from torch import nn
from torch.optim import lr_scheduler

from colossal_core import Booster

ROWS, STEPS = 12, 4
"""Rows divide equally among 2, 3 and 4 ranks."""


@frozen
class Objects:
    """What a loop is made of."""

    models: list[Any]
    optimizers: list[Any]
    schedulers: list[Any] = field(factory=list)


@frozen
class Turn:
    """One step of a loop.

    Attributes:
        objects: Boosted or plain.
        rows: Inputs ``[n, 4]``.
        step: Number of the step, from 0.
        backward: ``backward(loss, retain_graph=...)``.
    """

    objects: Objects
    rows: torch.Tensor
    step: int
    backward: Callable[..., None]


@frozen
class Loop:
    """Makes objects, and takes a step with them."""

    build: Callable[[], Objects]
    play: Callable[[Turn], None]


def perceptron(inputs: int, outputs: int) -> nn.Sequential:
    """Return a small network."""
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def adam(*parameters: Any) -> torch.optim.Optimizer:
    """Return Adam over the parameters of several modules."""
    return torch.optim.Adam([value for module in parameters for value in module.parameters()], lr=0.01)


# --- two players ---


def make_players() -> Objects:
    """Make a generator and a discriminator with an optimizer each."""
    generator, judge = perceptron(4, 4), perceptron(4, 1)
    return Objects([generator, judge], [adam(generator), adam(judge)])


def play_gan(turn: Turn) -> None:
    """Take a step of the discriminator, and one of the generator through it."""
    (generator, judge), (generates, judges) = turn.objects.models, turn.objects.optimizers
    fake = generator(turn.rows.flip(1))
    judges.zero_grad()
    turn.backward((F.softplus(-judge(turn.rows)) + F.softplus(judge(fake.detach()))).mean())
    judges.step()
    generates.zero_grad()
    turn.backward(F.softplus(-judge(fake)).mean())
    generates.step()


def play_wgan(turn: Turn) -> None:
    """Take a step of a critic with a gradient penalty, and one of the generator."""
    (generator, critic), (generates, judges) = turn.objects.models, turn.objects.optimizers
    fake = generator(turn.rows.flip(1))
    between = turn.rows.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (gradient.norm(dim=1) - 1).square().mean()
    judges.zero_grad()
    turn.backward((critic(fake.detach()).mean() - critic(turn.rows).mean() + penalty) / 8)
    judges.step()
    generates.zero_grad()
    turn.backward(-critic(fake).mean() / 8)
    generates.step()


# --- one network, several losses ---


def make_one() -> Objects:
    """Make a network and its optimizer."""
    model = perceptron(4, 3)
    return Objects([model], [adam(model)])


def play_two_losses(turn: Turn) -> None:
    """Run backward from two losses of one forward."""
    outputs = turn.objects.models[0](turn.rows)
    turn.backward(outputs.square().mean(), retain_graph=True)
    turn.backward(F.smooth_l1_loss(outputs, turn.rows[:, :3]))
    turn.objects.optimizers[0].step()
    turn.objects.optimizers[0].zero_grad()


def make_trunk() -> Objects:
    """Make an actor and a critic over one trunk, and one optimizer for all."""
    trunk, policy, value = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)
    models = [nn.Sequential(trunk, nn.Tanh(), policy), nn.Sequential(trunk, nn.Tanh(), value)]
    return Objects(models, [adam(trunk, policy, value)])


def make_trunk_with_two_optimizers() -> Objects:
    """Give the trunk and the actor one optimizer, and the critic's head another one."""
    models = make_trunk().models
    return Objects(models, [adam(models[0]), adam(models[1][2])])


def play_actor_and_critic(turn: Turn) -> None:
    """Run backward from the loss of each, and step with all optimizers."""
    actor, critic = turn.objects.models
    advantage = turn.rows.sum(1, keepdim=True) - critic(turn.rows)
    turn.backward(advantage.square().mean() / 8)  # fp16 starts with a scale of 2 ** 16
    turn.backward(-(actor(turn.rows).log_softmax(1)[:, :1] * advantage.detach()).mean() / 8)
    for optimizer in turn.objects.optimizers:
        optimizer.step()
    for optimizer in turn.objects.optimizers:
        optimizer.zero_grad()


# --- groups ---


def make_schedules() -> Objects:
    """Make two groups with a schedule each."""
    model = perceptron(4, 3)
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "lr": 0.02},
        {"params": model[2].parameters()},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1 / (1 + step)])
    return Objects([model], [optimizer], [schedule])


def play_scheduled(turn: Turn) -> None:
    """Take a plain step and one of the schedule."""
    turn.backward(turn.objects.models[0](turn.rows).square().mean())
    turn.objects.optimizers[0].step()
    turn.objects.schedulers[0].step()
    turn.objects.optimizers[0].zero_grad()


def make_half_frozen() -> Objects:
    """Make a network whose first layer is frozen and in no group."""
    model = perceptron(4, 3)
    model[0].requires_grad_(requires_grad=False)
    return Objects([model], [torch.optim.Adam(model[2].parameters(), lr=0.01, weight_decay=0.1)])


def play_late_groups(turn: Turn) -> None:
    """Unfreeze the first layer into a group of its own before the third step."""
    (model,), (optimizer,) = turn.objects.models, turn.objects.optimizers
    if turn.step == 2:
        model[0].requires_grad_(requires_grad=True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.02})
    turn.backward(model(turn.rows).square().mean())
    optimizer.step()
    optimizer.zero_grad()


LOOPS = {
    "gan": Loop(make_players, play_gan),
    "wgan": Loop(make_players, play_wgan),
    "two losses": Loop(make_one, play_two_losses),
    "shared trunk": Loop(make_trunk, play_actor_and_critic),
    "shared trunk, two optimizers": Loop(make_trunk_with_two_optimizers, play_actor_and_critic),
    "a schedule per group": Loop(make_schedules, play_scheduled),
    "late groups": Loop(make_half_frozen, play_late_groups),
}


def rows_of(step: int) -> torch.Tensor:
    """Return the rows of a global batch."""
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def run_loop(
    name: str, precision: str, settings: dict[str, Any], *, is_explicit: bool
) -> tuple[float, list[int]]:
    """Run a loop boosted on this rank and plain in fp64 on all rows.

    Args:
        name: One of :data:`LOOPS`.
        precision: Of the boosted run.
        settings: Further settings of the Booster.
        is_explicit: Whether losses go through ``booster.backward``.

    Returns:
        The largest difference of a parameter, and the steps that each optimizer skipped.
    """
    loop = LOOPS[name]
    torch.manual_seed(0)
    given = loop.build()
    torch.manual_seed(0)
    plain = loop.build()
    for model in plain.models:
        model.double()
    booster = Booster(*settings.pop("pieces", ()), precision=precision, **settings)
    found = list(booster.boost(*given.models, *given.optimizers, *given.schedulers))
    ours = Objects(
        [found.pop(0) for _ in given.models],
        [found.pop(0) for _ in given.optimizers],
        found,
    )
    share = slice(booster.data_rank * ROWS // booster.data_degree, None)
    for step in range(STEPS):
        rows = rows_of(step)
        mine = rows[share][: ROWS // booster.data_degree]
        mine = mine if precision == "fp64" else mine.float()
        loop.play(Turn(ours, mine, step, booster.backward if is_explicit else torch.Tensor.backward))
        loop.play(Turn(plain, rows, step, torch.Tensor.backward))
    worst = 0.0
    for model, reference in zip(ours.models, plain.models, strict=True):
        for value, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            worst = max(worst, float((value.detach().double() - wanted.detach()).abs().max()))
    return worst, [optimizer.skipped_steps for optimizer in ours.optimizers]
