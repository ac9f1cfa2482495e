"""Cut the layers of a Llama between two processes: ``colossal run --nproc 2 examples/cut_layers.py``.

Both processes work on the same rows. Each holds half of the heads, of the hidden features and of the
vocabulary, and, as ``sequence=True`` says, half of the tokens between the layers. What becomes of each layer
is printed before training. The task is to continue a pattern; at the end the whole model is written as plain
weights that transformers loads. With ``--nproc 4`` two pairs of processes share the batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from colossal_core import Booster, launch
from colossal_tensor_parallel import TensorParallel, explain

LETTERS, LENGTH, BATCH = 96, 24, 32


def main() -> None:
    """Explain, train, and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path("cut_layers_weights"))
    options = parser.parse_args()

    world = launch()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=LETTERS,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    if world.rank == 0:
        explain(model, degree=2, sequence=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    booster = Booster(TensorParallel(degree=2, sequence=True), max_grad_norm=1.0)
    model, optimizer = booster.boost(model, optimizer)

    order = torch.Generator().manual_seed(0)  # all processes draw the same batch
    for step in range(1, options.steps + 1):
        starts = torch.randint(LETTERS, (BATCH, 1), generator=order)
        strides = torch.randint(1, 4, (BATCH, 1), generator=order)
        ids = (starts + strides * torch.arange(LENGTH)) % LETTERS
        ids = ids[booster.data_rank :: booster.data_degree]
        loss = booster.forward_backward(model, {"input_ids": ids, "labels": ids})
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == options.steps:
            booster.print(f"step {step}: loss {loss:.3f}, gradient norm {optimizer.grad_norm:.2f}")
    booster.export(model, options.folder)
    booster.print(f"wrote {options.folder}")


if __name__ == "__main__":
    main()
