"""What went wrong in other pipelines: each kind of it, in a small case."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from colossal_core.errors import UsageError
from colossal_pipeline import Pipeline
from colossal_pipeline.absent import Absent
from colossal_testkit import run_ranks, run_ranks_expecting_errors
from colossal_testkit.models import GPT, TokenLoss, randomise

from . import trials
from .models import BUILDERS, VOCABULARY, Run, build_gpt, build_widths

# --- batches that do not divide, and the smaller one at the end of an epoch --------------------------------


def build_uneven() -> Run:
    """Return a run whose batches have 8, 7 and 2 rows."""
    run = build_gpt(num_blocks=4)
    cuts = (8, 7, 2)
    batches = [
        (ids[1 : rows + 1], target[1 : rows + 1])
        for rows, (ids, target) in zip(cuts, run.batches, strict=True)
    ]
    return Run(model=run.model, criterion=run.criterion, batches=batches)


def train_uneven(piece: Pipeline) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train over batches of different sizes."""
    run = build_uneven()
    booster, optimizer = trials.boost(run, [piece])
    losses = []
    for batch in run.batches:
        losses.append(float(booster.forward_backward(run.model, batch, run.criterion)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, trials.weights_of(booster, run.model)


@pytest.mark.parametrize("piece", [Pipeline(degree=2, microbatches=3), Pipeline(degree=3, microbatches=3)])
def test_micro_batches_of_different_sizes_weigh_by_what_counts(piece: Pipeline) -> None:
    """Eight rows in three parts, then seven, then two: fewer than there are micro-batches."""
    expected = trials.train_by_hand(build_uneven(), 3)

    for losses, weights in run_ranks(train_uneven, piece.degree, piece):
        assert losses == pytest.approx(expected.losses, abs=1e-6)
        for name, value in weights.items():
            assert torch.allclose(value, expected.weights[name], rtol=0, atol=1e-10), name


# --- samples in other dims ----------------------------------------------------------------------------------


class TimeMajor(nn.Module):
    """Maps ``[length, samples, width]`` to the same, with an offset for each position."""

    def __init__(self) -> None:
        """Make three layers."""
        super().__init__()
        self.offsets = nn.Embedding(6, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the last hidden values."""
        hidden: torch.Tensor = x + self.offsets(positions)[:, None]
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


def build_time_major() -> Run:
    """Return a model and batches of five samples at five positions."""
    torch.manual_seed(4)
    model = TimeMajor().double()
    batches = [
        ((torch.randn(5, 5, 5, dtype=torch.float64), torch.arange(5)), torch.randn(5, 5, 5).double())
        for _ in range(2)
    ]
    return Run(model=model, criterion=nn.MSELoss(), batches=batches)


DIMS = {"x": 1, "positions": None, "target": 1}


def train_time_major() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train and evaluate with samples in dim 1, after a batch whose dims are not clear was refused."""
    run = build_time_major()
    booster, optimizer = trials.boost(run, [Pipeline(degree=2, microbatches=3)])
    losses = []
    with pytest.raises(UsageError, match=r"inputs\[1\] has 5 elements.*5 samples or the 5 positions"):
        booster.forward_backward(run.model, run.batches[0], run.criterion)
    other = ((run.batches[0][0][0][:, :4], torch.arange(5)), run.batches[0][1])
    with pytest.raises(UsageError, match=r"dims of different sizes: .*'target': 5"):
        booster.forward_backward(run.model, other, run.criterion, batch_dims=DIMS)
    for batch in run.batches:
        losses.append(float(booster.evaluate(run.model, batch, run.criterion, batch_dims=DIMS)))
        found = booster.forward_backward(
            run.model, batch, run.criterion, weight=lambda part: part[0][0].shape[1], batch_dims=DIMS
        )
        losses.append(float(found))
        optimizer.step()
        optimizer.zero_grad()
    return losses, trials.weights_of(booster, run.model)


def test_samples_in_another_dim_are_cut_there_and_what_has_none_stays_whole() -> None:
    """As many positions as samples: who says which is which gets the numbers of one process."""
    run = build_time_major()
    losses = []
    optimizer = run.optimizer()
    for (x, positions), target in run.batches:
        loss = nn.functional.mse_loss(run.model(x, positions), target)
        losses += [float(loss.detach())] * 2
        loss.backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), trials.BOUND)
        optimizer.step()
        optimizer.zero_grad()

    for found, weights in run_ranks(train_time_major, 2):
        assert found == pytest.approx(losses, abs=1e-6)
        for name, value in run.model.state_dict().items():
            assert torch.allclose(weights[name], value, rtol=0, atol=1e-10), name


# --- weights on several stages ------------------------------------------------------------------------------


def own_copies(trains_embedding: bool) -> list[torch.Tensor]:  # noqa: FBT001 - passed to ranks by value
    """Train with a tied weight, and return this rank's copy of it after each step."""
    run = BUILDERS["gpt-tied"]()
    run.model.get_parameter("tokens.weight").requires_grad_(trains_embedding)
    booster, optimizer = trials.boost(run, [Pipeline(degree=2, microbatches=3)])
    copies = []
    for batch in run.batches:
        booster.forward_backward(run.model, batch, run.criterion)
        optimizer.step()
        optimizer.zero_grad()
        copies.append(run.model.get_parameter("tokens.weight").detach().clone())
    return copies


@pytest.mark.parametrize("trains_embedding", [True, False])
def test_copies_of_a_tied_weight_are_equal_after_every_step(trains_embedding: bool) -> None:  # noqa: FBT001
    """Bit by bit, and also where the weight is frozen."""
    first, last = run_ranks(own_copies, 2, trains_embedding)

    assert all(torch.equal(one, other) for one, other in zip(first, last, strict=True))
    assert torch.equal(first[0], first[1]) is not trains_embedding


class Twice(nn.Module):
    """A model that begins and ends with the same module."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.last = self.shared

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 4]`` to the same shape."""
        hidden = self.shared(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        outputs: torch.Tensor = self.last(hidden)
        return outputs


def build_twice() -> Run:
    """Build it with a norm and a product that are called twice."""
    model = Twice(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))).double()
    randomise(model, seed=3)
    source = torch.Generator().manual_seed(4)
    batches = [tuple(torch.randn(2, 5, 4, generator=source, dtype=torch.float64)) for _ in range(3)]
    return Run(model=model, criterion=nn.MSELoss(), batches=batches)


