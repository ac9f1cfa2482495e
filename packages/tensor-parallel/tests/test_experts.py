"""Stacked experts: what is cut, what stays whole, and that ranks have the numbers of one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from torch import nn

from colossal_tensor_parallel import TensorParallel, explain
from colossal_testkit.models import Workload, build_workload, randomise
from colossal_testkit.parity import Recipe, check_parity

from .registries import make_registry


class Experts(nn.Module):
    """Experts whose gates and values lie one behind the other, or in turn."""

    def __init__(self, width: int, hidden: int, *, in_turn: bool, adds: bool) -> None:
        super().__init__()
        self.hidden, self.in_turn = hidden, in_turn
        self.gate_up = nn.Parameter(torch.empty(3, width, 2 * hidden))
        self.gate_up_bias = nn.Parameter(torch.empty(3, 2 * hidden))
        self.down = nn.Parameter(torch.empty(3, hidden, width))
        self.down_bias = nn.Parameter(torch.empty(3, width)) if adds else None

    def forward(self, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Map ``[tokens, width]`` and weights ``[tokens, expert]`` to ``[tokens, width]``."""
        both = torch.einsum("tw,xwh->txh", hidden, self.gate_up) + self.gate_up_bias
        gate, up = (both[..., ::2], both[..., 1::2]) if self.in_turn else both.split(self.hidden, -1)
        found = torch.einsum("txh,xhw->txw", F.silu(gate) * up, self.down)
        found = found if self.down_bias is None else found + self.down_bias
        return torch.einsum("txw,tx->tw", found, weights)


class Routed(nn.Module):
    """A table, routed experts around a residual, and a head."""

    def __init__(self, *, in_turn: bool = False, adds: bool = False) -> None:
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(41, 8), nn.LayerNorm(8), nn.Linear(8, 41)
        self.router = nn.Linear(8, 3)
        self.experts = Experts(8, 7, in_turn=in_turn, adds=adds)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids to logits."""
        hidden = self.tokens(ids)
        flat = self.norm(hidden).flatten(0, 1)
        added = self.experts(flat, self.router(flat).softmax(-1))
        logits: torch.Tensor = self.head(hidden + added.view(hidden.shape))
        return logits


def build(*, in_turn: bool) -> Workload:
    """Return a run on the batches of the reference GPT."""
    work = build_workload("gpt", num_steps=3)
    model = Routed(in_turn=in_turn).double()
    randomise(model, seed=4)
    return evolve(work, model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))


@pytest.mark.parametrize(("nproc", "in_turn", "sequence"), [(2, False, True), (3, True, False)])
def test_stacked_experts_are_cut_and_exact(nproc: int, *, in_turn: bool, sequence: bool) -> None:
    """Seven hidden features of each expert divide unevenly; an integer counts them, or nothing does."""
    rows = explain(Routed(in_turn=in_turn), nproc).rows
    recipe = Recipe(builder=build, arguments={"in_turn": in_turn}, max_grad_norm=0.5)
    piece = TensorParallel(degree=nproc, sequence=sequence)

    assert {row.module: row.decision for row in rows}["experts"] == "experts"
    check_parity(recipe, nproc=nproc, pieces=[piece], registry=make_registry)


def test_biases_that_every_rank_would_add_leave_experts_whole() -> None:
    """They are no summands; everything else is cut."""
    rows = explain(Routed(adds=True), 2).rows

    assert "experts" not in {row.module for row in rows}
