"""Step time of pipelines against torch.distributed.pipelining: same model, stages, schedule, micro-batches.

A GPT (width 256, 8 blocks, vocabulary 512, sequence 128) is cut into the same stages in both systems, by
hand for torch, with `balance` for ours. Both run in the same processes, a step of each in turn and in
changing order, with fused AdamW and with gradients clipped by their norm over all stages, as in any training
of a GPT. `--no-clip` leaves that out; ours then still computes the norm, which tells whether gradients are
finite. At 2 ranks our `zbv` is compared with our `1f1b`, too; `--self` compares nothing else.

With more ranks than cores a bubble is another rank's time, so figures tell about schedules on as many cores
as ranks only. Processor time, of the last rank, is what is left of a comparison on a busy machine.

    python -m benchmarks.pipeline [--ranks 2 4] [--pairs 10] [--no-clip] [--self] [--json FILE]
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.workload import GPT, loss_of
from torch import nn
from torch.distributed import pipelining

from colossal_core import Booster, launch
from colossal_pipeline import Pipeline

WIDTH, LAYERS, VOCABULARY, SEQUENCE = 256, 8, 512, 128
ROWS = 16
WARM_UP_STEPS = 3
TARGET = 1.0
BOUND = 1.0

CASES = {"1f1b": 1, "gpipe": 1, "interleaved": 2}
"""Schedules that both have, with their chunks."""

Step = Callable[[torch.Tensor, torch.Tensor], Any]


class Part(nn.Module):
    """Some neighbours of the GPT, as torch's stages want them: one module that takes one tensor."""

    def __init__(self, model: GPT, blocks: range, *, is_first: bool, is_last: bool) -> None:
        """Take the modules of a stage."""
        super().__init__()
        self.token: nn.Embedding | None = model.token if is_first else None
        self.position: nn.Embedding | None = model.position if is_first else None
        self.blocks = nn.ModuleList(model.blocks[index] for index in blocks)
        self.norm: nn.LayerNorm | None = model.norm if is_last else None
        self.head: nn.Linear | None = model.head if is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the stage."""
        if self.token is not None and self.position is not None:
            x = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step, the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (ROWS, SEQUENCE + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def clip(parameters: list[nn.Parameter]) -> None:
    """Clip by the norm over all stages."""
    square = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).square()
    dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(parameters, BOUND, square.sqrt())


def make_torch(schedule: str, chunks: int, microbatches: int, *, clips: bool) -> Step:
    """Return the step of torch's runtime."""
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, num_stages = GPT(WIDTH, LAYERS), ranks * chunks
    each = LAYERS // num_stages
    stages: list[Any] = []
    for number in range(rank, num_stages, ranks):
        blocks = range(number * each, (number + 1) * each)
        part = Part(model, blocks, is_first=number == 0, is_last=number == num_stages - 1)
        stages.append(pipelining.PipelineStage(part, number, num_stages, torch.device("cpu")))
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    kinds: dict[str, Any] = {
        "1f1b": pipelining.Schedule1F1B,
        "gpipe": pipelining.ScheduleGPipe,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
    }
    runs = kinds[schedule](stages if chunks > 1 else stages[0], microbatches, loss_fn=loss_of)

    def step(ids: torch.Tensor, target: torch.Tensor) -> Any:
        losses: list[torch.Tensor] = []
        arguments = (ids,) if rank == 0 else ()
        runs.step(*arguments, target=target if rank == ranks - 1 else None, losses=losses)
        if clips:
            clip(parameters)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack([loss.detach() for loss in losses]).mean()) if losses else 0.0

    return step


