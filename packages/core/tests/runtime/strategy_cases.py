"""Models, strategies and layouts: what `test_strategies` goes through."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch
from torch import nn

from colossal_core.plugins import Registry
from colossal_testkit.models import TokenLoss, Workload, randomise
from colossal_testkit.parity import Loop, Recipe
from colossal_testkit.registry import isolated_registry
from colossal_testkit.traffic import all_reduce_words, gather_words

from .third_party_cube import CUBE, TwoLayers
from .third_party_experts import EXPERTS, Mixture
from .third_party_stages import STAGES, TiedChain
from .third_party_tensor import FUSED_QKV, SEQUENCE_REGION, UNEVEN_FEATURES, Attention
from .third_party_vocabulary import VOCABULARY

__all__ = ["BOUND", "CASES", "NUM_SAMPLES", "Case", "build", "make_registry"]

BOUND = 0.05
"""Bound of the gradient norm, which clips every step of every model here."""

NUM_STEPS, NUM_SAMPLES = 3, 8


def make_registry() -> Registry:
    """Return a registry with the strategies of these tests."""
    return isolated_registry(
        CUBE, EXPERTS, FUSED_QKV, SEQUENCE_REGION, STAGES, UNEVEN_FEATURES, VOCABULARY, plugin="third-party"
    )


# --- models -------------------------------------------------------------------------------------------------


class Reader(nn.Module):
    """A small language model, with an attention and a normalisation that no loss depends on."""

    def __init__(self, num_kv_heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 10)
        self.norm = nn.LayerNorm(10)
        self.attention = Attention(10, 4, num_kv_heads, 3)
        self.last_norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 11)
        self.unused = Attention(10, 4, num_kv_heads, 3)
        self.unused_norm = nn.LayerNorm(10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map token numbers ``[batch, time]`` to logits ``[batch, time, 11]``."""
        hidden = self.tokens(ids)
        hidden = hidden + self.attention(self.norm(hidden))
        logits: torch.Tensor = self.head(self.last_norm(hidden))
        return logits


class Normalised(nn.Module):
    """A layer whose seven features go through batch normalisation, and one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.leave = nn.Linear(7, 3)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 5]`` to ``[batch, 3]``."""
        outputs: torch.Tensor = self.leave(torch.tanh(self.norm(self.wide(samples))))
        return outputs


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "chain": lambda: TiedChain(12, 6, 3),
    "mixture": lambda: Mixture(6, 4),
    "multi-query reader": lambda: Reader(1),
    "normalised": Normalised,
    "reader": lambda: Reader(2),
    "two layers": lambda: TwoLayers(8, 12, 4),
}


