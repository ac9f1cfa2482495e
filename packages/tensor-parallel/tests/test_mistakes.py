"""What users get wrong is said with numbers on every rank, before anything hangs or drifts apart."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from colossal_core import Booster
from colossal_core.errors import CapabilityError, ColossalError, RankMismatchError, UsageError
from colossal_tensor_parallel import TensorParallel, explain
from colossal_testkit.ranks import run_ranks_expecting_errors

from .registries import make_registry


class Attention(nn.Module):
    """Attention with heads that it counts."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, time, width]`` to the same shape."""
        heads = [f(hidden).unflatten(-1, (self.num_heads, -1)) for f in (self.q, self.k, self.v)]
        mixed = F.scaled_dot_product_attention(*(h.transpose(1, 2) for h in heads))
        outputs: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return outputs


def make_model(num_heads: int = 3) -> nn.Module:
    """Return a small model of two such layers and a perceptron."""
    return nn.Sequential(
        Attention(12, num_heads), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 12), Attention(12, num_heads)
    )


def test_heads_that_do_not_divide_are_refused_with_legal_degrees() -> None:
    """The attribute, its value and what is legal; two features more would not help."""
    with pytest.raises(
        UsageError, match=r"3 heads \(0.num_heads\) of '0' .* 2 ranks; legal degrees are 1, 3"
    ):
        explain(make_model(), 2)


def test_heads_can_be_left_whole_by_pattern() -> None:
    """Then any degree goes: outputs are gathered, and the attention runs with all heads."""
    found = explain(make_model(), 2, plan={"*.q": "gathered-column", "*.out": "gathered-column"})

    assert {row.module: row.decision for row in found.rows} == {
        **{f"{n}.{name}": "gathered-column" for n in (0, 4) for name in ("q", "k", "v", "out")},
        "1": "column",
        "3": "row",
    }


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"*.query": "column"}, "matches none of 10 layers"),
        ({"1": "row"}, "wants '1' to be 'row', which it cannot"),
        ({"1": "column:4"}, "wants '1' to be 'column', which it cannot"),
        ({"3": "vocabulary"}, None),
    ],
)
def test_wishes_that_change_the_numbers_are_refused(plan: Mapping[str, str], text: str | None) -> None:
    """A pattern that matches nothing, and roles that no proof bears out; a head of its own is fine."""
    if text is None:
        assert explain(make_model(4), 2, plan=plan).rows[5].decision == "vocabulary"
        return
    with pytest.raises(UsageError, match=text):
        explain(make_model(4), 2, plan=plan)


class Reader(nn.Module):
    """Reads the weight of its embedding without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 4)
        self.middle = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids to logits."""
        logits: torch.Tensor = self.middle(self.tokens(ids)) @ self.tokens.weight.T
        return logits


def test_weights_that_others_read_stay_whole() -> None:
    """A head written as a product with the embedding's weight would see some rows only."""
    found = explain(Reader(), 2)

    assert found.rows[0].decision == "whole"
    assert found.rows[0].reason == "another module reads its weight"
    assert found.rows[1].decision == "gathered-column"


def test_models_of_which_nothing_can_be_cut_are_refused() -> None:
    """A unit cannot be replaced where it is the whole model."""
    with pytest.raises(CapabilityError, match=r"nothing of this MultiheadAttention can be cut") as caught:
        explain(nn.MultiheadAttention(8, 2), 2)

    assert "leave it out" in caught.value.hint


class Unguessable(nn.Module):
    """Wants an argument that nobody can guess."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)

    def forward(self, hidden: torch.Tensor, how: str) -> torch.Tensor:
        """Map ``[..., 4]`` to ``[..., 6]``."""
        outputs: torch.Tensor = self.inner(hidden) if how.startswith("as") else hidden
        return outputs


def test_forwards_that_cannot_be_run_say_why_and_take_arguments_or_patterns() -> None:
    """The error quotes what the forward said; a batch, or a pattern, helps."""
    with pytest.raises(CapabilityError, match=r"no arguments were found with which it runs \(AttributeError"):
        explain(Unguessable(), 2)

    found = explain(Unguessable(), 2, batch=(torch.ones(2, 4), "as it is"))
    asked = explain(Unguessable(), 2, plan={"inner": "gathered-column"})

    assert found.rows[0].decision == asked.rows[0].decision == "gathered-column"


def call_with_own_batches() -> None:
    """Call the model with another batch on each rank."""
    torch.manual_seed(0)
    model = make_model(4)
    booster = Booster(TensorParallel(degree=2), registry=make_registry())
    model, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.full((2, 3, 12), float(torch.distributed.get_rank())))


def test_different_batches_on_ranks_that_share_layers_are_found() -> None:
    """Sums over ranks would mix samples silently; the first call compares, and all ranks raise."""
    errors = run_ranks_expecting_errors(call_with_own_batches, 2, error=RankMismatchError)

    assert all("different batches" in str(error) for error in errors)


def boost_odd_heads() -> None:
    """Boost a model whose heads do not divide."""
    model = make_model()
    booster = Booster(TensorParallel(degree=2), registry=make_registry())
    booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_illegal_sizes_are_refused_on_every_rank_before_any_collective() -> None:
    """Each rank finds it by itself, with the same words."""
    errors = run_ranks_expecting_errors(boost_odd_heads, 2, error=ColossalError)

    assert all("legal degrees are 1, 3" in str(error) for error in errors)
