"""Blocks that are hard to recompute: statistics, randomness, states, all kinds of arguments."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

__all__ = [
    "MODELS",
    "Block",
    "Conversation",
    "Stack",
    "nested",
    "quiet_blocks",
]


class Block(nn.Module):
    """A residual block with a norm, dropout, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=None)
        self.up = nn.Linear(6, 9)
        self.drop = nn.Dropout(0.4)
        self.down = nn.Linear(9, 6)
        self.num_runs = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 6]`` to ``[n, 6]``."""
        self.num_runs += 1
        outputs: torch.Tensor = rows + self.down(self.drop(torch.tanh(self.up(self.norm(rows)))))
        return outputs


class Stack(nn.Module):
    """Blocks in a list, called with a single tensor."""

    def __init__(self, kind: Callable[[], nn.Module] = Block, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(kind() for _ in range(depth))
        self.head = nn.Linear(6, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 4]`` to ``[n, 2]``."""
        hidden = self.stem(rows)
        for block in self.blocks:
            hidden = block(hidden)
        outputs: torch.Tensor = self.head(hidden)
        return outputs


class Quiet(nn.Module):
    """A block without statistics, randomness and side effects."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.layer = nn.Linear(6, 6)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 6]`` to ``[n, 6]``."""
        return rows + torch.tanh(self.layer(self.norm(rows)))


class FrozenStem(Stack):
    """The first block is given a tensor that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)


class Talkative(nn.Module):
    """A block that takes and returns all kinds of things."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(
        self,
        rows: torch.Tensor,
        pair: tuple[torch.Tensor, torch.Tensor | None],
        *,
        mask: torch.Tensor,
        debug: dict[str, Any] | None = None,
        context_fn: str = "not ours",
    ) -> dict[str, Any]:
        """Mix everything."""
        hidden = torch.tanh(self.layer(rows) * pair[0]) * mask
        if pair[1] is not None and debug is not None:
            hidden = hidden + self.second(pair[1]) * debug["factor"]
        return {"rows": hidden, "pair": (hidden.mean() + pair[0], rows), "nothing": None, "text": context_fn}


class Conversation(nn.Module):
    """Calls talkative blocks with nested arguments, keywords, None, flags and tensors without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Talkative() for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 4]`` to ``[n, 6]``."""
        mask = torch.arange(6) != 2
        first = self.blocks[0](self.stem(rows), (rows.new_full((), 2.0), None), mask=mask)
        second = self.blocks[1](
            pair=first["pair"], rows=first["rows"], mask=mask, debug={"factor": 0.5}, context_fn="still not"
        )
        outputs: torch.Tensor = second["rows"] + second["pair"][0]
        return outputs


class Lucky(Block):
    """Skips itself by Python's random numbers, as LayerDrop and stochastic depth do."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 6]`` to ``[n, 6]``."""
        factor = random.random()  # noqa: S311 - not for secrets
        return super().forward(rows) * factor if factor < 0.6 else torch.sin(rows * factor)


class Spectral(nn.Module):
    """Its outputs depend on a state that each forward advances."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = spectral_norm(nn.Linear(6, 6))
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 6]`` to ``[n, 6]``."""
        self.calls = self.calls + 1  # a new tensor in the place of the old one
        outputs: torch.Tensor = torch.tanh(self.layer(rows)) * self.calls
        return outputs


class Nested(Block):
    """Recomputes a part of itself, as users do."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 6]`` to ``[n, 6]``."""
        outputs: torch.Tensor = checkpoint(super().forward, rows, use_reentrant=False)
        return torch.tanh(outputs) * outputs


class Casting(Block):
    """Enters autocast inside."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 6]`` to ``[n, 6]``."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(rows)


def lucky() -> nn.Module:
    """Return a stack that draws from Python's generator."""
    return Stack(Lucky)


def spectral() -> nn.Module:
    """Return a stack with advancing states."""
    return Stack(Spectral)


def nested() -> nn.Module:
    """Return a stack that recomputes by itself too."""
    return Stack(Nested)


def casting() -> nn.Module:
    """Return a stack with autocast inside its blocks."""
    return Stack(Casting)


def quiet_blocks() -> nn.Module:
    """Return a stack of quiet blocks."""
    return Stack(Quiet)


MODELS = [Stack, FrozenStem, Conversation, lucky, spectral, nested, casting]
