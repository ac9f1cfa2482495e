"""Train a GPT whose state is many times the memory that computes: ``colossal run examples/large_gpt.py``.

Parameters, gradients and optimizer state live in host memory, or in files with ``--disk``, and come to the
device layer by layer. Without accelerator a part of host memory stands in for one. Before anything is
allocated a report says whether it fits, and what lives where. Shapes: B sequences, T bytes, D width.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossal_core import Booster, Recompute, launch
from colossal_gemini import Gemini

BATCH, CONTEXT, HEADS = 4, 64, 4


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the stream with what this block adds to it."""
        q, k, v = self.qkv(self.norm1(x_BTD)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.merge(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.narrow(F.gelu(self.widen(self.norm2(x_BTD))))


class GPT(nn.Module):
    """Predict each byte from those before it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        """Return logits [B, 256, T] of the byte after each position."""
        x_BTD = self.bytes(bytes_BT) + self.positions.weight[: bytes_BT.shape[1]]
        return self.head(self.norm(self.blocks(x_BTD))).transpose(1, 2)


def main() -> None:
    """Report, train, and say how much of the device was used."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device-budget", default="48MiB", help="memory that computes")
    parser.add_argument("--host-budget", help="host memory for what does not fit there; default: no limit")
    parser.add_argument("--disk", help="a folder for what does not fit there either")
    parser.add_argument("--plan", type=Path, help="a TOML file instead, such as examples/gemini.toml")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()

    world = launch()
    text = "\n\n".join(topics.values()).encode()
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, CONTEXT + 1, 1)
    torch.manual_seed(0)
    model = GPT(options.width, options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randint(len(windows), (BATCH,))
    gemini = Gemini(device_budget=options.device_budget, host_budget=options.host_budget, disk=options.disk)
    if options.plan is None:
        pair = windows[batch][:, :-1], windows[batch][:, 1:]
        report = gemini.fit(model, pair, criterion=F.cross_entropy, ranks=world.world_size, recompute=True)
        if world.rank == 0:
            print(report)
            report.save("large_gpt.json")
        booster = Booster(gemini, Recompute(), max_grad_norm=1.0)
    else:
        booster = Booster(plan=options.plan)
    model, optimizer = booster.boost(model, optimizer)
    for step in range(1, options.steps + 1):
        batch = torch.randint(len(windows), (BATCH * booster.data_degree,))
        share = windows[batch[booster.data_rank :: booster.data_degree]].to(world.device)
        loss = booster.forward_backward(model, (share[:, :-1], share[:, 1:]), F.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == options.steps:
            booster.print(f"step {step}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
