"""``colossal run`` with scripts that use torch: meeting, failing inside collectives, jobs side by side."""

from __future__ import annotations

import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Program

# Each test imports torch two to four times, which takes seconds on a busy machine.
pytestmark = pytest.mark.timeout(90)

_LAUNCH = """
import os, signal, sys, time
import torch, torch.distributed as dist
from colossal_core import launch
world = launch(timeout_seconds=60)
total = torch.tensor([float(sys.argv[1])])
dist.all_reduce(total)
print("total", total.item(), flush=True)
"""


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        ("sys.exit(3)", 3, "exit code 3"),
        ("os._exit(5)", 5, "exit code 5"),
        ("raise ValueError('the cause')", 1, "ValueError: the cause"),
    ],
)
def test_the_rank_that_left_a_collective_is_blamed(
    program: Program, ending: str, code: int, last: str
) -> None:
    """Its peer fails in the collective a moment later, with an error of its own."""
    program.write(
        "s.py", f"{_LAUNCH}\nif world.rank == 1: {ending}\ndist.all_reduce(total)\ntime.sleep(60)\n"
    )

    done = program.run("run", "s.py", "1")

    assert done.code == code
    assert "rank 1 of 2" in done.err
    assert last in done.err
    assert done.err.rindex("rank 1 of 2") > done.err.rindex("[0] ")


def test_jobs_side_by_side_do_not_mix(program: Program) -> None:
    """Two runs that start at once each sum their own values."""
    program.write("s.py", _LAUNCH)

    jobs = [program.start("run", "s.py", value) for value in ("1", "10")]
    outputs = [job.communicate(timeout=80)[0] for job in jobs]

    assert [job.returncode for job in jobs] == [0, 0]
    assert [sorted(output.splitlines()) for output in outputs] == [
        ["[0] total 2.0", "[1] total 2.0"],
        ["[0] total 20.0", "[1] total 20.0"],
    ]


def test_ranks_of_two_launchers_meet(program: Program) -> None:
    """Two launchers on one machine stand for two machines."""
    program.write("s.py", _LAUNCH)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    flags = ["--nnodes", "2", "--nproc", "1", "--master", f"127.0.0.1:{port}", "--node-rank"]
    jobs = [program.start("run", *flags, node, "s.py", "1") for node in ("0", "1")]
    outputs = [job.communicate(timeout=80)[0] for job in jobs]

    assert outputs == ["[0] total 2.0\n", "[1] total 2.0\n"]


def test_a_script_of_plain_torch_runs_unchanged(program: Program) -> None:
    """``init_process_group`` finds the variables that torchrun sets too."""
    program.write(
        "s.py",
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1); dist.all_reduce(total); print(total.item())\n"
        "dist.destroy_process_group()\n",
    )

    done = program.run("run", "s.py")

    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == ["[0] 2.0", "[1] 2.0"]


def test_ranks_that_wait_in_a_collective_can_be_interrupted(program: Program) -> None:
    """Both wait for something that never comes, and no Python handler can run there."""
    program.write("s.py", f"{_LAUNCH}\nother = 1 - world.rank\ndist.recv(total, other)\n")
    process = program.start("run", "--grace", "2", "s.py", "1")
    assert process.stdout is not None
    for _ in range(2):
        assert "total 2.0" in process.stdout.readline()
    began = time.monotonic()

    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)

    assert process.returncode == 130
    assert time.monotonic() - began < 5
