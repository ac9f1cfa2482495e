"""A vision transformer written as those of timm: cut, exact, and divided along an odd number of tokens."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from torch import nn

from colossal_core import Booster
from colossal_tensor_parallel import TensorParallel, explain
from colossal_testkit.models import Workload, build_workload, randomise
from colossal_testkit.parity import Recipe, check_parity
from colossal_testkit.ranks import run_ranks

from .registries import make_registry

SIDE, PATCH, WIDTH, HEADS, CLASSES, BATCH = 28, 2, 24, 12, 5, 4
"""14 x 14 patches and the token of the class: 197, a prime."""


class Attention(nn.Module):
    """Queries, keys and values out of one layer, taken apart by their place."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.scale, self.fused_attn = self.head_dim**-0.5, True
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, tokens, width]`` to the same shape."""
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        mixed = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        x = mixed.transpose(1, 2).reshape(batch, tokens, WIDTH if mixed.shape[1] == HEADS else -1)
        outputs: torch.Tensor = self.proj_drop(self.proj(x))
        return outputs


class LayerScale(nn.Module):
    """Scales each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map any shape to itself."""
        return x * self.gamma


class DropPath(nn.Module):
    """Leaves out what a block adds, for some of the samples."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map any shape to itself."""
        if self.rate == 0.0 or not self.training:
            return x
        kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * kept.div_(1 - self.rate)


class Block(nn.Module):
    """Norm, attention, scale, perhaps nothing; norm, perceptron, scale, perhaps nothing."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.fc1, self.fc2 = Attention(), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.ls1, self.ls2 = LayerScale(), LayerScale()
        self.drop_path1, self.drop_path2 = DropPath(rate), DropPath(rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, tokens, width]`` to the same shape."""
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        outputs: torch.Tensor = x + self.drop_path2(self.ls2(self.fc2(F.gelu(self.fc1(self.norm2(x))))))
        return outputs


class VisionTransformer(nn.Module):
    """Patches, a token for the class, positions, blocks, and a head that reads one token or all."""

    def __init__(self, *, pools: str = "token", rate: float = 0.0) -> None:
        super().__init__()
        self.img_size, self.pools = SIDE, pools
        self.patch_embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, (SIDE // PATCH) ** 2 + 1, WIDTH))
        self.blocks = nn.Sequential(Block(rate), Block(rate))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 3, 28, 28]`` to ``[batch, classes]``."""
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        x = self.norm(self.blocks(x))
        logits: torch.Tensor = self.head(x[:, 0] if self.pools == "token" else x[:, 1:].mean(1))
        return logits


def make_images(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and classes."""
    source = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, SIDE, SIDE, generator=source, dtype=torch.float64)
    return images, torch.randint(0, CLASSES, (BATCH,), generator=source)


def build(**options: Any) -> Workload:
    """Return three steps of training."""
    model = VisionTransformer(**options).double()
    randomise(model, seed=5)
    # Gradients of positions are tiny, that of the bias of keys is rounding: a small eps would amplify both.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)
    work = build_workload("mlp", num_steps=3)
    batches = [make_images(step) for step in range(3)]
    return evolve(work, model=model, optimizer=optimizer, batches=batches, criterion=nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    ("nproc", "pools", "sequence"),
    [
        (2, "token", False),
        (3, "token", True),
        (4, "all", True),
        *(pytest.param(n, "all", s, marks=pytest.mark.slow) for n in (2, 3) for s in (False, True)),
    ],
)
def test_training_equals_one_process(nproc: int, pools: str, *, sequence: bool) -> None:
    """197 tokens divide among no number of ranks; norms of heads have shares of their gradients."""
    piece = TensorParallel(degree=nproc, sequence=sequence)

    check_parity(
        Recipe(builder=build, arguments={"pools": pools}), nproc=nproc, pieces=[piece], registry=make_registry
    )


def test_blocks_are_cut_by_heads_and_divided_from_row_to_row() -> None:
    """Scales and norms act on the pieces; only the head, which reads one token, wants the whole."""
    found = explain(VisionTransformer(rate=0.1), 4, sequence=True)

    decisions = {row.module: row.decision for row in found.rows}
    assert decisions["blocks.0.attn.qkv"] == decisions["blocks.1.fc1"] == "column"
    assert decisions["blocks.0.attn.proj"] == decisions["blocks.1.fc2"] == "row"
    assert len(found.divided) == 4
    assert {"blocks.1.norm2.weight", "blocks.0.ls1.gamma"} <= set(found.shared)
    assert all("(getitem)" in place or "__getitem__" in place for place in found.gathered), found.gathered


def leave_out(degree: int, *, sequence: bool) -> tuple[list[float], int]:
    """Return losses with blocks left out for some samples, and the number of gathers in a step."""
    pieces = [TensorParallel(degree=degree, sequence=sequence)] if degree > 1 else []
    booster = Booster(*pieces, precision="fp64", registry=make_registry())
    work = build(rate=0.4)
    model, optimizer = booster.boost(work.model, work.optimizer)
    losses = []
    for images, target in work.batches:
        loss = F.cross_entropy(model(images), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, sum(transfer.op == "all_gather" for transfer in booster.last_traffic)


@functools.lru_cache(maxsize=1)
def serial_losses() -> list[float]:
    """Return the losses of one process with the same random numbers."""
    return run_ranks(leave_out, 1, 1, sequence=False)[0][0]


@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_left_out_is_left_out_on_all_ranks(*, sequence: bool) -> None:
    """Random numbers of common and of divided values are those of one process, and cost no messages."""
    ranks = run_ranks(leave_out, 2, 2, sequence=sequence)

    for losses, num_gathers in ranks:
        assert losses == pytest.approx(serial_losses(), rel=1e-10)
        # Each of four pairs gathers in forward, and in backward twice; and the head.
        assert num_gathers == 1 or (sequence and num_gathers <= 4 * 3 + 1)
