"""Step time of ``TensorParallel`` against torch's ``parallelize_module``, and against transformers' own plan.

Two models: a decoder (separate queries, keys and values, so that torch can cut them by heads), against torch;
and a Llama, against ``from_pretrained(folder, tp_plan="auto")``. Both systems train with fused AdamW in the
same processes, one step of each in turn and in changing order, so that what else the machine does hits both.
Torch's plan is column-wise for queries, keys, values and the first feed-forward layer, row-wise for the
others, rows of the embedding, columns of the head, and ``loss_parallel``. The figures are the ratio of the
medians and the median of the ratios of pairs.

    python -m benchmarks.tensor_parallel [--ranks 2 4] [--models decoder llama] [--pairs 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from colossal_core import Booster, launch
from colossal_tensor_parallel import TensorParallel

WIDTH, LAYERS, HEADS, VOCABULARY, SEQUENCE, BATCH = 384, 6, 8, 2048, 128, 4
WARM_UP_STEPS = 4
TARGET = 0.95
RIVALS = {"decoder": "torch", "llama": "transformers"}


class Block(nn.Module):
    """A pre-norm transformer block that does not care how many heads it has."""

    def __init__(self) -> None:
        """Build the layers."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Return the stream with what this block adds."""
        normal = self.norm1(stream)
        heads = [layer(normal).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.q, self.k, self.v)]
        q, k, v = (head.transpose(1, 2) for head in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        stream = stream + self.out(mixed.transpose(1, 2).flatten(2))
        added: torch.Tensor = self.down(F.gelu(self.up(self.norm2(stream))))
        return stream + added


class Decoder(nn.Module):
    """A decoder-only language model."""

    def __init__(self) -> None:
        """Build the layers."""
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids to logits."""
        stream = self.tokens(ids)
        for block in self.blocks:
            stream = block(stream)
        logits: torch.Tensor = self.head(self.norm(stream))
        return logits


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def make_torch() -> Any:
    """Return torch's step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        **{f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")},
        **{f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")},
    }
    model = parallelize_module(Decoder(), mesh, plan)
    cut = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    groups: list[dict[str, Any]] = [{"params": cut}, {"params": whole}]  # its fused step takes no mixture
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)

    def step(ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with loss_parallel():
            loss = loss_of(model(ids), target)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def make_llama() -> Any:
    """Return a Llama of the decoder's size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
    )
    return LlamaForCausalLM(config)


def make_library() -> Any:
    """Return the step of transformers, which reads its plan when it loads a model."""
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        if dist.get_rank() == 0:
            make_llama().save_pretrained(directory)
        folder = [directory]
        dist.broadcast_object_list(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the argument moves into a configuration in later versions
            model = AutoModelForCausalLM.from_pretrained(folder[0], tp_plan="auto", dtype=torch.float32)
        dist.barrier()
    model.train()
    cut = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    groups: list[dict[str, Any]] = [{"params": cut}, {"params": whole}]  # its fused step takes no mixture
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)

    def step(ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids, shift_labels=target).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found: torch.Tensor = loss.detach()
        return found

    return step


def make_ours_of_llama() -> Any:
    """Return our step of the Llama."""
    plain = make_llama()
    booster = Booster(TensorParallel(degree=dist.get_world_size()))
    model, optimizer = booster.boost(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True))

    def step(ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        batch = {"input_ids": ids, "labels": ids, "shift_labels": target}
        loss = booster.forward_backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def make_ours() -> Any:
    """Return our step."""
    torch.manual_seed(0)
    plain = Decoder()
    booster = Booster(TensorParallel(degree=dist.get_world_size()))
    model, optimizer = booster.boost(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True))

    def step(ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = booster.forward_backward(model, (ids, target), loss_of)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def measure(kind: str, pairs: int) -> dict[str, Any]:
    """Run both systems in turn and return seconds per step and the last losses."""
    systems = (
        {"theirs": make_torch(), "ours": make_ours()}
        if kind == "decoder"
        else {"theirs": make_library(), "ours": make_ours_of_llama()}
    )
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    losses: dict[str, float] = {}
    for number in range(WARM_UP_STEPS + pairs):
        source = torch.Generator().manual_seed(number)
        ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=source)
        for name in sorted(systems, reverse=bool(number % 2)):
            dist.barrier()
            start = time.perf_counter()
            loss = systems[name](ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
            dist.barrier()
            if number >= WARM_UP_STEPS:
                seconds[name].append(time.perf_counter() - start)
            losses[name] = float(loss)
    return {"seconds": seconds, "losses": losses}


def summarise(kind: str, ranks: int, pairs: int) -> dict[str, Any]:
    """Measure one model on one number of ranks and print its line."""
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "result.json"
        command = [sys.executable, "-m", "colossal_cli", "run", "--nproc", str(ranks)]
        command += ["-m", "benchmarks.tensor_parallel", "--worker", str(target), "--pairs", str(pairs)]
        command += ["--models", kind]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})  # noqa: S603 - our own
        found: dict[str, Any] = json.loads(target.read_text())
    theirs, ours = found["seconds"]["theirs"], found["seconds"]["ours"]
    rival = RIVALS[kind]
    ratio = statistics.median(ours) / statistics.median(theirs)
    paired = statistics.median(b / a for a, b in zip(theirs, ours, strict=True))
    print(
        f"{kind}, {ranks} ranks: {rival} {1e3 * statistics.median(theirs):.1f} ms, "
        f"colossal {1e3 * statistics.median(ours):.1f} ms, ratio {ratio:.3f} (pairs {paired:.3f}, "
        f"target {TARGET}), last losses {found['losses']['theirs']:.6f} and {found['losses']['ours']:.6f}",
        flush=True,
    )
    return {
        "model": kind,
        "rival": rival,
        "ranks": ranks,
        "ratio_of_medians": ratio,
        "median_of_ratios": paired,
        "target": TARGET,
        **found,
    }


def main() -> None:
    """Run all cases, print a line for each and store everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", type=Path, default=Path("runs/bench_tensor_parallel.json"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        torch.set_num_threads(1)
        launch()
        result = measure(arguments.models[0], arguments.pairs)
        if dist.get_rank() == 0:
            Path(arguments.worker).write_text(json.dumps(result))
        return
    cases = [
        summarise(kind, ranks, arguments.pairs) for kind in arguments.models for ranks in arguments.ranks
    ]
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    report = {"torch": torch.__version__, "machine": machine, "cases": cases}
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
