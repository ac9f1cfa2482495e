"""Step time and live bytes of the memory manager ``replicated`` against torch's DistributedDataParallel.

Both train the same GPT (width 384, 8 layers, vocabulary 512, sequence 128, batch 4 a rank) with fused AdamW
in the same processes, one step of each in turn and in changing order, so that what else the machine does hits
both. The figures are the ratio of the medians and the median of the ratios of pairs. Live bytes are counted
in runs of their own.

DDP has ``gradient_as_bucket_view``; its bf16 is autocast over fp32 weights, ours bf16 weights, fp32 masters.

    python -m benchmarks.replicated [--ranks 2 4] [--precision fp32 bf16] [--pairs 15] [--clip 1.0] [--json F]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from benchmarks.workload import GPT, live_bytes, loss_of, make_batch
from torch import nn

from colossal_core import Booster, launch

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, LAYERS = 384, 8
WARM_UP_STEPS = 4
TIME_TARGETS = {"fp32": 1.03, "bf16": 0.95}
BYTES_TARGET = 1.01


Step = tuple["Callable[[torch.Tensor, torch.Tensor], torch.Tensor]", "Callable[[], None]"]


def make_ddp(precision: str, clip: float | None) -> Step:
    """Return DDP's step, and what clears its gradients."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(GPT(WIDTH, LAYERS), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        narrow = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
        with narrow:
            logits = model(ids)
        loss = loss_of(logits, target)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=True)
        optimizer.step()
        return loss.detach()

    return step, optimizer.zero_grad


def make_ours(precision: str, clip: float | None) -> Step:
    """Return our step, and what clears its gradients."""
    torch.manual_seed(0)
    plain = GPT(WIDTH, LAYERS)
    booster = Booster(precision=precision, max_grad_norm=clip)
    model, optimizer = booster.boost(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True))

    def step(ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(ids), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, optimizer.zero_grad


def measure_times(precision: str, pairs: int, clip: float | None) -> dict[str, Any]:
    """Run both systems in turn and return seconds per step and the last losses."""
    systems = {"ddp": make_ddp(precision, clip), "colossal": make_ours(precision, clip)}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    losses: dict[str, float] = {}
    for number in range(WARM_UP_STEPS + pairs):
        batch = make_batch(number, dist.get_rank())
        for name in sorted(systems, reverse=bool(number % 2)):
            step, clear = systems[name]
            dist.barrier()
            start = time.perf_counter()
            loss = step(*batch)
            clear()
            dist.barrier()
            if number >= WARM_UP_STEPS:
                seconds[name].append(time.perf_counter() - start)
            losses[name] = float(loss)
    return {"seconds": seconds, "losses": losses}


def measure_bytes(system: str, precision: str, clip: float | None) -> dict[str, int]:
    """Return the bytes of all tensors alive right after a step, gradients included, and the resident peak."""
    before = live_bytes()
    step, clear = (make_ddp if system == "ddp" else make_ours)(precision, clip)
    for number in range(3):
        clear()
        step(*make_batch(number, dist.get_rank()))
    import resource

    return {
        "live_bytes": live_bytes() - before,
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def work(arguments: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 writes the result."""
    torch.set_num_threads(1)
    launch()
    if arguments.system:
        result: dict[str, Any] = measure_bytes(arguments.system, arguments.precision[0], arguments.clip)
    else:
        result = measure_times(arguments.precision[0], arguments.pairs, arguments.clip)
    if dist.get_rank() == 0:
        Path(arguments.worker).write_text(json.dumps(result))


def run_workers(
    ranks: int, precision: str, arguments: argparse.Namespace, system: str = ""
) -> dict[str, Any]:
    """Start the ranks of one measurement and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "result.json"
        command = [sys.executable, "-m", "colossal_cli", "run", "--nproc", str(ranks)]
        command += ["-m", "benchmarks.replicated"]
        command += ["--worker", str(target), "--precision", precision, "--pairs", str(arguments.pairs)]
        command += ["--system", system] if system else []
        command += ["--clip", str(arguments.clip)] if arguments.clip is not None else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment)  # noqa: S603 - our own command
        found: dict[str, Any] = json.loads(target.read_text())
        return found


def summarise(ranks: int, precision: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one case and print its line."""
    times = run_workers(ranks, precision, arguments)
    sizes = {system: run_workers(ranks, precision, arguments, system) for system in ("ddp", "colossal")}
    ddp, ours = times["seconds"]["ddp"], times["seconds"]["colossal"]
    case = {
        "ranks": ranks,
        "precision": precision,
        "clip": arguments.clip,
        "pairs": len(ddp),
        "ddp_ms": 1e3 * statistics.median(ddp),
        "colossal_ms": 1e3 * statistics.median(ours),
        "ratio_of_medians": statistics.median(ours) / statistics.median(ddp),
        "median_of_ratios": statistics.median(b / a for a, b in zip(ddp, ours, strict=True)),
        "target": TIME_TARGETS[precision],
        "bytes_ratio": sizes["colossal"]["live_bytes"] / sizes["ddp"]["live_bytes"],
        "bytes_target": BYTES_TARGET,
        "losses": times["losses"],
        "sizes": sizes,
        "seconds": times["seconds"],
    }
    print(
        f"{ranks} ranks {precision}: DDP {case['ddp_ms']:.1f} ms, colossal {case['colossal_ms']:.1f} ms, "
        f"ratio {case['ratio_of_medians']:.3f} (pairs {case['median_of_ratios']:.3f}, "
        f"target {case['target']}), "
        f"live bytes {case['bytes_ratio']:.4f} (target {BYTES_TARGET})",
        flush=True,
    )
    return case


def main() -> None:
    """Run all cases, print a line for each and store everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=sorted(TIME_TARGETS))
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--clip", type=float, help="clip the gradient norm in both systems")
    parser.add_argument("--json", type=Path, default=Path("runs/bench_replicated.json"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--system", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    cases = [summarise(ranks, name, arguments) for ranks in arguments.ranks for name in arguments.precision]
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    report = {"torch": torch.__version__, "machine": machine, "cases": cases}
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
