"""The GPT that benchmarks train, its batches, and what is alive: the same for every system."""

from __future__ import annotations

import gc

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["BATCH", "GPT", "SEQUENCE", "VOCABULARY", "live_bytes", "loss_of", "make_batch"]

VOCABULARY, SEQUENCE, BATCH, HEAD_WIDTH = 512, 128, 4, 64


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        """Build the layers."""
        super().__init__()
        self.norm1, self.qkv, self.proj = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.norm2, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, sequence, width]`` to the same shape."""
        b, t, d = x.shape
        heads = d // HEAD_WIDTH
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, heads, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, d))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """A decoder-only language model."""

    def __init__(self, width: int = 384, layers: int = 8) -> None:
        """Build the layers."""
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids ``[batch, sequence]`` to logits ``[batch, sequence, vocabulary]``."""
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def make_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random ids and the ids that follow them, each ``[batch, sequence]``."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, computed in fp32 by every system."""
    return F.cross_entropy(logits.float().reshape(-1, VOCABULARY), target.reshape(-1))


def live_bytes() -> int:
    """Return the bytes of every tensor storage that Python can reach, each counted once."""
    gc.collect()
    storages: dict[int, int] = {}
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    for tensor in [*tensors, *gradients]:
        local = getattr(tensor, "_local_tensor", tensor)  # what a DTensor holds on this rank
        try:
            storage = local.untyped_storage()
        except (NotImplementedError, RuntimeError):  # wrappers without memory
            continue
        if storage.device.type != "meta":
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
