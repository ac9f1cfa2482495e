"""Reference models: small, awkward, and random where constants would hide mistakes.

Sizes do not divide by the degrees that tests use, so a transposed or cut layout cannot pass by accident.
Every parameter has a distinct random value, weights of normalisations included: ones and zeros hide a
gradient that was never reduced. Among the models are a frozen layer, one that no loss depends on, tied
weights, layers that some batches skip, and a recurrent one.

A `Workload` is everything one training run needs, built alike in every process that calls its builder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, final

import attrs
import torch
import torch.nn.functional as F
from torch import nn

__all__ = [
    "GPT",
    "MLP",
    "MODELS",
    "Branches",
    "ConvNet",
    "Recurrent",
    "TokenLoss",
    "Workload",
    "build_workload",
    "randomise",
]

OptimizerName = Literal["adamw", "sgd", "adafactor"]
DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}

FEATURES, CLASSES = 7, 3
VOCABULARY, WIDTH, HEADS, LENGTH = 41, 24, 3, 6


@final
@attrs.frozen(kw_only=True, eq=False)
class Workload:
    """A training run: what a script would have before its loop.

    Attributes:
        model: The serial model.
        optimizer: Over its parameters, in two groups.
        batches: Global batches ``(inputs, target)``, one for each step; dim 0 of every tensor is the sample.
        criterion: ``criterion(outputs, target)``: the mean over samples, or over tokens that count.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Sequence[tuple[Any, torch.Tensor]]
    criterion: Callable[..., torch.Tensor]


class MLP(nn.Module):
    """A perceptron whose first layer is frozen and whose last one nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, 11)
        self.hidden = nn.Linear(11, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, CLASSES)
        self.unused = nn.Linear(5, 13)
        self.frozen.requires_grad_(False)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 7]`` to ``[batch, 3]``."""
        hidden = torch.tanh(self.hidden(torch.tanh(self.frozen(samples))))
        outputs: torch.Tensor = self.head(self.norm(hidden))
        return outputs


class Branches(nn.Module):
    """Two branches; each sample says which one it takes, so a rank, or a whole step, may skip one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, 5)
        self.branches = nn.ModuleList(nn.Linear(5, CLASSES) for _ in range(2))

    def forward(self, samples: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 7]`` and branch numbers ``[batch]`` to ``[batch, 3]``."""
        hidden = torch.tanh(self.stem(samples))
        outputs = hidden.new_zeros(len(samples), CLASSES)
        for number, branch in enumerate(self.branches):
            rows = (which == number).nonzero().flatten()
            if len(rows):
                outputs = outputs.index_add(0, rows, branch(hidden[rows]))
        return outputs


class ConvNet(nn.Module):
    """Two convolutions with group normalisation, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.GroupNorm(3, 6)
        self.second = nn.Conv2d(6, 5, 3, stride=2, bias=False)
        self.head = nn.Linear(5 * 2 * 2, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 2, 6, 6]`` to ``[batch, 3]``."""
        hidden = F.gelu(self.norm(self.first(images)))
        outputs: torch.Tensor = self.head(torch.tanh(self.second(hidden)).flatten(1))
        return outputs


class Recurrent(nn.Module):
    """Two LSTM layers, whose weights torch keeps in one flat buffer of its own on accelerators."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, time, 7]`` to ``[batch, 3]``."""
        hidden, _ = self.lstm(series)
        outputs: torch.Tensor = self.head(hidden[:, -1])
        return outputs


