"""Rounds of gradients: neither the speed of messages nor who clears what changes the numbers silently."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

from colossal_core import Booster, UsageError
from colossal_core.runtime import scattered
from colossal_core.runtime.collectives import Pending
from colossal_testkit import run_ranks, run_ranks_expecting_errors
from colossal_testkit.contracts.memory_checks import build_large
from colossal_testkit.memory import LiveBytes
from colossal_testkit.plays import LOOPS
from colossal_testkit.stories import (
    Story,
    Trace,
    Turn,
    assert_same_story,
    batch_of,
    expect,
    tell,
    tiny_buffers,
)
from colossal_testkit.traffic import measure_traffic
from colossal_zero import Zero

from .models import Stage, build, loss_of, sgd


def tell_with_slow_messages(story: Story) -> Trace:
    """Play a story on a rank that believes at random that messages have not come back yet."""
    is_done, chance = Pending.is_done, random.Random(dist.get_rank())  # noqa: S311 - no secrets here
    Pending.is_done = lambda self: is_done(self) and chance.random() < 0.3  # type: ignore[method-assign]
    try:
        with tiny_buffers():
            return tell(story)
    finally:
        Pending.is_done = is_done  # type: ignore[method-assign]


@pytest.mark.parametrize("loop", ["accumulate_by_rank", "clear_and_zero", "assign_and_add", "use_two_losses"])
def test_rounds_do_not_depend_on_the_speed_of_messages(loop: str) -> None:
    """A message that is late keeps gradients aside; the round that they belong to stays the same."""
    story = attrs.evolve(LOOPS[loop], pieces=(Zero(stage=2),), shows_gradients=False)

    traces = run_ranks(tell_with_slow_messages, 2, story)

    assert_same_story(traces, expect(story, 2))


@contextmanager
def delays_of(share: float) -> Iterator[None]:
    """Let a share of all looks at messages find that they have not come back."""
    is_done, chance = Pending.is_done, random.Random(dist.get_rank())  # noqa: S311 - no secrets here
    patience = scattered.PATIENCE_SECONDS
    vars(scattered).update(PATIENCE_SECONDS=0.01)
    Pending.is_done = lambda self: chance.random() >= share and is_done(self)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Pending.is_done = is_done  # type: ignore[method-assign]
        vars(scattered).update(PATIENCE_SECONDS=patience)


def accumulate(stage: Stage, precision: str, form: str) -> list[torch.Tensor]:
    """Train with several passes for each step, in one of the forms; return the last norm and the weights."""
    model = build("tower").float()
    num_steps = 3 if form == "accumulate" else 1
    booster = Booster(Zero(stage=stage), precision=precision, accumulate=num_steps, max_grad_norm=0.3)
    with tiny_buffers():
        model, optimizer = booster.boost(model, sgd(model))
    num_passes = 3 + (dist.get_rank() if form == "uneven" and stage == 2 else 0)
    for step, number in itertools.product(range(3), range(num_passes)):
        holds = form == "no_sync" and number < 2
        with booster.no_sync() if holds else nullcontext():
            outputs = model(batch_of(dist.get_rank(), 4 * step + number).float())
            (outputs - 1.0).square().mean().backward()
        if form == "accumulate" or number == num_passes - 1:
            optimizer.step()
            optimizer.zero_grad()
    with booster.full_parameters(model) as full:
        return [optimizer.grad_norm, *(value.clone() for value in full.values())]


def accumulate_with_delays(stage: Stage, precision: str) -> list[str]:
    """Return in which forms, and with what delays, the bits are not those without delays."""
    wrong = []
    for form in ("accumulate", "no_sync", "plain", "uneven"):
        found = {}
        for share in (0.0, 0.6, 1.0):
            with delays_of(share):
                found[share] = accumulate(stage, precision, form)
            pairs = zip(found[share], found[0.0], strict=True)
            if not all(torch.equal(mine, wanted) for mine, wanted in pairs):
                wrong.append(f"{form} with {share:.0%} of messages late")
    return wrong


@pytest.mark.parametrize(
    ("stage", "num_ranks", "precision"), [(2, 2, "fp32"), (2, 3, "bf16"), (3, 3, "fp32")]
)
def test_bits_do_not_depend_on_the_speed_of_messages(stage: Stage, num_ranks: int, precision: str) -> None:
    """Each pass is a round of its own, and rounds are added in their order, however late messages are."""
    assert run_ranks(accumulate_with_delays, num_ranks, stage, precision) == [[]] * num_ranks


@pytest.mark.parametrize("loop", ["accumulate", "break_in_backward", "recompute"])
def test_loops_are_exact_while_values_are_on_their_way(loop: str) -> None:
    """Forward waits for what it reads, whatever the loop does."""
    piece = Zero(stage=1, gather="forward")
    story = attrs.evolve(LOOPS[loop], pieces=(piece,), shows_gradients=False)

    traces = run_ranks(tell_with_slow_messages, 2, story)

    assert_same_story(traces, expect(story, 2))


def keep_on_one_rank(turn: Turn) -> None:
    """Clear on one rank only."""
    if turn.rank == 0:
        turn.optimizer.zero_grad()


def play(turn: Turn) -> None:
    """Run one plain backward."""
    turn.loss("a").backward()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_only_some_ranks_keep_are_refused(stage: Stage) -> None:
    """No rank has them whole, so they cannot count on one rank only."""
    story = Story(play=play, after=keep_on_one_rank, pieces=(Zero(stage=stage),), shows_gradients=False)

    errors = run_ranks_expecting_errors(tell, 2, story, error=UsageError)

    assert all("cleared on some ranks only" in str(error) for error in errors)


def count_words(stage: Stage, num_passes: int) -> tuple[float, int]:
    """Return words received in a step of several backward passes, and the number of elements."""
    work = build_large(num_samples=4)
    booster = Booster(Zero(stage=stage))
    model, optimizer = booster.boost(work.model, work.optimizer)
    for _ in range(3):
        for _ in range(num_passes):
            inputs, target = work.batches[0]
            work.criterion(model(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    words = measure_traffic(booster.last_traffic).words_except("norm", "loss")
    return words, sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("stage", "gathers", "sums"), [(1, 1, 1), (2, 1, 3), (3, 6, 3)])
def test_accumulation_costs_what_the_formula_says(stage: Stage, gathers: int, sums: int) -> None:
    """Three passes: stage 1 reduces once, stage 2 each pass, stage 3 gathers twice for each pass, too."""
    for words, numel in run_ranks(count_words, 2, stage, 3):
        assert words == pytest.approx((gathers + sums) * numel / 2, rel=1.5e-3)


def measure_bytes(piece: Zero) -> tuple[int, int, int, int]:
    """Return bytes that are alive in bf16 before and after clearing, the estimate, the number of elements."""
    kept = scattered.KEEPS_CLEARED
    vars(scattered).update(KEEPS_CLEARED=set())  # as on an accelerator
    with LiveBytes() as live:
        work = build_large()
        numel = sum(parameter.numel() for parameter in work.model.parameters())
        estimate = sum(piece.estimate(work.model, ranks=2, precision="bf16").values())
        model, optimizer = Booster(piece, precision="bf16").boost(work.model, work.optimizer)
        live.label("batches", [tensor for batch in work.batches for tensor in batch])
        for inputs, target in work.batches:
            optimizer.zero_grad()
            work.criterion(model(inputs), target).backward()
            optimizer.step()
        del inputs, target
        held = live.current()
        optimizer.zero_grad()
        left = live.current()
    vars(scattered).update(KEEPS_CLEARED=kept)
    batches = held.bytes_of("batches")
    return held.total_bytes - batches, left.total_bytes - batches, estimate, numel


@pytest.mark.parametrize(
    ("piece", "with_gradients", "without"),
    [
        (Zero(stage=1), 10, 8),
        (Zero(stage=2), 9, 8),
        (Zero(stage=3), 8, 7),
        (Zero(stage=3, offload="optimizer"), 9, 8),
    ],
)
def test_bytes_in_bf16_are_those_of_the_paper(piece: Zero, with_gradients: int, without: int) -> None:
    """4 + 12/D, 2 + 14/D and 16/D for each element at D = 2, and a copy of gradients when offloading.

    Like torch's, gradients have memory from backward to ``zero_grad()`` where that costs no page faults.
    """
    for held, left, estimate, numel in run_ranks(measure_bytes, 2, piece):
        assert held == pytest.approx(with_gradients * numel, rel=0.01)
        assert held == pytest.approx(estimate, rel=0.01)
        assert left == pytest.approx(without * numel, rel=0.01)


def overflow_once(stage: Stage) -> tuple[list[bool], list[float], list[torch.Tensor]]:
    """Train in fp16 with an overflow on the last rank in the second step."""
    model = build("tower").float()
    booster = Booster(Zero(stage=stage), precision="fp16")
    model, optimizer = booster.boost(model, sgd(model))
    stepped, scales = [], []
    for step in range(4):
        loss = loss_of(model, dist.get_rank(), step) if dist.get_rank() < 2 or step != 1 else None
        wild = loss_of(model, dist.get_rank(), step) * 1e30 if loss is None else loss
        booster.backward(wild)
        optimizer.step()
        stepped.append(optimizer.stepped)
        scales.append(optimizer.loss_scale)
        optimizer.zero_grad()
    with booster.full_parameters(model) as full:
        return stepped, scales, [value.clone() for value in full.values()]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_on_one_rank_is_skipped_by_all(stage: Stage) -> None:
    """One rank's infinity reaches a shard of any rank; all skip that step and keep one scale."""
    found: list[Any] = run_ranks(overflow_once, 3, stage)

    for stepped, scales, weights in found:
        assert stepped == [True, False, True, True]
        assert scales == found[0][1]
        assert all(torch.equal(mine, first) for mine, first in zip(weights, found[0][2], strict=True))
