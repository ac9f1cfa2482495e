"""Step time and live bytes of zero1, zero2 and zero3 against DDP, FSDP2 and DeepSpeed ZeRO 1, 2 and 3.

All train the same GPTs in bf16 with clipping, in the same processes, a step of each in turn and in changing
order, so that what else the machine does hits all. ``floor`` is forward and backward in bf16 without
communication or update. Peers compute in their own recommended bf16: DDP under autocast over fp32 weights,
FSDP2 with a mixed-precision policy over fp32 shards, DeepSpeed with its bf16 optimizer and torch's Adam.
Bytes are measured in processes of their own: those of tensors that are alive between two steps, the most that
torch's allocator has handed out within a step, which is live bytes of whatever made them, resized storages
too, and by how much resident memory has grown at most, which decides what fits.

    python -m benchmarks.zero [--ranks 2 4] [--widths 384 768] [--rounds 9] [--json F] [--sweep]

Parts may be run one by one (``--parts``, ``--groups``, one width or number of ranks): the file keeps
what was measured before, and ``--parts`` without a value prints what it holds.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.workload import GPT, live_bytes, loss_of, make_batch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from colossal_core import Booster, launch

LAYERS, CLIP, RATE, WARM_UP_ROUNDS = 8, 1.0, 1e-3, 3

STAGES = {
    "ddp": 0,
    "zero1": 1,
    "zero2": 2,
    "zero3": 3,
    "deepspeed1": 1,
    "deepspeed2": 2,
    "deepspeed3": 3,
    "fsdp2-keep": 2,
    "fsdp2": 3,
}
"""How much each system divides: nothing, optimizer state, gradients as well, parameters as well. FSDP2 that
does not reshard after forward holds whole parameters from there to the end of backward."""

DEEPSPEED_BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
"""Set to 8 MiB of bf16: its defaults of a gigabyte would be larger than the models."""

OURS = ("zero1", "zero2", "zero3")

GROUPS = (
    ("floor", "ddp", "zero1", "zero2", "deepspeed1", "deepspeed2", "fsdp2-keep", "fsdp2"),
    ("floor", "zero3", "deepspeed3", "fsdp2"),
)
"""What is measured side by side; all together would not fit into the memory of a small machine."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "DEEPSPEED_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}
"""What all processes that measure have in common."""

IS_COMPLETE = importlib.util.find_spec("deepspeed") is not None
"""Whether all peers are installed; those that are not are left out, and the table says so."""

Step = Callable[[torch.Tensor, torch.Tensor], float]


# --- systems ------------------------------------------------------------------------------------------------


