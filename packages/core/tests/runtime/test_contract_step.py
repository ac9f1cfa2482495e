"""One step, sentence by sentence: what ``forward_backward``, plain loops, windows and ``backward`` promise.

Each test is named after what is promised and looks at it in its smallest form; the files about the parts
(executor, shares, accumulation, windows, loss scale) look further. Rank functions assert by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from colossal_core import Booster, ColossalError
from colossal_testkit import run_ranks

from .twins import batch_of, make_twins

TIGHT = 1e-10
half_square = nn.MSELoss()


# --- forward_backward ---------------------------------------------------------------------------------------


def mean_over_the_batch() -> float:
    """Train three steps on shares of 3, 2 and 2 rows; return a loss."""
    twins = make_twins()
    loss = torch.zeros(())
    for step in range(3):
        x, y = batch_of(step, 7)
        loss = twins.booster.forward_backward(twins.model, (twins.mine(x), twins.mine(y)), half_square)
        wanted = half_square(twins.plain(x), y)
        wanted.backward()
        assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-6)
        twins.step()
    assert twins.drift() < TIGHT
    assert (loss.shape, loss.dtype, loss.requires_grad) == ((), torch.float32, False)
    return float(loss)


def test_forward_backward_is_the_mean_over_the_global_batch_0d_fp32_detached_the_same_on_every_rank() -> None:
    """Shares need not be equal."""
    losses = run_ranks(mean_over_the_batch, 3)

    assert len(set(losses)) == 1


class Flexible(nn.Module):
    """Takes a second input, and labels for a loss of its own."""

    def __init__(self) -> None:
        """Build it."""
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, scale: Any = 1.0, labels: torch.Tensor | None = None) -> Any:
        """Return outputs, or an object with outputs and loss."""
        outputs = self.inner(x) * scale
        if labels is None:
            return outputs
        return SimpleNamespace(outputs=outputs, loss=half_square(outputs, labels))


def check_form(make: Callable[..., Any], criterion: Any) -> None:
    """Train on a form of batch, and in plain torch on its values."""
    twins = make_twins(Flexible())
    for step in range(2):
        x, y = batch_of(step)
        batch = make(twins.mine(x), twins.mine(y))
        twins.booster.forward_backward(twins.model, batch, criterion)
        scale = 2.0 if "scale" in str(batch) or (isinstance(batch, tuple) and len(batch[0]) == 2) else 1.0
        half_square(twins.plain(x, scale), y).backward()
        twins.step()
    assert twins.drift() < TIGHT


def a_tensor(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Inputs are one tensor."""
    return (x, y)


