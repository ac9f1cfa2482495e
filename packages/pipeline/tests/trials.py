"""Training by hand over micro-batches, and training through a pipeline: functions that run on ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from colossal_core.plugins import Registry
from colossal_core.runtime.batches import loss_of, split_batch
from colossal_core.runtime.booster import Booster
from colossal_pipeline import plugin
from colossal_pipeline.microbatches import cut_share
from colossal_testkit.engine import engine_of

from .models import BUILDERS

if TYPE_CHECKING:
    from torch import nn

    from .models import Run

__all__ = ["BOUND", "Outcome", "boost", "make_registry", "train", "train_by_hand", "weights_of"]

BOUND = 0.5
"""Bound of the gradient norm, which clips every step here."""


@frozen(kw_only=True, eq=False)
class Outcome:
    """What a run came to.

    Attributes:
        losses: Of each step.
        norms: Of each step, before clipping.
        weights: Of the serial model, by name.
        buffers: Those that this rank holds, by name.
    """

    losses: list[float]
    norms: list[float]
    weights: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]

    def difference(self, other: Outcome) -> float:
        """Return the largest difference of anything to another run."""
        pairs = [
            (torch.tensor(self.losses), torch.tensor(other.losses)),
            (torch.tensor(self.norms), torch.tensor(other.norms)),
            *((self.weights[name], other.weights[name]) for name in self.weights),
            *((self.buffers[name], other.buffers[name]) for name in self.buffers),
        ]
        assert self.weights.keys() == other.weights.keys()
        return max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())


def weights_of(booster: Booster, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all weights, whole."""
    with booster.full_parameters(model) as found:
        return {name: value.detach().clone() for name, value in found.items()}


def make_registry() -> Registry:
    """Return a registry of core and this package."""
    return Registry.isolated({"pipeline": plugin})


def train_by_hand(run: Run, number: int) -> Outcome:
    """Train in one process over micro-batches: the reference, in plain torch."""
    optimizer = run.optimizer()
    losses, norms = [], []
    for batch in run.batches:
        call = split_batch(batch, torch.device("cpu"))
        share = cut_share(call, batch, run.criterion, None, run.model, number=number)
        total = 1.0 if share.weight is None else share.weight
        mean = 0.0
        for piece in share.microbatches:
            if piece.weight == 0:
                continue
            outputs = run.model(*piece.call.args, **piece.call.kwargs)
            loss = loss_of(outputs, piece.call, run.criterion) * (piece.weight / total)
            loss.backward()
            mean += float(loss.detach())
        losses.append(mean)
        norms.append(float(torch.nn.utils.clip_grad_norm_(run.model.parameters(), BOUND)))
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(
        losses=losses,
        norms=norms,
        weights={name: value.detach().clone() for name, value in run.model.named_parameters()},
        buffers={name: value.clone() for name, value in run.model.named_buffers()},
    )


def call_of(batch: Any) -> Any:
    """Return how a batch becomes a call."""
    return split_batch(batch, torch.device("cpu"))


def boost(run: Run, pieces: Sequence[object], **settings: Any) -> tuple[Booster, Any]:
    """Boost a run; returns the Booster and the boosted optimizer."""
    keywords = {"precision": "fp64", "max_grad_norm": BOUND, "registry": make_registry(), **settings}
    booster = Booster(*pieces, **keywords)
    _, optimizer = booster.boost(run.model, run.optimizer())
    return booster, optimizer


def train(name: str, pieces: Sequence[object], settings: Mapping[str, Any] | None = None) -> Outcome:
    """Train one of the models through a Booster."""
    run = BUILDERS[name]()
    booster, optimizer = boost(run, pieces, **(settings or {}))
    losses, norms = [], []
    for batch in run.batches:
        losses.append(float(booster.forward_backward(run.model, batch, run.criterion)))
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
        optimizer.zero_grad()
    weights = weights_of(booster, run.model)
    context = engine_of(booster).context
    held = {entry.name for entry in context.table if entry.kind == "buffer" and entry.parts}
    buffers = {key: value.clone() for key, value in run.model.named_buffers() if key in held}
    return Outcome(losses=losses, norms=norms, weights=weights, buffers=buffers)