def make_ours(schedule: str, chunks: int, microbatches: int, *, clips: bool) -> Step:
    """Return our step."""
    torch.manual_seed(0)
    model, ranks = GPT(WIDTH, LAYERS), dist.get_world_size()
    balance = (LAYERS // (ranks * chunks),) * (ranks * chunks)
    piece = Pipeline(
        degree=ranks, microbatches=microbatches, schedule=schedule, chunks=chunks, balance=balance
    )
    booster = Booster(piece, max_grad_norm=BOUND if clips else None)
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))

    def step(ids: torch.Tensor, target: torch.Tensor) -> Any:
        loss = booster.forward_backward(model, (ids, target), loss_of)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def measure(systems: dict[str, Step], pairs: int) -> dict[str, Any]:
    """Run systems in turn, and return seconds per step, processor seconds and the last losses."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    processor: dict[str, list[float]] = {name: [] for name in systems}
    losses: dict[str, float] = {}
    for number in range(WARM_UP_STEPS + pairs):
        batch = make_batch(number)
        for name in sorted(systems, reverse=bool(number % 2)):
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            losses[name] = systems[name](*batch)
            used = time.process_time() - used
            dist.barrier()
            if number >= WARM_UP_STEPS:
                seconds[name].append(time.perf_counter() - start)
                processor[name].append(used)
    return {"seconds": seconds, "processor": processor, "losses": losses}


def work(arguments: argparse.Namespace) -> None:
    """Measure on this rank; the last rank, which has torch's loss, writes the result."""
    torch.set_num_threads(1)
    launch()
    microbatches = 2 * dist.get_world_size()
    if arguments.schedule == "self":
        systems = {
            "other": make_ours("1f1b", 1, microbatches, clips=arguments.clip),
            "colossal": make_ours("zbv", 2, microbatches, clips=arguments.clip),
        }
    else:
        settings = (arguments.schedule, CASES[arguments.schedule], microbatches)
        systems = {
            "other": make_torch(*settings, clips=arguments.clip),
            "colossal": make_ours(*settings, clips=arguments.clip),
        }
    result = measure(systems, arguments.pairs)
    if dist.get_rank() == dist.get_world_size() - 1:
        Path(arguments.worker).write_text(json.dumps(result))


def run_case(ranks: int, schedule: str, pairs: int, *, clips: bool) -> dict[str, Any]:
    """Start the ranks of one measurement, and print its line."""
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "result.json"
        command = [sys.executable, "-m", "colossal_cli", "run", "--nproc", str(ranks)]
        command += ["-m", "benchmarks.pipeline", "--worker", str(target)]
        command += ["--schedule", schedule, "--pairs", str(pairs), "--clip" if clips else "--no-clip"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment)  # noqa: S603 - our own command
        found: dict[str, Any] = json.loads(target.read_text())
    other, ours = found["seconds"]["other"], found["seconds"]["colossal"]
    used = {system: statistics.median(times) for system, times in found["processor"].items()}
    case = {
        "ranks": ranks,
        "schedule": schedule,
        "clips": clips,
        "other_ms": 1e3 * statistics.median(other),
        "colossal_ms": 1e3 * statistics.median(ours),
        "ratio_of_medians": statistics.median(ours) / statistics.median(other),
        "median_of_ratios": statistics.median(b / a for a, b in zip(other, ours, strict=True)),
        "ratio_of_processor": used["colossal"] / used["other"],
        "target": TARGET,
        **found,
    }
    name = "1f1b" if schedule == "self" else "torch"
    print(
        f"{ranks} ranks {'zbv' if schedule == 'self' else schedule}: {name} {case['other_ms']:.1f} ms, "
        f"colossal {case['colossal_ms']:.1f} ms, ratio {case['ratio_of_medians']:.3f} "
        f"(pairs {case['median_of_ratios']:.3f}, processor {case['ratio_of_processor']:.3f}, "
        f"target {TARGET}), losses {case['losses']}",
        flush=True,
    )
    return case


def main() -> None:
    """Run all cases, print a line for each, and store everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--clip", action=argparse.BooleanOptionalAction, default=True, help="clip gradients")
    parser.add_argument("--self", dest="own", action="store_true", help="compare zbv with 1f1b only")
    parser.add_argument("--json", type=Path, default=Path("runs/bench_pipeline.json"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--schedule", nargs="*", default=list(CASES))
    arguments = parser.parse_args()
    if arguments.worker:
        arguments.schedule = arguments.schedule[0]
        work(arguments)
        return
    wanted = [(ranks, schedule) for ranks in arguments.ranks for schedule in arguments.schedule]
    if arguments.own:
        wanted = [(2, "self")]
    elif 2 in arguments.ranks:
        wanted.append((2, "self"))
    cases = [run_case(ranks, schedule, arguments.pairs, clips=arguments.clip) for ranks, schedule in wanted]
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    report = {"torch": torch.__version__, "machine": machine, "cases": cases}
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