def make_model(width: int) -> nn.Module:
    """Return the model, with the same values in every system."""
    torch.manual_seed(0)
    return GPT(width, LAYERS)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of every system that lets its user choose."""
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)


def make_floor(width: int) -> Step:
    """Return a step that communicates and updates nothing."""
    model = make_model(width).to(torch.bfloat16)

    def step(ids: torch.Tensor, target: torch.Tensor) -> float:
        loss = loss_of(model(ids), target)
        loss.backward()
        model.zero_grad()
        return float(loss.detach())

    return step


def make_ddp(width: int) -> Step:
    """Return a step of DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(make_model(width), gradient_as_bucket_view=True)
    optimizer = adamw(model)

    def step(ids: torch.Tensor, target: torch.Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids)
        loss = loss_of(logits, target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def make_fsdp2(width: int, *, reshard: bool) -> Step:
    """Return a step of ``fully_shard``, one unit for each block."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = make_model(width)
    assert isinstance(model, GPT)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = adamw(model)

    def step(ids: torch.Tensor, target: torch.Tensor) -> float:
        loss = loss_of(model(ids), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def make_deepspeed(width: int, *, stage: int) -> Step:
    """Return a step of DeepSpeed."""
    deepspeed: Any = importlib.import_module("deepspeed")
    model = make_model(width)
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **dict.fromkeys(DEEPSPEED_BUCKETS, 1 << 22)},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=model.parameters())

    def step(ids: torch.Tensor, target: torch.Tensor) -> float:
        loss = loss_of(engine(ids), target)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def make_ours(width: int, *, name: str) -> Step:
    """Return a step of one of our memory managers."""
    model = make_model(width)
    booster = Booster(name, precision="bf16", max_grad_norm=CLIP)
    model, optimizer = booster.boost(model, adamw(model))

    def step(ids: torch.Tensor, target: torch.Tensor) -> float:
        loss = loss_of(model(ids), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def make(name: str, width: int) -> Step:
    """Return the step of a system by its name."""
    if name == "floor":
        return make_floor(width)
    if name == "ddp":
        return make_ddp(width)
    if name.startswith("fsdp2"):
        return make_fsdp2(width, reshard=name == "fsdp2")
    if name.startswith("deepspeed"):
        return make_deepspeed(width, stage=STAGES[name])
    return make_ours(width, name=name)


# --- measuring ----------------------------------------------------------------------------------------------


def measure_times(names: list[str], width: int, rounds: int) -> dict[str, Any]:
    """Run systems in turn and return seconds per step and the last losses."""
    systems = {name: make(name, width) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    losses: dict[str, float] = {}
    for number in range(WARM_UP_ROUNDS + rounds):
        batch = make_batch(number, dist.get_rank())
        shift = number % len(names)
        for name in [*names[shift:], *names[:shift]]:
            dist.barrier()
            start = time.perf_counter()
            losses[name] = systems[name](*batch)
            dist.barrier()
            if number >= WARM_UP_ROUNDS:
                seconds[name].append(time.perf_counter() - start)
    return {"seconds": seconds, "losses": losses}


def measure_bytes(name: str, width: int) -> dict[str, int]:
    """Return the bytes of tensors alive between two steps, and how they and resident memory grew at most."""
    nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))  # what the first operation loads
    before, resident = live_bytes(), resident_bytes()
    step = make(name, width)
    held = []
    for number in range(4):
        if number == 2:
            forget_peak()
        step(*make_batch(number, dist.get_rank()))
        held.append(live_bytes() - before)
    peak = resident_bytes("VmHWM") - resident
    batch = make_batch(len(held), dist.get_rank())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(*batch)
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    grown = max(itertools.accumulate((event.nbytes() for event in events), initial=0))
    return {"live_bytes": held[-1], "live_peak_bytes": held[-1] + grown, "peak_bytes": peak}


def resident_bytes(kind: str = "VmRSS") -> int:
    """Return the resident bytes of this process: now, or ``VmHWM``, the most since :func:`forget_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def forget_peak() -> None:
    """Begin to count the resident peak anew: what building left behind is not part of a step."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def work(arguments: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 writes the result."""
    torch.set_num_threads(1)
    launch()
    width = arguments.widths[0]
    if arguments.bytes:
        result: dict[str, Any] = measure_bytes(arguments.systems[0], width)
    else:
        result = measure_times(arguments.systems, width, arguments.rounds)
    if dist.get_rank() == 0:
        Path(arguments.worker).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()


def run_workers(
    ranks: int, width: int, systems: list[str], rounds: int, *, bytes_only: bool
) -> dict[str, Any]:
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
        command += ["--worker", str(target), "--widths", str(width), "--rounds", str(rounds)]
        command += ["--systems", *systems, *(["--bytes"] if bytes_only else [])]
        ended = subprocess.run(  # noqa: S603 - our own command
            command,
            check=False,
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if not target.exists():
            sys.exit(f"{' '.join(systems)} on {ranks} ranks failed:\n{ended.stdout[-4000:]}")
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        return found


def build_peers() -> None:
    """Let DeepSpeed compile its operation once: ranks that do so side by side remove each other's lock."""
    code = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
    subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-c", code], check=False, env={**os.environ, **ENVIRONMENT}, capture_output=True
    )


# --- judging ------------------------------------------------------------------------------------------------


def judge(name: str, medians: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Compare one of ours with the peers that it has to beat."""
    peers = {other: value for other, value in medians.items() if other in STAGES and other not in OURS}
    at_least = {other: value for other, value in peers.items() if STAGES[other] >= STAGES[name]}
    best = min(at_least, key=lambda other: at_least[other])
    floor = medians["floor"]
    found: dict[str, Any] = {
        "best_peer": best,
        "ratio": medians[name] / at_least[best],
        "above_floor_ratio": (medians[name] - floor) / (at_least[best] - floor),
    }
    if "ddp" in peers:
        found["ddp_ratio"] = medians[name] / peers["ddp"]
    smaller = [other for other in sizes if other not in OURS and STAGES[other] <= STAGES[name]]
    found["not_below"] = [other for other in smaller if name in sizes and sizes[name] >= sizes[other]]
    return found


class Report:
    """What was measured so far, in a file: parts of the benchmark may be run one by one."""

    def __init__(self, path: Path) -> None:
        """Go on with what the file holds, if it is of this machine and this version of torch."""
        machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        self.path = path
        self.content: dict[str, Any] = {"torch": torch.__version__, "machine": machine}
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if all(found.get(key) == value for key, value in self.content.items()):
                self.content = found

    def of(self, kind: str, case: str) -> dict[str, Any]:
        """Return what is known of one case, by system or by group of systems."""
        found: dict[str, Any] = self.content.setdefault(kind, {}).setdefault(case, {})
        return found

    def put(self, kind: str, case: str, name: str, value: Any) -> None:
        """Keep one measurement, in place of an earlier one."""
        self.of(kind, case)[name] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")


def name_case(ranks: int, width: int) -> str:
    """Return the name of a case in the report."""
    return f"{ranks} ranks, width {width}"


def compare(report: Report, ranks: int, width: int, arguments: argparse.Namespace) -> None:
    """Measure all systems on some ranks, and print the table."""
    case = name_case(ranks, width)
    groups = [
        [name for name in GROUPS[number] if IS_COMPLETE or "deepspeed" not in name]
        for number in arguments.groups
    ]
    if "bytes" in arguments.parts:
        for name in [name for name in STAGES if any(name in group for group in groups)]:
            report.put("bytes", case, name, run_workers(ranks, width, [name], 0, bytes_only=True))
    if "times" in arguments.parts:
        for number, group in zip(arguments.groups, groups, strict=True):
            found = run_workers(ranks, width, group, arguments.rounds, bytes_only=False)
            report.put("times", case, str(number), found)
    show(report, case)


def show(report: Report, case: str) -> None:
    """Print what is known of one case."""
    memory = report.of("bytes", case)
    sizes = {name: found["live_peak_bytes"] for name, found in memory.items()}
    groups = sorted(report.of("times", case).items())
    for _, found in groups:
        medians = {name: statistics.median(times) for name, times in found["seconds"].items()}
        print(f"\n{case}, {len(found['seconds']['floor'])} rounds", flush=True)
        for name, median in medians.items():
            size = ""
            if name in memory:
                size = f"{memory[name]['live_bytes'] / 1e6:8.1f} MB between steps, "
                size += f"{memory[name]['live_peak_bytes'] / 1e6:7.1f} MB at most, "
                size += f"{memory[name]['peak_bytes'] / 1e6:7.1f} MB resident"
            print(f"  {name:11} {1e3 * median:8.1f} ms  {size}", flush=True)
        for name in (one for one in medians if one in OURS):
            verdict = judge(name, medians, sizes)
            report.put("verdicts", case, name, verdict)
            against = f", {verdict['ddp_ratio']:.3f} of DDP" if "ddp_ratio" in verdict else ""
            below = f"NOT below {', '.join(verdict['not_below'])}" if verdict["not_below"] else "below all"
            print(
                f"  -> {name}: {verdict['ratio']:.3f} of {verdict['best_peer']}, above the floor "
                f"{verdict['above_floor_ratio']:.3f}{against}"
                + (f", peak {below} that divide no more" if name in sizes else ""),
                flush=True,
            )


def sweep(report: Report, arguments: argparse.Namespace) -> None:
    """Show how step time and bytes grow with ranks and with parameters."""
    print("\nranks, width: step time and live bytes of a rank", flush=True)
    cases = [(ranks, 384) for ranks in (1, 2, 4, 8)] + [(2, width) for width in (192, 768, 1088)]
    for (ranks, width), name in itertools.product(cases, OURS):
        case = name_case(ranks, width)
        if ranks in (arguments.ranks or [ranks]) and width in (arguments.widths or [width]):
            times = run_workers(ranks, width, [name], arguments.rounds, bytes_only=False)["seconds"][name]
            size = run_workers(ranks, width, [name], 0, bytes_only=True)
            numel = sum(parameter.numel() for parameter in make_model(width).parameters())
            report.put("sweep", case, name, {"numel": numel, "seconds": times, **size})
        if name in report.of("sweep", case):
            found = report.of("sweep", case)[name]
            print(
                f"  {ranks} ranks, {found['numel'] / 1e6:6.1f}M parameters, {name}: "
                f"{1e3 * statistics.median(found['seconds']):8.1f} ms, "
                f"{found['live_bytes'] / found['numel']:6.2f} bytes per parameter between steps, "
                f"{found['peak_bytes'] / found['numel']:6.2f} at most",
                flush=True,
            )


def main() -> None:
    """Run cases, print their tables and store everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[], help="2 and 4 by default")
    parser.add_argument("--widths", type=int, nargs="+", default=[], help="384 and 768 by default")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parts", choices=["times", "bytes"], nargs="*", default=["times", "bytes"])
    parser.add_argument("--groups", type=int, choices=range(len(GROUPS)), nargs="+", default=[0, 1])
    parser.add_argument("--sweep", action="store_true", help="only show how ours grow")
    parser.add_argument("--json", type=Path, default=Path("runs/bench_zero.json"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--systems", nargs="+", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--bytes", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    if IS_COMPLETE:
        build_peers()
    else:
        print("deepspeed is not installed, and left out")
    report = Report(arguments.json)
    if arguments.sweep:
        sweep(report, arguments)
    else:
        for width, ranks in itertools.product(arguments.widths or [384, 768], arguments.ranks or [2, 4]):
            compare(report, ranks, width, arguments)


if __name__ == "__main__":
    main()
