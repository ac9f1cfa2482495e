"""The gradient window: whatever a loop does between two steps, all ranks do what plain torch does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from colossal_core import Booster
from colossal_core.errors import UsageError
from colossal_testkit import run_ranks
from colossal_testkit.plays import (
    Recomputed,
    accumulate,
    accumulate_by_rank,
    accumulate_surprisingly,
    accumulate_without_sync,
    add_penalty,
    alternate_heads,
    announce_on_one_rank,
    ask_for_gradients,
    assign,
    assign_and_add,
    branch_by_rank,
    branch_by_rank_and_step,
    break_and_keep,
    break_in_backward,
    build_with_hooks,
    clear_and_zero,
    clear_at_the_end,
    clear_before_they_leave,
    clear_in_between,
    clear_one_head,
    clear_through_the_model,
    create_graph,
    keep,
    play_nothing,
    play_on_last_rank_only,
    recompute,
    retain_graph,
    use_one_head,
    use_two_losses,
    zero_after,
    zero_in_between,
)
from colossal_testkit.stories import (
    Awkward,
    Story,
    Trace,
    Turn,
    assert_same_story,
    batch_of,
    expect,
    sgd,
    tell,
    tiny_buffers,
)


def on_rank(story: Story) -> tuple[Trace, Trace]:
    """Play a story on a rank of the pool, with one buffer and with many that leave during backward."""
    one_buffer = tell(story)
    with tiny_buffers():
        return one_buffer, tell(story)


def check(story: Story, *, world_size: int = 2) -> None:
    """Play a story on every rank and in one plain process, and compare."""
    played = run_ranks(on_rank, world_size, story)

    wanted = expect(story, world_size)
    assert_same_story([one_buffer for one_buffer, _ in played], wanted)
    assert_same_story([many_buffers for _, many_buffers in played], wanted)


# --- parameters without gradients -----------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "play",
    [
        use_one_head,
        alternate_heads,
        branch_by_rank,
        branch_by_rank_and_step,
        play_on_last_rank_only,
        play_nothing,
    ],
)
def test_branches_are_treated_as_torch_treats_none(play: Callable[[Turn], None], world_size: int) -> None:
    """A parameter that no rank touched keeps its value and momentum, under weight decay as well."""
    check(Story(play=play, steps=5), world_size=world_size)


# --- several backward passes in one window --------------------------------------------------------------


@pytest.mark.parametrize(
    "play",
    [
        accumulate,
        accumulate_by_rank,
        accumulate_without_sync,
        announce_on_one_rank,
        use_two_losses,
        retain_graph,
        create_graph,
    ],
)
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_mispredicted_windows_are_exact(play: Callable[[Turn], None]) -> None:
    """The number of backward passes in a window is never fixed, and never matters."""
    check(Story(play=play, steps=5))


# --- what the user does to gradients --------------------------------------------------------------------


@pytest.mark.parametrize(
    "play",
    [
        clear_in_between,
        clear_through_the_model,
        zero_in_between,
        clear_at_the_end,
        clear_and_zero,
        clear_one_head,
        clear_before_they_leave,
        assign,
        assign_and_add,
        ask_for_gradients,
        add_penalty,
    ],
)
def test_what_the_user_does_to_gradients_counts_as_in_torch(play: Callable[[Turn], None]) -> None:
    """Clearing, zeroing, assigning and asking for gradients means the same, also after they have left."""
    check(Story(play=play, steps=5))


def test_hooks_of_the_user_count_as_in_torch() -> None:
    """A hook that clears leaves no gradient, also when it arrives late; one that scales scales once."""
    check(Story(play=accumulate_surprisingly, build=build_with_hooks))


# --- after the step -------------------------------------------------------------------------------------


def keep_on_one_rank(turn: Turn) -> None:
    """Clear on one rank only, so that the other one adds to the mean of the step before."""
    if turn.rank == 0:
        turn.optimizer.zero_grad()


def halve(turn: Turn) -> None:
    """Change the gradient that ``p.grad`` shows after the step in place, and keep it."""
    for parameter in turn.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("after", [keep, keep_on_one_rank, zero_after, halve])
def test_gradients_that_stay_count_in_the_next_step(after: Callable[[Turn], None], calls: int) -> None:
    """Without ``zero_grad`` gradients accumulate across steps, clipped as they were."""
    check(Story(play=branch_by_rank_and_step, after=after, calls=calls, max_grad_norm=0.05))


# --- recomputation --------------------------------------------------------------------------------------


def test_recomputation_of_both_kinds_is_exact() -> None:
    """A backward inside backward touches parameters twice and ends early; nothing leaves too soon."""
    check(Story(play=recompute, build=Recomputed, steps=5))


# --- errors and recovery --------------------------------------------------------------------------------


@pytest.mark.parametrize("play", [break_in_backward, break_and_keep])
def test_training_goes_on_after_an_exception_in_backward(play: Callable[[Turn], None]) -> None:
    """Half a backward counts as in torch, whether it is cleared or kept."""
    check(Story(play=play, steps=5))


def clear_on_one_rank_too_late() -> tuple[list[float], list[str], bool]:
    """Clear on rank 0 only, after gradients have left, then go on; return norms and errors."""
    torch.manual_seed(0)
    model = Awkward()
    with tiny_buffers():
        model, optimizer = Booster(precision="fp64").boost(model, sgd(model))
    errors, norms, is_clean = [], [], True
    for step in range(4):
        model(batch_of(dist.get_rank(), step)).square().mean().backward()
        if step == 2 and dist.get_rank() == 0:
            optimizer.zero_grad()
            model(batch_of(0, 9)).square().mean().backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        try:
            optimizer.step()
            norms.append(float(optimizer.grad_norm))
        except UsageError as error:
            errors.append(str(error))
            pairs = zip(before, model.parameters(), strict=True)
            is_clean = all(torch.equal(old, new) and new.grad is None for old, new in pairs)
        optimizer.zero_grad()
    return norms, errors, is_clean


def test_clearing_on_one_rank_what_has_left_is_refused_on_all() -> None:
    """The sum cannot be undone, so every rank raises, updates nothing, and goes on from a clean window."""
    results = run_ranks(clear_on_one_rank_too_late, 2)

    for norms, errors, is_clean in results:
        assert len(errors) == 1
        assert "cleared on some ranks only" in errors[0]
        assert "no_sync" in errors[0]
        assert is_clean
        assert norms == results[0][0]
        assert len(norms) == 3
