"""Sequence regions: what lies between cut layers is divided along the tokens, and the numbers stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from torch import nn

from colossal_core import Booster, Recompute
from colossal_core.errors import CapabilityError
from colossal_tensor_parallel import TensorParallel, explain, tracing
from colossal_tensor_parallel.draws import Dice
from colossal_tensor_parallel.regions import solo_wire
from colossal_tensor_parallel.tokens import Lot, SplitTokens, divide_tokens, whole_tokens
from colossal_testkit.models import Workload, build_workload, randomise
from colossal_testkit.parity import Recipe, check_parity
from colossal_testkit.ranks import run_ranks

from .registries import make_registry
from .test_logits import make_wire


class Scaled(nn.Module):
    """Scales each feature, as vision transformers do behind their blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map any shape to itself."""
        return hidden * self.gamma


class Across(nn.Module):
    """Mixes tokens, and has a weight: it must not run on a piece."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Add the mean over tokens to each of them."""
        mixed: torch.Tensor = hidden + hidden.mean(-2, keepdim=True) * self.gain
        return mixed


class Layer(nn.Module):
    """Attention and a perceptron with everything that may stand between cut layers."""

    def __init__(self, width: int, heads: int, *, mixes: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 20), nn.Linear(20, width)
        self.scale, self.gate = Scaled(width), nn.Parameter(torch.ones(width))
        self.across = Across(width) if mixes else nn.Identity()
        self.drop = nn.Dropout(0.0)  # used on features that are cut, and on divided tokens

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, tokens, width]`` to the same shape."""
        batch, tokens, _ = hidden.shape
        normal = self.norm1(hidden)
        q, k, v = (
            layer(normal).view(batch, tokens, self.heads, -1).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        hidden = hidden + self.scale(self.out(mixed))
        hidden = self.across(hidden)
        outputs: torch.Tensor = hidden + self.gate * self.drop(
            self.down(self.drop(F.gelu(self.up(self.norm2(hidden)))))
        )
        return outputs


class Model(nn.Module):
    """Two layers between a table with positions and a head."""

    def __init__(self, *, mixes: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(41, 12), nn.Parameter(torch.zeros(1, 6, 12))
        self.layers = nn.ModuleList(Layer(12, 4, mixes=mixes) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 41)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids to logits."""
        hidden = self.tokens(ids) + self.positions[:, : ids.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def build(*, mixes: bool = False, tokens: int = 6) -> Workload:
    """Return a run of the model on batches of the reference GPT, or on their first tokens."""
    work = build_workload("gpt", num_steps=3)
    model = Model(mixes=mixes).double()
    randomise(model, seed=4)
    batches = [(ids[:, :tokens], target[:, :tokens]) for ids, target in work.batches]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return evolve(work, model=model, optimizer=optimizer, batches=batches)


@pytest.mark.parametrize(
    ("nproc", "changes", "pieces"),
    [
        (2, {}, ()),
        (4, {"mixes": True}, ()),
        (4, {}, (Recompute(blocks=("layers.*",)),)),
        (2, {"tokens": 1}, ()),
    ],
)
def test_divided_sequences_have_the_numbers_of_one_process(
    nproc: int, changes: dict[str, Any], pieces: tuple[object, ...]
) -> None:
    """Six tokens among two and four ranks, recomputed blocks, and one token, of which a rank has none."""
    recipe = Recipe(builder=build, arguments=changes, max_grad_norm=0.5)
    pieces = (TensorParallel(degree=nproc, sequence=True), *pieces)

    check_parity(recipe, nproc=nproc, pieces=pieces, registry=make_registry)


@pytest.mark.parametrize("name", ["gpt", "gpt-tied"])
def test_tables_with_and_without_a_tied_head_are_divided(name: str) -> None:
    """Three ranks, two tokens each; two data ranks besides would change nothing."""
    recipe = Recipe(builder=build_workload, arguments={"name": name}, loop="forward_backward")

    check_parity(recipe, nproc=3, pieces=[TensorParallel(degree=3, sequence=True)], registry=make_registry)


@pytest.mark.parametrize("largest", [tracing.LARGEST_REAL, 0])
def test_what_is_divided_is_explained(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and scales treat tokens by themselves; what mixes them is named, with values or without."""
    monkeypatch.setattr(tracing, "LARGEST_REAL", largest)
    found = explain(Model(mixes=True), 2, sequence=True)

    assert set(found.divided) == {"tokens", *(f"layers.{n}.{row}" for n in (0, 1) for row in ("out", "down"))}
    assert any("layers.0.across (mean)" in text for text in found.gathered)
    assert {"layers.0.norm1.weight", "layers.1.scale.gamma", "layers.0.out.bias"} <= set(found.shared)
    assert not any("across" in name or "gate" in name for name in found.shared)
    assert "divided along the tokens" in str(found)


def test_models_without_tokens_are_refused() -> None:
    """A perceptron has rows, and nobody knows what they are."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 4), nn.Flatten())

    with pytest.raises(CapabilityError, match=r"Sequential cannot be divided along the sequence") as caught:
        explain(model, 2, sequence=True, batch=torch.ones(2, 24))

    assert "leave sequence=True out" in caught.value.hint


class Borrowing(nn.Module):
    """A head that is given a table, and has a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(41))

    def forward(self, hidden: torch.Tensor, table: nn.Embedding) -> torch.Tensor:
        """Map hidden features to logits."""
        return hidden @ table.weight.T + self.bias


class Lender(nn.Module):
    """A model whose head borrows its table."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.first, self.head = nn.Embedding(41, 12), Scaled(12), Borrowing()
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids to logits."""
        hidden = self.first(self.tokens(ids))
        logits: torch.Tensor = self.head(hidden + self.first(self.down(F.gelu(self.up(hidden)))), self.tokens)
        return logits


class Shared(nn.Module):
    """A vector that scales what enters, which is whole, and again what lies between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.first, self.second = nn.Embedding(41, 12), Scaled(12), Scaled(12)
        self.second.gamma = self.first.gamma
        self.up, self.down, self.head = nn.Linear(12, 20), nn.Linear(20, 12), nn.Linear(12, 41)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids to logits."""
        hidden = self.first(self.tokens(ids).flip(1))
        hidden = hidden + self.second(self.down(F.gelu(self.up(hidden))))
        logits: torch.Tensor = self.head(hidden)
        return logits


def build_shared(kind: type[nn.Module]) -> Workload:
    """Return a run of a model whose modules share weights."""
    work = build_workload("gpt", num_steps=3)
    model = kind().double()
    randomise(model, seed=4)
    return evolve(work, model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))


@pytest.mark.parametrize("kind", [Shared, Lender])
def test_weights_that_several_modules_share_are_exact(kind: type[nn.Module]) -> None:
    """One of the modules reads whole sequences, or weights that it does not have: no gradient is a share."""
    recipe = Recipe(builder=build_shared, arguments={"kind": kind})
    piece = TensorParallel(degree=2, sequence=True)

    check_parity(recipe, nproc=2, pieces=[piece], registry=make_registry)


class Dropping(nn.Module):
    """A pair of layers, and dropout of what they add."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 6), nn.Linear(6, 4), nn.Dropout(0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, tokens, 4]`` to what is left of ones."""
        kept: torch.Tensor = self.drop(self.down(F.gelu(self.up(hidden))))
        return kept


def drop_on_ranks() -> tuple[torch.Tensor, float]:
    """Return what is left, and a random number that is drawn behind it."""
    torch.manual_seed(1)
    model = nn.Sequential(Dropping(), nn.Identity())
    booster = Booster(TensorParallel(degree=2, sequence=True), registry=make_registry())
    model, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model(torch.ones(8, 33, 4)), float(torch.rand(()))


def test_dropout_of_tokens_differs_between_ranks_and_leaves_generators_alike() -> None:
    """17 tokens here and 16 there draw other masks, while common random numbers stay common."""
    (left, number), (other, other_number) = run_ranks(drop_on_ranks, 2)

    first, second = left[:, :16] != 0, left[:, 17:] != 0
    assert torch.equal(left, other)
    assert number == other_number
    assert 0.4 < float((first == second).float().mean()) < 0.6


def use_pieces() -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]]:
    """Return value, gradients and gathers of each use of divided tensors on this rank."""
    wire = make_wire()
    found = {}
    for name, (use, _) in USES.items():
        hidden, weight = make_numbers()
        with wire.collectives.ledger.recording() as transfers:
            divided = divide_tokens(hidden, Lot(wire, Dice(wire.group.index)))
            value = whole_tokens(use(divided, weight))
            num_gathers = sum(transfer.op == "all_gather" for transfer in transfers)
        (value * torch.arange(value.numel()).view(value.shape)).sum().backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        found[name] = (value.detach(), hidden.grad, weight.grad, num_gathers)
    return found


