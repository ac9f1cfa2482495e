"""Ranks that differ: every one of them raises within seconds, with the lines that differ and what to do."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_core import Booster
from colossal_core.errors import ColossalError, RankMismatchError, UsageError
from colossal_core.plugins.agreement import explain_disagreement
from colossal_core.runtime.agreement import Agreement
from colossal_core.runtime.launch import rendezvous_store
from colossal_testkit import collect_ranks, run_ranks, run_ranks_expecting_errors
from colossal_testkit.stories import batch_of

SECONDS = 10
"""Within this time every rank must have raised."""


def make(width: int = 4) -> nn.Sequential:
    """Make a model of two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.Linear(width, 5))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD over everything."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


# --- what differs at boost -------------------------------------------------------------------------------


def other_plan(rank: int) -> None:
    """Clip on one rank only."""
    model = make()
    Booster(max_grad_norm=1.0 if rank else None).boost(model, sgd(model))


def other_precision(rank: int) -> None:
    """Compute in bf16 on one rank."""
    model = make()
    Booster(precision="bf16" if rank else "fp32").boost(model, sgd(model))


def other_shapes(rank: int) -> None:
    """Build a wider model on one rank."""
    model = make(4 + rank)
    Booster().boost(model, sgd(model))


def other_names(rank: int) -> None:
    """Name a layer otherwise."""
    model = nn.ModuleDict({f"layer_{'b' if rank else 'a'}": nn.Linear(3, 3)})
    Booster().boost(model, sgd(model))


def other_dtypes(rank: int) -> None:
    """Store the model in another dtype on one rank."""
    model = make().to(torch.bfloat16 if rank else torch.float32)
    Booster(precision="bf16").boost(model, sgd(model))


def other_ties(rank: int) -> None:
    """Tie two layers on one rank."""
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    if rank:
        model[1].weight = model[0].weight
    Booster().boost(model, sgd(model))


def other_training(rank: int) -> None:
    """Freeze a layer on one rank."""
    model = make()
    model[0].requires_grad_(not rank)
    Booster().boost(model, sgd(model))


def other_buffers(rank: int) -> None:
    """Have a buffer on one rank."""
    model = make()
    if rank:
        model.register_buffer("extra", torch.zeros(2))
    Booster().boost(model, sgd(model))


def other_optimizers(rank: int) -> None:
    """Pass no optimizer on one rank."""
    model = make()
    Booster().boost(model, *([] if rank else [sgd(model)]))


def other_optimizer_kind(rank: int) -> None:
    """Use another optimizer on one rank."""
    model = make()
    kind = torch.optim.Adam if rank else torch.optim.AdamW
    Booster().boost(model, kind(model.parameters()))


def other_rate(rank: int) -> None:
    """Use another learning rate, as scripts do that scale it by the number of samples they see."""
    model = make()
    Booster().boost(model, torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1 * (1 + rank))))


def other_groups(rank: int) -> None:
    """Order the parameters of the optimizer otherwise."""
    model = make()
    parameters = list(model.parameters())
    Booster().boost(model, torch.optim.SGD(parameters[::-1] if rank else parameters, lr=0.1))


def other_order_of_models(rank: int) -> None:
    """Pass two models in another order."""
    first, second = make(3), make(4)
    Booster().boost(*((first, second) if rank else (second, first)))


DIFFERENCES: list[tuple[Callable[[int], None], str]] = [
    (other_plan, "max_grad_norm = 1.0"),
    (other_precision, "precision = "),
    (other_shapes, "0.weight (5, 5)"),
    (other_names, "layer_b.weight"),
    (other_dtypes, "bfloat16"),
    (other_ties, "tied to"),
    (other_training, "frozen"),
    (other_buffers, "extra"),
    (other_optimizers, "SGD group 0"),
    (other_optimizer_kind, "AdamW group 0"),
    (other_rate, "lr 0.2"),
    (other_groups, "order"),
    (other_order_of_models, "0.weight"),
]


def differ(number: int) -> None:
    """Run one of the differences on this rank."""
    DIFFERENCES[number][0](dist.get_rank())


@pytest.mark.parametrize("number", range(len(DIFFERENCES)), ids=[case.__name__ for case, _ in DIFFERENCES])
def test_ranks_that_differ_at_boost_all_raise(number: int) -> None:
    """Before any collective, with the differing lines by rank."""
    errors = run_ranks_expecting_errors(differ, 2, number, error=RankMismatchError, timeout_seconds=SECONDS)

    text = DIFFERENCES[number][1]
    for error in errors:
        assert "ranks disagree about" in error.message
        assert any(text in other.message for other in errors), error.message
        assert "rank 0" in error.message
        assert "rank 1" in error.message
        assert error.hint


