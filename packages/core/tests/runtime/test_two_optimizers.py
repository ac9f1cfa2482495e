"""Two models, two optimizers, two Boosters, and compiled models, side by side."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_core import Booster, NonFiniteError
from colossal_testkit import run_ranks
from colossal_testkit.stories import (
    assert_close,
    batch_of,
    tiny_buffers,
)

from .small_models import Layers, adam_over_all


def play_gan(rank: int | None, *, detaches: bool) -> list[dict[str, torch.Tensor]]:
    """Train a generator against a discriminator, on this rank, or in one process for two ranks."""
    torch.manual_seed(0)
    generator: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    discriminator: Any = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    first: Any = torch.optim.Adam(generator.parameters(), lr=0.02)
    second: Any = torch.optim.SGD(discriminator.parameters(), lr=0.1, momentum=0.5)
    if rank is not None:
        with tiny_buffers():
            booster = Booster(precision="fp64", max_grad_norm=0.5)
            found = booster.boost(generator, discriminator, first, second)
        generator, discriminator, first, second = found
    ranks = [0, 1] if rank is None else [rank]
    share = 1.0 / len(ranks)

    def end_step(model: nn.Module, optimizer: Any) -> None:
        if rank is None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    for step in range(5):
        second.zero_grad()
        for place in ranks:
            fake = generator(batch_of(place, step, width=4))
            real = batch_of(place, 50 + step)
            (discriminator(real).sigmoid().log().mean() * -share).backward()
            judged = discriminator(fake.detach() if detaches else fake)
            ((1 - judged.sigmoid()).log().mean() * -share).backward()
        end_step(discriminator, second)
        first.zero_grad()
        for place in ranks:
            judged = discriminator(generator(batch_of(place, step, width=4)))
            (judged.sigmoid().log().mean() * -share).backward()
        end_step(generator, first)
    return [dict(generator.state_dict()), dict(discriminator.state_dict())]


def play_gan_here(*, detaches: bool) -> list[dict[str, torch.Tensor]]:
    """Train on this rank of the pool."""
    return play_gan(dist.get_rank(), detaches=detaches)


@pytest.mark.parametrize("detaches", [True, False])
def test_two_models_and_two_optimizers_do_not_disturb_each_other(detaches: bool) -> None:  # noqa: FBT001
    """Gradients of one phase reach the other optimizer only as in torch, whatever has left already."""
    results = run_ranks(play_gan_here, 2, detaches=detaches)

    wanted = play_gan(None, detaches=detaches)
    for result in results:
        for found, reference in zip(result, wanted, strict=True):
            for name, value in reference.items():
                assert_close(found[name], value, name)


def spoil_one_model() -> str:
    """Let the gradients of the second of two equal models be not finite on one rank; return the message."""
    torch.manual_seed(0)
    models: Any = [nn.Linear(5, 2).double(), nn.Linear(5, 2).double()]
    optimizer: Any = torch.optim.SGD([value for model in models for value in model.parameters()], lr=0.1)
    *models, optimizer = Booster(precision="fp64").boost(*models, optimizer)
    bad = math.inf if dist.get_rank() == 1 else 1.0
    inputs = batch_of(dist.get_rank(), 0)
    (models[0](inputs).sum() + models[1](inputs).sum() * bad).backward()
    with pytest.raises(NonFiniteError) as caught:
        optimizer.step()
    return str(caught.value)


def test_non_finite_gradients_are_named_with_their_model_where_there_are_several() -> None:
    """Both models have a ``weight``, and only one of them is to blame."""
    for message in run_ranks(spoil_one_model, 2):
        assert "gradient of 'model_1.weight', 'model_1.bias' is not finite" in message


def train_under_two_boosters() -> list[torch.Tensor]:
    """Train two models of two Boosters through one loss."""
    torch.manual_seed(0)
    first: Any = nn.Linear(5, 5).double()
    second: Any = nn.Linear(5, 2).double()
    with tiny_buffers():
        first, one = Booster(precision="fp64").boost(first, adam_over_all(first))
        second, two = Booster(precision="fp64").boost(second, adam_over_all(second))
    for step in range(3):
        second(first(batch_of(dist.get_rank(), step))).square().mean().backward()
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()
    return [value.detach().clone() for model in (first, second) for value in model.parameters()]


def test_two_boosters_live_side_by_side() -> None:
    """Messages of one never meet those of the other."""
    results = run_ranks(train_under_two_boosters, 2)

    torch.manual_seed(0)
    models = [nn.Linear(5, 5).double(), nn.Linear(5, 2).double()]
    optimizers = [adam_over_all(model) for model in models]
    for step in range(3):
        for rank in range(2):
            (models[1](models[0](batch_of(rank, step))).square().mean() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    wanted = [value for model in models for value in model.parameters()]
    for result in results:
        for value, reference in zip(result, wanted, strict=True):
            assert_close(value, reference, "weight")


def train_compiled(when: str) -> list[torch.Tensor]:
    """Train a model that was compiled before boost, after it, given to it compiled, or in one block only."""
    torch.manual_seed(0)
    model: Any = Layers()
    optimizer: Any = adam_over_all(model)
    if when == "block":
        model.second.compile(backend="aot_eager")
    compiled: Any = torch.compile(model, backend="aot_eager")
    with tiny_buffers():
        booster = Booster(precision="fp64")
        given, optimizer = booster.boost(compiled if when == "given" else model, optimizer)
    if when == "after":
        given = torch.compile(model, backend="aot_eager")
    chosen = compiled if when == "before" else given

    def mean_of_squares(outputs: torch.Tensor, _: object) -> torch.Tensor:
        return outputs.square().mean()

    for step in range(3):
        rows = batch_of(dist.get_rank(), step)
        loss = booster.evaluate(chosen, (rows, None), mean_of_squares)
        if step == 1:  # the other loop takes the wrapper as well
            assert torch.equal(loss, booster.forward_backward(chosen, (rows, None), mean_of_squares))
        else:
            chosen(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with booster.full_parameters(chosen) as of_wrapper, booster.full_parameters(model) as of_model:
        assert all(torch.equal(of_wrapper[name], of_model[name]) for name in of_model)
    return [value.detach().clone() for value in model.parameters()]


@pytest.mark.parametrize("when", ["before", "after", "given", "block"])
def test_torch_compile_works_on_blocks_and_on_the_model(when: str) -> None:
    """Gradients of a compiled graph arrive at the same parameters, early or late."""
    results = run_ranks(train_compiled, 2, when)

    torch.manual_seed(0)
    model = Layers()
    optimizer = adam_over_all(model)
    for step in range(3):
        for rank in range(2):
            (model(batch_of(rank, step)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for result in results:
        for value, reference in zip(result, model.parameters(), strict=True):
            assert_close(value, reference, "weight")
