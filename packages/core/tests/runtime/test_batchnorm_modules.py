"""Synchronised BatchNorm as an object: dtypes, layouts, messages, what users hold, and what is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from colossal_core import Booster
from colossal_core.errors import CapabilityError, UsageError
from colossal_testkit import run_ranks, run_ranks_expecting_errors

from .norms import (
    TOLERANCE,
    HandMadeNorm,
    affine,
    batch_of,
    build,
    channels_last,
    images,
    sgd,
    shared_norm,
)

# --- dtypes, layouts, row weights -----------------------------------------------------------------------


def on_narrow(shift: float) -> tuple[torch.dtype, torch.dtype, torch.Tensor, torch.Tensor]:
    """Train a norm in bf16; return dtypes of outputs and of statistics, gradient and running variance."""
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(norm, nn.Identity())
    booster = Booster(precision="bf16")
    model, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen: list[torch.dtype] = []
    model[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    rows = (shift + torch.arange(24.0).view(8, 3) % 5).tensor_split(booster.data_degree)[booster.data_rank]
    rows = rows.requires_grad_()
    model(rows).square().sum().backward()
    model.eval()
    model(rows)
    assert norm.running_var is not None
    assert rows.grad is not None
    return seen[0], norm.running_var.dtype, rows.grad, norm.running_var.clone()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_narrow_rows_have_wide_statistics(num_ranks: int) -> None:
    """In bf16 the statistics are those of the rounded rows in fp32, on one rank too."""
    shift = 64.0  # where bf16 still has quarters, and a sum of squares in it has nothing left
    results = run_ranks(on_narrow, num_ranks, shift)

    rows = (shift + torch.arange(24.0).view(8, 3) % 5).bfloat16().float().requires_grad_()
    norm = nn.BatchNorm1d(3)
    norm(rows).square().sum().backward()
    for inside, statistics, _, variance in results:
        assert (inside, statistics) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(variance, norm.running_var, rtol=1e-6, atol=0)
    gradient = torch.cat([gradient for _, _, gradient, _ in results])
    torch.testing.assert_close(gradient, rows.grad, rtol=0, atol=0.05)


def on_layouts() -> tuple[bool, bool]:
    """Tell whether outputs and gradients keep the channels innermost."""
    model = channels_last()
    booster = Booster(precision="fp64")
    model, _ = booster.boost(model.double(), sgd(model))
    rows = batch_of(0, 4)[0].contiguous(memory_format=torch.channels_last).requires_grad_()
    outputs = model[1](torch.cat([rows, rows, rows], dim=1).contiguous(memory_format=torch.channels_last))
    outputs.square().sum().backward()
    assert rows.grad is not None
    innermost = torch.channels_last
    return outputs.is_contiguous(memory_format=innermost), rows.grad.is_contiguous(memory_format=innermost)


def test_layouts_pass_through() -> None:
    """Channels-last activations stay so."""
    assert run_ranks(on_layouts, 2) == [(True, True), (True, True)]


def on_row_weights(weights: torch.Tensor) -> torch.Tensor:
    """Normalise this rank's rows of a batch of 8, which count as the weights say."""
    booster = Booster(precision="fp64")
    norm: Any = nn.BatchNorm1d(3).double()
    model, _ = booster.boost(nn.Sequential(norm), sgd(nn.Sequential(norm)))
    rows = torch.arange(24.0, dtype=torch.float64).view(8, 3).square().tensor_split(2)[booster.data_rank]
    rows = rows.clone().requires_grad_()
    with booster._built("test").context.row_weights.set(weights.tensor_split(2)[booster.data_rank]):
        outputs = model(rows)
        outputs.pow(3).sum().backward()
    assert rows.grad is not None
    return torch.cat([outputs.detach(), rows.grad, norm.running_mean[None]])


