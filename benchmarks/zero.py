"""Step time and live bytes of ``zero1``, ``zero2`` and ``zero3`` against DDP, FSDP2 and DeepSpeed.

All systems train the same GPT in bf16 with fp32 masters, fused AdamW where the system allows it and clipping,
in the same processes, one step of each in turn and in changing order, so that what else the machine does hits
all of them. The floor is forward and backward of a bf16 model without communication or update. Live bytes and
the resident peak are measured in runs of their own.

DDP's bf16 is autocast over fp32 weights; FSDP2 has ``MixedPrecisionPolicy(param_dtype=bfloat16)``; DeepSpeed
runs with ``DS_ACCELERATOR=cpu`` and ``torch_adam``. Systems that are not installed are left out and named.

    python -m benchmarks.zero [--ranks 2 4] [--width 384 768] [--rounds 7] [--systems ...] [--sweep] [--json F]
"""

from __future__ import annotations

import argparse
import importlib.util
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
from benchmarks.gpt import GPT, live_bytes, loss_of, make_batch
from torch import nn

from colossal_core import Booster, launch
from colossal_zero import Zero

WARM_UP_STEPS = 4
CLIP, RATE = 1.0, 1e-3
SHARDED = {"ddp": 0, "fsdp2-keep": 2, "fsdp2": 3, "deepspeed1": 1, "deepspeed2": 2, "deepspeed3": 3}
"""What peers divide: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too. FSDP2 that keeps
parameters after forward gathers once, and divides the rest as stage 3 does between steps."""

Step = tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], Callable[[], None]]


