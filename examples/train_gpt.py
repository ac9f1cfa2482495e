"""Train a small GPT on the bytes of real text: ``colossal run --nproc 2 examples/train_gpt.py --steps 900``.

An ordinary PyTorch script; the lines that name ``booster`` are all that distributes it. Without ``--plan`` every process
holds the whole model and takes a share of each batch. A plan cuts it in other ways, and the numbers stay the same.
Shapes: B sequences, T bytes, D width, H heads, E width of a head, V values of a byte.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from colossal_core import Booster, launch

CONTEXT, WIDTH, HEADS, LAYERS = 128, 128, 4, 4
BATCH, PEAK_RATE, WARMUP_STEPS, VALIDATE_EVERY = 16, 3e-3, 50, 150  # sequences over all processes; steps


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.merge = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the stream with what this block adds to it."""
        qkv = self.qkv(self.norm1(x_BTD)).unflatten(-1, (3, HEADS, -1))
        mixed_BHTE = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x_BTD = x_BTD + self.merge(mixed_BHTE.transpose(1, 2).flatten(2))
        return x_BTD + self.narrow(F.gelu(self.wide(self.norm2(x_BTD))))


class GPT(nn.Module):
    """Predict each byte from those before it; input and output share their embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.bytes.weight

    def forward(self, bytes_BT: Tensor) -> Tensor:
        """Return logits [B, T, V] of the byte that follows each position."""
        x_BTD = self.bytes(bytes_BT) + self.positions.weight[: bytes_BT.shape[1]]
        return self.head(self.norm(self.blocks(x_BTD)))


def loss_per_byte(logits_BTV: Tensor, target_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten())


def read_text(file: Path | None) -> tuple[Tensor, Tensor]:
    """Return bytes to learn from and the last tenth, which is held out. Topics repeat paragraphs; each counts once."""
    paragraphs = dict.fromkeys(paragraph for topic in topics.values() for paragraph in topic.split("\n\n"))
    text = file.read_bytes() if file else "\n\n".join(paragraphs).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def count_models(train: Tensor, held_out: Tensor) -> dict[str, float]:
    """Return the losses on held-out text of models that count bytes and pairs of bytes, in nats per byte.

    The bigram leans on the unigram by a weight k, chosen on the held-out text itself, so in its favour.
    """
    unigram = (torch.bincount(train, minlength=256) + 1) / (len(train) + 256)
    pairs = torch.bincount(train[:-1] * 256 + train[1:], minlength=256 * 256).view(256, 256)
    bigrams = [(pairs + k * unigram) / (pairs.sum(1, keepdim=True) + k) for k in (1, 3, 10, 30, 100)]
    before, after = held_out[:-1], held_out[1:]
    best = min(-bigram[before, after].log().mean().item() for bigram in bigrams)
    return {"unigram": -unigram[after].log().mean().item(), "bigram": best}


def validate(booster: Booster, model: nn.Module, held_out: Tensor) -> float:
    """Return the loss over the whole held-out text in nats per byte, the same on every process."""
    windows = held_out[: (len(held_out) - 1) // CONTEXT * CONTEXT + 1]
    mine = slice(booster.data_rank, None, booster.data_degree)
    batch = windows[:-1].view(-1, CONTEXT)[mine], windows[1:].view(-1, CONTEXT)[mine]
    return booster.evaluate(model, batch, loss_per_byte).item()


@torch.no_grad()
def write_text(model: nn.Module, text: Tensor, num_bytes: int) -> str:
    """Return what the model draws byte by byte to continue ``text``, the same on every process."""
    prompt, generator = len(text), torch.Generator(text.device).manual_seed(1)
    for _ in range(num_bytes):
        probabilities = model(text[None, -CONTEXT:])[0, -1].float().div(0.8).softmax(-1)
        text = torch.cat([text, torch.multinomial(probabilities, 1, generator=generator)])
    return bytes(text[prompt:].tolist()).decode(errors="replace")


def draw(file: Path, losses: list[float], validation: dict[int, float], levels: dict[str, float]) -> None:
    """Draw the losses over steps, beside those of the models that count."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, alpha=0.4, label="training")
    axes.plot(list(validation), list(validation.values()), "o-", label="validation")
    for (name, level), style in zip(levels.items(), (":", "--"), strict=True):
        axes.axhline(level, color="gray", linestyle=style, label=name)
    axes.set(xlabel="step", ylabel="nats per byte")
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main() -> None:
    """Train, validate, draw the curves and write a sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, help="text to learn; default: Python's own help topics")
    parser.add_argument("--plan", type=Path, help="TOML file that says how to distribute")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--picture", type=Path, default=Path("runs/train_gpt.png"))
    options = parser.parse_args()

    world = launch()
    train, held_out = (data.to(world.device) for data in read_text(options.file))
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=WARMUP_STEPS)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps, eta_min=PEAK_RATE / 20)
    scheduler = torch.optim.lr_scheduler.ChainedScheduler([warmup, cosine])

    booster = Booster(plan=options.plan, max_grad_norm=1.0)
    model, optimizer, scheduler = booster.boost(model, optimizer, scheduler)
    order = torch.Generator().manual_seed(0)  # all processes draw the same batches, and each takes its share
    losses, validation = [], {}
    bar = tqdm(total=options.steps * BATCH * CONTEXT, unit="tok", unit_scale=True, disable=not booster.is_first)
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(train) - CONTEXT, (BATCH, 1), generator=order)
        windows = train[starts[booster.data_rank :: booster.data_degree] + torch.arange(CONTEXT + 1)]
        loss = booster.forward_backward(model, (windows[:, :-1], windows[:, 1:]), loss_per_byte)
        optimizer.step()
        rate = scheduler.get_last_lr()[0]
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.update(BATCH * CONTEXT)
        bar.set_postfix_str(f"loss {losses[-1]:.2f} lr {rate:.1e} gradient norm {optimizer.grad_norm:.2f}")
        if step % VALIDATE_EVERY == 0 or step == options.steps:
            validation[step] = validate(booster, model, held_out)
            bar.write(f"step {step}: validation loss {validation[step]:.3f}")
    bar.close()
    ...
