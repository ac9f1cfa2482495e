"""Everything that needs a GPU, in one script that ends within five minutes on one.

It checks, on one accelerator, that boosted training is that of plain torch in every precision, that the
update, the norm and the guards work on device memory, that gemini has the bits of replicated within a budget
that the allocator confirms, and what a step costs beside plain torch; then it runs the tests that are marked
``gpu``, if pytest and the tests are there. Prints a line for each check and ends
with status 1 if one failed.

    python benchmarks/gpu_check.py [--tests packages/core/tests ...]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from colossal_core import Booster, NonFiniteError
from colossal_gemini import Gemini

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 5
TOLERANCES = {"fp64": 1e-10, "fp32": 2e-4, "bf16": 5e-2, "fp16": 3e-2}
"""Of weights after five steps of AdamW at a rate of 0.01, against fp64."""


class Net(nn.Module):
    """Embedding, convolution, norm and a tied head: what differs between CPU and GPU kernels."""

    def __init__(self, width: int = 64, vocabulary: int = 101, layers: int = 2) -> None:
        """Build it from a fixed seed."""
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(vocabulary, width)
        self.mix = nn.Conv1d(width, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids ``[batch, sequence]`` to logits ``[batch, sequence, vocabulary]``."""
        x = self.token(ids)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def make_batch(step: int, batch: int = 8, sequence: int = 33) -> torch.Tensor:
    """Return ids ``[batch, sequence]`` on the GPU."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 101, (batch, sequence), generator=generator).cuda()


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of predicting the next id."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train_plain() -> dict[str, torch.Tensor]:
    """Train in fp64 with plain torch."""
    model = Net().double().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        loss_of(model, make_batch(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def check_precision(precision: str, *, fused: bool) -> None:
    """Compare five boosted steps with fp64."""
    expected = train_plain()
    plain = Net().double() if precision == "fp64" else Net()
    booster = Booster(precision=precision, max_grad_norm=1.0)
    model, optimizer = booster.boost(plain, torch.optim.AdamW(plain.parameters(), lr=0.01, fused=fused))
    for step in range(STEPS):
        for _ in range(8):  # the first loss scales of fp16 may overflow
            loss_of(model, make_batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.stepped:
                break
    for name, parameter in model.named_parameters():
        assert parameter.is_cuda
        difference = (parameter.double() - expected[name]).abs().max().item()
        assert difference < TOLERANCES[precision], f"{name} differs by {difference}"


def check_forward_backward() -> None:
    """The loss and its gradients are those of a plain backward."""
    model = Net().double()
    booster = Booster(precision="fp64")
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = make_batch(0)
    reference = loss_of(model, ids)
    loss = booster.forward_backward(
        model, (ids[:, :-1], ids[:, 1:]), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())
    )
    assert abs(loss.item() - reference.item()) < 1e-6 * reference.item()
    optimizer.step()
    assert optimizer.grad_norm > 0


def check_non_finite() -> None:
    """An infinite gradient names its parameter, and nothing is updated."""
    model = Net()
    booster = Booster()
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.mix.bias.detach().clone()
    (loss_of(model, make_batch(0)) + (model.mix.bias * float("inf")).sum()).backward()
    message = ""
    try:
        optimizer.step()
    except NonFiniteError as err:
        message = str(err)
    assert "mix.bias" in message
    assert torch.equal(before, model.mix.bias)


def train_within(piece: object, precision: str) -> tuple[list[torch.Tensor], int]:
    """Train under a memory manager; return losses and weights, and most bytes from the third step on."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    plain = Net(width=256, layers=12)
    booster = Booster(piece, precision=precision)
    model, optimizer = booster.boost(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True))
    found = []
    for step in range(2 + STEPS):
        if step == 2:  # the first one is watched, and the second moves state to where it lives
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        loss = loss_of(model, make_batch(step))
        loss.backward()
        found.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
        del loss
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    with booster.full_parameters(model) as shown:
        found.extend(value.cpu().clone() for value in shown.values())
        shown.clear()
    booster.release(model)
    return found, peak


def check_gemini(precision: str) -> str:
    """Bits are those of replicated, with pinned host memory and files, and the budget is kept."""
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    wanted, whole = train_within("replicated", precision)
    report = Gemini(device_budget=1).fit(
        Net(width=256, layers=12),
        (make_batch(0)[:, :-1], make_batch(0)[:, 1:]),
        criterion=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
        precision=precision,
    )
    assert report.least_budget is not None
    notes = [f"replicated {whole / 1e6:.1f} MB"]
    with tempfile.TemporaryDirectory() as folder:
        files: dict[str, Any] = {"disk": folder, "host_budget": "48MiB"}
        for times, more in ((1.3, {}), (2.0, {}), (1.3, files), (16.0, {})):
            budget = int(times * report.least_budget)
            found, peak = train_within(Gemini(device_budget=budget, **more), precision)
            assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)), (
                f"other bits in {budget}"
            )
            assert peak <= 1.02 * budget, f"{peak} bytes of a budget of {budget}"  # the allocator rounds up
            notes.append(f"{peak / 1e6:.1f} of {budget / 1e6:.1f} MB{' with files' if more else ''}")
    return ", ".join(notes)


def compare_speed() -> str:
    """Time boosted bf16 steps beside plain torch with autocast and fused AdamW."""
    seconds: dict[str, list[float]] = {"torch": [], "colossal": []}
    plain = Net(width=1024, layers=8).cuda()
    torch_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    model = Net(width=1024, layers=8).cuda()
    booster = Booster(precision="bf16")
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))

    def step_plain(ids: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(plain, ids)
        loss.backward()
        torch_optimizer.step()
        torch_optimizer.zero_grad()

    def step_ours(ids: torch.Tensor) -> None:
        loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(25):
        ids = make_batch(number, 16, 513)
        for name, step in (("torch", step_plain), ("colossal", step_ours)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step(ids)
            torch.cuda.synchronize()
            if number >= 5:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    return f"torch {medians['torch']:.2f} ms, colossal {medians['colossal']:.2f} ms a step"


def run_check(name: str, check: Callable[[], object]) -> bool:
    """Run one check and print its line."""
    start = time.perf_counter()
    try:
        note = check()
    except Exception:  # noqa: BLE001 - the next check runs all the same, and the status tells
        traceback.print_exc()
        print(f"FAILED  {name}", flush=True)
        return False
    print(f"ok      {name} ({time.perf_counter() - start:.1f} s) {note or ''}", flush=True)
    return True


def main() -> int:
    """Run all checks; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", nargs="*", default=[], help="folders whose tests marked gpu are run")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to check")
        return 2
    results = []
    for precision in TOLERANCES:
        for fused in (False, True):
            name = f"{precision}, {'fused' if fused else 'plain'} AdamW"
            results.append(run_check(name, partial(check_precision, precision, fused=fused)))
    results.append(run_check("forward_backward", check_forward_backward))
    results.append(run_check("non-finite gradients", check_non_finite))
    results += [run_check(f"gemini, {name}", partial(check_gemini, name)) for name in ("fp32", "bf16")]
    results.append(run_check("speed", compare_speed))
    if options.tests:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *options.tests]
        results.append(subprocess.run(command, check=False).returncode in {0, 5})  # noqa: S603 - our own command
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
