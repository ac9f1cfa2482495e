"""Uneven shares on real ranks: losses count by rows, gathered values are the dataset's, ranks agree."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any, Literal

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from colossal_core import Booster, Replicated
from colossal_core.errors import RankMismatchError, UsageError
from colossal_core.runtime.agreement import Agreement
from colossal_core.runtime.loading import BoostedLoader, prepare_loaders
from colossal_core.runtime.sources import Place
from colossal_testkit import run_ranks, run_ranks_expecting_errors

from .loaders import CPU, Numbers, book_of, boost
from .strategy_cases import make_registry

ROWS, WIDTH = 11, 3
"""With batches of 4 the last one has 3 rows; with batches of 2 some shares are empty."""


def make_model() -> nn.Module:
    """Return a small model in fp64, with the dropout-free kind of nonlinearity that makes means differ."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def make_data() -> TensorDataset:
    """Return inputs and targets whose losses differ a lot between rows."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x * torch.arange(1, ROWS + 1).unsqueeze(1), x.flip(0)[:, :2] * 3)


@attrs.frozen(kw_only=True)
class Run:
    """How a run goes.

    Attributes:
        batch_size: Rows of a global batch.
        loop: ``plain``, ``explicit`` (``booster.backward``), ``forward_backward``, or ``twice``: two losses.
        reduce: When gradients are reduced.
        accumulate: Batches in a window.
        epochs: Epochs.
    """

    batch_size: int = 4
    loop: str = "plain"
    reduce: Literal["window", "backward"] = "window"
    accumulate: int = 1
    epochs: int = 2


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD whose momentum and decay would show a step too many."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def train_boosted(run: Run) -> list[torch.Tensor]:
    """Train on this rank; return the weights."""
    model = make_model()
    torch.manual_seed(1024)
    loader = DataLoader(make_data(), batch_size=run.batch_size, shuffle=True)
    booster = Booster(Replicated(reduce=run.reduce), precision="fp64", accumulate=run.accumulate)
    model, optimizer, loader = booster.boost(model, optimizer_of(model), loader)
    criterion = nn.MSELoss()
    for _ in range(run.epochs):
        for x, y in loader:
            if run.loop == "forward_backward":
                booster.forward_backward(model, (x, y), criterion)
            elif run.loop == "explicit":
                booster.backward(criterion(model(x), y))
            else:
                criterion(model(x), y).backward()
            if run.loop == "twice":
                (0.3 * model(x).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_plain(run: Run) -> list[torch.Tensor]:
    """Train in one process with torch alone, on the global batches of the same order."""
    model = make_model()
    optimizer = optimizer_of(model)
    torch.manual_seed(1024)
    loader = boost(DataLoader(make_data(), batch_size=run.batch_size, shuffle=True), 1, 0)
    for _ in range(run.epochs):
        batches = list(loader)
        for start in range(0, len(batches), run.accumulate):
            window = batches[start : start + run.accumulate]
            rows = sum(len(x) for x, _ in window)
            for x, y in window:
                loss = nn.functional.mse_loss(model(x), y)
                if run.loop == "twice":
                    loss = loss + 0.3 * model(x).square().mean()
                (loss * len(x) / rows).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("nproc", [2, 3, 4])
@pytest.mark.parametrize("batch_size", [2, 4])
@pytest.mark.parametrize("loop", ["plain", "forward_backward"])
def test_uneven_batches_equal_one_process(nproc: int, batch_size: int, loop: str) -> None:
    """Uneven and empty shares, in the plain loop as by forward_backward, to 1e-10."""
    check(Run(batch_size=batch_size, loop=loop), nproc)


@pytest.mark.parametrize("batch_size", [2, 4])
def test_uneven_batches_equal_one_process_when_every_backward_reduces(batch_size: int) -> None:
    """With DDP's semantics of gradients, too."""
    check(Run(batch_size=batch_size, reduce="backward"), 3)


@pytest.mark.parametrize("loop", ["explicit", "twice"])
def test_explicit_and_repeated_backward_count_by_rows(loop: str) -> None:
    """booster.backward is the plain loop's; several losses of one batch have one weight."""
    check(Run(loop=loop), 3)


@pytest.mark.parametrize("loop", ["plain", "forward_backward"])
@pytest.mark.parametrize("accumulate", [2, 5])
def test_last_batch_closes_the_window_with_its_true_weight(loop: str, accumulate: int) -> None:
    """Micro-batches count by their rows, and a window never reaches into the next epoch."""
    check(Run(loop=loop, accumulate=accumulate), 2)