def build(name: str) -> Workload:
    """Return the training run of a model, in fp64, with weight decay on everything."""
    model = MODELS[name]().double()
    randomise(model, seed=3)
    source = torch.Generator().manual_seed(5)
    batches = [_make_batch(name, source) for _ in range(NUM_STEPS)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    takes_tokens = name.endswith("reader") or name == "chain"
    criterion = TokenLoss() if takes_tokens else nn.MSELoss()
    return Workload(model=model, optimizer=optimizer, batches=batches, criterion=criterion)


def _make_batch(name: str, source: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global batch of one step."""
    if name.endswith("reader") or name == "chain":
        ids = torch.randint(0, 11, (NUM_SAMPLES, 7), generator=source)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    num_inputs, num_outputs = (8, 4) if name == "two layers" else (5, 3)
    samples = torch.randn(NUM_SAMPLES, num_inputs, generator=source, dtype=torch.float64)
    return samples, torch.randn(NUM_SAMPLES, num_outputs, generator=source, dtype=torch.float64)


# --- cases --------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Case:
    """One strategy on one layout.

    Attributes:
        name: For test ids.
        model: Key of `MODELS`.
        pieces: Names of strategies, with their options.
        nproc: Number of ranks.
        untouched: Parameters that no loss depends on.
        poisoned: Rank and parameter for a gradient that is not finite.
        volumes: Words that a rank receives in each step by the strategies' own phases, as formulas say.
    """

    name: str
    model: str
    pieces: Mapping[str, Mapping[str, int]]
    nproc: int
    untouched: tuple[str, ...] = ()
    poisoned: tuple[int, str]
    volumes: Mapping[str, float]

    def recipe(self, loop: Loop = "plain") -> Recipe:
        """Return the run; its bound clips the gradients of every model here in every step."""
        return Recipe(builder=build, arguments={"name": self.model}, loop=loop, max_grad_norm=BOUND)

    @property
    def settings(self) -> dict[str, object]:
        """Keywords of the Booster."""
        return {"plan": {"pieces": self.pieces}}


UNUSED = tuple(f"unused{part}.{kind}" for part in (".qkv", ".out", "_norm") for kind in ("weight", "bias"))
TIME = 6
"""Tokens of a sample."""


def stage_words(degree: int, num_samples: int) -> float:
    """Return the words of a chain: values are broadcast and gradients summed, behind each module."""
    words = num_samples * TIME * (6 + 3 * 6 + 12)
    return words + all_reduce_words(words, degree)


def vocabulary_words(degree: int, num_samples: int) -> float:
    """Return the words of a divided vocabulary: hidden states are summed twice, and logits gathered."""
    tokens = num_samples * TIME
    return 2 * all_reduce_words(tokens * 6, degree) + gather_words(tokens * 12, degree)


def expert_words(degree: int, num_tokens: int) -> float:
    """Return the words of experts that see some tokens: these and their choices, outputs, and gradients."""
    return gather_words(4 * num_tokens * 6 + num_tokens, degree)


def cube_words(q: int, num_inputs: int, hidden: int, num_outputs: int) -> float:
    """Return the words of two layers in three dimensions; the inputs of the first need no gradient.

    Source: (q - 1) / q^3 (MH + HN + MN) for a layer; weights of the second are not gathered.
    """
    m = NUM_SAMPLES
    forward = m * num_inputs + num_inputs * hidden + m * hidden + m * hidden + m * num_outputs
    return (q - 1) / q**3 * (2 * forward - m * num_inputs)


CASES = (
    Case(
        name="qkv-2",
        model="reader",
        pieces={"fused-qkv": {"degree": 2}},
        nproc=2,
        untouched=UNUSED,
        poisoned=(1, "attention.qkv.weight"),
        volumes={"attention": 2 * all_reduce_words(NUM_SAMPLES * TIME * 10, 2)},
    ),
    Case(
        name="qkv-4-shared-kv",
        model="reader",
        pieces={"fused-qkv": {"degree": 4}},
        nproc=4,
        untouched=UNUSED,
        poisoned=(2, "attention.qkv.bias"),
        volumes={"attention": 2 * all_reduce_words(NUM_SAMPLES * TIME * 10, 4)},
    ),
    Case(
        name="qkv-2-one-kv-x-data-2",
        model="multi-query reader",
        pieces={"fused-qkv": {"degree": 2}},
        nproc=4,
        untouched=UNUSED,
        poisoned=(3, "attention.out.weight"),
        volumes={"attention": 2 * all_reduce_words(NUM_SAMPLES // 2 * TIME * 10, 2)},
    ),
    Case(
        name="stages-2-x-data-2",
        model="chain",
        pieces={"stages": {"degree": 2}},
        nproc=4,
        poisoned=(0, "embedding.weight"),
        volumes={"stages": stage_words(2, NUM_SAMPLES // 2)},
    ),
    Case(
        name="stages-3",
        model="chain",
        pieces={"stages": {"degree": 3}},
        nproc=3,
        poisoned=(1, "layers.1.weight"),
        volumes={"stages": stage_words(3, NUM_SAMPLES)},
    ),
    Case(
        name="stages-2-x-vocabulary-2",
        model="chain",
        pieces={"stages": {"degree": 2}, "vocabulary": {"degree": 2}},
        nproc=4,
        poisoned=(3, "embedding.weight"),
        volumes={"stages": stage_words(2, NUM_SAMPLES)},
    ),
    Case(
        name="vocabulary-3-x-data-2",
        model="chain",
        pieces={"vocabulary": {"degree": 3}},
        nproc=6,
        poisoned=(4, "head.bias"),
        volumes={"vocabulary": vocabulary_words(3, NUM_SAMPLES // 2)},
    ),
    Case(
        name="experts-2-x-expert-data-2",
        model="mixture",
        pieces={"experts": {"degree": 2}},
        nproc=4,
        poisoned=(1, "experts.up"),
        volumes={"experts": expert_words(2, NUM_SAMPLES // 2)},
    ),
    Case(
        name="experts-2",
        model="mixture",
        pieces={"experts": {"degree": 2}},
        nproc=2,
        poisoned=(0, "experts.down"),
        volumes={"experts": expert_words(2, NUM_SAMPLES)},
    ),
    Case(
        name="sequence-3",
        model="reader",
        pieces={"sequence-region": {"degree": 3}},
        nproc=3,
        untouched=UNUSED,
        poisoned=(2, "norm.weight"),
        volumes={"sequence": 4 * gather_words(NUM_SAMPLES * TIME * 10, 3)},
    ),
    Case(
        name="sequence-2-x-data-2",
        model="reader",
        pieces={"sequence-region": {"degree": 2}},
        nproc=4,
        untouched=UNUSED,
        poisoned=(0, "last_norm.bias"),
        volumes={"sequence": 4 * gather_words(NUM_SAMPLES // 2 * TIME * 10, 2)},
    ),
    Case(
        name="features-3",
        model="normalised",
        pieces={"uneven-features": {"degree": 3}},
        nproc=3,
        poisoned=(2, "norm.bias"),
        volumes={"features": all_reduce_words(NUM_SAMPLES * 7, 3)},
    ),
    Case(
        name="cube",
        model="two layers",
        pieces={"cube": {"side": 2}},
        nproc=8,
        poisoned=(5, "up.weight"),
        volumes={"cube": cube_words(2, 8, 12, 4), "border": all_reduce_words(NUM_SAMPLES * 4, 8)},
    ),
)