def test_rows_can_be_weighed_one_by_one() -> None:
    """A row of weight 2 counts like two rows, one of weight 0 is only normalised."""
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0, 1.0, 1.0, 3.0], dtype=torch.float64)

    results = run_ranks(on_row_weights, 2, weights)

    rows = torch.arange(24.0, dtype=torch.float64).view(8, 3).square().requires_grad_()
    counted = rows.repeat_interleave(weights.long(), dim=0)
    mean, variance = counted.mean(0), counted.var(0, correction=0)
    outputs = (rows - mean) * (variance + 1e-5).rsqrt()
    outputs.pow(3).sum().backward()
    assert rows.grad is not None
    for rank, result in enumerate(results):
        mine = slice(4 * rank, 4 * rank + 4)
        wanted = torch.cat([outputs[mine], rows.grad[mine], mean[None] * 0.1])
        torch.testing.assert_close(result, wanted.detach(), rtol=TOLERANCE, atol=TOLERANCE)


# --- traffic --------------------------------------------------------------------------------------------


def on_traffic() -> list[tuple[str, str, float]]:
    """Return what one step moved for statistics."""
    model = build(affine)
    booster = Booster(precision="fp64")
    model, optimizer = booster.boost(model, sgd(model))
    booster.forward_backward(model, batch_of(booster.data_rank, 2), nn.MSELoss())
    optimizer.step()
    return [
        (transfer.op, transfer.group, transfer.full_bytes / 8)
        for transfer in booster.last_traffic
        if transfer.phase == "batchnorm"
    ]


def test_each_norm_sends_one_message_each_way() -> None:
    """Three numbers of a channel forward (its count once for all), two back, on a channel of their own."""
    group = "data/batchnorm"
    forward = [("all_gather", group, 2.0 * (2 * 6 + 1)), ("all_gather", group, 2.0 * (2 * 5 + 1))]
    backward = [("all_reduce", group, 10.0), ("all_reduce", group, 12.0)]

    assert run_ranks(on_traffic, 2) == [forward + backward] * 2


# --- the user's objects ---------------------------------------------------------------------------------


