"""Models whose parameters are read in other ways than by their own module's call."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from colossal_core import Booster
from colossal_testkit.models import randomise
from colossal_testkit.stories import batch_of
from colossal_zero import Zero

__all__ = ["MODELS", "Stage", "Tower", "boost", "build", "loss_of", "sgd"]

WIDTH = 6

Stage = Literal[1, 2, 3]
"""What ``Zero`` takes."""


class Block(nn.Module):
    """Two layers with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 6]`` to the same shape."""
        outputs: torch.Tensor = x + self.down(torch.tanh(self.up(x))) * self.gain
        return outputs


class Tower(nn.Module):
    """Blocks between an entry and an exit; subclasses change how they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 5]`` to ``[n, 3]``."""
        return self.end(self.run(torch.tanh(self.enter(x))))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        for block in self.blocks:
            x = block(x)
        return x

    def end(self, x: torch.Tensor) -> torch.Tensor:
        """Map hidden states to outputs."""
        outputs: torch.Tensor = self.leave(x)
        return outputs


class Tied(Tower):
    """Two blocks share a weight, and the exit reads the entry's without calling it."""

    def __init__(self) -> None:
        super().__init__()
        first, last = self.blocks[0], self.blocks[2]
        assert isinstance(first, Block)
        assert isinstance(last, Block)
        last.up.weight = first.up.weight

    def end(self, x: torch.Tensor) -> torch.Tensor:
        """Use the entry's weight backwards."""
        outputs: torch.Tensor = x @ self.enter.weight + self.leave(x).sum(dim=1, keepdim=True)
        return outputs


class Penalised(Tower):
    """Reads weights of its blocks before and after they run, as they are, as a view, and in a list."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Let outputs depend on weights that no module reads then."""
        first, *_, last = (block for block in self.blocks if isinstance(block, Block))
        gains = torch.stack([block.gain for block in (first, last)])
        x = super().run(x * gains.square().mean() + last.up.weight.T[0, :WIDTH])
        return x @ first.down.weight[:, :WIDTH] + 0.1 * last.up.weight.square().sum()


class Filtered(Tower):
    """Filters rows in the frequency domain, by pairs of real parameters that are read as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.ones(1))
        self.filters = nn.ParameterList(nn.Parameter(torch.ones(WIDTH // 2 + 1, 2)) for _ in self.blocks)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Filter after each block."""
        for block, pairs in zip(self.blocks, self.filters, strict=True):
            spectrum = torch.fft.rfft(block(x) * self.odd) * torch.view_as_complex(pairs).conj()
            x = torch.fft.irfft(spectrum, n=WIDTH)
        return x


class Repeated(Tower):
    """Blocks run twice, in an order that returns."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Run there and back."""
        return super().run(super().run(x).flip(0))


class Checkpointed(Tower):
    """Recomputes two blocks as one, and then one in a reentrant way."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Recompute across the border of units."""
        x = checkpoint(lambda y: self.blocks[1](self.blocks[0](y)), x, use_reentrant=False)
        outputs: torch.Tensor = checkpoint(self.blocks[2], x, use_reentrant=torch.is_grad_enabled())
        return outputs


class Attending(nn.Module):
    """Layers of torch that read the weights of their children without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 5]`` to ``[n, 8]``, the rows being one sequence."""
        outputs: torch.Tensor = self.encoder(self.enter(x)[None])[0] * self.scale
        return outputs


class Adapted(Tower):
    """Everything is frozen but a small adapter in each block, and one block is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(requires_grad=False)
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Run the first two blocks with their adapters."""
        for block, adapter in zip(self.blocks, self.adapters, strict=False):
            x = block(x) + adapter(x)
        return x


class Recurrent(nn.Module):
    """An LSTM, whose module keeps a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, num_layers=2, bidirectional=True)
        self.leave = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a series ``[n, 5]`` to ``[n, 3]``."""
        outputs: torch.Tensor = self.leave(self.lstm(x)[0])
        return outputs


class Short(nn.Module):
    """Fewer elements than ranks: 0-d, one element, none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.tensor([0.1]))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map anything to the same shape."""
        return x * self.scale + self.shift + self.nothing.sum()


MODELS: dict[str, Any] = {
    kind.__name__.lower(): kind
    for kind in (
        Tower,
        Tied,
        Penalised,
        Filtered,
        Repeated,
        Checkpointed,
        Attending,
        Adapted,
        Recurrent,
        Short,
    )
}


def build(name: str) -> nn.Module:
    """Build a model in fp64 with random values, the same everywhere."""
    torch.manual_seed(0)
    model: nn.Module = MODELS[name]().double()
    randomise(model, seed=3)
    return model


def sgd(model: nn.Module, *, lr: float = 0.1) -> torch.optim.Optimizer:
    """Return SGD with momentum over a group for each parameter, frozen ones and an empty group among them."""
    groups: list[dict[str, Any]] = [
        {"params": [parameter], "lr": lr / (1 + index % 3), "weight_decay": 0.1 * (index % 2)}
        for index, parameter in enumerate(model.parameters())
    ]
    return torch.optim.SGD([*groups, {"params": []}], lr=lr, momentum=0.9)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return a loss on a rank's batch of a step."""
    outputs = model(batch_of(rank, step))
    return F.smooth_l1_loss(outputs, torch.ones_like(outputs))


def boost(name: str = "tower", *, stage: Stage = 3, precision: str = "fp64") -> tuple[Booster, Any, Any]:
    """Boost a model with its optimizer."""
    model = build(name)
    if precision != "fp64":
        model = model.float()
    booster = Booster(Zero(stage=stage), precision=precision)
    model, optimizer = booster.boost(model, sgd(model))
    return booster, model, optimizer