def train_twice(piece: Pipeline, folder: str | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train, and return norms and weights; with a folder these go through a checkpoint."""
    run = build_twice()
    booster, optimizer = trials.boost(run, [piece])
    norms = []
    for batch in run.batches:
        booster.forward_backward(run.model, batch, run.criterion)
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
        optimizer.zero_grad()
    if folder is not None:
        booster.export(run.model, folder)
    return norms, trials.weights_of(booster, run.model)


def names_in(folder: Path) -> list[str]:
    """Return the names of all tensors in exported files, as often as they are there."""
    found: list[str] = []
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        found += [name for name in header if name != "__metadata__"]
    return sorted(found)


@pytest.mark.parametrize(
    "piece",
    [
        Pipeline(degree=2, microbatches=3, balance=("blocks.2",)),
        Pipeline(degree=2, microbatches=2, schedule="zbv", chunks=2),
    ],
    ids=["two ranks", "one rank"],
)
def test_a_module_may_begin_and_end_the_model(piece: Pipeline, tmp_path: Path) -> None:
    """Each stage that calls it has a copy; the norm counts it once, and a file has it once."""
    expected = trials.train_by_hand(build_twice(), piece.microbatches)

    found = run_ranks(train_twice, 2, piece, str(tmp_path / "out"))

    for norms, weights in found:
        assert norms == pytest.approx(expected.norms, rel=0, abs=1e-10)
        for name, value in expected.weights.items():
            assert torch.allclose(weights[name], value, rtol=0, atol=1e-10), name
    assert names_in(tmp_path / "out") == sorted(expected.weights)


def count_batches_twice() -> None:
    """Let both stages count what a normalisation sees."""
    run = Run(model=Twice(nn.BatchNorm1d(4)).double(), criterion=nn.MSELoss(), batches=[])
    trials.boost(run, [Pipeline(degree=2, microbatches=2)])


def test_batch_statistics_on_two_stages_are_refused_by_name() -> None:
    """On all ranks, with what to do."""
    for error in run_ranks_expecting_errors(count_batches_twice, 2):
        assert "'shared' is called on stages [0, 1]" in str(error)


# --- evaluation between steps -------------------------------------------------------------------------------


def train_and_look(order: str) -> tuple[dict[str, torch.Tensor], list[float], int]:
    """Train at each T and evaluate at each E, with dropout; returns weights, losses and gradients left."""
    torch.manual_seed(11)
    run = build_widths(dropout=0.4)
    booster, optimizer = trials.boost(run, [Pipeline(degree=2, microbatches=3)])
    batches, losses = iter(run.batches), []
    for number, letter in enumerate(order):
        if letter == "T":
            booster.forward_backward(run.model, next(batches), run.criterion)
            optimizer.step()
            optimizer.zero_grad()
            continue
        rows = (5, 1)[number % 2]
        share = {name: value[:rows] for name, value in run.batches[0].items()}
        with torch.inference_mode(), torch.no_grad():
            losses.append(float(booster.evaluate(run.model, share, run.criterion)))
    left = sum(parameter.grad is not None for parameter in run.model.parameters())
    return trials.weights_of(booster, run.model), losses, left


def test_evaluation_between_steps_changes_nothing() -> None:
    """Of other sizes, in inference mode, with dropout in the model."""
    with_looks = run_ranks(train_and_look, 2, "ETETTE")
    without = run_ranks(train_and_look, 2, "TTT")

    for (weights, losses, left), (expected, _, _) in zip(with_looks, without, strict=True):
        assert all(torch.equal(value, expected[name]) for name, value in weights.items())
        assert len(losses) == 3
        assert left == 0


# --- random numbers -----------------------------------------------------------------------------------------


class Noted(nn.Dropout):
    """Dropout that keeps the patterns it drew."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.patterns: list[torch.Tensor] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Drop, and note where."""
        outputs: torch.Tensor = super().forward(hidden)
        self.patterns.append(outputs.detach() != 0)
        return outputs


def draw_patterns() -> list[torch.Tensor]:
    """Return the patterns that this rank's blocks drew in one step."""
    torch.manual_seed(3)
    drops = [Noted() for _ in range(4)]
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), drop) for drop in drops)).double()
    run = Run(model=model, criterion=nn.MSELoss(), batches=[])
    booster, _ = trials.boost(run, [Pipeline(degree=2, microbatches=1)])
    batch = (torch.randn(8, 16).double(), torch.randn(8, 16).double())
    booster.forward_backward(run.model, batch, run.criterion)
    return [pattern for drop in drops for pattern in drop.patterns if not isinstance(pattern, Absent)]


