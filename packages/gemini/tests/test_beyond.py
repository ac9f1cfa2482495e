"""Training beyond what there is: a state 20 times the device, and 4 times what the process may hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does"),
]

MIB = 1 << 20

CALM = {"OMP_NUM_THREADS": "1"}
"""Environment of the processes."""

PROGRAM = """
import json, resource, sys, time
import torch
from torch.utils.checkpoint import checkpoint
from colossal_core import Booster, launch
from colossal_gemini import Gemini
from colossal_testkit.models import GPT

options = json.loads(sys.argv[1])
torch.set_num_threads(1)
launch()


class Deep(GPT):
    def forward(self, ids):
        hidden = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return self.head(self.norm(hidden))


def data_bytes():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["VmData"].split()[0]) * 1024


def count_bytes():
    with torch.device("meta"):
        model = Deep(**options["model"])
    return 16 * sum(parameter.numel() for parameter in model.parameters())


def make():
    torch.manual_seed(0)
    if options["on_meta"]:
        with torch.device("meta"):
            return Deep(**options["model"])
    return Deep(**options["model"])


state = count_bytes()
if options["limit"]:
    torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
    limit = data_bytes() + options["limit"]
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
model = make()
booster = Booster(Gemini(**options["gemini"]))
model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
losses, seconds = [], []
for number in range(options["steps"]):
    start = time.perf_counter()
    ids = torch.randint(0, 64, (1, 33), generator=torch.Generator().manual_seed(number))
    logits = model(ids[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss.detach()).hex())
    seconds.append(time.perf_counter() - start)
tiers = booster._engine.manager.tiers
report = {
    "losses": losses,
    "seconds": seconds,
    "state": state,
    "peak_resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
    "peaks": {tier.name: tier.peak for tier in tiers.ordered},
}
print("REPORT", json.dumps(report))
"""


def train(
    model: dict[str, int], gemini: dict[str, Any], *, steps: int, limit: int = 0, on_meta: bool = False
) -> dict[str, Any]:
    """Train in a process of its own and return what it reports."""
    options = {"model": model, "gemini": gemini, "steps": steps, "limit": limit, "on_meta": on_meta}
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(PROGRAM), json.dumps(options)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **CALM},
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-4000:]}"
    line = next(line for line in done.stdout.splitlines() if line.startswith("REPORT "))
    found: dict[str, Any] = json.loads(line.removeprefix("REPORT "))
    shown = {key: value for key, value in found.items() if key != "losses"}
    print(json.dumps(shown))  # noqa: T201 - the numbers are what is asked for; pytest -s shows them
    return found


def test_a_state_of_20_times_the_device_trains_as_without_a_limit() -> None:
    """One process, 256 MiB of device memory, more than 5 GiB of state: the losses are the same bits."""
    model = {"num_blocks": 41, "width": 1024, "heads": 16, "length": 32, "vocabulary": 64}

    limited = train(model, {"device_budget": 256 * MIB}, steps=3)
    free = train(model, {}, steps=3)

    assert limited["state"] >= 20 * 256 * MIB
    assert limited["peaks"]["device"] <= 256 * MIB
    assert limited["losses"] == free["losses"]


def test_a_state_of_4_times_a_hard_limit_trains_with_files(tmp_path: Path) -> None:
    """The system refuses what exceeds the limit; the rest is in a file that is not mapped."""
    model = {"num_blocks": 20, "width": 512, "heads": 8, "length": 32, "vocabulary": 64}
    limit = 160 * MIB

    # The rest is for what is no chunk: activations, new states of one chunk, and the stacks of four threads.
    options = {"host_budget": limit * 5 // 8, "disk": str(tmp_path)}
    limited = train(model, options, steps=3, limit=limit, on_meta=True)
    free = train(model, {}, steps=3, on_meta=True)

    assert limited["state"] >= 4 * limit
    assert limited["peak_resident"] < limit + 64 * MIB
    assert limited["losses"] == free["losses"]
