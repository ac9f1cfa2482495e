"""Train a small GPT on the bytes of real text: ``colossal run --nproc 2 examples/train_gpt.py``.

An ordinary PyTorch script; the lines that name ``booster`` distribute it. Without ``--plan`` every process
holds the whole model and takes its share of each batch; a plan cuts the model in other ways, and the numbers
stay the same. Whatever interrupts it, the same command goes on where it was. Shapes: B sequences, T bytes, D
width, V values of a byte.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from tqdm import tqdm

from colossal_core import Booster, launch

CONTEXT, WIDTH, HEADS, LAYERS = 128, 128, 4, 4
BATCH, TOKENS, PEAK_RATE = 16, 16 * CONTEXT, 2.5e-3  # a step's, of all processes together


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the stream with what this block adds to it."""
        q, k, v = self.qkv(self.norm1(x_BTD)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.merge(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.narrow(F.gelu(self.widen(self.norm2(x_BTD))))


class GPT(nn.Module):
    """Predict each byte from those before it; input and output share their embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.bytes.weight
        for table in (self.bytes, self.positions):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        """Return logits [B, V, T], as torch's cross-entropy wants them, of the byte after each position."""
        x_BTD = self.bytes(bytes_BT) + self.positions.weight[: bytes_BT.shape[1]]
        return self.head(self.norm(self.blocks(x_BTD))).transpose(1, 2)


def read_text(file: Path | None) -> tuple[Tensor, Tensor]:
    """Return the bytes to learn from, and the last tenth of the text, which is held out."""
    paragraphs = (paragraph for topic in topics.values() for paragraph in topic.split("\n\n"))
    # Python's topics repeat whole paragraphs. Each counts once, or the held-out text would not be new.
    text = file.read_bytes() if file else "\n\n".join(dict.fromkeys(paragraphs)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def counting_losses(train: Tensor, held_out: Tensor) -> dict[str, float]:
    """Return the losses of models that only count single bytes and pairs of bytes, in nats per byte."""
    unigram = (torch.bincount(train, minlength=256) + 1) / (len(train) + 256)
    pairs = torch.bincount(train[:-1] * 256 + train[1:], minlength=256 * 256).view(256, 256)
    # Rare pairs lean on the unigram by a weight k, the best one for the held-out text: the bigram's favour.
    bigrams = [(pairs + k * unigram) / (pairs.sum(1, keepdim=True) + k) for k in (1, 3, 10, 30, 100)]
    best = min(-bigram[held_out[:-1], held_out[1:]].log().mean().item() for bigram in bigrams)
    return {"unigram": -unigram[held_out[1:]].log().mean().item(), "bigram": best}


def validate(booster: Booster, model: nn.Module, held_out: Tensor) -> float:
    """Return the loss over the held-out text in nats per byte, the same on every process."""
    share = held_out.unfold(0, CONTEXT + 1, CONTEXT)[booster.data_rank :: booster.data_degree]
    return booster.evaluate(model, (share[:, :-1], share[:, 1:]), F.cross_entropy).item()


@torch.no_grad()
def write_text(model: nn.Module, text: Tensor, num_bytes: int) -> str:
    """Let the model continue ``text`` byte by byte; every process draws the same bytes."""
    generator = torch.Generator(text.device).manual_seed(1)
    for _ in range(num_bytes):
        odds = model(text[None, -CONTEXT:])[0, :, -1].div(0.8).softmax(-1)
        text = torch.cat([text, torch.multinomial(odds, 1, generator=generator)])
    return bytes(text[-num_bytes:].tolist()).decode(errors="replace")


def draw(train: list[float], held_out: dict[int, float], counted: dict[str, float]) -> None:
    """Draw losses over steps into train_gpt.png, beside those of the models that count."""
    axes = (figure := Figure(layout="constrained")).subplots()
    axes.plot(train, alpha=0.4, label="training")
    axes.plot(list(held_out), list(held_out.values()), "o-", label="validation")
    axes.hlines(list(counted.values()), 0, len(train), "gray", "dashed", label=" and ".join(counted))
    axes.set(xlabel="step", ylabel="nats per byte")
    axes.legend()
    figure.savefig("train_gpt.png")


def main() -> None:
    """Train, validate, write a sample, and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, help="text to learn; default: Python's own help topics")
    parser.add_argument("--plan", type=Path, help="TOML file that says how to distribute")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--checkpoints", type=Path, default=Path("train_gpt_checkpoints"))
    parser.add_argument("--save-every", type=int, default=25, help="steps between two checkpoints")
    options = parser.parse_args()

    world = launch()
    train, held_out = (data.to(world.device) for data in read_text(options.file))
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = OneCycleLR(optimizer, PEAK_RATE, options.steps + 1, pct_start=0.07, cycle_momentum=False)
    booster = Booster(plan=options.plan, max_grad_norm=1.0)
    model, optimizer, scheduler = booster.boost(model, optimizer, scheduler)

    losses, validation, windows = [], {}, train.unfold(0, CONTEXT + 1, 1)
    order = torch.Generator().manual_seed(0)  # all processes draw the same batch, and each takes its share
    if loaded := booster.load(options.checkpoints, missing_ok=True):
        losses, validation = loaded.extra["losses"], loaded.extra["validation"]
        order.set_state(loaded.extra["order"])
        booster.print(f"going on after step {loaded.step}")

    def state() -> dict[str, Any]:
        """Return what this script itself needs to go on."""
        return {"losses": losses, "validation": validation, "order": order.get_state()}

    booster.save_on_signal(options.checkpoints, extra=state)
    total, done = options.steps * TOKENS, booster.step * TOKENS
    with tqdm(total=total, initial=done, unit="tok", unit_scale=True, disable=world.rank > 0) as bar:
        for step in range(booster.step + 1, options.steps + 1):
            batch = torch.randint(len(windows), (BATCH,), generator=order)
            share = windows[batch[booster.data_rank :: booster.data_degree]]
            loss = booster.forward_backward(model, (share[:, :-1], share[:, 1:]), F.cross_entropy)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            rate, norm = scheduler.get_last_lr()[0], optimizer.grad_norm
            bar.set_postfix_str(f"loss {loss:.2f}, lr {rate:.0e}, norm {norm:.2f}", refresh=False)
            bar.update(TOKENS)
            if step % 100 == 0 or step == options.steps:
                validation[step] = validate(booster, model, held_out)
                booster.print(f"\nstep {step}: validation loss {validation[step]:.3f}")
            if step % options.save_every == 0:
                booster.save(options.checkpoints, extra=state(), keep=2, asynchronous=True)
    booster.wait_for_save()
    booster.print(f"\n{write_text(model, held_out[:CONTEXT], 400)}\n")
    counted = counting_losses(train, held_out)
    text = ", ".join(f"{name} {loss:.3f}" for name, loss in counted.items())
    booster.print(f"nats per byte: validation {validation[options.steps]:.3f}, {text}")
    if booster.is_first:
        draw(losses, validation, counted)
        shutil.rmtree(options.checkpoints, ignore_errors=True)  # this run is over: the next one begins anew


if __name__ == "__main__":
    main()