# --- what fails on one rank ------------------------------------------------------------------------------


def foreign(rank: int) -> None:
    """Pass an optimizer over another model on one rank."""
    model = make()
    Booster().boost(model, sgd(make() if rank == 1 else model))


def unknown_thing(rank: int) -> None:
    """Pass a text on one rank."""
    model = make()
    Booster().boost(model, *(["text"] if rank == 1 else []))


def sparse(rank: int) -> None:
    """Use a sparse embedding on one rank."""
    model = nn.Sequential(nn.Embedding(3, 2, sparse=rank == 1))
    Booster().boost(model, sgd(model))


def boosted_already(rank: int) -> None:
    """Boost the model beforehand on one rank, in a world of its own making."""
    model = make()
    if rank == 1:
        make_alone(model)
    Booster().boost(model, sgd(model))


def make_alone(model: nn.Module) -> None:
    """Keep a graph over the model alive."""
    vars(model)["kept"] = model(torch.ones(1, 5))


ALONE: list[tuple[Callable[[int], None], str]] = [
    (foreign, "belongs to none of the models"),
    (unknown_thing, "cannot boost a str"),
    (sparse, "sparse=True"),
    (boosted_already, "is alive"),
]


def fail_alone(number: int) -> None:
    """Run one of the failures on this rank."""
    ALONE[number][0](dist.get_rank())


@pytest.mark.parametrize("number", range(len(ALONE)), ids=[case.__name__ for case, _ in ALONE])
def test_an_error_of_one_rank_is_raised_on_all(number: int) -> None:
    """The failing rank raises its own error, the others one that quotes it and names the rank."""
    errors = run_ranks_expecting_errors(fail_alone, 3, number, timeout_seconds=SECONDS)

    text = ALONE[number][1]
    for rank, error in enumerate(errors):
        assert text in error.message
        assert error.hint
        assert isinstance(error, RankMismatchError) == (rank != 1)
        assert ("rank 1 could not go on" in error.message) == (rank != 1)


def wrong_world() -> None:
    """Ask for more data ranks than there are."""
    model = make()
    Booster(data=4).boost(model, sgd(model))


def test_wrong_world_size_shows_the_arithmetic_on_every_rank() -> None:
    """Degrees and world are in the message, and what to change."""
    for error in run_ranks_expecting_errors(wrong_world, 3, timeout_seconds=SECONDS):
        assert "4" in error.message
        assert "3" in error.message
        assert error.hint


def recover_from_boost() -> list[torch.Tensor]:
    """Fail to boost on all ranks because of one, mend it, and boost the same objects."""
    model = make()
    optimizer = sgd(model)
    for attempt in range(2):
        extra = ["text"] if attempt == 0 and dist.get_rank() == 0 else []
        booster = Booster()
        try:
            model, optimizer, *_ = booster.boost(model, optimizer, *extra)
        except ColossalError:
            continue
    model(batch_of(dist.get_rank(), 0).float()).square().mean().backward()
    optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_boost_can_be_tried_again() -> None:
    """A failed boost leaves objects and agreement as they were on every rank."""
    first, second = run_ranks(recover_from_boost, 2)

    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[0], make().get_parameter("0.weight"))


# --- values ----------------------------------------------------------------------------------------------


class Varied(nn.Module):
    """Holds tensors of every kind, filled by rank."""

    def __init__(self, rank: int) -> None:
        """Fill everything with the rank."""
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 2), float(rank)).t())
        self.frozen = nn.Parameter(torch.full((2,), rank), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, 2))
        self.scalar = nn.Parameter(torch.tensor(float(rank)))
        self.register_buffer("mask", torch.tensor([bool(rank), True]))
        self.register_buffer("phase", torch.full((2,), complex(rank, 1)))
        self.register_buffer("hidden", torch.full((1,), rank), persistent=False)


