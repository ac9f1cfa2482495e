"""``release`` and the end of objects: plain models come back, and nothing of ours stays behind."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_core import Booster
from colossal_core.errors import UsageError
from colossal_testkit import run_ranks
from colossal_testkit.stories import Awkward, assert_close, batch_of, sgd, tiny_buffers

from .small_models import make, train


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_released_model_trains_on_in_plain_torch(precision: str) -> None:
    """Parameters own their memory, hooks are gone, and the user's own optimizer goes on with its state."""
    torch.manual_seed(0)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    booster = Booster(precision=precision)
    model, boosted = booster.boost(model, optimizer)
    train(model, boosted, range(2))

    released = booster.release(model)
    found = train(released, optimizer, range(2, 4))

    assert released is model
    storages = {value.untyped_storage()._cdata for value in model.parameters()}
    assert len(storages) == len(list(model.parameters()))
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in model.parameters())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    tolerance = {"fp64": 1e-10, "fp32": 1e-6, "bf16": 0.02}[precision]
    for value, wanted in zip(found, train(plain, reference, range(4)), strict=True):
        assert torch.allclose(value.to(dtype), wanted, atol=tolerance)


def test_released_optimizer_says_so() -> None:
    """What ``boost`` returned is dead after release; every use names the object that lives."""
    model, optimizer = make()
    booster = Booster()
    model, boosted = booster.boost(model, optimizer)
    train(model, boosted, range(1))
    state = boosted.state_dict()
    booster.release(model)

    for use in (
        boosted.step,
        boosted.state_dict,
        lambda: boosted.load_state_dict(state),
        lambda: boosted.clip_grad_norm_(1.0),
        lambda: boosted.add_param_group({"params": []}),
    ):
        with pytest.raises(UsageError, match="was released"):
            use()


def boost_again() -> list[torch.Tensor]:
    """Boost, train, release, boost with a second Booster, train."""
    torch.manual_seed(0)
    model: Any = Awkward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for generation in range(2):
        booster = Booster(precision="fp64")
        with tiny_buffers():
            model, boosted = booster.boost(model, optimizer)
        for step in range(2):
            model(batch_of(dist.get_rank(), step + 2 * generation)).square().mean().backward()
            boosted.step()
            boosted.zero_grad()
        booster.release(model)
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_released_model_can_be_boosted_again() -> None:
    """A second Booster continues exactly where the first one stopped."""
    results = run_ranks(boost_again, 2)

    torch.manual_seed(0)
    model = Awkward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        for rank in range(2):
            (model(batch_of(rank, step)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in results:
        for value, wanted in zip(weights, model.parameters(), strict=True):
            assert_close(value, wanted, "weight")


def release_in_between(when: str) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    """Release after a step, or between a backward of which some ranks have sent a part and the step."""
    torch.manual_seed(0)
    model: Any = Awkward()
    booster = Booster(precision="fp64")
    with tiny_buffers():
        model, optimizer = booster.boost(model, sgd(model))
    for step in range(2):
        model(batch_of(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
        if when != "kept":
            optimizer.zero_grad()
    if when == "backward":
        model(batch_of(dist.get_rank(), 2), "ab"[dist.get_rank()]).square().mean().backward()
    booster.release(model)
    value = torch.ones(3)
    dist.all_reduce(value)
    assert value.tolist() == [2.0] * 3
    shown = [None if value.grad is None else value.grad.clone() for value in model.parameters()]
    return shown, [value.detach().clone() for value in model.parameters()]


@pytest.mark.parametrize("when", ["cleared", "kept", "backward"])
def test_release_leaves_neither_guards_nor_messages_behind(when: str) -> None:
    """A plain model shows plain gradients or none, and no collective of a rank waits for another one."""
    torch.manual_seed(0)
    model = Awkward()
    optimizer = sgd(model)
    for step in range(2):
        for rank in range(2):
            (model(batch_of(rank, step)).square().mean() / 2).backward()
        optimizer.step()
        if when != "kept":
            optimizer.zero_grad()

    for gradients, weights in run_ranks(release_in_between, 2, when):
        for found, value, wanted in zip(gradients, weights, model.parameters(), strict=True):
            assert_close(value, wanted, "weight")
            assert (found is None) == (wanted.grad is None)
            if found is not None and wanted.grad is not None:
                # As for one rank without clearing: the second backward added to the mean of the first.
                assert_close(found, wanted.grad, "gradient")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("releases", [False, True])
def test_nothing_keeps_a_boosted_model_alive(precision: str, *, releases: bool) -> None:
    """Sweeps boost many models in one process; each is freed with the last reference of the user."""

    def run() -> list[weakref.ref[Any]]:
        model, optimizer = make()
        booster = Booster(precision=precision)
        model, boosted = booster.boost(model, optimizer)
        train(model, boosted, range(2))
        if releases:
            booster.release(model)
        return [weakref.ref(thing) for thing in (model, optimizer, booster, boosted, *model.parameters())]

    references = run()
    for _ in range(3):
        gc.collect()

    assert [reference() for reference in references] == [None] * len(references)


def test_model_outlives_its_booster_as_a_plain_one() -> None:
    """Who keeps only the model has a model: gradients are torch's own."""
    model, optimizer = make()
    model, boosted = Booster().boost(model, optimizer)
    train(model, boosted, range(1))

    del optimizer, boosted
    gc.collect()
    model(torch.ones(1, 5)).sum().backward()
    model(torch.ones(1, 5)).sum().backward()

    plain = copy.deepcopy(model)
    for parameter in plain.parameters():
        parameter.grad = None
    (2 * plain(torch.ones(1, 5)).sum()).backward()
    for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert wanted.grad is not None
        assert torch.allclose(parameter.grad, wanted.grad)
