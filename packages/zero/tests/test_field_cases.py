"""Kinds of failures that users of such systems have met, each as one process would do it."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from colossal_core import Booster, CapabilityError, UsageError
from colossal_core.runtime import buckets
from colossal_testkit import run_ranks, run_ranks_expecting_errors
from colossal_testkit.models import randomise
from colossal_testkit.stories import assert_close, batch_of
from colossal_zero import Zero

from .models import Stage, build, loss_of, sgd

Weights = dict[str, torch.Tensor]


def weights_of(booster: Booster, model: nn.Module) -> Weights:
    """Return copies of the whole parameters."""
    with booster.full_parameters(model) as full:
        return {name: value.clone() for name, value in full.items()}


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Train on this rank's batches."""
    for step in steps:
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_with_bucket_sizes(stage: Stage) -> list[Weights]:
    """Train with buffers of one byte, of some parameters, and of everything."""
    found = []
    before = buckets.BUFFER_BYTES, buckets.LAST_BUFFER_BYTES
    for size in (1, 97, 4096, 1 << 20):
        vars(buckets).update(BUFFER_BYTES=size, LAST_BUFFER_BYTES=min(size, 200))
        model = build("tower")
        booster = Booster(Zero(stage=stage), precision="fp64", max_grad_norm=0.1)
        model, optimizer = booster.boost(model, sgd(model))
        train(model, optimizer, range(3))
        found.append(weights_of(booster, model))
    vars(buckets).update(BUFFER_BYTES=before[0], LAST_BUFFER_BYTES=before[1])
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_the_size_of_buckets_changes_no_number(stage: Stage) -> None:
    """Also where each parameter is larger than a bucket; norms are rounded in another order."""
    for found in run_ranks(train_with_bucket_sizes, 2, stage):
        for weights in found[1:]:
            for name, value in weights.items():
                assert_close(value, found[0][name], name)