def make_ours(stage: int, width: int, layers: int) -> Step:
    """Return our step, and what clears its gradients."""
    plain = GPT(width, layers)
    piece: Any = {1: Zero(stage=1), 2: Zero(stage=2), 3: Zero(stage=3)}[stage]
    booster = Booster(piece, precision="bf16", max_grad_norm=CLIP)
    model, optimizer = booster.boost(plain, torch.optim.AdamW(plain.parameters(), lr=RATE, fused=True))

    def step(ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(ids), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, optimizer.zero_grad


def make_ddp(width: int, layers: int) -> Step:
    """Return DDP's step, and what clears its gradients."""
    model = nn.parallel.DistributedDataParallel(GPT(width, layers), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def step(ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids)
        loss = loss_of(logits, target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        return loss.detach()

    return step, optimizer.zero_grad


def make_fsdp2(width: int, layers: int, *, releases: bool) -> Step:
    """Return FSDP2's step, and what clears its gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model: Any = GPT(width, layers)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=releases)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=releases)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def step(ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(ids), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        return loss.detach()

    return step, optimizer.zero_grad


def make_deepspeed(stage: int, width: int, layers: int) -> Step:
    """Return DeepSpeed's step; it clears gradients by itself."""
    deepspeed: Any = importlib.import_module("deepspeed")
    plain = GPT(width, layers)
    engine, *_ = deepspeed.initialize(
        model=plain,
        model_parameters=plain.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "gradient_clipping": CLIP,
            "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
        },
    )

    def step(ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = loss_of(engine(ids), target)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, lambda: None


def make_floor(width: int, layers: int) -> Step:
    """Return forward and backward alone."""
    model = GPT(width, layers).bfloat16()

    def step(ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(ids), target)
        loss.backward()
        return loss.detach()

    return step, model.zero_grad


SYSTEMS: dict[str, Callable[[int, int], Step]] = {
    "floor": make_floor,
    "ddp": make_ddp,
    "fsdp2": lambda width, layers: make_fsdp2(width, layers, releases=True),
    "fsdp2-keep": lambda width, layers: make_fsdp2(width, layers, releases=False),
    "deepspeed1": lambda width, layers: make_deepspeed(1, width, layers),
    "deepspeed2": lambda width, layers: make_deepspeed(2, width, layers),
    "deepspeed3": lambda width, layers: make_deepspeed(3, width, layers),
    "zero1": lambda width, layers: make_ours(1, width, layers),
    "zero2": lambda width, layers: make_ours(2, width, layers),
    "zero3": lambda width, layers: make_ours(3, width, layers),
}


def measure_times(names: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all systems in turn and return seconds per step and the last losses."""
    width, layers = arguments.width[0], arguments.layers
    systems = {}
    for name in names:
        torch.manual_seed(0)
        systems[name] = SYSTEMS[name](width, layers)
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    losses: dict[str, float] = {}
    for number in range(WARM_UP_STEPS + arguments.rounds):
        batch = make_batch(number, dist.get_rank())
        for name in names[number % len(names) :] + names[: number % len(names)]:
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


def measure_bytes(name: str, arguments: argparse.Namespace) -> dict[str, int]:
    """Return the bytes of all tensors alive right after a step, gradients included, and the resident peak."""
    before = live_bytes()
    torch.manual_seed(0)
    step, clear = SYSTEMS[name](arguments.width[0], arguments.layers)
    for number in range(3):
        clear()
        step(*make_batch(number, dist.get_rank()))
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"live_bytes": live_bytes() - before, "peak_resident_bytes": peak}


def work(arguments: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 writes the result."""
    torch.set_num_threads(1)
    launch()
    if arguments.system:
        result: dict[str, Any] = measure_bytes(arguments.system, arguments)
    else:
        result = measure_times(arguments.systems, arguments)
    if dist.get_rank() == 0:
        Path(arguments.worker).write_text(json.dumps(result))


def run_workers(ranks: int, width: int, arguments: argparse.Namespace, system: str = "") -> dict[str, Any]:
    """Start the ranks of one measurement and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "result.json"
        command = [
            sys.executable,
            "-m",
            "colossal_cli",
            "run",
            "--nproc",
            str(ranks),
            "-m",
            "benchmarks.zero",
        ]
        command += ["--worker", str(target), "--width", str(width), "--layers", str(arguments.layers)]
        command += ["--rounds", str(arguments.rounds), "--systems", *arguments.systems]
        command += ["--system", system] if system else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)  # noqa: S603 - our own command
        found: dict[str, Any] = json.loads(target.read_text())
        return found


def summarise(ranks: int, width: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one case and print its table."""
    times = run_workers(ranks, width, arguments)
    medians = {name: statistics.median(seconds) for name, seconds in times["seconds"].items()}
    sizes = (
        {}
        if arguments.times_only
        else {
            name: run_workers(ranks, width, arguments, name) for name in arguments.systems if name != "floor"
        }
    )
    floor = medians.get("floor", 0.0)
    print(f"\n{ranks} ranks, width {width}, {arguments.layers} layers, bf16, clipping {CLIP}")
    print(f"{'system':12} {'ms':>8} {'ms above floor':>15} {'live MiB':>9} {'resident MiB':>13} {'loss':>8}")
    for name, median in medians.items():
        held = sizes.get(name, {})
        live, peak = (held.get(key, 0) / 2**20 for key in ("live_bytes", "peak_resident_bytes"))
        above = 1e3 * (median - floor)
        loss = times["losses"][name]
        print(f"{name:12} {1e3 * median:8.1f} {above:15.1f} {live:9.1f} {peak:13.1f} {loss:8.4f}", flush=True)
    ratios = {}
    for stage in (1, 2, 3):
        ours = medians.get(f"zero{stage}")
        peers = {name: medians[name] for name, level in SHARDED.items() if name in medians and level >= stage}
        if ours is None or not peers:
            continue
        best = min(peers, key=lambda name: peers[name])
        ratios[f"zero{stage}"] = {
            "best_peer": best,
            "to_best_peer": ours / peers[best],
            "above_floor_to_best_peer": (ours - floor) / (peers[best] - floor),
            "to_ddp": ours / medians["ddp"] if "ddp" in medians else None,
        }
        print(
            f"zero{stage}: {ours / peers[best]:.2f} of {best}, above the floor "
            f"{(ours - floor) / (peers[best] - floor):.2f}"
            + (f", {ours / medians['ddp']:.2f} of ddp" if "ddp" in medians else ""),
            flush=True,
        )
    return {
        "ranks": ranks,
        "width": width,
        "layers": arguments.layers,
        "medians": medians,
        "ratios": ratios,
        "sizes": sizes,
        "losses": times["losses"],
        "seconds": times["seconds"],
    }


def main() -> None:
    """Run all cases, print a table for each and store everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, nargs="+", default=[384, 768])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--times-only", action="store_true", help="do not measure bytes")
    parser.add_argument(
        "--sweep", action="store_true", help="our stages on 1 to 8 ranks and 4 to 120M parameters"
    )
    parser.add_argument("--json", type=Path, default=Path("runs/bench_zero.json"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--system", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if importlib.util.find_spec("deepspeed") is None:
        arguments.systems = [name for name in arguments.systems if not name.startswith("deepspeed")]
        if not arguments.worker:
            print("deepspeed is not installed, and left out")
    if arguments.worker:
        work(arguments)
        return
    pairs = [(ranks, width) for width in arguments.width for ranks in arguments.ranks]
    if arguments.sweep:
        arguments.systems = [name for name in arguments.systems if name.startswith("zero")]
        pairs = [(ranks, 384) for ranks in (1, 2, 4, 8)] + [(2, width) for width in (192, 576, 768, 1088)]
    cases = [summarise(ranks, width, arguments) for ranks, width in pairs]
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    report = {"torch": torch.__version__, "machine": machine, "cases": cases}
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
