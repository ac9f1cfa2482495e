"""Train an encoder-decoder in stages: ``colossal run --nproc 2 examples/reverse_digits.py``.

Its task is to write a row of digits backwards. Stages run the model's own forward, so what the encoder
returns goes to every decoder block, on whatever process that is. Without ``--plan`` the modules are timed on
this machine first, and cut so that the slowest stage is as fast as possible. Shapes: B rows, T digits, D
width, V symbols.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossal_core import Booster, launch
from colossal_pipeline import Pipeline

DIGITS, START, LENGTH, WIDTH, LAYERS = 10, 10, 8, 64, 2
ROWS, MICROBATCHES = 64, 4


class Reverser(nn.Module):
    """Read digits in any order, and write them one after another; blocks are those of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(DIGITS + 1, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.readers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.writers = nn.ModuleList(
            nn.TransformerDecoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, DIGITS)

    def forward(self, read_BT: Tensor, written_BT: Tensor) -> Tensor:
        """Return logits [B, V, T] of the digit at each place, given all that was read and what is written."""
        places_TD = self.places(torch.arange(LENGTH, device=read_BT.device))
        memory_BTD = self.symbols(read_BT) + places_TD
        for block in self.readers:
            memory_BTD = block(memory_BTD)
        later_TT = torch.full((LENGTH, LENGTH), -torch.inf, device=read_BT.device).triu(1)
        x_BTD = self.symbols(written_BT) + places_TD
        for block in self.writers:
            x_BTD = block(x_BTD, memory_BTD, tgt_mask=later_TT)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV.transpose(1, 2)


def draw_rows(generator: torch.Generator, num_rows: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return rows of digits with what is written before each place, and the digits to write."""
    read_BT = torch.randint(DIGITS, (num_rows, LENGTH), generator=generator)
    target_BT = read_BT.flip(1)
    start_B1 = torch.full((num_rows, 1), START)
    return (read_BT, torch.cat([start_B1, target_BT[:, :-1]], 1)), target_BT


def main() -> None:
    """Train, and count the digits that are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, help="TOML file that says how to distribute")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    launch()
    torch.manual_seed(0)
    model, source = Reverser(), torch.Generator().manual_seed(0)
    if options.plan:
        booster = Booster(plan=options.plan)
    else:
        piece = Pipeline(degree=2, microbatches=MICROBATCHES, schedule="1f1b")
        fit = piece.fit(model, draw_rows(source, ROWS // MICROBATCHES), F.cross_entropy)
        booster = Booster(fit.piece, max_grad_norm=1.0)
        booster.print(fit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = booster.boost(model, optimizer)

    for step in range(1, options.steps + 1):
        batch = draw_rows(source, ROWS)  # processes of one pipeline draw the same
        loss = booster.forward_backward(model, batch, F.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == options.steps:
            booster.print(f"step {step}: loss {loss.item():.3f}")

    (inputs, target_BT) = draw_rows(source, 256)
    _, logits_BVT = booster.evaluate(model, (inputs, target_BT), F.cross_entropy, return_outputs=True)
    right = (logits_BVT.argmax(1) == target_BT).float().mean().item()
    booster.print(f"{right:.0%} of the digits are right")


if __name__ == "__main__":
    main()
