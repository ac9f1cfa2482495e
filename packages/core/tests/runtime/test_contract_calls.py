"""What a Booster's other calls promise, sentence by sentence: evaluation, gathering, full tensors, averages.

Each test is named after what is promised; the files about the parts look further. Rank functions assert by
themselves.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from colossal_core import Booster, CapabilityError, Replicated, UsageError
from colossal_testkit import run_ranks

from .twins import batch_of, make_twins

TIGHT = 1e-10


# --- evaluate -----------------------------------------------------------------------------------------------


class Observed(nn.Module):
    """Says in which mode it runs."""

    def __init__(self) -> None:
        """Build it, with a part that stays in evaluation mode."""
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.drop = nn.Dropout(0.5)
        self.fixed = nn.Dropout(0.5).eval()
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 4]`` to ``[n, 3]``."""
        self.seen.append((self.training, torch.is_grad_enabled()))
        outputs: torch.Tensor = self.fixed(self.drop(self.inner(x)))
        return outputs


def evaluate_between() -> None:
    """Evaluate a batch of 7 rows between backward and step."""
    twins = make_twins(Observed())
    booster, model = twins.booster, twins.model
    x, y = batch_of(0, 7)
    model.inner(twins.mine(x)).square().mean().backward()
    loss, outputs = booster.evaluate(model, (twins.mine(x), twins.mine(y)), F.mse_loss, return_outputs=True)
    alone = booster.evaluate(model, (twins.mine(x), twins.mine(y)), F.mse_loss)

    assert model.seen == [(False, False)] * 2
    assert [module.training for module in model.modules()] == [True, True, True, False]
    wanted = twins.plain.inner(x).detach()
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    assert float(loss) == float(alone) == pytest.approx(float(F.mse_loss(wanted, y)), rel=1e-6)
    assert torch.allclose(outputs, twins.mine(wanted), rtol=TIGHT)
    for part in torch.split(x, [4, 3]):
        (twins.plain.inner(part).square().mean() / 2).backward()
    twins.step()
    assert twins.drift() < TIGHT


def test_evaluate_runs_in_evaluation_mode_without_gradients_and_restores_what_was() -> None:
    """It returns the loss, or the loss and the outputs of this data rank's share."""
    run_ranks(evaluate_between, 2)


# --- gather and mean ----------------------------------------------------------------------------------------


def gather_and_average() -> None:
    """Loop over five rows in batches of four on three ranks, so that two have a stand-in."""
    booster = Booster()
    rows = torch.arange(5.0)
    model: Any
    model, loader = booster.boost(nn.Linear(1, 1), DataLoader(TensorDataset(rows), batch_size=4))
    del model
    seen, means = [], []
    for (x,) in loader:
        seen.append(booster.gather({"x": x})["x"].tolist())
        means.append(booster.mean(x.mean(), weight=booster.rows))
    assert seen == [[0.0, 1.0, 2.0, 3.0], [4.0]]
    assert means == [1.5, 4.0]
    with pytest.raises(UsageError, match="counted in a loop over a boosted loader"):
        booster.rows  # noqa: B018 - it raises


def test_gather_is_the_concatenation_in_dataset_order_without_duplicates() -> None:
    """Stand-ins are left out, also of ``mean`` when it weighs by ``rows``."""
    run_ranks(gather_and_average, 3)


def average_numbers() -> None:
    """Average a number of each rank."""
    booster = Booster()
    booster.boost(nn.Linear(1, 1))
    rank = booster.world.rank
    assert booster.mean(rank) == 1.0
    assert booster.mean(torch.tensor(float(rank)), weight=rank) == pytest.approx(5 / 3)
    with pytest.raises(UsageError, match="sum to 0"):
        booster.mean(1.0, weight=0.0)


def test_mean_weighs_every_rank_as_it_says_and_equally_by_default() -> None:
    """Weights that sum to nothing are an error of all."""
    run_ranks(average_numbers, 3)


def print_once() -> bool:
    """Print, and say whether this is the first rank."""
    booster = Booster()
    booster.print("only", "once", sep="-")
    return booster.is_first


def test_is_first_is_rank_0_and_print_prints_there(capsys: pytest.CaptureFixture[str]) -> None:
    """With the options of the built-in."""
    assert run_ranks(print_once, 3) == [True, False, False]
    assert capsys.readouterr().out.count("only-once") == 1


# --- full tensors -------------------------------------------------------------------------------------------