class Block(nn.Module):
    """A pre-norm transformer block with a fused qkv."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 2)
        self.down = nn.Linear(2 * width + 2, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, time, width]`` to the same shape."""
        batch, time, width = hidden.shape
        qkv = self.qkv(self.norm1(hidden)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        outputs: torch.Tensor = hidden + self.down(F.gelu(self.up(self.norm2(hidden))))
        return outputs


class GPT(nn.Module):
    """A decoder-only model; tied, embedding and head share their weight."""

    def __init__(
        self,
        *,
        is_tied: bool = False,
        num_blocks: int = 2,
        vocabulary: int = VOCABULARY,
        width: int = WIDTH,
        heads: int = HEADS,
        length: int = LENGTH,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map token numbers ``[batch, time]`` to logits ``[batch, time, vocabulary]``."""
        hidden = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        outputs: torch.Tensor = self.head(self.norm(hidden))
        return outputs


class TokenLoss(nn.CrossEntropyLoss):
    """Cross entropy over the tokens of ``[batch, time, vocabulary]``; targets of -100 do not count."""

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the mean over tokens that count."""
        return super().forward(logits.flatten(0, 1), target.flatten())


def _tied_gpt() -> nn.Module:
    """Make a GPT whose head is its embedding."""
    return GPT(is_tied=True)


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "branches": Branches,
    "convnet": ConvNet,
    "gpt": GPT,
    "gpt-tied": _tied_gpt,
    "lstm": Recurrent,
    "mlp": MLP,
}
"""The reference models by name."""


def build_workload(
    name: str,
    *,
    dtype: str = "float64",
    optimizer: OptimizerName = "adamw",
    num_samples: int = 12,
    num_steps: int = 5,
    ignores_some: bool = False,
) -> Workload:
    """Build one of the reference runs; equal arguments give equal bits in every process.

    Args:
        name: A key of `MODELS`.
        dtype: ``"float64"`` or ``"float32"``: of parameters and floating inputs.
        optimizer: ``"adamw"`` with weight decay on matrices, ``"sgd"`` with momentum, or ``"adafactor"``,
            which needs whole parameters.
        num_samples: Size of the global batch; 12 divides by 1, 2, 3 and 4.
        num_steps: Number of batches.
        ignores_some: Whether some targets of the token models are -100, more of them in later samples, so
            that equal numbers of samples weigh differently.
    """
    model = MODELS[name]().to(DTYPES[dtype])
    randomise(model, seed=7)
    source = torch.Generator().manual_seed(11)
    batches = [
        _make_batch(
            name,
            step,
            num_samples=num_samples,
            dtype=DTYPES[dtype],
            source=source,
            ignores_some=ignores_some,
        )
        for step in range(num_steps)
    ]
    criterion = TokenLoss() if name.startswith("gpt") else nn.MSELoss()
    return Workload(
        model=model, optimizer=_make_optimizer(model, optimizer), batches=batches, criterion=criterion
    )


def randomise(model: nn.Module, *, seed: int) -> None:
    """Give every parameter and floating buffer a random value of its own; norm weights lie around one.

    Args:
        model: Changed in place; frozen parameters too.
        seed: Equal seeds give equal values, whatever the order of construction or the global generator.
    """
    source = torch.Generator().manual_seed(seed)
    norms = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - no public base
    around_one = {id(module.weight) for module in model.modules() if isinstance(module, norms)}
    with torch.no_grad():
        for parameter in model.parameters():
            fan_in = parameter[0].numel() if parameter.dim() > 1 and len(parameter) else parameter.numel()
            spread = 0.2 if parameter.dim() < 2 or not fan_in else fan_in**-0.5
            values = torch.randn(parameter.shape, generator=source, dtype=torch.float64) * spread
            parameter.copy_(values + 1 if id(parameter) in around_one else values)


def _make_optimizer(model: nn.Module, name: OptimizerName) -> torch.optim.Optimizer:
    """Make an optimizer over two groups that differ in everything; frozen parameters are in them too."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    first: dict[str, Any] = {"params": matrices, "weight_decay": 0.1}
    second: dict[str, Any] = {"params": vectors, "weight_decay": 0.0, "lr": 0.02}
    match name:
        case "adamw":
            return torch.optim.AdamW([first, second], lr=0.01, betas=(0.8, 0.95))
        case "sgd":
            return torch.optim.SGD([first, {**second, "momentum": 0.8}], lr=0.05, momentum=0.9)
        case "adafactor":
            return torch.optim.Adafactor([first, second], lr=0.01)


def _make_batch(
    name: str, step: int, *, num_samples: int, dtype: torch.dtype, source: torch.Generator, ignores_some: bool
) -> tuple[Any, torch.Tensor]:
    """Make the global batch of one step."""

    def draw(*shape: int) -> torch.Tensor:
        """Return random numbers for each sample."""
        return torch.randn(num_samples, *shape, generator=source, dtype=torch.float64).to(dtype)

    if name.startswith("gpt"):
        ids = torch.randint(0, VOCABULARY, (num_samples, LENGTH + 1), generator=source)
        target = ids[:, 1:].clone()
        if ignores_some:
            for sample in range(num_samples):
                target[sample, : sample * LENGTH // num_samples] = -100
        return ids[:, :-1].contiguous(), target
    if name == "branches":
        # First both, then one, then the other, then a minority: a branch may be missing on a rank, or on all.
        thirds = [num_samples // 2, num_samples, 0, num_samples - num_samples // 4]
        which = (torch.arange(num_samples) >= thirds[step % len(thirds)]).long()
        return (draw(FEATURES), which), draw(CLASSES)
    shapes = {"convnet": (2, 6, 6), "lstm": (4, FEATURES), "mlp": (FEATURES,)}
    return draw(*shapes[name]), draw(CLASSES)
