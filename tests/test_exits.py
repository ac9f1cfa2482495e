"""Short runs end with the exit code of their script: no thread of torch's outlives the interpreter.

A process group that is destroyed while the interpreter goes down takes the process with it now and then
("terminate called without an active exception", exit code 134), so many runs are needed to see it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from colossal_core.processes import make_rank_variables, reserve_port

from .preloaded import Preloaded

RUN = """
import os, sys
children = []
for variables in {ranks!r}:
    child = os.fork()
    if child == 0:
        break
    children.append(child)
else:
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
    sys.exit()
os.environ.update(variables)

import torch
from colossal_core import Booster, launch

launch()
net = torch.nn.Linear(4, 2)
booster = Booster()
model, optimizer = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
for _ in range(3):
    booster.forward_backward(model, (torch.randn(4, 4), torch.randn(4, 2)), torch.nn.MSELoss())
    optimizer.step()
    optimizer.zero_grad()
{end}
"""

ENDS = {
    "pass": 0,
    "sys.exit(3)": 3,
    "raise ValueError('boom')": 1,
    "torch.distributed.destroy_process_group()": 0,
}


@pytest.fixture(scope="module")
def preloaded() -> Iterator[Preloaded]:
    """Return what starts the runs."""
    interpreter = Preloaded()
    yield interpreter
    interpreter.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_runs", [1, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("end", ENDS)
def test_short_runs_end_as_their_script_says(
    end: str, num_runs: int, tmp_path: Path, preloaded: Preloaded
) -> None:
    """By themselves, by ``sys.exit``, by an error, and with a group that the script has destroyed."""
    for _ in range(num_runs):
        with reserve_port() as holder:
            ranks = [
                make_rank_variables(
                    rank=rank,
                    world_size=2,
                    local_rank=rank,
                    local_world_size=2,
                    address="127.0.0.1",
                    port=holder.getsockname()[1],
                    run_directory=str(tmp_path),
                )
                for rank in range(2)
            ]
            code = RUN.format(ranks=ranks, end=end)
            exit_code, printed = preloaded.run(code, tmp_path, os.environ)

        assert exit_code == 0, printed
        assert str([ENDS[end]] * 2) in printed, printed