def edit_parameters(precision: str) -> None:
    """Write a parameter in the context, and train on."""
    twins = make_twins(precision=precision)
    with twins.booster.full_parameters(twins.model) as found:
        assert {name: value.shape for name, value in found.items()} == {
            name: value.shape for name, value in twins.plain.named_parameters()
        }
        found["2.bias"].fill_(0.5)
        found["0.bias"] = torch.ones_like(found["0.bias"])
    with torch.no_grad():
        twins.plain.get_parameter("2.bias").fill_(0.5)
        twins.plain.get_parameter("0.bias").fill_(1.0)
    x, _ = batch_of(0)
    twins.model(twins.mine(x)).square().mean().backward()
    twins.plain(x).square().mean().backward()
    twins.step()
    assert twins.drift() < (TIGHT if precision == "fp64" else 1e-2)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_full_parameters_maps_names_to_full_tensors_and_keeps_edits(precision: str) -> None:
    """Also into the masters of a 16-bit precision."""
    run_ranks(edit_parameters, 2, precision)


def edit_gradients(precision: str, *, clips: bool) -> None:
    """Look at gradients, change one, and step."""
    twins = make_twins(precision=precision, max_grad_norm=0.2 if clips else None)
    for step in range(2):
        x, _ = batch_of(step)
        (twins.model(twins.mine(x)).square().mean() / 4).backward()
        (twins.plain(x).square().mean() / 4).backward()
        with twins.booster.full_gradients(twins.model) as found:
            assert list(found) == [name for name, _ in twins.plain.named_parameters()]
            for name, parameter in twins.plain.named_parameters():
                assert found[name].dtype == (torch.float64 if precision == "fp64" else torch.float32)
                near = TIGHT if precision == "fp64" else 0.02
                assert torch.allclose(found[name].double(), parameter.grad, rtol=near, atol=near), name
            found["0.weight"].mul_(2)
            found["2.weight"] = found["2.weight"] * 2
        for name in ("0.weight", "2.weight"):
            twins.plain.get_parameter(name).grad.mul_(2)
        if clips:
            nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.2)
        twins.step()
    assert twins.drift() < (TIGHT if precision == "fp64" else 1e-2)


@pytest.mark.parametrize("precision", ["fp64", "bf16", "fp16"])
@pytest.mark.parametrize("clips", [False, True])
def test_full_gradients_maps_names_to_averages_and_keeps_edits(precision: str, *, clips: bool) -> None:
    """Before clipping, without the loss scale, and without what has no gradient."""
    run_ranks(edit_gradients, 2, precision, clips=clips)


def assign_what_does_not_fit() -> None:
    """Assign another shape, and a name that there is not."""
    twins = make_twins()
    for name, value in (("2.bias", torch.zeros(4)), ("3.bias", torch.zeros(3))):
        with (
            pytest.raises(UsageError, match=f"'{name}' was assigned a tensor of shape"),
            twins.booster.full_parameters(twins.model) as found,
        ):
            found[name] = value


def test_full_parameters_refuses_what_does_not_fit() -> None:
    """With both shapes, or the name."""
    run_ranks(assign_what_does_not_fit, 2)


def look_inside_a_window() -> None:
    """Ask for gradients that are not complete."""
    twins = make_twins(accumulate=2)
    twins.model(batch_of(0)[0]).sum().backward()
    with pytest.raises(UsageError, match="micro-batch 1 of 2"), twins.booster.full_gradients(twins.model):
        pass


def test_full_gradients_inside_an_accumulation_window_are_refused() -> None:
    """They are not complete, on no rank."""
    run_ranks(look_inside_a_window, 2)


# --- averages -----------------------------------------------------------------------------------------------


def keep_an_average(precision: str) -> None:
    """Follow a model with an average, one step of which is skipped."""
    twins = make_twins(precision=precision, nonfinite="skip")
    average = twins.booster.average(twins.model, 0.9)
    wanted = copy.deepcopy(twins.plain)
    for step in range(4):
        x, _ = batch_of(step)
        factor = math.nan if step == 1 else 0.25
        (twins.model(twins.mine(x)).square().mean() * factor).backward()
        twins.optimizer.step()
        twins.optimizer.zero_grad()
        if step == 1:
            continue
        (twins.plain(x).square().mean() * factor).backward()
        twins.reference.step()
        twins.reference.zero_grad()
        with torch.no_grad():
            for one, other in zip(wanted.parameters(), twins.plain.parameters(), strict=True):
                one.lerp_(other, 0.1)
    assert average.num_updates == 3
    near = TIGHT if precision == "fp64" else 1e-2
    with average.applied():
        for one, other in zip(twins.model.parameters(), wanted.parameters(), strict=True):
            assert torch.allclose(one.double(), other, rtol=near, atol=near)
    assert twins.drift() < near


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_average_follows_real_steps_and_can_be_applied(precision: str) -> None:
    """Values come back afterwards; with masters it averages these."""
    run_ranks(keep_an_average, 2, precision)


