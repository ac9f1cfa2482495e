"""Step time of gemini over its device budget, beside its floor, and against DeepSpeed and FSDP2 with offload.

Trains a GPT whose blocks recompute, so that its state is most of what it needs. A second arena of host memory
stands in for the device. The *floor* of a budget is a step with everything in memory (``replicated`` on one
rank, ``zero3`` on more) while a thread moves the bytes that gemini moved, with the same calls; what bytes
take at the measured rates stands beside it. Steps of both alternate in one process, so that what else the
machine does hits both. Peers are given offload as far as they take it on this machine, where it moves
nothing; their resident peaks are measured in processes of their own.

With files below the budgets an update is mostly reading and writing, which cannot begin before backward ends,
since the norm of all gradients says whether there is an update: only what memory has room for can be read
before it, or be written after it. So there the floor, in which all bytes may move at any time, is below what
any order of the same work can reach. The *floor in order* keeps to it, see
:mod:`benchmarks.floor`.

    python -m benchmarks.gemini [--ranks 1 2] [--precisions fp32 bf16] [--budgets 1 .5 .25 .1 .05] [--json F]
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from benchmarks.floor import Floor, Moved, in_order
from benchmarks.workload import GPT, loss_of, make_batch
from benchmarks.zero import ENVIRONMENT, IS_COMPLETE, build_peers
from torch import nn
from torch.utils.checkpoint import checkpoint

from colossal_core import Booster, ColossalError, launch
from colossal_core.runtime.arena import Arena
from colossal_gemini import Gemini
from colossal_gemini.contents import Tiers
from colossal_gemini.rates import measure_rates

STATE_BYTES = 16
"""Of a parameter: value, gradient and two moments of Adam in fp32, or 16-bit ones of two and a master."""

RATE, WARM_UP, ROWS = 1e-3, 3, 1
"""The first step of gemini is traced and the second follows the plan for the first time."""

Step = Callable[..., float]
"""Takes a step by its number, and calls what it may be given besides between backward and update."""


@attrs.frozen
class Case:
    """Budgets of one run.

    Attributes:
        fraction: Of the state: the budget of the device.
        disk: A folder, for state beyond as much host memory as the device has; None for host memory only.
    """

    fraction: float
    disk: str | None

    def options(self, budget: int) -> dict[str, Any]:
        """Return the options of gemini for a budget of the device in bytes."""
        if self.disk is None:
            return {"device_budget": budget}
        return {"device_budget": budget, "host_budget": 2 * budget, "disk": self.disk}


class Deep(GPT):
    """The GPT of the other benchmarks, with blocks that recompute."""

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Map ids to logits ``[B, T, V]``."""
        x_BTD = self.token(ids_BT) + self.position.weight[: ids_BT.shape[1]]
        for block in self.blocks:
            x_BTD = checkpoint(block, x_BTD, use_reentrant=False)
        logits: torch.Tensor = self.head(self.norm(x_BTD))
        return logits


# --- systems ------------------------------------------------------------------------------------------------


def make_model(arguments: argparse.Namespace) -> nn.Module:
    """Return the model, with the same values in every system."""
    torch.manual_seed(0)
    return Deep(arguments.width, arguments.layers)


