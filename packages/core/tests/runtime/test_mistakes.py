"""Mistakes of one rank in ``forward_backward`` and ``evaluate``: errors of all ranks, which can go on."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_core import Booster
from colossal_core.errors import ColossalError, RankMismatchError, UsageError
from colossal_testkit import run_ranks
from colossal_testkit.stories import assert_close, tiny_buffers

from .taggers import Flat, Tagger, cross_entropy, share_of


def none(_outputs: Any, _target: Any) -> Any:
    """Return no loss."""
    return None


def vector(outputs: torch.Tensor, _target: Any) -> torch.Tensor:
    """Return a loss for each token."""
    return outputs.square().sum(1)


def detached(outputs: torch.Tensor, _target: Any) -> torch.Tensor:
    """Return a loss without a graph."""
    return outputs.detach().mean()


def number(_outputs: Any, _target: Any) -> Any:
    """Return a float."""
    return 1.0


MISTAKES: dict[str, tuple[Any, Any, Any, str]] = {
    "batch": ("three", Flat(), None, "a batch is tuple of length 3"),
    "none": (None, none, None, "the criterion returned None"),
    "vector": (None, vector, None, r"a tensor of shape \(5,\), expected a scalar"),
    "detached": (None, detached, None, "the loss does not require gradients"),
    "number": (None, number, None, "the criterion returned 1.0"),
    "no criterion": (None, None, None, "without a criterion the model's output has a loss of None"),
    "weight": (None, Flat(), -2.0, "the weight of the batch is -2.0"),
    "reduction": (None, Flat(reduction="none"), None, "reduction='none'"),
}


def make_mistake(name: str, wrong: int, call: str) -> list[str]:
    """Make a mistake on one rank; return the errors of all, and go on with a good step."""
    form, criterion, weight, _ = MISTAKES[name]
    torch.manual_seed(0)
    model: Any = Tagger()
    booster = Booster(precision="fp64")
    with tiny_buffers(200, 60):
        model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens, target = share_of(1, 0, 2)
    batch: Any = (tokens, target)
    is_wrong = dist.get_rank() == wrong
    errors = []
    try:
        given = (*batch, target) if is_wrong and form == "three" else batch
        chosen = criterion if is_wrong else Flat()
        if call == "evaluate":
            booster.evaluate(model, given, chosen)
        else:
            booster.forward_backward(model, given, chosen, weight=weight if is_wrong else None)
    except ColossalError as error:
        errors.append(f"{type(error).__name__}: {error}")
    optimizer.zero_grad()
    loss = booster.forward_backward(model, batch, Flat())
    optimizer.step()
    return [*errors, f"{float(loss):.6f}", f"{float(optimizer.grad_norm):.6f}"]


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("wrong", [0, 1])
def test_a_mistake_of_one_rank_is_an_error_of_all(name: str, wrong: int) -> None:
    """The rank says what is wrong, the others say which rank; a good step follows."""
    results = run_ranks(make_mistake, 2, name, wrong, "train", timeout_seconds=15)

    message = MISTAKES[name][3]
    for rank, (error, *after) in enumerate(results):
        kind = "UsageError" if rank == wrong else f"RankMismatchError: rank {wrong} could not go on"
        assert error.startswith(kind), error
        assert re.search(message, error), error
        assert "next: " in error
        assert after == results[0][1:]


@pytest.mark.parametrize("name", ["batch", "none", "vector"])
def test_a_mistake_in_evaluation_is_an_error_of_all(name: str) -> None:
    """``evaluate`` sends the same two messages."""
    results = run_ranks(make_mistake, 2, name, 1, "evaluate", timeout_seconds=15)

    assert results[1][0].startswith("UsageError")
    assert results[0][0].startswith("RankMismatchError: rank 1 could not go on")
    assert results[0][1:] == results[1][1:]


class Normed(Tagger):
    """Waits for the other ranks in forward and backward, on request."""

    def __init__(self, *, is_normed: bool) -> None:
        """Build it in fp64."""
        super().__init__()
        self.norm = nn.BatchNorm1d(4).double() if is_normed else nn.Identity()

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Map tokens ``[n, t]`` to normed logits ``[n * t, 4]``."""
        logits: torch.Tensor = self.norm(super().forward(tokens, scale))
        return logits


