"""Small models with awkward parts, and stories: the same user code on many ranks and on plain torch.

A story is what a user writes between ``boost`` and ``optimizer.step()``. :func:`tell` plays it on one rank
with boosted objects; :func:`expect` plays it in one process with a plain torch model for each rank, and
averages the gradients by the definition: None where no rank has one, else the mean with zeros for those
that have none. Whatever a story does to gradients on single ranks, the definition stays that simple, so
both must agree to 1e-10 in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import field, frozen
from torch import nn

from colossal_core import Booster
from colossal_core.runtime import buckets

if TYPE_CHECKING:
    from colossal_core.plugins import Registry

__all__ = [
    "Awkward",
    "Story",
    "Trace",
    "Turn",
    "assert_close",
    "assert_same_story",
    "batch_of",
    "expect",
    "play_plain",
    "sgd",
    "tell",
    "tiny_buffers",
    "zero_grad",
]

TOLERANCE = 1e-10
"""Absolute and relative, in fp64."""


class Awkward(nn.Module):
    """Two heads, and a parameter of every odd kind: unused, frozen, 0-d, one element, none at all, tied."""

    def __init__(self) -> None:
        """Build it in fp64."""
        super().__init__()
        self.trunk = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(requires_grad=False)
        self.head_a = nn.Linear(7, 3)
        self.head_b = nn.Linear(7, 3)
        self.tied = nn.Linear(7, 3, bias=False)
        self.tied.weight = self.head_b.weight
        self.unused = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.tensor([0.1]))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.double()

    def forward(self, x: torch.Tensor, head: str = "a") -> torch.Tensor:
        """Map ``[n, 5]`` to ``[n, 3]`` through one head, or both."""
        hidden = torch.tanh(self.frozen(self.norm(self.trunk(x)))) * self.scale + self.shift
        outputs = []
        if "a" in head:
            outputs.append(self.head_a(hidden) + self.nothing.sum())
        if "b" in head:
            outputs.append(self.head_b(hidden) + self.tied(hidden * hidden))
        return torch.stack(outputs).sum(dim=0)


def batch_of(rank: int, step: int, *, rows: int = 3, width: int = 5) -> torch.Tensor:
    """Return this rank's inputs of a step, the same wherever it is asked for."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64)


@frozen(kw_only=True)
class Turn:
    """One step of a story on one rank.

    Attributes:
        model: The model, boosted or plain.
        optimizer: The optimizer, boosted or plain.
        rank: Which rank plays.
        step: Number of the step, from 0.
        booster: None in plain torch.
    """

    model: Any
    optimizer: Any
    rank: int
    step: int
    booster: Booster | None

    def no_sync(self) -> AbstractContextManager[None]:
        """Return ``booster.no_sync()``, which plain torch does not need."""
        return nullcontext() if self.booster is None else self.booster.no_sync()

    def loss(self, head: str = "a", *, part: int = 0) -> torch.Tensor:
        """Return a loss of the model on this rank's batch, or on another part of it."""
        loss: torch.Tensor = self.model(batch_of(self.rank, self.step + 100 * part), head).square().mean()
        return loss


def zero_grad(turn: Turn) -> None:
    """Do what a loop does after ``step()``."""
    turn.optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum and weight decay, which move also what has no gradient, in two groups."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.03}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@frozen(kw_only=True)
class Story:
    """User code for a few steps; every function is module-level, so that it can travel.

    Attributes:
        play: From ``zero_grad`` of the step before to right before ``step()``.
        after: What follows ``step()``.
        build: Makes the model, after seeding.
        optimizer: Makes the optimizer.
        steps: Number of steps.
        max_grad_norm: Bound of the gradient norm.
        calls: How often ``step()`` is called in a row.
        pieces: What the Booster is made of.
        shows_gradients: Whether ``p.grad`` is looked at after each step. Managers that divide gradients show
            guards there.
        registry: Returns the registry that knows the pieces; None when they are installed.
    """

    play: Callable[[Turn], None]
    after: Callable[[Turn], None] = zero_grad
    build: Callable[[], nn.Module] = Awkward
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    steps: int = 4
    max_grad_norm: float | None = None
    calls: int = 1
    pieces: tuple[object, ...] = ()
    shows_gradients: bool = True
    registry: Callable[[], Registry] | None = None


