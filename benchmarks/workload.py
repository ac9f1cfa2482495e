"""What benchmarks train: one GPT, its batches, and how live bytes are counted; the same for every system.

Shapes: B sequences, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import gc

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["GPT", "Block", "live_bytes", "loss_of", "make_batch"]

VOCABULARY, SEQUENCE, BATCH, HEAD_WIDTH = 512, 128, 4, 64


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        """Build the layers."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Return the stream with what this block adds."""
        qkv = self.qkv(self.norm1(x_BTD)).unflatten(-1, (3, -1, HEAD_WIDTH))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.proj(mixed.transpose(1, 2).flatten(2))
        out_BTD: torch.Tensor = x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))
        return out_BTD


class GPT(nn.Module):
    """A decoder-only language model."""

    def __init__(self, width: int, layers: int) -> None:
        """Build the layers."""
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Map ids to logits ``[B, T, V]``."""
        x_BTD = self.token(ids_BT) + self.position.weight[: ids_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits: torch.Tensor = self.head(self.norm(x_BTD))
        return logits


def make_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random ids and the ids that follow them, each ``[B, T]``."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, computed in fp32 by all systems."""
    return F.cross_entropy(logits.float().reshape(-1, VOCABULARY), target.reshape(-1))


def live_bytes() -> int:
    """Return the bytes of every tensor storage that Python can reach, each counted once."""
    gc.collect()
    storages: dict[int, int] = {}
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    leaves = [tensor for tensor in tensors if not hasattr(tensor, "_local_tensor")]  # a DTensor holds another
    gradients = [tensor.grad for tensor in leaves if tensor.is_leaf and tensor.grad is not None]
    for tensor in [*leaves, *gradients]:
        if tensor.layout is torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