# --- scalers and clipping of torch --------------------------------------------------------------------------


def train_with_torchs_own(pieces: list[Any], precision: str) -> None:
    """Scale and clip with torch's own tools."""
    twins = make_twins(pieces=pieces, precision=precision)
    ours, theirs = (torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2))
    for step in range(3):
        x, _ = batch_of(step)
        mine = twins.mine(x).to(torch.float64 if precision == "fp64" else torch.float32)
        runs = [(ours, twins.model, twins.optimizer, mine), (theirs, twins.plain, twins.reference, x)]
        norms = []
        for scaler, model, optimizer, rows in runs:
            factor = math.inf if step == 1 else 1.0
            scaler.scale(model(rows).square().mean() * factor).backward()
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert step == 1 or float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-5)
    assert ours.get_scale() == theirs.get_scale() == 4.0
    assert twins.drift() < (TIGHT if precision == "fp64" else 1e-5)


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_torchs_scaler_and_clipping_are_honoured_on_one_rank_and_where_every_backward_reduces(
    num_ranks: int, precision: str
) -> None:
    """In fp32 and fp64: they unscale, clip and skip as in plain torch."""
    pieces: list[Any] = [] if num_ranks == 1 else [Replicated(reduce="backward")]

    run_ranks(train_with_torchs_own, num_ranks, pieces, precision)


def use_elsewhere() -> None:
    """Use torch's tools where gradients are reduced in ``step()``."""
    twins = make_twins(precision="fp32")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(twins.model(batch_of(0)[0].float()).square().mean()).backward()
    with pytest.raises(UsageError, match=r"Booster\(precision='fp16'\)"):
        scaler.unscale_(twins.optimizer)
    with pytest.raises(UsageError, match=r"Replicated\(reduce='backward'\)"):
        scaler.step(twins.optimizer)
    with pytest.raises(UsageError, match=r"Booster\(max_grad_norm=...\) or optimizer.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(twins.model.parameters(), 1.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(CapabilityError, match=r"reduce='backward'\) with precision 'bf16'"):
        Booster(Replicated(reduce="backward"), precision="bf16").boost(model)
    assert type(model[1]) is nn.BatchNorm1d
    dist.barrier()


def test_elsewhere_torchs_scaler_and_clipping_are_refused_with_the_line_that_replaces_them() -> None:
    """On every rank, before anything waits."""
    run_ranks(use_elsewhere, 2, timeout_seconds=15)


# --- dims of samples ----------------------------------------------------------------------------------------


class TimeMajor(nn.Module):
    """Maps ``[length, samples, 4]`` to ``[samples, 3]``, with one weight for each position."""

    def __init__(self) -> None:
        """Make one layer."""
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum over positions."""
        hidden: torch.Tensor = self.inner(x) * positions[:, None, None]
        return hidden.sum(0)


def weigh_named_dims() -> None:
    """Ranks bring one and two samples, which stand in dim 1 of the only tensor that has them."""
    rank = dist.get_rank()
    model = TimeMajor().double()
    booster = Booster(precision="fp64")
    model, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(5, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(1.0, 6.0, dtype=torch.float64)
    share = x[:, :1] if rank == 0 else x[:, 1:]
    batch, dims = ((share, positions), None), {"x": 1, "positions": None}

    def mean_of_squares(outputs: torch.Tensor, _: object) -> torch.Tensor:
        return outputs.square().sum(1).mean()

    expected = mean_of_squares(model(x, positions), None).item()
    evaluated = booster.evaluate(model, batch, mean_of_squares, batch_dims=dims)
    trained = booster.forward_backward(model, batch, mean_of_squares, batch_dims=dims)
    assert float(evaluated) == pytest.approx(expected, rel=1e-6)
    assert float(trained) == pytest.approx(expected, rel=1e-6)
    for wrong, text in (
        ({"y": 1}, "names 'y', and the batch has 'x', 'positions', 'target'"),
        ({"x": 3}, r"dim 3 for inputs\[0\], which has the shape"),
    ):
        with pytest.raises(UsageError, match=text):
            booster.forward_backward(model, batch, mean_of_squares, batch_dims=wrong)


def test_batch_dims_says_where_samples_are_by_name() -> None:
    """They count in the mean, in both calls; what is not there is refused on every rank."""
    run_ranks(weigh_named_dims, 2, timeout_seconds=15)