def batch_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a small batch of this rank, so that transfers are what a step is made of."""
    ids, target = make_batch(number, dist.get_rank())
    return ids[:ROWS], target[:ROWS]


def make_boosted(arguments: argparse.Namespace, piece: Any) -> tuple[Booster, Step]:
    """Return a booster with one of our memory managers, and a step of it."""
    model = make_model(arguments)
    booster = Booster(piece, precision=arguments.precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    model, optimizer = booster.boost(model, optimizer)

    def step(number: int, between: Callable[[], None] = lambda: None) -> float:
        ids, target = batch_of(number)
        loss = loss_of(model(ids), target)
        loss.backward()
        between()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return booster, step


def make_fsdp2(arguments: argparse.Namespace) -> Step:
    """Return a step of ``fully_shard`` with CPU offload, one unit for each block."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    model = make_model(arguments)
    assert isinstance(model, Deep)
    dtype = torch.bfloat16 if arguments.precision == "bf16" else None
    policies: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    for block in model.blocks:
        fully_shard(block, **policies)
    fully_shard(model, **policies)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def step(number: int) -> float:
        ids, target = batch_of(number)
        loss = loss_of(model(ids), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def make_deepspeed(arguments: argparse.Namespace) -> Step:
    """Return a step of DeepSpeed ZeRO 3 with parameters and optimizer state in host memory."""
    deepspeed: Any = importlib.import_module("deepspeed")
    model = make_model(arguments)
    offload = {"device": "cpu", "pin_memory": False}
    buckets = dict.fromkeys(
        ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"), 1 << 22
    )
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": arguments.precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload, **buckets},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=model.parameters())

    def step(number: int) -> float:
        ids, target = batch_of(number)
        loss = loss_of(engine(ids), target)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def make(name: str, arguments: argparse.Namespace) -> Step:
    """Return the step of a system by its name."""
    if name == "fsdp2":
        return make_fsdp2(arguments)
    if name == "deepspeed3":
        return make_deepspeed(arguments)
    return make_boosted(arguments, Gemini())[1]


# --- measuring ----------------------------------------------------------------------------------------------


def begin(
    arguments: argparse.Namespace, options: dict[str, Any]
) -> tuple[Booster, Step, list[float], dict[str, Any]]:
    """Boost and take the first steps; with chunks of one parameter each where larger ones do not fit."""
    smallest = max(parameter.nbytes for parameter in make_model(arguments).parameters())
    more: dict[str, Any] = {}
    while True:
        try:
            booster, step = make_boosted(arguments, Gemini(**options, **more))
            return booster, step, [step(number) for number in range(WARM_UP)], more
        except ColossalError:
            if more:
                raise
        more = {"chunk_bytes": smallest}
        gc.collect()


def measure_budget(arguments: argparse.Namespace, case: Case, floor: Floor) -> dict[str, Any]:
    """Return what steps take with a part of the state as budget, and what their floors take."""
    numel = sum(parameter.numel() for parameter in make_model(arguments).parameters())
    budget = int(case.fraction * STATE_BYTES * numel)
    found: dict[str, Any] = {"fraction": case.fraction, "budget": budget, "disk": case.disk is not None}
    try:
        booster, step, losses, more = begin(arguments, case.options(budget))
    except ColossalError as err:
        return {**found, "refused": str(err)}
    seconds, floors, ordered = [], [], []
    moved: Moved = {}
    before: Moved = {}
    free = 0
    engine: Any = booster._engine  # noqa: SLF001 - nothing public tells what moved in half a step
    tiers: Tiers = engine.manager.tiers

    def look() -> None:
        nonlocal before, free
        before = {f"{source} to {target}": size for (source, target), size in tiers.moved.items()}
        memories = [tier for tier in tiers.ordered if isinstance(tier, Arena)]
        free = sum(max(0, int(tier.room()) + tiers.leaving.taken(tier)) for tier in memories if tier.budget)

    for number in range(WARM_UP, WARM_UP + arguments.rounds):
        dist.barrier()
        start = time.perf_counter()
        losses.append(step(number, look))
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        moved = booster.report()["moved"]
        floors.append(floor.run(number, moved))
        if case.disk is not None:
            ordered.append(floor.run(number, *in_order(before, moved, free)))
    peaks = {name: tier["peak"] for name, tier in booster.report()["tiers"].items()}
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found |= {"seconds": seconds, "floors": floors, "ordered": ordered, "moved": moved, "losses": losses}
    found |= {"before": before, "free": free, **more}
    return {**found, "peaks": peaks, "resident": resident}


def measure_sweep(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what all budgets take, the largest first, then with files, and the rates between tiers."""
    folder = arguments.disk or tempfile.gettempdir()  # one for all ranks; the files have no names
    piece = "replicated" if dist.get_world_size() == 1 else "zero3"
    num_bytes = 12 * arguments.width**2 * (2 if arguments.precision == "bf16" else 4)
    floor = Floor(make_boosted(arguments, piece)[1], num_bytes, folder)
    rates = measure_rates(floor.tiers)
    for number in range(WARM_UP):
        floor.run(number, {})
    cases = [Case(fraction, None) for fraction in arguments.budgets]
    cases += [Case(fraction, folder) for fraction in arguments.disk_budgets]
    budgets = []
    for case in cases:
        budgets.append(measure_budget(arguments, case, floor))
        gc.collect()
    floor.tiers.close()
    shown = {f"{source} to {target}": rate for (source, target), rate in rates.items()}
    return {"rates": shown, "budgets": budgets}


def measure_times(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run systems in turn and return seconds per step."""
    systems = {name: make(name, arguments) for name in arguments.systems}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(WARM_UP + arguments.rounds):
        shift = number % len(systems)
        for name in [*arguments.systems[shift:], *arguments.systems[:shift]]:
            dist.barrier()
            start = time.perf_counter()
            systems[name](number)
            dist.barrier()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return {"seconds": seconds}


def measure_peak(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the resident peak of the process grew by."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = make(arguments.systems[0], arguments)
    for number in range(WARM_UP):
        step(number)
    return {"peak": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024}


MEASUREMENTS = {"sweep": measure_sweep, "times": measure_times, "peak": measure_peak}


def work(arguments: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 writes the result."""
    torch.set_num_threads(1)
    launch()
    arguments.precision = arguments.precisions[0]
    result = MEASUREMENTS[arguments.measurement](arguments)
    if dist.get_rank() == 0:
        Path(arguments.worker).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()


def run_workers(
    arguments: argparse.Namespace, ranks: int, precision: str, measurement: str, systems: list[str]
) -> dict[str, Any]:
    """Start the ranks of one measurement and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "result.json"
        command = [sys.executable, "-m", "colossal_cli", "run", "--nproc", str(ranks)]
        command += ["-m", "benchmarks.gemini", "--worker", str(target), "--measurement", measurement]
        command += ["--precisions", precision, "--systems", *systems]
        command += ["--width", str(arguments.width), "--layers", str(arguments.layers)]
        command += ["--rounds", str(arguments.rounds), "--budgets", *map(str, arguments.budgets)]
        command += ["--disk-budgets", *map(str, arguments.disk_budgets)]
        command += ["--disk", arguments.disk] if arguments.disk else []
        ended = subprocess.run(  # noqa: S603 - our own command
            command,
            check=False,
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if not target.exists():
            sys.exit(f"{measurement} of {' '.join(systems)} on {ranks} ranks failed:\n{ended.stdout[-4000:]}")
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        return found


# --- tables -------------------------------------------------------------------------------------------------


def show_sweep(found: dict[str, Any]) -> None:
    """Print a table of budgets, and add medians to what was found."""
    rates = found["rates"]
    print("  " + ", ".join(f"{way} {rate / 1e9:.1f} GB/s" for way, rate in rates.items()), flush=True)
    first: list[float] = []
    for row in found["budgets"]:
        if "refused" in row:
            print(f"  {row['fraction']:5.0%}  {row['refused'].splitlines()[0]}", flush=True)
            continue
        first = first or row["losses"]
        row["ms"], row["floor_ms"] = (1e3 * statistics.median(row[key]) for key in ("seconds", "floors"))
        row["ratio"] = row["ms"] / row["floor_ms"]
        row["bytes_ms"] = 1e3 * sum(nbytes / rates[way] for way, nbytes in row["moved"].items())
        row["same_losses"] = row["losses"] == first
        order = ""
        if row["ordered"]:
            row["ordered_ms"] = 1e3 * statistics.median(row["ordered"])
            order = f"; in order {row['ordered_ms']:8.1f} ms: {row['ms'] / row['ordered_ms']:.2f}"
        moved = ", ".join(f"{nbytes / 1e6:.0f} MB {way}" for way, nbytes in row["moved"].items())
        losses = "equal" if row["same_losses"] else "DIFFER"
        print(
            f"  {row['fraction']:5.0%} {row['budget'] / 1e6:8.1f} MB{' and files' if row['disk'] else ''}"
            f"{', small chunks' if 'chunk_bytes' in row else ''}  {row['ms']:8.1f} ms, floor "
            f"{row['floor_ms']:8.1f} ms: {row['ratio']:.2f}{order}; bytes alone {row['bytes_ms']:6.1f} ms "
            f"({moved}); losses {losses}; {row['resident'] / 1e6:.0f} MB resident so far",
            flush=True,
        )


def compare_peers(arguments: argparse.Namespace, ranks: int, precision: str) -> dict[str, Any]:
    """Measure gemini without a device of its own against the peers, and print the table."""
    names = ["gemini", "fsdp2", *(["deepspeed3"] if IS_COMPLETE else [])]
    peaks = {name: run_workers(arguments, ranks, precision, "peak", [name])["peak"] for name in names}
    seconds = run_workers(arguments, ranks, precision, "times", names)["seconds"]
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratios: dict[str, Any] = {}
    for name in names:
        against = ""
        if name != "gemini":
            found = {"time": medians["gemini"] / medians[name], "memory": peaks["gemini"] / peaks[name]}
            ratios[name] = found
            against = f"  -> gemini: {found['time']:.3f} of its time, {found['memory']:.2f} of its bytes"
        print(
            f"  {name:11} {1e3 * medians[name]:8.1f} ms  {peaks[name] / 1e6:8.1f} MB resident{against}",
            flush=True,
        )
    return {"peaks": peaks, "seconds": seconds, "ratios": ratios}


def main() -> None:
    """Run all cases, print their tables and store everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.0, 0.5, 0.25, 0.1, 0.05])
    parser.add_argument("--disk-budgets", type=float, nargs="*", default=[0.1], help="with files below them")
    parser.add_argument("--disk", help="a folder for files; a temporary one by default")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--self", action="store_true", help="leave peers out")
    parser.add_argument("--json", type=Path, default=Path("runs/bench_gemini.json"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--measurement", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    parser.add_argument("--systems", nargs="+", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    if IS_COMPLETE:
        build_peers()
    else:
        print("deepspeed is not installed, and left out")
    cases = []
    for ranks, precision in itertools.product(arguments.ranks, arguments.precisions):
        print(
            f"\n{precision}, {ranks} ranks, {arguments.layers} layers of width {arguments.width}", flush=True
        )
        case = {"ranks": ranks, "precision": precision}
        case |= run_workers(arguments, ranks, precision, "sweep", ["gemini"])
        show_sweep(case)
        if ranks > 1 and not arguments.self:
            case["peers"] = compare_peers(arguments, ranks, precision)
        cases.append(case)
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    report = {"torch": torch.__version__, "machine": machine, "cases": cases}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
