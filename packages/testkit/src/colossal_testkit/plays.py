"""Plays: what user code does between two steps, from the plain loop to the surprising one.

Each is the ``play`` of a story, or what follows a step in one; every memory manager has to do with it what
plain torch does. `LOOPS` names the stories that the contract of memory managers runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from colossal_testkit.stories import Awkward, Story, Turn, batch_of

__all__ = [
    "LOOPS",
    "UNEVEN",
    "Recomputed",
    "accumulate",
    "accumulate_by_rank",
    "accumulate_surprisingly",
    "accumulate_without_sync",
    "add_penalty",
    "alternate_heads",
    "announce_on_one_rank",
    "ask_for_gradients",
    "assign",
    "assign_and_add",
    "branch_by_rank",
    "branch_by_rank_and_step",
    "break_and_keep",
    "break_in_backward",
    "build_with_hooks",
    "clear_and_zero",
    "clear_at_the_end",
    "clear_before_they_leave",
    "clear_in_between",
    "clear_one_head",
    "clear_through_the_model",
    "create_graph",
    "keep",
    "play_nothing",
    "play_on_last_rank_only",
    "recompute",
    "retain_graph",
    "use_one_head",
    "use_two_losses",
    "zero_after",
    "zero_in_between",
]


def use_one_head(turn: Turn) -> None:
    """Leave the other head and the unused layer without gradients."""
    turn.loss("a").backward()


def alternate_heads(turn: Turn) -> None:
    """Use the heads in turn, the same on all ranks."""
    turn.loss("ab"[turn.step % 2]).backward()


def branch_by_rank(turn: Turn) -> None:
    """Use another head on every rank."""
    turn.loss("ab"[turn.rank % 2]).backward()


def branch_by_rank_and_step(turn: Turn) -> None:
    """Let ranks swap heads, and let the same rank skip backward now and then."""
    if (turn.rank + turn.step) % 3 != 2:
        turn.loss("ab"[(turn.rank + turn.step) % 2]).backward()


def play_on_last_rank_only(turn: Turn) -> None:
    """Let gradients arrive on one rank only."""
    if turn.rank == 1:
        turn.loss("ab").backward()


def play_nothing(turn: Turn) -> None:
    """Step without any backward on even steps."""
    if turn.step % 2:
        turn.loss("a").backward()


def accumulate(turn: Turn, counts: Sequence[int] = (1, 3, 2, 1, 2)) -> None:
    """Run a number of backward passes that changes from step to step."""
    for part in range(counts[turn.step]):
        turn.loss("ab"[part % 2], part=part).backward()


def accumulate_by_rank(turn: Turn) -> None:
    """Run a number of backward passes that differs between ranks and steps."""
    for part in range((turn.step + 2 * turn.rank) % 3):
        turn.loss("ab", part=part).backward()


def accumulate_without_sync(turn: Turn) -> None:
    """Announce all but the last backward pass."""
    counts = (1, 3, 2, 1, 2)
    with turn.no_sync():
        accumulate(turn, tuple(count - 1 for count in counts))
    turn.loss("a", part=9).backward()


def announce_on_one_rank(turn: Turn) -> None:
    """Announce on one rank only, nested, and leave the context by an exception."""
    if turn.rank == 0:
        with contextlib.suppress(ValueError), turn.no_sync(), turn.no_sync():
            turn.loss("a").backward()
            raise ValueError
    else:
        turn.loss("a").backward()
    turn.loss("b", part=1).backward()


def use_two_losses(turn: Turn) -> None:
    """Run backward for two losses over one graph, the second a shorter one."""
    hidden = turn.model.trunk(batch_of(turn.rank, turn.step))
    turn.loss("a").backward()
    hidden.square().mean().backward()


def retain_graph(turn: Turn) -> None:
    """Run backward twice through the same graph."""
    loss = turn.loss("ab")
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()


def create_graph(turn: Turn) -> None:
    """Add a gradient penalty on the inputs, by a backward that makes a graph."""
    inputs = batch_of(turn.rank, turn.step).requires_grad_()
    loss = turn.model(inputs, "ab").square().mean()
    loss.backward(create_graph=True)
    assert inputs.grad is not None
    inputs.grad.square().sum().backward()


def clear_in_between(turn: Turn) -> None:
    """Clear what the first backward did, on all ranks, in steps whose first backward sends it."""
    turn.loss("a").backward()
    if turn.step >= 2:
        turn.optimizer.zero_grad()
        turn.loss("b", part=1).backward()


def clear_through_the_model(turn: Turn) -> None:
    """Clear by ``model.zero_grad()``, and only then run backward."""
    turn.loss("a", part=1).backward()
    turn.model.zero_grad()
    turn.loss("ab").backward()


def zero_in_between(turn: Turn) -> None:
    """Overwrite what the first backward did with zeros."""
    turn.loss("a").backward()
    if turn.step >= 2:
        turn.optimizer.zero_grad(set_to_none=False)
        turn.loss("b", part=1).backward()


def clear_at_the_end(turn: Turn) -> None:
    """Clear everything right before every other step."""
    turn.loss("ab").backward()
    if turn.step % 2:
        turn.optimizer.zero_grad()


def clear_and_zero(turn: Turn) -> None:
    """Clear and zero in turn after gradients have left, with a third backward in the end."""
    turn.loss("ab").backward()
    turn.optimizer.zero_grad(set_to_none=bool(turn.step % 2))
    turn.loss("a", part=1).backward()
    turn.optimizer.zero_grad(set_to_none=not turn.step % 2)
    if turn.step < 3:
        turn.loss("b", part=2).backward()


def clear_one_head(turn: Turn) -> None:
    """Clear the gradient of single parameters after they have left, the same on all ranks."""
    turn.loss("ab").backward()
    turn.model.head_a.weight.grad = None
    turn.model.scale.grad = None
    if turn.step % 2:
        turn.loss("a", part=1).backward()


def clear_before_they_leave(turn: Turn) -> None:
    """Clear on one rank only, where nothing can have left."""
    with turn.no_sync():
        turn.loss("ab").backward()
        if turn.rank == 0:
            turn.optimizer.zero_grad()
    turn.loss("a", part=1).backward()


def assign(turn: Turn) -> None:
    """Assign gradients before and after backward, one of them to an unused parameter."""
    turn.model.unused.bias.grad = torch.full((2,), 0.1 * (turn.rank + 1), dtype=torch.float64)
    turn.model.head_a.bias.grad = torch.ones(3, dtype=torch.float64)
    turn.loss("a").backward()
    if turn.step >= 2:
        turn.model.trunk.bias.grad = torch.full((7,), 0.2 * (turn.rank + 1), dtype=torch.float64)


def assign_and_add(turn: Turn) -> None:
    """Replace a gradient that has left by another one, and add to it by a further backward."""
    turn.loss("ab").backward()
    turn.model.head_b.weight.grad = torch.ones_like(turn.model.head_b.weight)
    turn.loss("b", part=1).backward()


def ask_for_gradients(turn: Turn) -> None:
    """Ask autograd for gradients of parameters between, before and after backward passes."""
    parameters = [parameter for parameter in turn.model.parameters() if parameter.requires_grad]
    torch.autograd.grad(turn.loss("ab", part=3), parameters, allow_unused=True)
    turn.loss("ab").backward()
    torch.autograd.grad(turn.loss("ab", part=4), parameters, allow_unused=True)
    if turn.step % 2:
        turn.loss("a", part=1).backward()
        torch.autograd.grad(turn.loss("ab", part=5), parameters, allow_unused=True)


def add_penalty(turn: Turn) -> None:
    """Train on the norm of gradients that autograd was asked for."""
    loss = turn.loss("ab")
    (gradient,) = torch.autograd.grad(loss, [turn.model.trunk.weight], create_graph=True)
    (loss + gradient.square().sum()).backward()


def forget(parameter: torch.Tensor) -> None:
    """Clear a gradient as soon as it has arrived, as optimizers do that step inside backward."""
    parameter.grad = None


def double(gradient: torch.Tensor) -> torch.Tensor:
    """Scale what arrives."""
    return gradient * 2


def build_with_hooks() -> nn.Module:
    """Hook parameters before boost: two clear, one scales."""
    model = Awkward()
    model.head_a.weight.register_post_accumulate_grad_hook(forget)
    model.scale.register_post_accumulate_grad_hook(forget)
    model.trunk.weight.register_hook(double)
    return model


def accumulate_surprisingly(turn: Turn) -> None:
    """Run two passes where one was expected."""
    turn.loss("ab").backward()
    if turn.step >= 2:
        turn.loss("a", part=1).backward()


def keep(turn: Turn) -> None:
    """Clear nothing: gradients pile up from step to step."""


def zero_after(turn: Turn) -> None:
    """Overwrite with zeros: weight decay and momentum go on."""
    turn.optimizer.zero_grad(set_to_none=False)


class Recomputed(Awkward):
    """Recomputes the trunk, and one head twice."""

    def forward(self, x: torch.Tensor, head: str = "a") -> torch.Tensor:
        """Map ``[n, 5]`` to ``[n, 3]``; a head in upper case recomputes in a reentrant way."""
        reentrant = head.isupper()
        x = x.requires_grad_()
        hidden = checkpoint(self.trunk, x, use_reentrant=reentrant)
        hidden = hidden + checkpoint(self.trunk, x + 1, use_reentrant=reentrant)
        chosen = self.head_a if head.lower() == "a" else self.head_b
        outputs: torch.Tensor = checkpoint(chosen, self.norm(hidden), use_reentrant=reentrant) * self.scale
        return outputs


def recompute(turn: Turn) -> None:
    """Mix both kinds of recomputation, which end backward early or not, and accumulate in odd steps."""
    turn.loss("aB"[(turn.rank + turn.step) % 2]).backward()
    if turn.step % 2:
        turn.loss("A", part=1).backward()


def break_here(_: torch.Tensor) -> None:
    """Raise, as a hook that runs inside backward."""
    raise ArithmeticError


def start_and_break(turn: Turn) -> None:
    """Run half a backward: the head has its gradients when it fails, the trunk has none."""
    hidden = turn.model.trunk(batch_of(turn.rank, turn.step))
    hidden.register_hook(break_here)
    with contextlib.suppress(ArithmeticError):
        (turn.model.head_a(hidden) * turn.model.scale).sum().backward()


def break_in_backward(turn: Turn) -> None:
    """Fail in the middle of a backward, after the heads had theirs, and start again."""
    if turn.step % 2:
        start_and_break(turn)
        turn.optimizer.zero_grad()
    turn.loss("a", part=1).backward()


def break_and_keep(turn: Turn) -> None:
    """Fail in the middle of a backward and keep what had arrived."""
    start_and_break(turn)
    if turn.step % 2 == turn.rank:
        turn.loss("b", part=1).backward()


LOOPS: Mapping[str, Story] = {
    **{
        play.__name__: Story(play=play, steps=5)
        for play in (
            alternate_heads,
            branch_by_rank_and_step,
            play_on_last_rank_only,
            play_nothing,
            accumulate,
            accumulate_by_rank,
            accumulate_without_sync,
            announce_on_one_rank,
            use_two_losses,
            clear_in_between,
            clear_through_the_model,
            zero_in_between,
            clear_at_the_end,
            clear_and_zero,
            clear_one_head,
            clear_before_they_leave,
            assign,
            assign_and_add,
            break_in_backward,
            break_and_keep,
        )
    },
    "hooks": Story(play=accumulate_surprisingly, build=build_with_hooks),
    "keep": Story(play=branch_by_rank_and_step, after=keep, max_grad_norm=0.05),
    "zero_after": Story(play=branch_by_rank_and_step, after=zero_after, max_grad_norm=0.05),
    "step_twice": Story(play=branch_by_rank_and_step, after=keep, calls=2, max_grad_norm=0.05),
    "recompute": Story(play=recompute, build=Recomputed, steps=5),
}
"""Stories by name, without the pieces."""

UNEVEN = frozenset(
    {
        "accumulate_by_rank",
        "branch_by_rank_and_step",
        "break_and_keep",
        "keep",
        "play_on_last_rank_only",
        "step_twice",
        "zero_after",
    }
)
"""Those in which ranks run their models a different number of times."""
