"""``Replicated(reduce="backward")``: gradients are averaged as backward ends, and are torch's own then."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from colossal_core import Booster, Replicated
from colossal_testkit import run_ranks
from colossal_testkit.stories import (
    Awkward,
    Story,
    Trace,
    Turn,
    assert_close,
    assert_same_story,
    batch_of,
    expect,
    sgd,
    tell,
    tiny_buffers,
    zero_grad,
)

PIECES = (Replicated(reduce="backward"),)


def on_rank(story: Story) -> tuple[Trace, Trace]:
    """Play a story on a rank of the pool, with one buffer and with many."""
    one_buffer = tell(story)
    with tiny_buffers():
        return one_buffer, tell(story)


# --- the stories of the window ---------------------------------------------------------------------------


def branch(turn: Turn) -> None:
    """Use another head on every rank and step."""
    turn.loss("ab"[(turn.rank + turn.step) % 2]).backward()


def accumulate(turn: Turn) -> None:
    """Run a number of backward passes that changes from step to step, all but the last one announced."""
    count = (1, 3, 2, 1, 2)[turn.step]
    for part in range(count - 1):
        with turn.no_sync():
            turn.loss("ab"[part % 2], part=part).backward()
    turn.loss("ab", part=count).backward()


def accumulate_bare(turn: Turn) -> None:
    """Run several passes and announce none."""
    for part in range((1, 3, 2, 1, 2)[turn.step]):
        turn.loss("ab"[(part + turn.rank) % 2], part=part).backward()


def clear_in_between(turn: Turn) -> None:
    """Clear what the first backward did."""
    turn.loss("ab").backward()
    turn.optimizer.zero_grad(set_to_none=bool(turn.step % 2))
    turn.loss("b", part=1).backward()


def assign(turn: Turn) -> None:
    """Replace gradients after they were averaged, alike on all ranks."""
    turn.loss("a").backward()
    turn.model.head_a.bias.grad = torch.ones(3, dtype=torch.float64)
    turn.model.unused.bias.grad = torch.full((2,), 0.1, dtype=torch.float64)


def change_in_place(turn: Turn) -> None:
    """Scale averaged gradients in place; the mean of halves is half of the mean."""
    turn.loss("ab").backward()
    for parameter in turn.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def use_two_losses(turn: Turn) -> None:
    """End two backward passes for one step, through one graph."""
    loss = turn.loss("ab")
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()


def keep(turn: Turn) -> None:
    """Clear nothing."""


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "play", [branch, accumulate, accumulate_bare, clear_in_between, assign, change_in_place, use_two_losses]
)
def test_loops_give_what_torch_gives(play: Callable[[Turn], None], world_size: int) -> None:
    """Averaging at every backward or once in the step is the same mean."""
    story = Story(play=play, steps=5, pieces=PIECES)

    played = run_ranks(on_rank, world_size, story)

    wanted = expect(story, world_size)
    assert_same_story([trace for trace, _ in played], wanted)
    assert_same_story([trace for _, trace in played], wanted)


@pytest.mark.parametrize("after", [keep, zero_grad])
def test_gradients_that_stay_count_in_the_next_step(after: Callable[[Turn], None]) -> None:
    """Without ``zero_grad`` gradients accumulate across steps, clipped as they were."""
    story = Story(play=branch, after=after, calls=2, max_grad_norm=0.05, pieces=PIECES)

    played = run_ranks(on_rank, 2, story)

    assert_same_story([trace for _, trace in played], expect(story, 2))


class Recomputed(Awkward):
    """Recomputes the trunk in a way that ends a backward inside another one."""

    def forward(self, x: torch.Tensor, head: str = "a") -> torch.Tensor:
        """Map ``[n, 5]`` to ``[n, 3]``."""
        hidden = checkpoint(self.trunk, x.requires_grad_(), use_reentrant=True)
        chosen = self.head_a if head == "a" else self.head_b
        outputs: torch.Tensor = chosen(self.norm(hidden)) * self.scale
        return outputs


def test_backward_that_ends_early_inside_is_averaged_whole() -> None:
    """A reentrant checkpoint ends a backward of its own, on all ranks at the same place."""
    story = Story(play=branch_a, build=Recomputed, pieces=PIECES)

    played = run_ranks(on_rank, 2, story)

    assert_same_story([trace for _, trace in played], expect(story, 2))


def branch_a(turn: Turn) -> None:
    """Use one head."""
    turn.loss("a").backward()


# --- what the user may do with gradients -----------------------------------------------------------------


def train_by_hand(how: str) -> tuple[list[torch.Tensor], list[float]]:
    """Clip or scale with torch's own means; return weights and norms."""
    torch.manual_seed(0)
    model: Any = Awkward()
    with tiny_buffers():
        model, optimizer = Booster(*PIECES, precision="fp64").boost(model, sgd(model))
    return train(model, optimizer, how, [dist.get_rank()])