def check(run: Run, nproc: int) -> None:
    """Compare the weights of every rank with one process."""
    weights = run_ranks(train_boosted, nproc, run)

    wanted = train_plain(run)
    for mine in weights:
        for got, want in zip(mine, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


class Branching(nn.Module):
    """Uses a layer only for rows that are marked, as a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(1, 1)
        self.rare = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 1]`` to ``[n, 1]``."""
        common: torch.Tensor = self.common(x)
        return common + self.rare(x) if bool((x > 0).any()) else common


def train_with_stand_in() -> tuple[list[float], list[float]]:
    """Step on one sample that the second rank has to stand in for; return what moved."""
    model: nn.Module = Branching()
    data = TensorDataset(torch.tensor([[-1.0]]))
    booster = Booster()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    loader: Any = DataLoader(data, batch_size=2)
    model, optimizer, loader = booster.boost(model, optimizer, loader)
    before = [parameter.item() for parameter in model.parameters()]
    for (x,) in loader:
        # A stand-in is a copy, so make the copy differ: what it touches and how it explodes must not matter.
        value = x if loader.last_share.rows else torch.full_like(x, float("inf"))
        model(value).mean().backward()
        optimizer.step()
    return before, [parameter.item() for parameter in model.parameters()]


def test_stand_in_counts_for_nothing() -> None:
    """Neither its gradients, were they infinite, nor that it touched a layer that no sample touched."""
    for before, after in run_ranks(train_with_stand_in, 2):
        assert after[2:] == before[2:]
        assert all(one != two for one, two in zip(before[:2], after[:2], strict=True))


# --- the book -----------------------------------------------------------------------------------------------


def test_book_knows_what_was_given_last_in_loops_that_run() -> None:
    """An evaluation inside training counts while it runs, and gives way to the training batch."""
    book = book_of(2)
    training, evaluation = (
        BoostedLoader(
            prepare_loaders(
                [DataLoader(Numbers(count), 4)],
                batch="global",
                place=Place(degree=2, index=1),
                agreement=Agreement(None, 0, 1),
            )[0],
            device=CPU,
            book=book,
            agreement=Agreement(None, 0, 1),
        )
        for count in (7, 5)
    )

    seen = []
    for _ in training:
        seen.append(book.weight)
        seen.extend(book.weight for _ in evaluation)
        seen.append(book.weight)

    assert seen == [1.0, 1.0, 0.0, 1.0, 2 / 3, 1.0, 0.0, 2 / 3]
    assert book.weight == 1.0
    assert book.current is None
    for _ in training:
        break
    assert book.current is None


def test_weights_of_equal_shares_are_exactly_one() -> None:
    """So that nothing is multiplied, and no bit changes."""
    book = book_of(3)
    for loader in [boost(DataLoader(Numbers(21), 7), 3, index) for index in range(3)]:
        loader._book = book
        for _ in loader:
            share = loader.last_share
            assert share is not None
            assert book.weight == share.rows * 3 / 7
    loader = boost(DataLoader(Numbers(21), 3), 3, 0)
    assert all(loader._book.weight == 1.0 for _ in loader)


# --- gather -------------------------------------------------------------------------------------------------


def boosted_numbers(count: int, batch_size: int) -> tuple[Booster, Any]:
    """Return a Booster and its loader over the numbers."""
    booster = Booster()
    _, loader = booster.boost(nn.Linear(1, 1), DataLoader(Numbers(count), batch_size=batch_size))
    return booster, loader


def gather_each_batch(count: int, batch_size: int) -> list[Any]:
    """Gather outputs of each batch."""
    booster, loader = boosted_numbers(count, batch_size)
    found = []
    for x in loader:
        outputs = {
            "square": (x * x).to(torch.bfloat16),
            "even": x % 2 == 0,
            "pair": (torch.stack([x, -x], dim=1).to(torch.complex64), None),
            "text": [f"sample {number}" for number in x.tolist()],
            "mean": x.double().mean(),
        }
        found.append(booster.gather(outputs))
    return found


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_gather_gives_each_batch_in_the_order_of_the_dataset(nproc: int) -> None:
    """Any dtype, uneven shares, without stand-ins; texts too; 0-d values as one for each share."""
    results = run_ranks(gather_each_batch, nproc, 7, 5)

    for found in results:
        for batch, wanted in zip(found, ([0, 1, 2, 3, 4], [5, 6]), strict=True):
            numbers = torch.tensor(wanted)
            assert torch.equal(batch["square"], (numbers * numbers).to(torch.bfloat16))
            assert torch.equal(batch["even"], numbers % 2 == 0)
            pair, nothing = batch["pair"]
            assert torch.equal(pair, torch.stack([numbers, -numbers], dim=1).to(torch.complex64))
            assert nothing is None
            assert batch["text"] == [f"sample {number}" for number in wanted]
            assert len(batch["mean"]) == min(nproc, len(wanted))


def gather_after_the_loop(count: int, batch_size: int) -> tuple[list[int], list[int], float]:
    """Keep outputs of all batches and gather them once, within another loop."""
    booster, loader = boosted_numbers(count, batch_size)
    for x in loader:
        kept = [y.clone() for y in loader_outputs(loader)]
        gathered = booster.gather({"kept": torch.cat(kept), "total": torch.tensor(1.0)})
        own = booster.gather(x)
        return gathered["kept"].tolist(), own.tolist(), gathered["total"].sum().item()
    raise AssertionError


def loader_outputs(loader: Any) -> Iterator[torch.Tensor]:
    """Yield what a loop over the loader gives."""
    yield from loader


@pytest.mark.parametrize("nproc", [2, 3])
def test_gather_puts_many_batches_in_the_order_of_the_dataset(nproc: int) -> None:
    """What was kept from all batches of a loop comes batch by batch, also when the loop is over."""
    for kept, own, total in run_ranks(gather_after_the_loop, nproc, 7, 2):
        assert kept == [0, 1, 2, 3, 4, 5, 6]
        assert own == [0, 1]
        assert total == min(nproc, 2)


def gather_without_a_loader() -> list[int]:
    """Gather another number of rows from every rank."""
    booster = Booster()
    booster.boost(nn.Linear(1, 1))
    rank = dist.get_rank()
    gathered: torch.Tensor = booster.gather(torch.full((rank,), rank))
    return gathered.tolist()


def test_gather_without_a_loader_is_in_rank_order() -> None:
    """Whatever each rank has, none included."""
    assert run_ranks(gather_without_a_loader, 3) == [[1, 2, 2]] * 3


def gather_wrongly(kind: str) -> None:
    """Gather something that does not fit, on one rank or on all."""
    booster, loader = boosted_numbers(3, 2)
    first = dist.get_rank() == 0
    if kind == "number":
        booster.gather({"loss": 1.5 if first else torch.zeros(1)})
    elif kind == "shape":
        booster.gather(torch.zeros(2, 3 if first else 4))
    elif kind == "part":
        list(loader)
        booster.gather(torch.zeros(5))


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("number", UsageError, r"gather got a float at \['loss'\]"),
        ("shape", RankMismatchError, r"rows of shape \(3,\)"),
        ("part", UsageError, r"have \[5, 5\] rows .* last batch has \[1, 1\], all batches .* \[2, 2\]"),
    ],
)
def test_gather_refuses_on_all_ranks(kind: str, error: type[UsageError], text: str) -> None:
    """What cannot be put in order is refused everywhere, with the numbers."""
    errors = run_ranks_expecting_errors(gather_wrongly, 2, kind)

    assert any(isinstance(found, error) for found in errors)
    assert any(re.search(text, str(found), flags=re.DOTALL) for found in errors)


