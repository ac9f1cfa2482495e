"""``forward_backward`` and ``evaluate``: the mean over the global batch, or an error on every rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from colossal_core import Booster
from colossal_core.errors import UsageError
from colossal_core.runtime.batches import loss_weight, split_batch
from colossal_testkit import run_ranks
from colossal_testkit.stories import assert_close, tiny_buffers

from .taggers import Flat, Tagger, cross_entropy, share_of

CPU = torch.device("cpu")


def count_targets(batch: Any) -> float:
    """Count the tokens that count."""
    return float((batch[1] != -100).sum())


def squared(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Average over samples of a sum over everything else."""
    return (logits.view(len(target), -1) - 0.1).square().sum(1).mean()


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5], dtype=torch.float64)
CRITERIA: dict[str, tuple[Callable[..., torch.Tensor], Any]] = {
    "ignoring": (Flat(), None),
    "class weights": (Flat(weight=CLASS_WEIGHTS), None),
    "sum": (Flat(reduction="sum"), None),
    "by function": (cross_entropy, count_targets),
    "samples": (squared, None),
}


def train_shares(name: str, world_size: int) -> tuple[list[float], list[float], list[torch.Tensor]]:
    """Train three steps by ``forward_backward``; return losses, norms and weights."""
    criterion, weight = CRITERIA[name]
    torch.manual_seed(0)
    model: Any = Tagger()
    booster = Booster(precision="fp64", max_grad_norm=0.5)
    with tiny_buffers(200, 60):
        model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    losses, norms = [], []
    for step in range(3):
        batch = share_of(dist.get_rank(), step, world_size)
        losses.append(float(booster.evaluate(model, batch, criterion)) if weight is None else math.nan)
        loss = booster.forward_backward(model, batch, criterion, weight=weight)
        assert loss.shape == ()
        assert not loss.requires_grad
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(optimizer.grad_norm))
    return losses, norms, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", CRITERIA)
def test_mean_is_that_of_the_global_batch(name: str, world_size: int) -> None:
    """Uneven rows, ignored targets, a rank without any, class weights and sums equal one process."""
    results = run_ranks(train_shares, world_size, name, world_size)

    criterion, _ = CRITERIA[name]
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        shares = [share_of(rank, step, world_size) for rank in range(world_size)]
        tokens, target = (torch.cat(parts) for parts in zip(*shares, strict=True))
        loss = criterion(model(tokens), target)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        for losses, norms, _ in results:
            evaluated, trained = losses[2 * step : 2 * step + 2]
            assert trained == pytest.approx(float(loss.detach()), rel=1e-6)  # the loss is returned in fp32
            assert math.isnan(evaluated) or evaluated == trained
            assert norms[step] == pytest.approx(norm, rel=1e-10)
    for losses, _, weights in results:
        assert losses[1::2] == results[0][0][1::2]
        for value, parameter in zip(weights, model.parameters(), strict=True):
            assert_close(value, parameter, "weight")


# --- forms of batches ------------------------------------------------------------------------------------


class Returning(Tagger):
    """Returns its loss, as models of some libraries do."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None, kind: str = "dict") -> Any:
        """Return logits and loss in a mapping or an object."""
        logits = super().forward(tokens)
        loss = None if labels is None else F.cross_entropy(logits, labels.flatten())
        if kind == "dict":
            return {"logits": logits, "loss": loss}
        return Answer(logits=logits, loss=loss)


@dataclasses.dataclass
class Answer:
    """Logits and loss."""

    logits: torch.Tensor
    loss: torch.Tensor | None


def try_forms() -> list[list[float]]:
    """Run every form of a batch; return losses and gradients' norms."""
    found = []
    for number in range(6):
        torch.manual_seed(0)
        model: Any = Returning() if number > 3 else Tagger()
        booster = Booster(precision="fp64")
        model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        tokens, target = share_of(dist.get_rank(), 0, 2)
        scale = torch.ones(len(tokens), dtype=torch.float64)
        criterion: Any = Flat()
        batch: Any = [
            (tokens, target),
            ((tokens, scale), target),
            [{"tokens": tokens, "scale": scale}, target],
            {"tokens": tokens, "scale": scale},
            {"tokens": tokens, "labels": target},
            {"tokens": tokens, "labels": target, "kind": "object"},
        ][number]
        if number == 3:
            criterion = by_mapping
        weight = None if number < 3 else count_targets_of(target)
        loss = booster.forward_backward(model, batch, None if number > 3 else criterion, weight=weight)
        optimizer.step()
        found.append([float(loss), float(optimizer.grad_norm)])
    return found