def make_numbers() -> tuple[torch.Tensor, torch.Tensor]:
    """Return activations and a vector."""
    source = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(shape, generator=source).double() for shape in ((2, 5, 4), (4,)))
    return hidden.requires_grad_(), weight.requires_grad_()


USES: dict[str, tuple[Any, int]] = {
    "scaled": (lambda h, w: (h * 2 + 1) * w, 1),
    "residual": (lambda h, w: h + torch.tanh(h) * w - h / 3, 1),
    "with the whole": (lambda h, w: h + torch.ones(2, 5, 4).double() * w, 1),
    "norm": (lambda h, w: F.layer_norm(h, (4,), w, w), 1),
    "same shape": (lambda h, w: h.view(2, -1, h.shape[-1])[:, :].to(torch.float64) * w, 1),
    "in place": (lambda h, w: (h * w).add_(1).mul_(2), 1),
    "last token": (lambda h, w: h[:, -1] * w, 1),
    "mean": (lambda h, w: h.mean(1) * w, 1),
    "flat": (lambda h, w: (h.reshape(-1, 4) @ w).view(2, h.size(1)), 1),
    "softmax": (lambda h, w: (h * w).softmax(1), 1),
    "joined features": (lambda h, w: torch.cat([h, h * w], -1), 2),
}
"""Uses of activations and a weight, and how many gathers they cost with that of the result."""