# --- agreement ----------------------------------------------------------------------------------------------


class ByRank(IterableDataset[int]):
    """A stream that divides itself by rank, which it must not."""

    def __iter__(self) -> Iterator[int]:
        yield from range(dist.get_rank(), 8, dist.get_world_size())


def read_by_rank(kind: str) -> list[int]:
    """Boost a loader that differs by rank, and read it."""
    booster = Booster()
    rank = dist.get_rank()
    random.seed(rank)
    if kind == "stream":
        loader = DataLoader(ByRank(), batch_size=2)
    elif kind == "sampler":
        loader = DataLoader(Numbers(8), batch_size=2, sampler=list(range(rank, 8, 2)))
    elif kind == "length":
        loader = DataLoader(Numbers(8 + rank), batch_size=2)
    else:
        loader = DataLoader(Numbers(8), batch_size=2, in_order=rank == 0, num_workers=1)
    _, boosted = booster.boost(nn.Linear(1, 1), loader)
    return [int(x) for batch in boosted for x in batch]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("stream", r"the IterableDataset of the loader gives ranks \[1\] other samples than rank 0"),
        ("sampler", r"the sampler of the loader gives ranks \[1\] other samples than rank 0"),
        ("length", "8 samples of SequentialSampler"),
        ("option", "in_order=False"),
    ],
)
def test_ranks_with_different_loaders_are_told(kind: str, text: str) -> None:
    """Before anybody trains on wrong shares or waits for a step that never comes."""
    errors = run_ranks_expecting_errors(read_by_rank, 2, kind)

    assert all(text.replace("\\", "") in str(error) for error in errors)


# --- other axes ---------------------------------------------------------------------------------------------


def read_on_a_mesh() -> tuple[int, list[list[int]], list[int]]:
    """Read two shuffled epochs with workers on data(2) x tensor(2)."""
    torch.manual_seed(7)
    booster = Booster("fused-qkv", registry=make_registry())
    loader = DataLoader(Numbers(), batch_size=3, shuffle=True, num_workers=1)
    _, boosted = booster.boost(nn.Linear(1, 1), loader)
    epochs = []
    for _ in range(2):
        samples = []
        for batch in boosted:
            samples += batch.tolist()[: boosted.last_share.rows]
        epochs.append(samples)
    return booster.data_rank, epochs, booster.gather(torch.tensor([booster.data_rank])).tolist()


def test_ranks_along_other_axes_read_the_same() -> None:
    """Tensor peers have equal batches, data ranks disjoint ones that cover the dataset."""
    results = run_ranks(read_on_a_mesh, 4)

    by_rank = {rank: [epochs for other, epochs, _ in results if other == rank] for rank in (0, 1)}
    for first, second in by_rank.values():
        assert first == second
    for epoch in range(2):
        assert sorted(by_rank[0][0][epoch] + by_rank[1][0][epoch]) == list(range(23))
    assert by_rank[0][0][0] != by_rank[0][0][1]
    assert {tuple(gathered) for _, _, gathered in results} == {(0, 1)}
