"""Synchronised BatchNorm: what a plain process computes on the global batch, ranks compute on shares."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import frozen
from torch import nn

from colossal_core import Booster
from colossal_core.errors import CapabilityError, UsageError
from colossal_testkit import run_ranks, run_ranks_expecting_errors

TOLERANCE = 1e-10


# --- models ---------------------------------------------------------------------------------------------


class UserNorm(nn.BatchNorm2d):
    """A BatchNorm of a user, who adds an activation."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalise and activate."""
        return torch.tanh(super().forward(rows))


class RewrittenNorm(nn.BatchNorm2d):
    """A BatchNorm of a library that calls the function itself, as timm's BatchNormAct2d does."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalise and activate."""
        return F.gelu(
            F.batch_norm(
                rows,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.training,
                0.2,
                self.eps,
            )
        )


class HandMadeNorm(nn.BatchNorm2d):
    """A BatchNorm that computes its statistics by hand."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalise."""
        return rows - rows.mean((0, 2, 3), keepdim=True)


def images(norm: nn.Module) -> nn.Module:
    """Return a convolutional network around a norm of 6 channels, and a BatchNorm1d behind it."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        norm,
        nn.Tanh(),
        nn.Conv2d(6, 3, 3, stride=2),
        nn.Flatten(),
        nn.Linear(12, 5),
        nn.BatchNorm1d(5),
        nn.Linear(5, 3),
    )


def affine() -> nn.Module:
    """Return the ordinary network."""
    return images(nn.BatchNorm2d(6))


def not_affine() -> nn.Module:
    """Return one without weights."""
    return images(nn.BatchNorm2d(6, affine=False))


def cumulative() -> nn.Module:
    """Return one whose running statistics are plain means."""
    return images(nn.BatchNorm2d(6, momentum=None))


def untracked() -> nn.Module:
    """Return one without running statistics."""
    return images(nn.BatchNorm2d(6, track_running_stats=False, eps=0.1))


def frozen_weights() -> nn.Module:
    """Return one with a frozen norm, below a frozen convolution: nothing before it needs a gradient."""
    model = images(nn.BatchNorm2d(6))
    for module in list(model.children())[:2]:
        module.requires_grad_(False)
    return model


def only_bias() -> nn.Module:
    """Return one that trains the bias of its norm."""
    norm = nn.BatchNorm2d(6)
    norm.weight.requires_grad_(False)
    return images(norm)


def user_norm() -> nn.Module:
    """Return one with the user's norm."""
    return images(UserNorm(6))


def rewritten_norm() -> nn.Module:
    """Return one with a norm that calls the function."""
    return images(RewrittenNorm(6))


def shared_norm() -> nn.Module:
    """Return one that runs one norm twice, under two names."""
    norm = nn.BatchNorm2d(6)
    return images(nn.Sequential(norm, nn.Tanh(), norm))


def channels_last() -> nn.Module:
    """Return one whose activations have the channels innermost."""
    model: Any = affine()
    inner: nn.Module = model.to(memory_format=torch.channels_last)
    return inner


class Volumes(nn.Module):
    """BatchNorm over volumes and over series."""

    def __init__(self) -> None:
        super().__init__()
        self.volume = nn.BatchNorm3d(2)
        self.series = nn.BatchNorm1d(2)
        self.head = nn.Linear(12, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 2, 6, 6]`` to ``[n, 3]``."""
        volume = self.volume(rows.view(-1, 2, 2, 3, 6)).flatten(2)
        outputs: torch.Tensor = self.head(self.series(torch.tanh(volume)).unfold(2, 6, 6).mean(3).flatten(1))
        return outputs


# --- one run --------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Run:
    """A training run with a share for each rank in each step.

    Attributes:
        build: Makes the model.
        shares: Rows of each rank, in each step; 0 gives the rank one sample of weight 0.
        last_is_frozen: Whether the last step runs with the norms in evaluation mode.
    """

    build: Callable[[], nn.Module]
    shares: Sequence[Sequence[int]]
    last_is_frozen: bool = False

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.shares[0])


@frozen
class Result:
    """What a run leaves.

    Attributes:
        losses: Of each step.
        state: Parameters and buffers at the end.
        evaluation: Outputs of the trained model in evaluation mode.
    """

    losses: list[float]
    state: dict[str, torch.Tensor]
    evaluation: torch.Tensor


def batch_of(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global batch of a step; its mean is far from 0."""
    source = torch.Generator().manual_seed(step)
    inputs = torch.randn(rows, 2, 6, 6, generator=source, dtype=torch.float64) * 2 + 30
    return inputs, torch.randn(rows, 3, generator=source, dtype=torch.float64)


