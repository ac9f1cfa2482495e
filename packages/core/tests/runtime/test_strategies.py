"""What later packages need of the table, proven by strategies that somebody else could have written.

Each strategy cuts a small model, which trains for three AdamW steps with clipping in fp64 on gloo ranks. Losses,
gradient norms, weights and optimizer states, put together from the two books, equal those of one process to 1e-10.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from colossal_core.errors import NonFiniteError
from colossal_core.mesh import GroupSpec
from colossal_core.plugins import Registry
from colossal_core.runtime.booster import Booster
from colossal_core.runtime.cover import HeldEntry, find_cover_problems, held_entries
from colossal_core.runtime.table import Key, Place
from colossal_testkit.engine import engine_of
from colossal_testkit.models import TokenLoss, Workload, randomise
from colossal_testkit.parity import (
    FP64,
    Loop,
    Recipe,
    Slab,
    Trace,
    boost_workload,
    check_parity,
    compare_traces,
    reference_trace,
    share_of,
    train_serial,
)
from colossal_testkit.ranks import run_ranks, run_ranks_expecting_errors
from colossal_testkit.registry import isolated_registry
from colossal_testkit.traffic import all_reduce_words, gather_words, measure_traffic

from .third_party_cube import CUBE, TwoLayers
from .third_party_experts import EXPERTS, Mixture
from .third_party_stages import STAGES, TiedChain
from .third_party_tensor import FUSED_QKV, SEQUENCE_REGION, UNEVEN_FEATURES, VOCABULARY, Attention

NUM_STEPS, NUM_SAMPLES = 3, 8


def make_registry() -> Registry:
    """Return a registry with the strategies of these tests."""
    return isolated_registry(
        CUBE, EXPERTS, FUSED_QKV, SEQUENCE_REGION, STAGES, UNEVEN_FEATURES, VOCABULARY, plugin="third-party"
    )


# --- models -----------------------------------------------------------------------------------------------------


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
    "chain": lambda: TiedChain(11, 6, 3),
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


# --- cases ------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Case:
    """One strategy on one layout.

    Attributes:
        name: For test ids.
        model: Key of `MODELS`.
        piece: Name of the strategy.
        options: Its options.
        nproc: Number of ranks.
        untouched: Parameters that no loss depends on.
        poisoned: Rank and parameter for a gradient that is not finite.
    """

    name: str
    model: str
    piece: str
    options: Mapping[str, int]
    nproc: int
    untouched: tuple[str, ...] = ()
    poisoned: tuple[int, str]

    def recipe(self, loop: Loop = "plain") -> Recipe:
        """Return the run; its bound clips the gradients of every model here in every step."""
        return Recipe(builder=build, arguments={"name": self.model}, loop=loop, max_grad_norm=0.05)

    @property
    def settings(self) -> dict[str, object]:
        """Keywords of the Booster."""
        return {"plan": {"pieces": {self.piece: dict(self.options)}}}


UNUSED = tuple(f"unused.{part}.{kind}" for part in ("qkv", "out") for kind in ("weight", "bias"))
UNUSED_NORM = ("unused_norm.weight", "unused_norm.bias")

CASES = (
    Case(
        name="qkv-2",
        model="reader",
        piece="fused-qkv",
        options={"degree": 2},
        nproc=2,
        untouched=UNUSED,
        poisoned=(1, "attention.qkv.weight"),
    ),
    Case(
        name="qkv-4-shared-kv",
        model="reader",
        piece="fused-qkv",
        options={"degree": 4},
        nproc=4,
        untouched=UNUSED,
        poisoned=(2, "attention.qkv.bias"),
    ),
    Case(
        name="qkv-2-one-kv-x-data-2",
        model="multi-query reader",
        piece="fused-qkv",
        options={"degree": 2},
        nproc=4,
        untouched=UNUSED,
        poisoned=(3, "attention.out.weight"),
    ),
    Case(
        name="stages-2-x-data-2",
        model="chain",
        piece="stages",
        options={"degree": 2},
        nproc=4,
        poisoned=(0, "embedding.weight"),
    ),
    Case(
        name="stages-3",
        model="chain",
        piece="stages",
        options={"degree": 3},
        nproc=3,
        poisoned=(1, "layers.1.weight"),
    ),
    Case(
        name="experts-2-x-expert-data-2",
        model="mixture",
        piece="experts",
        options={"degree": 2},
        nproc=4,
        poisoned=(1, "experts.up"),
    ),
    Case(
        name="experts-2",
        model="mixture",
        piece="experts",
        options={"degree": 2},
        nproc=2,
        poisoned=(0, "experts.down"),
    ),
    Case(
        name="sequence-3",
        model="reader",
        piece="sequence-region",
        options={"degree": 3},
        nproc=3,
        untouched=(*UNUSED, *UNUSED_NORM),
        poisoned=(2, "norm.weight"),
    ),
    Case(
        name="sequence-2-x-data-2",
        model="reader",
        piece="sequence-region",
        options={"degree": 2},
        nproc=4,
        untouched=(*UNUSED, *UNUSED_NORM),
        poisoned=(0, "last_norm.bias"),
    ),
    Case(
        name="features-3",
        model="normalised",
        piece="uneven-features",
        options={"degree": 3},
        nproc=3,
        poisoned=(2, "norm.bias"),
    ),
    Case(
        name="cube",
        model="two layers",
        piece="cube",
        options={"side": 2},
        nproc=8,
        poisoned=(5, "up.weight"),
    ),
)

each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@pytest.mark.parametrize("loop", ["plain", "forward_backward"])
@each_case
def test_training_equals_one_process(case: Case, loop: Loop) -> None:
    """Losses, gradient norms and weights are those of one process, whatever is cut, in both loops."""
    check_parity(
        case.recipe(loop), nproc=case.nproc, settings=case.settings, registry=make_registry, tolerance=FP64
    )
