"""A model that classifies tokens, uneven shares of its batches, and losses over the tokens that count."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Tagger(nn.Module):
    """Classifies every token."""

    def __init__(self) -> None:
        """Build it in fp64."""
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 4)
        self.double()

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Map tokens ``[n, t]`` to logits ``[n * t, 4]``."""
        hidden = self.embed(tokens)
        if scale is not None:
            hidden = hidden * scale[:, None, None]
        logits: torch.Tensor = self.head(hidden).flatten(0, 1)
        return logits


ROWS = (3, 1, 2, 2)
"""Rows of each rank: the shares of a global batch, as far as there are ranks."""


def share_of(rank: int, step: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's tokens and targets, a part of which is to be ignored; on rank 1 sometimes all."""
    generator = torch.Generator().manual_seed(step)
    rows = ROWS[:world_size]
    tokens = torch.randint(11, (sum(rows), 5), generator=generator)
    target = torch.randint(4, (sum(rows), 5), generator=generator)
    target[torch.rand(target.shape, generator=generator) < 0.4] = -100
    first = sum(rows[:rank])
    if step == 1 and world_size > 1:
        target[rows[0] : rows[0] + rows[1]] = -100
    return tokens[first : first + rows[rank]], target[first : first + rows[rank]]


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Average over the tokens that count, by hand."""
    return F.cross_entropy(logits, target.flatten())


class Flat(nn.CrossEntropyLoss):
    """torch's loss on flat targets."""

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Flatten the target."""
        return super().forward(logits, target.flatten())