def fail_in_between(name: str, accumulate: int, *, is_normed: bool) -> tuple[str, float, list[torch.Tensor]]:
    """Make a mistake on rank 1 between two micro-batches; return the error, and what the others came to."""
    torch.manual_seed(0)
    model: Any = Normed(is_normed=is_normed)
    booster = Booster(precision="fp64", accumulate=accumulate)
    with tiny_buffers(200, 60):
        model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    error = ""
    for step in range(3):
        tokens, target = share_of(dist.get_rank(), step, 2)
        if step != 1:
            booster.forward_backward(model, (tokens, target), Flat())
            optimizer.step()
            optimizer.zero_grad()
            continue
        wrong = name if dist.get_rank() == 1 else ""
        batches = {"batch": (tokens, target, target), "forward": (tokens + 100, target)}
        try:
            criterion: Any = vector if wrong == "vector" else Flat()
            booster.forward_backward(model, batches.get(wrong, (tokens, target)), criterion)
        except (ColossalError, IndexError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        optimizer.zero_grad()
    return error, float(optimizer.grad_norm), [value.detach().clone() for value in model.parameters()]


@pytest.mark.parametrize(
    ("name", "accumulate", "is_normed"),
    [
        ("batch", 1, True),
        ("vector", 1, True),
        ("batch", 2, False),
        ("vector", 2, False),
        ("forward", 2, False),
        ("batch", 1, False),
        ("vector", 1, False),
        ("forward", 1, False),
    ],
)
def test_a_mistake_of_one_rank_leaves_no_trace(name: str, accumulate: int, *, is_normed: bool) -> None:
    """Nobody waits inside a model that communicates, and a window goes on as if the batch had not been."""
    healthy, wrong = run_ranks(fail_in_between, 2, name, accumulate, is_normed=is_normed, timeout_seconds=15)

    assert healthy[0].startswith("RankMismatchError: rank 1 could not go on")
    assert wrong[0].startswith("IndexError" if name == "forward" else "UsageError")
    assert healthy[1] == wrong[1]
    torch.manual_seed(0)
    model = Normed(is_normed=is_normed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shares = {step: [share_of(rank, step, 2) for rank in range(2)] for step in (0, 2)}
    counts = {step: sum(int((target != -100).sum()) for _, target in parts) for step, parts in shares.items()}
    for step, parts in shares.items():
        tokens, target = (torch.cat(part) for part in zip(*parts, strict=True))
        part_of_window = counts[step] / sum(counts.values()) if accumulate == 2 else 1.0
        (Flat()(model(tokens), target) * part_of_window).backward()
        if step == 2 or accumulate == 1:
            optimizer.step()
            optimizer.zero_grad()
    for _, _, weights in (healthy, wrong):
        for value, parameter in zip(weights, model.parameters(), strict=True):
            assert_close(value, parameter, "weight")


def go_wrong_then_be_nan() -> tuple[str, float]:
    """Recover from a mistake, and meet a loss that is NaN by itself later."""
    model: Any = Tagger()
    booster = Booster(precision="fp64")
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = share_of(0, 0, 2)
    message = ""
    try:
        booster.forward_backward(model, batch, none if dist.get_rank() == 0 else Flat())
    except (UsageError, RankMismatchError) as error:
        message = str(error)
    optimizer.zero_grad()
    loss = booster.forward_backward(model, batch, spoiled)
    return message, float(loss)


def spoiled(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss that is NaN."""
    return cross_entropy(logits, target) * math.nan


def test_an_old_mistake_is_not_blamed_for_a_loss_that_is_nan() -> None:
    """A NaN loss comes back as it is; the step then raises for the gradients."""
    for message, loss in run_ranks(go_wrong_then_be_nan, 2):
        assert "None" in message
        assert math.isnan(loss)