def a_tuple(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Inputs are a tuple of arguments."""
    return ((x, 2.0), y)


def a_mapping(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Inputs are a mapping of keyword arguments."""
    return ({"x": x, "scale": 2.0}, y)


def one_mapping(x: torch.Tensor, y: torch.Tensor) -> Any:
    """The batch is one mapping, and the target lies where only the criterion looks."""
    by_first[float(x[0, 0])] = y
    return {"x": x, "scale": 2.0}


by_first: dict[float, torch.Tensor] = {}


def by_mapping(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """Find the target of a batch of one mapping."""
    assert set(batch) == {"x", "scale"}
    return F.mse_loss(outputs, by_first[float(batch["x"][0, 0])])


def with_labels(x: torch.Tensor, y: torch.Tensor) -> Any:
    """The model computes its loss."""
    return {"x": x, "labels": y}


@pytest.mark.parametrize("make", [a_tensor, a_tuple, a_mapping])
def test_a_batch_is_inputs_and_target_and_inputs_are_a_tensor_a_tuple_or_a_mapping(
    make: Callable[..., Any],
) -> None:
    """Each form calls the model as written."""
    run_ranks(check_form, 2, make, half_square)


def test_a_batch_may_be_one_mapping_of_keyword_arguments_that_the_criterion_gets_whole() -> None:
    """``criterion(outputs, batch)``."""
    run_ranks(check_form, 2, one_mapping, by_mapping)


def test_without_a_criterion_the_loss_of_the_outputs_is_used() -> None:
    """An attribute or an item of that name."""
    run_ranks(check_form, 2, with_labels, None)


def meet_other_lengths() -> None:
    """Pass a batch of three on rank 1 only; every rank gets an error and goes on."""
    twins = make_twins()
    x, y = batch_of(0)
    batch = (x, y, y) if twins.booster.data_rank == 1 else (x, y)
    with pytest.raises(ColossalError, match="tuple of length 3"):
        twins.booster.forward_backward(twins.model, batch, half_square)
    twins.booster.forward_backward(twins.model, (x, y), half_square)
    half_square(twins.plain(x), y).backward()
    twins.step()
    assert twins.drift() < TIGHT


def test_batches_of_other_lengths_are_errors_on_all_ranks() -> None:
    """Nobody waits for the rank that cannot go on."""
    run_ranks(meet_other_lengths, 2, timeout_seconds=15)


# --- weights ------------------------------------------------------------------------------------------------


class Scorer(nn.Module):
    """Scores three classes; computes a loss by itself, and accepts the number of items in the batch."""

    def __init__(self) -> None:
        """Build it."""
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: Any = None, num_items_in_batch: Any = None) -> Any:
        """Return scores, or a mapping with the loss."""
        del num_items_in_batch
        scores = self.inner(x)
        return scores if labels is None else {"loss": F.cross_entropy(scores, labels)}


def own_mean(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Average over the labels that count, which nobody can see from outside."""
    return F.cross_entropy(scores, labels)


def count_labels(batch: Any) -> float:
    """Count the labels that count."""
    return float((batch[1] != -100).sum())


WEIGHTS: dict[str, tuple[Any, Any, str]] = {
    "number": (own_mean, "number", "weight= of the call"),
    "callable": (own_mean, count_labels, "weight= of the call"),
    "before the loss's own": (nn.CrossEntropyLoss(), "number", "weight= of the call"),
    "ignore_index": (nn.CrossEntropyLoss(), None, "targets that CrossEntropyLoss counts"),
    "reduction": (nn.CrossEntropyLoss(reduction="sum"), None, "nothing: CrossEntropyLoss sums"),
    "num_items_in_batch": (None, None, "num_items_in_batch, or the labels that count"),
    "samples": (own_mean, None, "number of samples"),
}
"""Criterion, ``weight=``, and what ``describe()`` says."""


def weigh(kind: str) -> None:
    """Train on labels of which each rank has another number that counts."""
    criterion, weight, rule = WEIGHTS[kind]
    twins = make_twins(Scorer())
    assert "loss weight = the first that applies" in twins.booster.describe()
    for step in range(2):
        x, _ = batch_of(step, 7)
        labels = torch.tensor([0, -100, 1, 2, -100, -100, 1])
        if kind == "samples":
            labels = labels.clamp(min=0)
        mine = (twins.mine(x), twins.mine(labels))
        given = count_labels(mine) if weight == "number" else weight
        batch: Any = {"x": mine[0], "labels": mine[1]} if criterion is None else mine
        twins.booster.forward_backward(twins.model, batch, criterion, weight=given)
        F.cross_entropy(twins.plain(x), labels, reduction="sum" if kind == "reduction" else "mean").backward()
        twins.step()
    assert twins.drift() < TIGHT
    assert f"loss weight = {rule}  (the last forward_backward)" in twins.booster.describe()


@pytest.mark.parametrize("kind", WEIGHTS)
def test_the_weight_is_the_first_that_applies_and_describe_says_which(kind: str) -> None:
    """``weight``, the torch loss's own, ``num_items_in_batch``, samples."""
    run_ranks(weigh, 3, kind)


# --- the plain loop -----------------------------------------------------------------------------------------


def loader_of(count: int, batch_size: int) -> Any:
    """Return a loader over some rows."""
    x, y = batch_of(9, count)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def train_plainly(count: int, *, how: str, accumulate: int = 1) -> None:
    """Train on a boosted loader and in plain torch on its global batches."""
    twins = make_twins(accumulate=accumulate)
    loader = twins.booster.boost(loader_of(count, 4))
    batches = list(loader_of(count, 4))
    for step, (x, y) in enumerate(loader):
        if how == "weight":  # the mean over elements above 0, which rows do not tell
            chosen = y > 0
            loss = F.mse_loss(twins.model(x)[chosen], y[chosen])
            twins.booster.backward(loss, weight=int(chosen.sum()))
        else:
            half_square(twins.model(x), y).backward()
        twins.optimizer.step()
        twins.optimizer.zero_grad()
        assert twins.optimizer.stepped == ((step + 1) % accumulate == 0 or step + 1 == len(batches))
    for start in range(0, len(batches), accumulate):
        x, y = (torch.cat(part) for part in zip(*batches[start : start + accumulate], strict=True))
        chosen = y > 0 if how == "weight" else torch.ones_like(y, dtype=torch.bool)
        F.mse_loss(twins.plain(x)[chosen], y[chosen]).backward()
        twins.reference.step()
        twins.reference.zero_grad()
    assert twins.drift() < TIGHT


def test_in_the_plain_loop_a_loss_counts_by_its_rows_in_the_batch_that_the_loader_gave_last() -> None:
    """Shares of a batch of four differ among three ranks."""
    run_ranks(train_plainly, 3, 8, how="plain")


def test_other_means_are_exact_by_backward_with_a_weight() -> None:
    """``backward(loss, weight=...)`` counts what the mean was taken over."""
    run_ranks(train_plainly, 3, 8, how="weight")


def have_an_empty_share() -> Any:
    """Read a last batch of one row; return the rows of this rank that count."""
    twins = make_twins()
    loader = twins.booster.boost(loader_of(5, 4))
    counts = []
    for x, _ in loader:
        counts.append(twins.booster.rows)
        assert len(x) == max(counts[-1], 1)
    return counts[-1]


def test_a_rank_with_an_empty_share_gets_one_sample_of_weight_0() -> None:
    """It takes part in every collective, and counts for nothing."""
    run_ranks(train_plainly, 3, 5, how="plain")

    assert run_ranks(have_an_empty_share, 3) == [1, 0, 0]


def count_equally() -> None:
    """Train on shares of 4 and 2 rows without a boosted loader."""
    twins = make_twins()
    x, y = batch_of(0)
    first, second = (x[:4], y[:4]), (x[4:], y[4:])
    mine = (first, second)[twins.booster.data_rank]
    half_square(twins.model(mine[0]), mine[1]).backward()
    for part in (first, second):
        (half_square(twins.plain(part[0]), part[1]) / 2).backward()
    twins.step()
    assert twins.drift() < TIGHT


def test_without_a_boosted_loader_ranks_count_equally() -> None:
    """As under DDP."""
    run_ranks(count_equally, 2)


# --- accumulation -------------------------------------------------------------------------------------------


def count_per_optimizer() -> None:
    """Step one optimizer at every micro-batch and another one at every second."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 1)
    one: Any = torch.optim.SGD(first.parameters(), lr=0.1)
    two: Any = torch.optim.SGD(second.parameters(), lr=0.1)
    first, second, one, two = Booster(accumulate=2).boost(first, second, one, two)
    seen = []
    for number in range(4):
        second(first(torch.ones(1, 3))).sum().backward()
        for optimizer in (one, two) if number % 2 else (one,):
            optimizer.step()
            optimizer.zero_grad()
        seen.append((one.stepped, two.stepped))
    assert seen == [(False, False), (True, False), (False, False), (True, True)]


def test_with_accumulate_calls_of_step_are_counted_per_optimizer() -> None:
    """An optimizer that steps every other time has windows of its own."""
    run_ranks(count_per_optimizer, 2)


def do_nothing_in_between() -> None:
    """Train six micro-batches, three to a step, with a schedule."""
    twins = make_twins(accumulate=3, max_grad_norm=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(twins.optimizer, 1, gamma=0.5)
    schedule, theirs = twins.booster.boost(schedule), torch.optim.lr_scheduler.StepLR(twins.reference, 1, 0.5)
    for number in range(6):
        x, y = batch_of(number)
        before = [value.detach().clone() for value in twins.model.parameters()]
        half_square(twins.model(twins.mine(x)), twins.mine(y)).backward()
        (half_square(twins.plain(x), y) / 3).backward()
        twins.optimizer.step()
        schedule.step()
        twins.optimizer.zero_grad()
        is_real = number % 3 == 2
        assert twins.optimizer.stepped == is_real
        assert all(map(torch.equal, before, twins.model.parameters())) != is_real
        if is_real:
            nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.1)
            twins.reference.step()
            theirs.step()
            twins.reference.zero_grad()
        assert schedule.get_last_lr() == theirs.get_last_lr()
    assert twins.drift() < TIGHT


def test_inside_a_window_step_and_its_scheduler_and_zero_grad_do_nothing() -> None:
    """The loop stays as it is; rates and weights move in real steps only."""
    run_ranks(do_nothing_in_between, 2)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_the_last_batch_of_the_loader_closes_the_window_with_its_true_weight(accumulate: int) -> None:
    """Five batches of 4, 4, 4, 4 and 2 rows: the last window has fewer batches and rows."""
    run_ranks(train_plainly, 2, 18, how="plain", accumulate=accumulate)


def flush_by_hand() -> None:
    """Close a window of three after two micro-batches."""
    twins = make_twins(accumulate=3)
    for number in range(2):
        x, y = batch_of(number)
        half_square(twins.model(twins.mine(x)), twins.mine(y)).backward()
        (half_square(twins.plain(x), y) / 2).backward()
        twins.optimizer.step()
    assert not twins.optimizer.stepped
    twins.optimizer.flush()
    assert twins.optimizer.stepped
    twins.optimizer.flush()
    assert not twins.optimizer.stepped
    twins.reference.step()
    assert twins.drift() < TIGHT


def test_flush_closes_a_window_by_hand() -> None:
    """With the micro-batches that it has; with none it does nothing."""
    run_ranks(flush_by_hand, 2)


def accumulate_explicitly(announced: int) -> Any:
    """Run three backward passes before each step; return the words of gradients of the last one."""
    twins = make_twins()
    for step in range(3):
        for part in range(3):
            x, y = batch_of(3 * step + part)
            (half_square(twins.plain(x), y) / 3).backward()
            loss = half_square(twins.model(twins.mine(x)), twins.mine(y)) / 3
            if part < announced:
                with twins.booster.no_sync():
                    loss.backward()
            else:
                loss.backward()
        twins.step()
    assert twins.drift() < TIGHT
    return sum(each.received_words for each in twins.booster.last_traffic if each.phase == "gradients")


def test_no_sync_is_the_explicit_form_and_bare_repeated_backward_adds_as_in_torch() -> None:
    """Both are exact, and gradients travel once."""
    announced = run_ranks(accumulate_explicitly, 2, 2)
    bare = run_ranks(accumulate_explicitly, 2, 0)

    assert announced == bare


# --- backward -----------------------------------------------------------------------------------------------


def loss_of(kind: str, model: Any, x: torch.Tensor) -> torch.Tensor:
    """Return a loss that does not, or not only, pass the outputs of the model."""
    loss: torch.Tensor = model(x).square().mean()
    if kind == "gradient penalty":
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = loss + (gradient.norm(dim=1) - 1).square().mean() / 4
    elif kind == "sub-module":
        loss = loss + model[0](x.to(model[0].weight.dtype)).to(loss.dtype).square().mean() / 4
    else:
        for value in model.parameters():
            loss = loss + value.to(loss.dtype).square().sum() / 8
    return loss


def go_backward(kind: str, precision: str) -> None:
    """Take two steps by the explicit backward."""
    twins = make_twins(precision=precision)
    for step in range(2):
        x, _ = batch_of(step)
        mine = twins.mine(x).to(torch.float64 if precision == "fp64" else torch.float32)
        twins.booster.backward(loss_of(kind, twins.model, mine))
        loss_of(kind, twins.plain, x).backward()
        twins.step()
    assert twins.optimizer.skipped_steps == 0
    assert twins.drift() < (TIGHT if precision == "fp64" else 2e-3)


@pytest.mark.parametrize("precision", ["fp64", "fp16"])
@pytest.mark.parametrize("kind", ["gradient penalty", "sub-module", "penalty on parameters"])
def test_backward_is_the_form_for_penalties_and_losses_on_sub_modules_in_fp16(
    kind: str, precision: str
) -> None:
    """It scales the loss itself, and is right in every precision."""
    run_ranks(go_backward, 2, kind, precision)
