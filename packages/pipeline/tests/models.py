"""Models that are hard to cut: tied weights, skips past stages, every kind of container, batch statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import nn

from colossal_testkit.models import GPT, TokenLoss, randomise

__all__ = ["BUILDERS", "Run", "Widths"]

VOCABULARY, LENGTH = 41, 6


@frozen(kw_only=True, eq=False)
class Run:
    """A training run.

    Attributes:
        model: The model, in fp64.
        criterion: The loss, or None when the outputs carry it.
        batches: Batches of the share of one data rank.
    """

    model: nn.Module
    criterion: Callable[..., torch.Tensor] | None
    batches: list[Any]

    def optimizer(self) -> torch.optim.Optimizer:
        """Return AdamW with decay on everything."""
        return torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.1)


class Residual(nn.Module):
    """Two convolutions with batch normalisation and a skip, written in place."""

    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.short = nn.Conv2d(width, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, width, side, side]`` to fewer and wider pixels."""
        hidden = F.relu_(self.norm1(self.first(F.relu(images))))
        hidden = self.norm2(self.second(hidden))
        hidden += self.short(images)
        outputs: torch.Tensor = hidden
        return outputs


class ResNet(nn.Module):
    """A residual network whose last stage also looks at what its stem saw."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, 1, 1)
        self.norm = nn.BatchNorm2d(4)
        self.low = nn.Sequential(*(Residual(4, 4) for _ in range(depth)))
        self.high = nn.Sequential(Residual(4, 6, 2), *(Residual(6, 6) for _ in range(depth - 1)))
        self.skip = nn.Conv2d(4, 6, 1, 2)
        self.head = nn.Linear(6, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 2, side, side]`` to ``[batch, 3]``."""
        stem = F.relu(self.norm(self.stem(images)))
        hidden = self.high(self.low(stem))
        hidden += self.skip(stem)
        outputs: torch.Tensor = self.head(hidden.mean((2, 3)))
        return outputs


class Widths(nn.Module):
    """Blocks that hand each other dicts with tensors, numbers, None and flags; masks and kwargs on all."""

    class Block(nn.Module):
        """A block over a dict."""

        def __init__(self, width: int, dropout: float) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
            self.dropout = nn.Dropout(dropout)

        def forward(self, state: dict[str, Any], *, mask: torch.Tensor) -> dict[str, Any]:
            """Add to ``hidden`` where the mask is, count the depth, keep what else there is."""
            hidden = state["hidden"] + self.dropout(self.inner(state["hidden"])) * mask[..., None]
            largest = hidden.detach().abs().amax(-1)
            return {
                "hidden": hidden,
                "depth": state["depth"] + 1,
                "nothing": None,
                "flags": (largest > 0.5, largest),
            }

    def __init__(self, depth: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.frozen = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Widths.Block(7, dropout) for _ in range(depth))
        self.head = nn.Linear(7, 3)
        self.unused = nn.Linear(7, 2)
        self.frozen.requires_grad_(False)

    def forward(self, samples: torch.Tensor, *, mask: torch.Tensor) -> dict[str, Any]:
        """Map ``[batch, time, 5]`` to a dict with ``logits`` of 3."""
        state = {"hidden": self.frozen(samples) * self.scale, "depth": 0, "nothing": None, "flags": ()}
        for block in self.blocks:
            state = block(state, mask=mask)
        weight = 1.0 + state["depth"] / 10
        return {"logits": self.head(state["hidden"] * self.scale) * weight, "flags": state["flags"]}


class WidthsLoss(nn.Module):
    """A criterion that reads a weight of each sample out of the batch."""

    reduction = "mean"

    def forward(self, outputs: Mapping[str, Any], batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the mean over samples."""
        errors = (outputs["logits"] - batch["target"]).square().mean((1, 2))
        loss: torch.Tensor = (errors * batch["weight"]).mean()
        return loss


class WidthsOfBatch(Widths):
    """The same, for batches that are one mapping."""

    def forward(self, samples: torch.Tensor, *, mask: torch.Tensor, **_: Any) -> dict[str, Any]:
        """Leave out what only the criterion needs."""
        return super().forward(samples, mask=mask)


def _draw(seed: int) -> Callable[..., torch.Tensor]:
    """Return a source of normal numbers in fp64."""
    source = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=source, dtype=torch.float64)


def build_gpt(*, tied: bool = False, num_blocks: int = 9, rows: int = 11) -> Run:
    """Build a GPT whose later samples have more targets that do not count."""
    model = GPT(is_tied=tied, num_blocks=num_blocks, width=6, heads=2).double()
    randomise(model, seed=3)
    source = torch.Generator().manual_seed(5)
    batches = []
    for _ in range(3):
        ids = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=source)
        target = ids[:, 1:].clone()
        for sample in range(rows):
            target[sample, : sample * LENGTH // rows] = -100
        target[0] = -100
        batches.append((ids[:, :-1].contiguous(), target))
    return Run(model=model, criterion=TokenLoss(), batches=batches)


def build_tied() -> Run:
    """Build a GPT whose head is its embedding."""
    return build_gpt(tied=True)


def build_resnet(*, depth: int = 2) -> Run:
    """Build the residual network, with a number of blocks on each of its two widths."""
    model = ResNet(depth).double()
    randomise(model, seed=4)
    draw = _draw(6)
    batches = [(draw(9, 2, 6, 6), draw(9, 3)) for _ in range(3)]
    return Run(model=model, criterion=nn.MSELoss(), batches=batches)


def build_widths(*, depth: int = 5, dropout: float = 0.0) -> Run:
    """Build the model of dicts; a batch is one mapping, whose criterion weighs each sample."""
    model = WidthsOfBatch(depth=depth, dropout=dropout).double()
    randomise(model, seed=5)
    draw = _draw(7)
    batches = [
        {
            "samples": draw(7, 4, 5),
            "mask": (draw(7, 4) > 0).double(),
            "target": draw(7, 4, 3),
            "weight": draw(7).abs(),
        }
        for _ in range(3)
    ]
    return Run(model=model, criterion=WidthsLoss(), batches=batches)


BUILDERS: Mapping[str, Callable[[], Run]] = {
    "gpt": build_gpt,
    "gpt-tied": build_tied,
    "resnet": build_resnet,
    "widths": build_widths,
    # With as many items as the largest number of stages in tests, which is 12.
    "resnet-deep": functools.partial(build_resnet, depth=4),
    "widths-deep": functools.partial(build_widths, depth=9),
    "dropout-deep": functools.partial(build_widths, depth=9, dropout=0.4),
}