def by_mapping(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Find the target of a mapping batch by its tokens."""
    _, target = share_of(dist.get_rank(), 0, 2)
    assert set(batch) == {"tokens", "scale"}
    return F.cross_entropy(logits, target.flatten())


def count_targets_of(target: torch.Tensor) -> float:
    """Count the tokens that count."""
    return float((target != -100).sum())


def test_all_forms_of_a_batch_mean_the_same() -> None:
    """Tensor, tuple, mapping and keyword inputs, a criterion over a mapping, and losses of outputs."""
    for forms in run_ranks(try_forms, 2):
        for loss, norm in forms[1:]:
            assert loss == pytest.approx(forms[0][0], rel=1e-7)
            assert norm == pytest.approx(forms[0][1], rel=1e-10)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.ones(1), torch.ones(1), torch.ones(1)), r"a batch is tuple of length 3"),
        ([torch.ones(1)], r"a batch is list of length 1"),
        (torch.ones(2), r"a batch is Tensor"),
        ("text", r"a batch is str"),
    ],
)
def test_other_batches_are_refused_by_their_form(batch: Any, message: str) -> None:
    """The message shows what came and how to regroup it."""
    with pytest.raises(UsageError, match=message) as caught:
        split_batch(batch, CPU)

    assert "regroup" in caught.value.hint


def weigh(criterion: Any, target: Any, weight: Any = None) -> float | None:
    """Return the weight of a batch of two samples."""
    batch = (torch.ones(2, 3), target)
    return loss_weight(batch, split_batch(batch, CPU), criterion, weight)[0]


def test_weights_follow_what_the_loss_averages_over() -> None:
    """The user's weight first, then the targets that a torch loss counts, then samples."""
    labels = torch.tensor([1, -100])
    chances = torch.tensor([[0.5, 0.5], [0.9, 0.1]])

    assert weigh(nn.CrossEntropyLoss(), labels) == 1
    assert weigh(nn.CrossEntropyLoss(ignore_index=1), labels) == 1
    assert weigh(nn.CrossEntropyLoss(ignore_index=7), labels) == 2
    assert weigh(nn.CrossEntropyLoss(), chances) == 2
    assert weigh(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0])), labels) == 4
    assert weigh(F.cross_entropy, labels) == 1
    assert weigh(nn.MSELoss(), torch.ones(2, 3)) == 6
    assert weigh(nn.BCEWithLogitsLoss(), torch.ones(2, 5)) == 10
    assert weigh(squared, torch.ones(2, 3)) == 2
    assert weigh(nn.MSELoss(reduction="sum"), torch.ones(2, 3)) is None
    assert weigh(nn.MSELoss(), torch.ones(2, 3), 0.5) == 0.5
    assert weigh(nn.MSELoss(), torch.ones(2, 3), lambda batch: len(batch[0])) == 2
    assert weigh(None, None) == 2


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_impossible_weights_are_refused(weight: float) -> None:
    """A weight is a finite number of at least 0."""
    with pytest.raises(UsageError, match="the weight of the batch is"):
        weigh(nn.MSELoss(), torch.ones(2, 3), weight)


def ignore_everything() -> list[str]:
    """Train on a batch of which nothing counts."""
    model: Any = Tagger()
    booster = Booster(precision="fp64")
    model, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens, target = share_of(dist.get_rank(), 0, 2)
    try:
        booster.forward_backward(model, (tokens, torch.full_like(target, -100)), Flat())
    except UsageError as error:
        return [error.message, error.hint]
    return []


def test_batches_in_which_nothing_counts_are_an_error_of_all() -> None:
    """A mean over nothing is NaN in torch; here every rank says why."""
    for message, hint in run_ranks(ignore_everything, 2):
        assert "sum to 0.0" in message
        assert "ignore_index" in hint


def test_errors_of_torch_come_through_unchanged() -> None:
    """What the model itself raises is not wrapped: its own traceback says most."""
    model: Any = Tagger()
    booster = Booster(precision="fp64")
    model, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens, target = share_of(0, 0, 1)

    with pytest.raises(IndexError, match="index out of range"):
        booster.forward_backward(model, (tokens + 100, target), Flat())


def weigh_wrongly(weights: list[float]) -> str:
    """Call ``backward`` with weights that have no mean."""
    model: Any = Tagger()
    booster = Booster(precision="fp64")
    model, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens, target = share_of(dist.get_rank(), 0, 2)
    try:
        booster.backward(cross_entropy(model(tokens), target), weight=weights[dist.get_rank()])
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("weights", [[-1.0, 2.0], [math.nan, 1.0], [0.0, 0.0]])
def test_weights_of_backward_without_a_mean_are_an_error_of_all(weights: list[float]) -> None:
    """A wrong weight on one rank is found on every rank."""
    for message in run_ranks(weigh_wrongly, 2, weights, timeout_seconds=10):
        assert "over the ranks" in message
        assert "at least 0" in message


# --- evaluation ------------------------------------------------------------------------------------------


class Moody(nn.Module):
    """Has dropout, a frozen module in evaluation mode, and counts its calls."""

    def __init__(self) -> None:
        """Build it in fp64."""
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.drop = nn.Dropout(0.5)
        self.fixed = nn.Dropout(0.5).eval()
        self.last = nn.Linear(4, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 3]`` to ``[n, 2]``."""
        outputs: torch.Tensor = self.last(self.fixed(self.drop(torch.tanh(self.first(x)))))
        return outputs


def evaluate_in_between() -> dict[str, Any]:
    """Evaluate between backward and step, with another batch size, and also with an error."""
    torch.manual_seed(0)
    model: Any = Moody()
    booster = Booster(precision="fp64")
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = (torch.ones(3, 3, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64))
    booster.forward_backward(model, batch, nn.MSELoss())
    rows = 2 + dist.get_rank()
    other = (torch.ones(rows, 3, dtype=torch.float64), torch.zeros(rows, 2, dtype=torch.float64))
    loss, outputs = booster.evaluate(model, other, nn.MSELoss(), return_outputs=True)
    modes = [module.training for module in model.modules()]
    try:
        booster.evaluate(model, (other[0],), nn.MSELoss())
    except UsageError:
        modes += [module.training for module in model.modules()]
    optimizer.step()
    return {"loss": float(loss), "rows": len(outputs), "graph": outputs.requires_grad, "modes": modes}


def test_evaluation_leaves_training_alone() -> None:
    """No graph, no dropout, and every module is in the mode in which it was, also after an error."""
    results = run_ranks(evaluate_in_between, 2)

    for rank, result in enumerate(results):
        assert result["rows"] == 2 + rank
        assert not result["graph"]
        assert result["modes"] == [True, True, True, False, True] * 2
        assert result["loss"] == results[0]["loss"]