def warm_up_while_overflowing(stage: Stage) -> list[tuple[bool, float]]:
    """Warm up under fp16 with a scale that overflows at first; return what was taken, and the rates."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    randomise(model, seed=3)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=4)
    booster = Booster(Zero(stage=stage), precision="fp16")
    model, optimizer, scheduler = booster.boost(model, optimizer, scheduler)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(8):
            loss = model(batch_of(dist.get_rank(), step).float()).square().mean()
            wild = 1e6 if step < 3 and dist.get_rank() == 1 else 1.0
            booster.backward(loss * wild)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            found.append((optimizer.stepped, scheduler.get_last_lr()[0]))
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_schedules_follow_real_steps_only(stage: Stage) -> None:
    """A warm-up that meets overflows on one rank loses nothing of it, on any rank, and warns of nothing."""
    found = run_ranks(warm_up_while_overflowing, 2, stage)

    assert found[0] == found[1]
    assert [stepped for stepped, _ in found[0]] == [False] * 3 + [True] * 5
    rates = [0.025] * 3 + [0.04375, 0.0625, 0.08125, 0.1, 0.1]
    assert [rate for _, rate in found[0]] == pytest.approx(rates)


def train_in_bf16(piece: object, root: Path) -> Weights:
    """Train with large steps in bf16, save and go on; return the masters."""
    model = build("tower").float()
    booster = Booster(piece, precision="bf16")
    model, optimizer = booster.boost(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    for step in range(4):
        model(batch_of(dist.get_rank(), step).float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            booster.save(root)
            booster.load(root)
    return weights_of(booster, model)


def test_every_stage_has_the_same_bits_in_bf16(tmp_path: Path) -> None:
    """With sharding switched off, too, and through a checkpoint."""
    pieces = ["replicated", "zero1", "zero2", "zero3"]
    found = [run_ranks(train_in_bf16, 2, piece, tmp_path / piece)[0] for piece in pieces]

    for weights in found[1:]:
        assert all(torch.equal(value, found[0][name]) for name, value in weights.items())


class Mixed(nn.Module):
    """Tied, frozen, unused and used parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.unused, self.frozen = nn.Linear(5, 5), nn.Linear(5, 5).requires_grad_(requires_grad=False)
        self.leave.weight = self.enter.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 5]`` to the same shape."""
        outputs: torch.Tensor = self.leave(self.frozen(torch.tanh(self.middle(self.enter(x)))))
        return outputs


def build_mixed() -> nn.Module:
    """Build it in fp64 with random values."""
    model: nn.Module = Mixed().double()
    randomise(model, seed=3)
    return model


def clip_by_hand(stage: Stage, bounds: list[tuple[float, float]]) -> tuple[list[float], Weights, str]:
    """Clip each step in another norm; return the norms, the weights, and the error of clipping twice."""
    model = build_mixed()
    booster = Booster(Zero(stage=stage), precision="fp64")
    model, optimizer = booster.boost(model, sgd(model))
    norms = []
    for step, (max_norm, norm_type) in enumerate(bounds):
        loss_of(model, dist.get_rank(), step).backward()
        norms.append(float(optimizer.clip_grad_norm_(max_norm, norm_type)))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.max_grad_norm = 1.0
    with pytest.raises(UsageError) as caught:
        optimizer.clip_grad_norm_(0.5)
    return norms, weights_of(booster, model), str(caught.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_clipping_counts_tied_frozen_and_unused_parameters_as_torch_does(stage: Stage) -> None:
    """In every norm, on three ranks, with one group for each parameter; set in two places it is refused."""
    bounds = [(0.1, 2.0), (0.1, 1.0), (0.01, math.inf), (1e9, 2.0)]
    model = build_mixed()
    optimizer = sgd(model)
    norms = []
    for step, (max_norm, norm_type) in enumerate(bounds):
        torch.stack([loss_of(model, rank, step) for rank in range(3)]).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)))
        optimizer.step()
        optimizer.zero_grad()

    for mine, weights, error in run_ranks(clip_by_hand, 3, stage, bounds):
        assert mine == pytest.approx(norms, rel=1e-10)
        assert "max_grad_norm" in error
        for name, value in model.named_parameters():
            assert_close(weights[name], value.detach(), name)


def resume(steps: range, stage: Stage, root: Path) -> Weights:
    """Load what is there, which changes nothing when it is done twice, train with Adam, and save."""
    model = build("tied")
    booster = Booster(Zero(stage=stage), precision="fp64")
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1))
    booster.load(root, missing_ok=True)
    before = weights_of(booster, model)
    booster.load(root, missing_ok=True)
    after = weights_of(booster, model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    train(model, optimizer, steps)
    booster.save(root)
    return weights_of(booster, model)


def resume_after(num_steps: int, stage: Stage, root: Path) -> Weights:
    """Train some steps, save, and let a fresh run go on for three more."""
    resume(range(num_steps), stage, root)
    return resume(range(num_steps, num_steps + 3), stage, root)


@pytest.mark.parametrize(("stage", "num_steps"), [(1, 0), (2, 1), (3, 0), (3, 1)])
def test_step_counts_survive_a_restart(stage: Stage, num_steps: int, tmp_path: Path) -> None:
    """Also when nothing was trained before: no step is invented, and bias correction goes on."""
    model = build("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(num_steps + 3):
        torch.stack([loss_of(model, rank, step) for rank in range(2)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for found in run_ranks(resume_after, 2, num_steps, stage, tmp_path):
        for name, value in model.named_parameters():
            assert_close(found[name], value.detach(), name)


class Buffered(nn.Module):
    """Buffers of all kinds, and modules without parameters around them."""

    frequencies: torch.Tensor
    mask: torch.Tensor
    count: torch.Tensor
    phases: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Identity(), nn.Sequential(nn.Linear(5, 6)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give buffers their values; also on the device where their memory is then."""
        self.register_buffer("frequencies", 1.0 / torch.arange(1.0, 7.0), persistent=False)
        self.register_buffer("mask", torch.arange(6) % 2 == 0)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("phases", torch.polar(torch.ones(6), torch.arange(6.0)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use every buffer."""
        hidden = self.body(x) * self.frequencies + self.mask * self.count
        outputs: torch.Tensor = hidden * self.phases.real
        return outputs


def run_buffered(stage: Stage) -> tuple[torch.Tensor, Weights]:
    """Build on the meta device, boost, and run; return outputs and buffers."""
    torch.manual_seed(5)
    with torch.device("meta"):
        model: nn.Module = Buffered()
    booster = Booster(Zero(stage=stage))
    model, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        outputs = model(batch_of(0, 0).float())
    return outputs, {name: value.clone() for name, value in model.named_buffers()}


@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_of_every_kind_survive_the_meta_device(stage: Stage) -> None:
    """Not persistent, bool, integer and complex ones: as on a model that was built with memory."""
    wanted = dict(Buffered().named_buffers())

    found = run_ranks(run_buffered, 2, stage)

    assert torch.equal(found[0][0], found[1][0])
    for outputs, buffers in found:
        assert bool(outputs.isfinite().all())
        for name, value in wanted.items():
            assert buffers[name].dtype == value.dtype
            assert torch.equal(buffers[name], value), name


class Words(nn.Module):
    """An embedding with a row for padding."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, padding_idx=0, sparse=sparse)
        self.leave = nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids ``[n]`` to ``[n, 2]``."""
        outputs: torch.Tensor = self.leave(self.table(ids))
        return outputs


def words_of(rank: int, step: int) -> torch.Tensor:
    """Return ids; those of rank 1 are all padding."""
    return torch.zeros(3, dtype=torch.long) if rank == 1 else torch.tensor([1 + step, 5, 0])


def loss_of_words(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return a loss whose gradient has rows that add up to zero."""
    outputs = model(words_of(rank, step))
    loss: torch.Tensor = (outputs @ outputs.new_tensor([1.0, -1.0])).square().mean() + F.relu(outputs).mean()
    return loss


def train_words(stage: Stage, *, sparse: bool) -> Weights:
    """Train an embedding."""
    torch.manual_seed(0)
    model: nn.Module = Words(sparse=sparse).double()
    booster = Booster(Zero(stage=stage), precision="fp64")
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(3):
        loss_of_words(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(booster, model)


def train_dense_words(stage: Stage) -> Weights:
    """Train one with dense gradients."""
    return train_words(stage, sparse=False)


def train_sparse_words(stage: Stage) -> Weights:
    """Train one with sparse gradients."""
    return train_words(stage, sparse=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_rows_of_padding_stay_and_batches_of_padding_count(stage: Stage) -> None:
    """One rank sees padding only."""
    torch.manual_seed(0)
    model: nn.Module = Words().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        torch.stack([loss_of_words(model, rank, step) for rank in range(2)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for found in run_ranks(train_dense_words, 2, stage):
        assert not found["table.weight"][0].any()
        for name, value in model.named_parameters():
            assert_close(found[name], value.detach(), name)


def test_sparse_gradients_are_refused_by_name() -> None:
    """Never skipped in silence."""
    errors = run_ranks_expecting_errors(train_sparse_words, 2, 2, error=CapabilityError)

    assert all("sparse" in str(error) and "table" in str(error) for error in errors)