def train(model: Any, optimizer: Any, how: str, ranks: list[int]) -> tuple[list[torch.Tensor], list[float]]:
    """Train with torch's clipping or scaler on the losses of some ranks."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=how == "scaler")
    norms = []
    for step in range(4):
        for rank in ranks:
            loss = model(batch_of(rank, step), "ab").square().mean() / len(ranks)
            factor = math.inf if how == "scaler" and step == 1 and rank == 1 else 1.0
            scaler.scale(loss * factor).backward()
        scaler.unscale_(optimizer)
        if how == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.02)
        else:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()], norms


@pytest.mark.parametrize("how", ["norm", "value", "scaler"])
def test_torchs_clipping_and_scaler_see_the_averaged_gradients(how: str) -> None:
    """They act on the mean, so every rank clips and skips alike, as one process does."""
    results = run_ranks(train_by_hand, 2, how)

    torch.manual_seed(0)
    model = Awkward()
    wanted, norms = train(model, sgd(model), how, [0, 1])
    for weights, found in results:
        assert [norm for norm in found if math.isfinite(norm)] == pytest.approx(
            [norm for norm in norms if math.isfinite(norm)], rel=1e-10
        )
        for value, reference in zip(weights, wanted, strict=True):
            assert_close(value, reference, "weight")


def look_between() -> list[torch.Tensor]:
    """Return what ``p.grad`` shows after each of two backward passes, inside and outside ``no_sync``."""
    torch.manual_seed(0)
    model: Any = Awkward()
    booster = Booster(*PIECES, precision="fp64")
    model, _ = booster.boost(model, sgd(model))
    found = []
    for part in range(2):
        model(batch_of(dist.get_rank(), part)).square().mean().backward()
        found.append(model.trunk.weight.grad.clone())
    return found


def test_gradients_are_there_after_every_backward() -> None:
    """Each backward adds its mean to what is shown, as under DDP."""
    results = run_ranks(look_between, 2)

    torch.manual_seed(0)
    model = Awkward()
    for part in range(2):
        for rank in range(2):
            (model(batch_of(rank, part)).square().mean() / 2).backward()
        assert model.trunk.weight.grad is not None
        for found in results:
            assert_close(found[part], model.trunk.weight.grad, "gradient")


def count_traffic() -> list[float]:
    """Return the words of gradients in steps of 1, 3, and 3 passes of which two are announced."""
    torch.manual_seed(0)
    model: Any = nn.Linear(50, 40).double()
    booster = Booster(*PIECES, precision="fp64")
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for passes, announced in ((1, 0), (3, 0), (3, 2)):
        for part in range(passes):
            x = torch.ones(2, 50, dtype=torch.float64)
            if part < announced:
                with booster.no_sync():
                    model(x).square().mean().backward()
            else:
                model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        words = sum(t.received_words for t in booster.last_traffic if t.phase == "gradients")
        found.append(words / (50 * 40 + 40))
    return found


def test_traffic_is_once_for_each_backward_outside_no_sync() -> None:
    """Two ranks receive one word a parameter and round."""
    for found in run_ranks(count_traffic, 2):
        assert found == pytest.approx([1, 3, 1], rel=0.01)
