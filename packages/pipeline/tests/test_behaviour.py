"""What users see of a pipeline beside its numbers: evaluation, refusals, failures, checkpoints, traffic."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colossal_core import Recompute, Replicated
from colossal_core.errors import ColossalError, UsageError
from colossal_pipeline import Pipeline
from colossal_testkit import run_ranks, run_ranks_expecting_errors
from colossal_testkit.engine import engine_of
from colossal_testkit.models import TokenLoss

from . import trials
from .models import BUILDERS, build_gpt, build_widths

# --- evaluation ---------------------------------------------------------------------------------------------


def train_and_evaluate() -> tuple[list[float], list[float], Any, bool]:
    """Evaluate with other sizes between training steps; returns losses, expected ones, and outputs."""
    run, plain = BUILDERS["gpt"](), BUILDERS["gpt"]()
    booster, optimizer = trials.boost(run, [Pipeline(degree=2, microbatches=4)])
    found, expected, outputs = [], [], None
    for number, batch in enumerate(run.batches):
        inputs, target = batch
        for rows in (3, 1 + number):  # other batch sizes than in training, and one micro-batch per row
            share = (inputs[1 : 1 + rows, :5], target[1 : 1 + rows, :5])
            weights = trials.weights_of(booster, run.model)
            plain.model.load_state_dict(weights, strict=False)
            with torch.no_grad():
                logits = plain.model(share[0])
            loss, outputs = booster.evaluate(run.model, share, run.criterion, return_outputs=True)
            found += [float(loss), float(booster.evaluate(run.model, share, run.criterion))]
            expected += [float(TokenLoss()(logits, share[1]))] * 2
            assert torch.allclose(outputs, logits, atol=1e-12)
        booster.forward_backward(run.model, batch, run.criterion)
        optimizer.step()
        optimizer.zero_grad()
    return found, expected, outputs, run.model.training


def test_evaluation_may_have_other_sizes_and_leaves_training_alone() -> None:
    """Between steps, with outputs and without; the loss and the outputs are on all ranks."""
    ranks = run_ranks(train_and_evaluate, 2)

    for found, expected, _, is_training in ranks:
        assert found == pytest.approx(expected, abs=1e-6)
        assert is_training
    assert torch.equal(ranks[0][2], ranks[1][2])


# --- dropout ------------------------------------------------------------------------------------------------


def train_with_dropout(piece: Pipeline) -> dict[str, torch.Tensor]:
    """Train with dropout from equal generators."""
    torch.manual_seed(11)
    run = build_widths(dropout=0.4)
    booster, optimizer = trials.boost(run, [piece])
    for batch in run.batches:
        booster.forward_backward(run.model, batch, run.criterion)
        optimizer.step()
        optimizer.zero_grad()
    return trials.weights_of(booster, run.model)


def test_dropout_is_equal_under_every_schedule_and_cut() -> None:
    """The same masks, whoever computes what and when."""
    pieces = [
        Pipeline(degree=1, microbatches=4),
        Pipeline(degree=2, microbatches=4, schedule="gpipe"),
        Pipeline(degree=3, microbatches=4, schedule="zbh1"),
        Pipeline(degree=2, microbatches=4, schedule="zbv", chunks=2),
    ]

    first, *others = [run_ranks(train_with_dropout, piece.degree, piece)[0] for piece in pieces]

    for other in others:
        assert all(torch.allclose(first[name], other[name], rtol=0, atol=1e-12) for name in first)


# --- accumulation -------------------------------------------------------------------------------------------


def accumulate(degree: int) -> dict[str, torch.Tensor]:
    """Take steps of two batches each, and backward passes that add up."""
    run = BUILDERS["gpt-tied"]()
    pieces = [Pipeline(degree=degree, microbatches=3)] if degree else []
    booster, optimizer = trials.boost(run, pieces, accumulate=2)
    for batch in (*run.batches, run.batches[0]):
        booster.forward_backward(run.model, batch, run.criterion)
        optimizer.step()
        optimizer.zero_grad()
    return trials.weights_of(booster, run.model)


def test_accumulation_gives_the_weights_of_one_process() -> None:
    """Two batches in a window, with different numbers of targets that count."""
    (plain,) = run_ranks(accumulate, 1, 0)

    for found in run_ranks(accumulate, 2, 2):
        assert all(torch.allclose(plain[name], found[name], rtol=0, atol=1e-10) for name in plain)


# --- refusals and failures ----------------------------------------------------------------------------------


def call_the_model() -> None:
    """Call a model under a pipeline."""
    run = BUILDERS["gpt"]()
    trials.boost(run, [Pipeline(degree=2, microbatches=2)])
    run.model(run.batches[0][0])


def test_calling_the_model_names_the_line_to_use() -> None:
    """On every rank."""
    for error in run_ranks_expecting_errors(call_the_model, 2):
        assert "booster.forward_backward(model, batch, criterion)" in str(error)


class Explosive(nn.Module):
    """A block that raises at its n-th call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.fails_at: int | None = None
        self.calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raise, or run the block."""
        if self.fails_at is not None:
            self.calls += 1
            if self.calls > self.fails_at:
                raise ValueError("a block does not like this")
        outputs: torch.Tensor = self.inner(hidden)
        return outputs


def fail_once(schedule: str) -> tuple[str, float, float]:
    """Let one stage fail in a step, and go on; returns the error, the time it took and the next loss."""
    run = build_gpt(num_blocks=4)
    blocks: Any = run.model.get_submodule("blocks")
    blocks[3] = Explosive(blocks[3])
    booster, optimizer = trials.boost(run, [Pipeline(degree=2, microbatches=5, schedule=schedule)])
    booster.forward_backward(run.model, run.batches[0], run.criterion)
    optimizer.step()
    optimizer.zero_grad()
    start = time.perf_counter()
    blocks[3].fails_at = 2
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the failing rank raises its own, others ours
        booster.forward_backward(run.model, run.batches[1], run.criterion)
    seconds = time.perf_counter() - start
    blocks[3].fails_at = None
    loss = booster.forward_backward(run.model, run.batches[1], run.criterion)
    optimizer.step()
    return str(caught.value), seconds, float(loss)


@pytest.mark.parametrize("schedule", ["1f1b", "zbh1"])
def test_a_failing_stage_ends_the_step_on_all_ranks_and_leaves_no_trace(schedule: str) -> None:
    """Its own error on the failing rank, a quotation on the others, within seconds; then training goes on."""
    found = run_ranks(fail_once, 2, schedule)

    assert all("a block does not like this" in message for message, _, _ in found)
    assert all(seconds < 10 for _, seconds, _ in found)
    assert found[0][2] == found[1][2]


def bring_different_batches() -> None:
    """Each rank reads samples of its own, as data ranks do."""
    run = BUILDERS["gpt"]()
    booster, _ = trials.boost(run, [Pipeline(degree=2, microbatches=2)])
    booster.forward_backward(run.model, run.batches[booster.world.rank], run.criterion)


def test_ranks_of_one_pipeline_bring_the_same_batch() -> None:
    """Different ones are refused in the first step, on every rank."""
    for error in run_ranks_expecting_errors(bring_different_batches, 2):
        assert "bring different batches" in str(error)


def boost_with(pieces: list[object], settings: dict[str, Any]) -> None:
    """Boost a GPT."""
    trials.boost(BUILDERS["gpt"](), pieces, **settings)


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([Pipeline(degree=2, microbatches=2, schedule="zbv")], "puts 2 stages on each rank"),
        ([Pipeline(degree=2, microbatches=2, schedule="1f1", chunks=1)], "'1f1'"),
        ([Pipeline(degree=2, microbatches=2, schedule="gpipe", chunks=9)], "fewer than 18 stages"),
        ([Pipeline(degree=2, microbatches=2, balance=("blocks",))], "where no stage can begin"),
        ([Pipeline(degree=2, microbatches=2, balance=(4, 4))], "sums to 8 blocks, and the model has 9"),
        ([Pipeline(degree=2, microbatches=2, everywhere="x")], "no parameter of GPT"),
        ([Pipeline(degree=2, microbatches=2), Replicated(reduce="backward")], "still wait for its messages"),
    ],
)
def test_what_cannot_be_is_refused_at_boost(pieces: list[object], text: str) -> None:
    """On every rank, before anything is cut."""
    for error in run_ranks_expecting_errors(boost_with, 2, pieces, {}):
        assert isinstance(error, ColossalError)
        assert text in str(error)


def test_options_are_checked_where_they_are_written() -> None:
    """Numbers, lists and names that mean nothing."""
    for options in (
        {"degree": 0, "microbatches": 1},
        {"degree": 2, "microbatches": True},
        {"degree": 2, "microbatches": 2, "schedule": ""},
        {"degree": 2, "microbatches": 2, "balance": [1, 2, 3]},
        {"degree": 2, "microbatches": 2, "balance": ["a", "b"]},
        {"degree": 2, "microbatches": 2, "balance": "memory"},
        {"degree": 2, "microbatches": 2, "flow": "all"},
        {"degree": 2, "microbatches": 2, "everywhere": [1]},
    ):
        with pytest.raises(UsageError, match="Pipeline: "):
            Pipeline(**options)


# --- precision, recomputation -------------------------------------------------------------------------------


def lose(pieces: list[object], settings: dict[str, Any]) -> list[float]:
    """Train and return the losses."""
    run = BUILDERS["gpt-tied"]()
    run.model.float()
    booster, optimizer = trials.boost(run, pieces, **settings)
    losses = []
    for batch in run.batches:
        losses.append(float(booster.forward_backward(run.model, batch, run.criterion)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_narrow_precisions_train_as_on_one_rank(precision: str) -> None:
    """Values of parameters are narrow, messages too; losses are those of one rank, as far as it goes."""
    (plain,) = run_ranks(lose, 1, [Pipeline(degree=1, microbatches=3)], {"precision": precision})

    for found in run_ranks(lose, 2, [Pipeline(degree=2, microbatches=3)], {"precision": precision}):
        assert found == pytest.approx(plain, rel=1e-5 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zbh1", 1), ("zbv", 2)])
def test_recomputed_blocks_give_the_same_numbers(schedule: str, chunks: int) -> None:
    """Blocks keep their inputs only, on every stage; no schedule runs their backward in halves."""
    expected = trials.train_by_hand(BUILDERS["gpt"](), 4)
    piece = Pipeline(degree=2, microbatches=4, schedule=schedule, chunks=chunks)

    for found in run_ranks(trials.train, 2, "gpt", [piece, Recompute()]):
        assert found.difference(expected) < 1e-10


# --- checkpoints --------------------------------------------------------------------------------------------


def save_run(root: str, degree: int, schedule: str, chunks: int) -> None:
    """Take two steps and save."""
    run = BUILDERS["gpt-tied"]()
    piece = Pipeline(degree=degree, microbatches=3, schedule=schedule, chunks=chunks)
    booster, optimizer = trials.boost(run, [piece])
    for batch in run.batches[:2]:
        booster.forward_backward(run.model, batch, run.criterion)
        optimizer.step()
        optimizer.zero_grad()
    booster.save(root)


def load_run(root: str, degree: int) -> dict[str, torch.Tensor]:
    """Load into other weights, take the third step."""
    run = BUILDERS["gpt-tied"]()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(0.5)
    pieces = [Pipeline(degree=degree, microbatches=3)] if degree else []
    booster, optimizer = trials.boost(run, pieces)
    booster.load(root)
    booster.forward_backward(run.model, run.batches[2], run.criterion)
    optimizer.step()
    return trials.weights_of(booster, run.model)


def test_checkpoints_go_to_other_numbers_of_stages(tmp_path: Path) -> None:
    """From two ranks with two stages each to three stages, and to one process without a pipeline."""
    run_ranks(save_run, 2, str(tmp_path), 2, "zbv", 2)
    expected = trials.train_by_hand(BUILDERS["gpt-tied"](), 3).weights

    for degree in (3, 0):
        for found in run_ranks(load_run, max(degree, 1), str(tmp_path), degree):
            for name, value in found.items():
                assert torch.allclose(value, expected[name], rtol=0, atol=1e-10), (degree, name)


# --- cost ---------------------------------------------------------------------------------------------------


def count_messages(piece: Pipeline) -> tuple[dict[str, int], dict[str, int]]:
    """Return the messages of one step, and their bytes, by operation and phase."""
    run = build_gpt(num_blocks=12)
    booster, optimizer = trials.boost(run, [piece], precision="fp64")
    ledger = engine_of(booster).context.collectives.ledger
    with ledger.recording() as seen:
        booster.forward_backward(run.model, run.batches[0], run.criterion)
    optimizer.step()
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for transfer in seen:
        if transfer.op in {"send", "receive"}:
            key = f"{transfer.op} {transfer.phase}"
            counts[key] = counts.get(key, 0) + 1
            sizes[key] = sizes.get(key, 0) + transfer.full_bytes
    return counts, sizes


@pytest.mark.parametrize(
    ("piece", "boundaries"),
    [
        (Pipeline(degree=3, microbatches=5), 2),
        (Pipeline(degree=2, microbatches=5, schedule="interleaved", chunks=3), 5),
        (Pipeline(degree=3, microbatches=5, schedule="zbv", chunks=2), 4),
    ],
)
def test_each_boundary_between_ranks_carries_two_messages_for_each_micro_batch(
    piece: Pipeline, boundaries: int
) -> None:
    """One tensor of the hidden size forth, its gradient back, and nothing else."""
    found = run_ranks(count_messages, piece.degree, piece)

    hidden_bytes = 11 * 6 * 6 * 8  # rows, tokens, width, fp64: of all micro-batches together
    for key in ("send stages", "receive stages", "send stage gradients", "receive stage gradients"):
        assert sum(counts.get(key, 0) for counts, _ in found) == 5 * boundaries
        assert sum(sizes.get(key, 0) for _, sizes in found) == boundaries * hidden_bytes


def own_elements() -> tuple[int, int]:
    """Return the elements that this rank holds of parameters, and those of the model."""
    run = build_gpt(num_blocks=9)
    total = sum(parameter.numel() for parameter in run.model.parameters())
    trials.boost(run, [Pipeline(degree=3, microbatches=2)])
    return sum(parameter.numel() for parameter in run.model.parameters()), total


def test_a_rank_holds_its_stages_only() -> None:
    """What the ranks hold sums to the model."""
    found = run_ranks(own_elements, 3)

    assert sum(mine for mine, _ in found) == found[0][1]
    assert max(mine for mine, _ in found) < found[0][1] * 0.5