def on_objects() -> list[str]:
    """Look at a boosted and released model through what users hold."""
    model = build(shared_norm)
    old = model[1][0]
    model.kept = [old]
    parameters, names, mean = list(model.parameters()), list(model.state_dict()), old.running_mean
    calls: list[str] = []
    old.register_forward_hook(lambda *_: calls.append("hook"))
    booster = Booster(precision="fp64")
    model, _ = booster.boost(model, sgd(model))

    new: Any = model[1][0]
    assert isinstance(new, nn.BatchNorm2d)
    assert new is not old
    assert new is model[1][2]
    assert repr(new).startswith("SynchronisedBatchNorm2d(6, eps=1e-05")
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == names
    model(batch_of(booster.data_rank, 2)[0])
    assert calls == ["hook", "hook"]
    assert new.running_mean is mean
    old.eval()
    assert not new.training
    with pytest.raises(UsageError, match="this BatchNorm2d was replaced by boost") as error:
        old(batch_of(0, 2)[0])
    old.train()

    twin: Any = copy.deepcopy(model)
    assert type(twin[1][0]).__name__ == "BatchNorm2d"
    assert twin[1][0] is twin[1][2] is twin.kept[0]
    assert torch.equal(twin[1][0].running_mean, mean)
    twin(batch_of(booster.data_rank, 2)[0])
    assert not torch.equal(twin[1][0].running_mean, mean)
    file = io.BytesIO()
    torch.save(model[6], file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is nn.BatchNorm1d
    loaded(torch.ones(2, 5, dtype=torch.float64))
    calls.clear()

    booster.release(model)
    assert model[1][0] is model[1][2] is old
    assert not any("colossal" in key for key in vars(old))
    model(batch_of(booster.data_rank, 2)[0])
    assert calls == ["hook", "hook"]
    return [str(error.value)]


def test_objects_stay_the_users() -> None:
    """Class, parameters, buffers, hooks, names, copies and pickles are theirs; release undoes everything."""
    messages = run_ranks(on_objects, 2)

    assert "module '1.0' of the model" in messages[0][0]


def on_one_rank() -> str:
    """Return the class of a norm."""
    model, _ = Booster().boost(images(nn.BatchNorm2d(6)), None)
    return type(model[1]).__name__


def test_one_data_rank_changes_nothing() -> None:
    """There is nobody to synchronise with."""
    assert run_ranks(on_one_rank, 1) == ["BatchNorm2d"]


def on_switched_off() -> tuple[str, list[str]]:
    """Return the class of a norm that stays with its rank, and what was moved for statistics."""
    model = affine()
    booster = Booster(synchronise_batchnorm=False)
    model, optimizer = booster.boost(model, sgd(model))
    booster.forward_backward(model, tuple(it.float() for it in batch_of(0, 2)), nn.MSELoss())
    optimizer.step()
    return type(model[1]).__name__, [it.op for it in booster.last_traffic if it.phase == "batchnorm"]


def test_statistics_stay_with_the_rank_on_request() -> None:
    """``synchronise_batchnorm=False`` leaves the modules alone."""
    assert run_ranks(on_switched_off, 2) == [("BatchNorm2d", [])] * 2


# --- what is refused ------------------------------------------------------------------------------------


def boost_only(make: Callable[[], nn.Module]) -> None:
    """Boost a model."""
    Booster().boost(make(), None)


def torch_sync() -> nn.Module:
    """Return a model that torch would synchronise."""
    model: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(images(nn.BatchNorm2d(6)))
    return model


def lazy() -> nn.Module:
    """Return a model without a shape."""
    return images(nn.LazyBatchNorm2d(affine=False))


def tracking_instances() -> nn.Module:
    """Return a model whose other norm has running statistics."""
    return images(nn.InstanceNorm2d(6, track_running_stats=True))


def root() -> nn.Module:
    """Return a model that is a norm."""
    return nn.BatchNorm1d(3)


def patched() -> nn.Module:
    """Return a model whose norm has a forward on the object."""
    norm: Any = nn.BatchNorm2d(6)
    norm.forward = norm._check_input_dim
    return images(norm)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch_sync, "module '1' is torch's SyncBatchNorm"),
        (lazy, "buffer '1.running_mean' has no shape yet"),
        (tracking_instances, "module '1' is a InstanceNorm2d with running statistics"),
        (root, "the model is a BatchNorm1d itself"),
        (patched, "module '1' has a forward that was set on the object"),
    ],
    ids=lambda it: getattr(it, "__name__", ""),
)
def test_what_cannot_be_synchronised_is_refused_on_every_rank(
    make: Callable[[], nn.Module], reason: str
) -> None:
    """The module and the reason are named."""
    for error in run_ranks_expecting_errors(boost_only, 2, make):
        assert reason in str(error)


def on_hand_made() -> None:
    """Call a norm that does not call the function."""
    model, _ = Booster().boost(images(HandMadeNorm(6)), None)
    model(batch_of(0, 2)[0].float())


def test_statistics_that_are_computed_by_hand_are_refused() -> None:
    """They would silently be those of each rank."""
    for error in run_ranks_expecting_errors(on_hand_made, 2, error=CapabilityError):
        assert "module '1' of class HandMadeNorm computes its statistics without" in str(error)


def on_single_value() -> str:
    """Take statistics of one value on each rank, and then of one altogether."""
    booster = Booster()
    model, _ = booster.boost(nn.Sequential(nn.BatchNorm1d(3)), None)
    rows = torch.randn(1, 3) + booster.data_rank
    assert model(rows).isfinite().all()
    context = booster._built("test").context
    with context.row_weights.set(float(booster.data_rank)), pytest.raises(UsageError) as error:
        model(rows)
    return str(error.value)


def test_statistics_of_one_value_are_refused() -> None:
    """One on each of two ranks are two; torch refuses one."""
    for message in run_ranks(on_single_value, 2):
        assert "module '0' would take batch statistics of 1 values per channel over 2 ranks" in message