def build(make: Callable[[], nn.Module]) -> Any:
    """Return a model in fp64 whose every parameter is random."""
    torch.manual_seed(3)
    model = make().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def freeze_statistics(model: nn.Module) -> None:
    """Put every norm into evaluation mode."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all runs."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def result_of(model: nn.Module, losses: list[float]) -> Result:
    """Return what a run leaves."""
    model.eval()
    with torch.no_grad():
        outputs = model(batch_of(99, 4)[0])
    state = {name: value.detach().clone().double() for name, value in model.state_dict().items()}
    return Result(losses, state, outputs)


def run_plain(run: Run) -> Result:
    """Train in one process on the global batches."""
    model = build(run.build)
    optimizer = sgd(model)
    losses = []
    for step, shares in enumerate(run.shares):
        if run.last_is_frozen and step == len(run.shares) - 1:
            freeze_statistics(model)
        inputs, target = batch_of(step, sum(shares))
        loss = F.mse_loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return result_of(model, losses)


def run_boosted(run: Run) -> Result:
    """Train on this rank's shares."""
    model = build(run.build)
    booster = Booster(precision="fp64")
    model, optimizer = booster.boost(model, sgd(model))
    losses = []
    for step, shares in enumerate(run.shares):
        if run.last_is_frozen and step == len(run.shares) - 1:
            freeze_statistics(model)
        inputs, target = batch_of(step, sum(shares))
        start, count = sum(shares[: booster.data_rank]), shares[booster.data_rank]
        if count:
            batch = inputs[start : start + count], target[start : start + count]
            loss = booster.forward_backward(model, batch, nn.MSELoss(), weight=float(count))
        else:
            loss = booster.forward_backward(model, (inputs[:1] * 7, target[:1]), nn.MSELoss(), weight=0.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return result_of(model, losses)


def compare(result: Result, wanted: Result, tolerance: float = TOLERANCE) -> None:
    """Compare with the plain run; the reported loss is fp32."""
    assert result.losses == pytest.approx(wanted.losses, rel=1e-6)
    assert result.state.keys() == wanted.state.keys()
    for name, value in wanted.state.items():
        torch.testing.assert_close(result.state[name], value, rtol=tolerance, atol=tolerance, msg=name)
    torch.testing.assert_close(result.evaluation, wanted.evaluation, rtol=tolerance, atol=tolerance)


def check(run: Run) -> None:
    """Train on ranks and in one process, and compare; buffers have the same bits on all ranks."""
    results = run_ranks(run_boosted, run.num_ranks, run)

    compare(results[0], run_plain(run))
    for other in results[1:]:
        assert all(torch.equal(value, results[0].state[name]) for name, value in other.state.items())


@pytest.mark.parametrize(
    "make",
    [
        affine,
        not_affine,
        cumulative,
        untracked,
        frozen_weights,
        only_bias,
        user_norm,
        rewritten_norm,
        shared_norm,
        channels_last,
        Volumes,
    ],
    ids=lambda make: make.__name__,
)
@pytest.mark.parametrize("shares", [(4, 2), (1, 5, 3), (3, 2, 2, 1)], ids=["2", "3", "4"])
def test_statistics_are_those_of_the_global_batch(
    make: Callable[[], nn.Module], shares: Sequence[int]
) -> None:
    """Losses, weights, running statistics and outputs equal one process, whatever the shares."""
    check(Run(build=make, shares=[shares, shares, shares[::-1]]))


def test_norms_in_evaluation_use_their_running_statistics() -> None:
    """A step with frozen statistics communicates nothing for them, and equals one process."""
    check(Run(build=affine, shares=[(3, 3), (2, 4), (3, 3)], last_is_frozen=True))


@pytest.mark.parametrize("make", [affine, cumulative, untracked], ids=lambda make: make.__name__)
def test_the_sample_of_an_empty_share_does_not_count(make: Callable[[], nn.Module]) -> None:
    """A rank with one sample of weight 0 takes part, and leaves no trace in the statistics."""
    check(Run(build=make, shares=[(2, 3, 0), (0, 4, 1), (0, 0, 3)]))


# --- the plain loop -------------------------------------------------------------------------------------


def weigh_by_rows(model: Any, booster: Booster, shares: Sequence[int]) -> torch.Tensor:
    """Run a backward of the plain loop as after a boosted loader, and return the gradient of the inputs."""
    inputs, target = batch_of(0, sum(shares))
    start, count = sum(shares[: booster.data_rank]), shares[booster.data_rank]
    stop = start + max(count, 1)
    context = booster._built("test").context
    context.arrivals.weight = count * len(shares) / sum(shares)
    context.row_weights.value = None if count else 0.0
    rows = inputs[start:stop].clone().requires_grad_()
    F.mse_loss(model(rows), target[start:stop]).backward()
    assert rows.grad is not None
    return rows.grad * (context.arrivals.weight / len(shares))


def on_plain_loop(make: Callable[[], nn.Module], shares: Sequence[int]) -> dict[str, torch.Tensor]:
    """Take one step of the plain loop on uneven shares; return the state and the gradients of the inputs."""
    model = build(make)
    booster = Booster(precision="fp64")
    model, optimizer = booster.boost(model, sgd(model))
    gradient = weigh_by_rows(model, booster, shares)
    optimizer.step()
    return {**model.state_dict(), "inputs": gradient}


@pytest.mark.parametrize("shares", [(4, 1), (2, 0, 3)], ids=str)
def test_losses_that_are_weighed_after_backward_are_weighed_between_ranks(shares: Sequence[int]) -> None:
    """What ranks exchange inside backward is in terms of the weighed loss, before gradients are."""
    model = build(affine)
    optimizer = sgd(model)
    inputs, target = batch_of(0, sum(shares))
    inputs.requires_grad_()
    F.mse_loss(model(inputs), target).backward()
    optimizer.step()

    results = run_ranks(on_plain_loop, len(shares), affine, shares)

    for name, value in model.state_dict().items():
        torch.testing.assert_close(results[0][name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    gradients = [result["inputs"] for result, count in zip(results, shares, strict=True) if count]
    torch.testing.assert_close(torch.cat(gradients), inputs.grad, rtol=TOLERANCE, atol=TOLERANCE)


def penalise(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Return a loss with a gradient penalty through the norms."""
    inputs = inputs.clone().requires_grad_()
    outputs = model(inputs)
    (gradient,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
    loss: torch.Tensor = outputs.mean() + gradient.square().sum((1, 2, 3)).sqrt().mean()
    return loss


def on_penalty() -> dict[str, torch.Tensor]:
    """Take two steps with the penalty."""
    model = build(affine)
    booster = Booster(precision="fp64")
    model, optimizer = booster.boost(model, sgd(model))
    for step in range(2):
        penalise(model, batch_of(step, 6)[0].tensor_split(booster.data_degree)[booster.data_rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gradient_penalties_go_through_the_statistics(num_ranks: int) -> None:
    """The second derivative knows that statistics depend on all rows of all ranks."""
    model = build(affine)
    optimizer = sgd(model)
    for step in range(2):
        penalise(model, batch_of(step, 6)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()

    states = run_ranks(on_penalty, num_ranks)

    for name, value in model.state_dict().items():
        torch.testing.assert_close(states[0][name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


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