@frozen
class Trace:
    """What a story left behind.

    Attributes:
        weights: Every parameter after each step, by name.
        gradients: What ``p.grad`` showed after each step.
        norms: Gradient norms before clipping.
    """

    weights: list[dict[str, torch.Tensor]] = field(factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = field(factory=list)
    norms: list[float] = field(factory=list)

    def note(
        self, model: nn.Module, weights: Mapping[str, torch.Tensor], norm: float, *, gradients: bool
    ) -> None:
        """Write down a step, with what ``p.grad`` shows if that is looked at."""
        named = dict(model.named_parameters())
        self.weights.append({name: value.detach().clone() for name, value in weights.items()})
        self.gradients.append(
            {
                name: None if value.grad is None else value.grad.detach().clone()
                for name, value in (named if gradients else {}).items()
            }
        )
        self.norms.append(norm)


@contextmanager
def tiny_buffers(buffer_bytes: int = 64, last_bytes: int = 16) -> Iterator[None]:
    """Let every few elements have a buffer of their own, so that many leave during backward."""
    before = {name: vars(buckets)[name] for name in ("BUFFER_BYTES", "LAST_BUFFER_BYTES")}
    vars(buckets).update(BUFFER_BYTES=buffer_bytes, LAST_BUFFER_BYTES=last_bytes)
    try:
        yield
    finally:
        vars(buckets).update(before)


def tell(story: Story) -> Trace:
    """Play a story on this rank with boosted objects; runs on every rank."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = story.build()
    booster = Booster(
        *story.pieces,
        precision="fp64",
        max_grad_norm=story.max_grad_norm,
        registry=None if story.registry is None else story.registry(),
    )
    model, optimizer = booster.boost(model, story.optimizer(model))
    trace = Trace()
    for step in range(story.steps):
        turn = Turn(model=model, optimizer=optimizer, rank=rank, step=step, booster=booster)
        story.play(turn)
        for _ in range(story.calls):
            optimizer.step()
            with booster.full_parameters(model) as weights:
                trace.note(model, weights, float(optimizer.grad_norm), gradients=story.shows_gradients)
        story.after(turn)
    return trace


def expect(story: Story, world_size: int) -> Trace:
    """Play a story in one process on plain torch, one model for each rank."""
    models = []
    for _ in range(world_size):
        torch.manual_seed(0)
        models.append(story.build())
    return play_plain(story, models, [story.optimizer(model) for model in models])


def play_plain(
    story: Story, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> Trace:
    """Play a story on plain models that stand for the ranks, averaging their gradients before each step."""
    trace = Trace()
    for step in range(story.steps):
        turns = [
            Turn(model=model, optimizer=optimizer, rank=rank, step=step, booster=None)
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
        ]
        for turn in turns:
            story.play(turn)
        for _ in range(story.calls):
            _average(models)
            norm = 0.0
            for model, optimizer in zip(models, optimizers, strict=True):
                bound = float("inf") if story.max_grad_norm is None else story.max_grad_norm
                norm = float(nn.utils.clip_grad_norm_(model.parameters(), bound))
                optimizer.step()
            weights = dict(models[0].named_parameters())
            trace.note(models[0], weights, norm, gradients=story.shows_gradients)
        for turn in turns:
            story.after(turn)
    return trace


def _average(models: Sequence[nn.Module]) -> None:
    """Give every model the mean of the gradients, with zeros for None; None where all have none."""
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        mean = torch.stack(gradients).sum(dim=0) / len(parameters) if gradients else None
        for parameter in parameters:
            parameter.grad = None if mean is None else mean.clone()


def assert_close(found: torch.Tensor, wanted: torch.Tensor, label: str, tolerance: float = TOLERANCE) -> None:
    """Compare two tensors of one shape."""
    # Tensors are printed on failure only, which takes longer than comparing them.
    if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=tolerance, atol=tolerance):
        raise AssertionError(f"{label}: {found.flatten()[:4]} is not {wanted.flatten()[:4]}")


def assert_same_story(traces: Sequence[Trace], wanted: Trace) -> None:
    """Compare weights, norms and visible gradients of every rank after every step with plain torch."""
    for rank, trace in enumerate(traces):
        assert len(trace.weights) == len(wanted.weights)
        for step, (weights, gradients) in enumerate(zip(trace.weights, trace.gradients, strict=True)):
            where = f"rank {rank} after step {step}"
            for name, value in weights.items():
                assert_close(value, wanted.weights[step][name], f"{name} on {where}")
            norm = abs(trace.norms[step] - wanted.norms[step])
            assert norm <= TOLERANCE * (1 + wanted.norms[step]), f"norm on {where}"
            for name, gradient in gradients.items():
                reference = wanted.gradients[step][name]
                assert (gradient is None) == (reference is None), f"gradient of {name} on {where}: {gradient}"
                if gradient is not None and reference is not None:
                    assert_close(gradient, reference, f"gradient of {name} on {where}")