def test_stages_draw_different_numbers_and_the_same_ones_again() -> None:
    """No two layers share a pattern, and another run has the same ones."""
    first, again = run_ranks(draw_patterns, 2), run_ranks(draw_patterns, 2)

    patterns: Sequence[torch.Tensor] = [pattern for rank in first for pattern in rank]
    assert len(patterns) == 4
    for number, pattern in enumerate(patterns):
        assert not any(torch.equal(pattern, other) for other in patterns[:number])
    assert all(
        torch.equal(one, other)
        for mine, theirs in zip(first, again, strict=True)
        for one, other in zip(mine, theirs, strict=True)
    )


# --- fewer layers than stages -------------------------------------------------------------------------------


def build_short() -> Run:
    """Return a run of one block, whose embeddings, norm and head are stages of their own."""
    model = GPT(num_blocks=1, width=6, heads=2).double()
    randomise(model, seed=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("tokens", "head")))
    source = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCABULARY, (5, 7), generator=source)
    return Run(
        model=model,
        criterion=TokenLoss(),
        batches=[(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())] * 3,
    )


def train_short() -> dict[str, torch.Tensor]:
    """Train with stages that have nothing to train between those that have."""
    run = build_short()
    booster, optimizer = trials.boost(
        run, [Pipeline(degree=4, microbatches=3, schedule="zbh1", balance=("blocks.0", "norm", "head"))]
    )
    for batch in run.batches:
        booster.forward_backward(run.model, batch, run.criterion)
        optimizer.step()
        optimizer.zero_grad()
    return trials.weights_of(booster, run.model)


def test_stages_may_have_nothing_to_train() -> None:
    """One block on four ranks, of which two train."""
    expected = trials.train_by_hand(build_short(), 3).weights

    for found in run_ranks(train_short, 4):
        assert all(torch.allclose(value, expected[name], rtol=0, atol=1e-10) for name, value in found.items())