@pytest.mark.parametrize("nproc", [2, 3])
def test_uses_of_divided_activations_equal_those_of_the_whole(nproc: int) -> None:
    """Values and gradients agree, of the activations and of what all tokens read."""
    ranks = run_ranks(use_pieces, nproc)

    for name, (use, num_gathers) in USES.items():
        hidden, weight = make_numbers()
        value = use(hidden, weight)
        (value * torch.arange(value.numel()).view(value.shape)).sum().backward()
        for found in ranks:
            assert torch.allclose(found[name][0], value), name
            for mine, leaf in zip(found[name][1:3], (hidden, weight), strict=True):
                assert leaf.grad is not None
                assert torch.allclose(mine, leaf.grad), name
            assert found[name][3] == num_gathers, name


def test_shapes_are_those_of_the_whole_and_printing_is_local() -> None:
    """Code that asks for the number of tokens gets it."""
    cut = SplitTokens.of(torch.ones(2, 3, 4), Lot(solo_wire(), Dice(0)), 7)

    assert cut.shape == cut.size() == (2, 7, 4)
    assert (cut.size(-2), cut.shape[1], cut.numel(), len(cut), cut.dim()) == (7, 7, 56, 2, 3)
    assert repr(cut).startswith("SplitTokens((2, 7, 4), here tensor(")
