"""Train a model of transformers with its loss: ``colossal run --nproc 2 examples/finetune_transformers.py``.

The model has tied weights and computes its loss from ``labels``, so there is no criterion. The task is to
repeat a word: only its copy counts, and labels of -100 leave out the rest. Rows have different numbers of
labels that count, and so have processes; the mean is over all of them together, as on one process. To tune a
model that you have, replace ``GPT2LMHeadModel(config)`` by ``AutoModelForCausalLM.from_pretrained(folder)``.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

from colossal_core import Booster, launch

LETTERS, STOP, LONGEST, BATCH = 16, 16, 6, 32
LENGTH = 2 * LONGEST + 1  # a word, STOP, the word again


def make_batch(num_rows: int, order: torch.Generator) -> dict[str, Tensor]:
    """Return token ids and labels, both [num_rows, LENGTH]; shorter rows are filled up with STOP."""
    ids = torch.full((num_rows, LENGTH), STOP)
    labels = torch.full((num_rows, LENGTH), -100)
    for row in range(num_rows):
        size = int(torch.randint(2, LONGEST + 1, (), generator=order))
        word = torch.randint(LETTERS, (size,), generator=order)
        ids[row, :size] = ids[row, size + 1 : 2 * size + 1] = word
        labels[row, size + 1 : 2 * size + 1] = word
    return {"input_ids": ids, "labels": labels}


def main() -> None:
    """Train, and let the model repeat a word."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()

    launch()
    config = GPT2Config(
        vocab_size=LETTERS + 1,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=STOP,
        eos_token_id=STOP,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 20, options.steps + 1)
    booster = Booster(max_grad_norm=1.0)
    model, optimizer, scheduler = booster.boost(model, optimizer, scheduler)

    order = torch.Generator().manual_seed(0)  # all processes draw the same batch, and each takes its share
    mine = slice(booster.data_rank, None, booster.data_degree)
    for step in range(1, options.steps + 1):
        batch = {name: rows[mine] for name, rows in make_batch(BATCH, order).items()}
        loss = booster.forward_backward(model, batch)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == options.steps:
            booster.print(f"step {step}: loss {loss:.3f}, gradient norm {optimizer.grad_norm:.2f}")

    word = [3, 1, 4, 1, 5]
    prompt = torch.tensor([[*word, STOP]], device=model.device)
    written = model.eval().generate(prompt, max_new_tokens=len(word), do_sample=False, pad_token_id=STOP)
    booster.print(f"asked to repeat {word}, it wrote {written[0, len(word) + 1 :].tolist()}")


if __name__ == "__main__":
    main()