def start_apart() -> tuple[list[str], dict[str, torch.Tensor]]:
    """Boost a model that each rank fills otherwise; return warnings and values."""
    model = Varied(dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Booster().boost(model, sgd(model))
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    return [str(warning.message) for warning in caught], values


def test_values_of_the_first_rank_win_with_one_warning() -> None:
    """Every kind of tensor is taken over, and rank 0 says once which ranks differed and why."""
    results = run_ranks(start_apart, 3)

    for rank, (messages, values) in enumerate(results):
        mine = [message for message in messages if "other values" in message]
        assert len(mine) == (1 if rank == 0 else 0)
        for message in mine:
            assert "ranks [1, 2]" in message
            assert "launch()" in message
        wanted: dict[str, torch.Tensor] = {
            **dict(Varied(0).named_parameters()),
            **dict(Varied(0).named_buffers()),
        }
        for name, value in wanted.items():
            assert torch.equal(values[name], value), name


def start_together() -> list[str]:
    """Boost equal models; return warnings."""
    model = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Booster().boost(model, sgd(model))
    return [str(warning.message) for warning in caught]


def test_equal_values_warn_of_nothing_and_are_not_sent() -> None:
    """The usual case is silent."""
    assert run_ranks(start_together, 2) == [[], []]


# --- the exchange itself ---------------------------------------------------------------------------------


def exchange() -> dict[str, Any]:
    """Use every call of an agreement, and two agreements at once."""
    rank = dist.get_rank()
    one = Agreement(rendezvous_store(), rank, 3)
    two = Agreement(rendezvous_store(), rank, 3)
    found: dict[str, Any] = {
        "shared": one.share("greeting", f"from {rank}"),
        "again": one.share("greeting", f"again {rank}"),
        "other": two.share("greeting", f"other {rank}"),
        "attempt": one.attempt("sum", lambda: rank + 1),
    }
    one.compare("equal lines", ["a", "b"], explain_disagreement)
    one.begin_exchange()
    if rank == 2:
        one.note_failure(UsageError("it broke", hint="mend it"))
    dist.barrier()
    try:
        one.raise_noted_failure()
    except RankMismatchError as error:
        found["noted"] = str(error)
    one.begin_exchange()
    one.raise_noted_failure()
    return found


def test_texts_come_in_rank_order_and_calls_do_not_mix() -> None:
    """Equal topics, several agreements, and failures of earlier exchanges stay apart."""
    for rank, found in enumerate(run_ranks(exchange, 3)):
        assert found["shared"] == ["from 0", "from 1", "from 2"]
        assert found["again"] == ["again 0", "again 1", "again 2"]
        assert found["other"] == ["other 0", "other 1", "other 2"]
        assert found["attempt"] == rank + 1
        assert found.get("noted") == (
            None if rank == 2 else "rank 2 could not go on: it broke\n  next: mend it"
        )


def wait_for_nobody() -> tuple[str, float]:
    """Let rank 1 stay away."""
    if dist.get_rank():
        return "", 0.0
    started = time.monotonic()
    agreement = Agreement(rendezvous_store(), 0, 2, timeout_seconds=0.5)
    try:
        agreement.share("the plan", "")
    except RankMismatchError as error:
        return str(error), time.monotonic() - started
    return "", 0.0


def test_a_rank_that_does_not_come_is_named() -> None:
    """After the timeout, with the topic that it did not reach."""
    (message, seconds), _ = run_ranks(wait_for_nobody, 2)

    assert "ranks [1] did not reach 'the plan'" in message
    assert 0.4 < seconds < timedelta(seconds=5).total_seconds()


def test_a_lone_rank_agrees_with_itself() -> None:
    """No store is needed."""
    agreement = Agreement(None, 0, 1)

    agreement.compare("anything", ["a"], explain_disagreement)

    assert agreement.share("anything", "text") == ["text"]
    assert agreement.attempt("anything", lambda: 3) == 3
    with pytest.raises(UsageError, match="own"):
        agreement.attempt("anything", raise_own)


def raise_own() -> None:
    """Raise an error of this rank."""
    raise UsageError("own")


def start_apart_and_strictly() -> None:
    """Boost a model that each rank fills otherwise, where warnings are errors."""
    model = Varied(dist.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Booster().boost(model, sgd(model))


def test_a_warning_that_is_an_error_on_the_first_rank_ends_all() -> None:
    """Only rank 0 warns; under ``-W error`` the others hear of it instead of waiting for its values."""
    outcomes = collect_ranks(start_apart_and_strictly, 3)

    assert "other values" in str(outcomes[0].error)
    assert all(isinstance(outcome.error, RankMismatchError) for outcome in outcomes[1:])
    assert all("rank 0 could not go on: UserWarning" in str(outcome.error) for outcome in outcomes[1:])
