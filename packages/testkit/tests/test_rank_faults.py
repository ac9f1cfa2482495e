"""Jobs that go wrong: all ranks end within seconds, the cause is told first, no process stays behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from colossal_core.errors import CapabilityError, ColossalError, UsageError
from colossal_testkit.ranks import (
    RankDiedError,
    RankFailedError,
    RanksDisagreeError,
    RankTimeoutError,
    collect_ranks,
    run_ranks,
    run_ranks_expecting_errors,
)


def fail_on(rank: int) -> None:
    """Raise on one rank while the others wait for it."""
    threshold = 41
    if dist.get_rank() == rank:
        raise ValueError(f"threshold {threshold} is odd")
    dist.barrier()


def wait_for_nobody() -> int:
    """Wait in a collective that one rank never enters."""
    if dist.get_rank() != 1:
        dist.barrier()
    return dist.get_rank()


def end(how: str) -> None:
    """End the process of rank 1."""
    sys.stdout.write("about to end\n")
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(7)
        if how == "crash":
            ctypes.string_at(0)
        os.kill(os.getpid(), getattr(signal, how))
    dist.barrier()


def refuse(first: int) -> str:
    """Raise a usage error on every rank from one on."""
    if dist.get_rank() >= first:
        raise UsageError(f"rank {dist.get_rank()} refuses", hint="ask again")
    return "fine"


def refuse_differently() -> None:
    """Raise another class on each rank, the second one first."""
    if dist.get_rank() == 0:
        time.sleep(0.1)
        raise CapabilityError("cannot")
    raise UsageError("must not")


def issue_one_more() -> None:
    """Start a collective on one rank only and do not wait for it."""
    value = torch.ones(2, 3)
    dist.all_reduce(value)
    if dist.get_rank() == 0:
        dist.all_reduce(value, async_op=True)


def forget_to_wait() -> None:
    """Start a collective on all ranks and wait on none."""
    dist.all_reduce(torch.ones(2), async_op=True)


def return_lock() -> object:
    """Return what cannot be pickled."""
    return threading.Lock()


def leave() -> None:
    """Call what ends a program."""
    sys.exit(3)


def skip() -> None:
    """Skip from inside."""
    pytest.skip("this machine lacks something")


def my_pid() -> int:
    """Return the process id."""
    return os.getpid()


def test_the_first_failing_rank_is_told_and_the_others_end() -> None:
    """The peers hang in a barrier; the job ends within seconds, with traceback, locals and their stacks."""
    started = time.monotonic()

    with pytest.raises(RankFailedError) as caught:
        run_ranks(fail_on, 3, 1)

    text = str(caught.value)
    assert time.monotonic() - started < 20
    assert caught.value.rank == 1
    assert isinstance(caught.value.error, ValueError)
    assert "rank 1 of 3 raised ValueError" in text
    assert "threshold = 41" in text
    assert "rank 2 had not ended" in text
    assert "barrier: NOT FINISHED" in text
    assert "colossal_testkit/pool" not in text


def test_a_hang_ends_with_the_stack_of_each_rank() -> None:
    """The message says where ranks wait, in which collective, and which rank had returned."""
    with pytest.raises(RankTimeoutError) as caught:
        run_ranks(wait_for_nobody, 3, timeout_seconds=1)

    text = str(caught.value)
    assert "not ended after 1 s: ranks 0, 2" in text
    assert "in wait_for_nobody" in text
    assert "#1 barrier: NOT FINISHED" in text
    assert "rank 1 returned" in text


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("exit", "rank 1 ended with exit code 7"),
        ("crash", "rank 1 was ended by signal 11 (SIGSEGV)"),
        ("SIGKILL", "rank 1 was ended by signal 9 (SIGKILL)"),
    ],
)
def test_a_dead_process_is_told_with_its_signal(how: str, told: str) -> None:
    """The message holds how it ended and what it had printed; a crash adds its stack."""
    with pytest.raises(RankDiedError) as caught:
        run_ranks(end, 3, how)

    text = str(caught.value)
    assert told in text
    assert "about to end" in text
    assert ("in end" in text) == (how == "crash")
    assert run_ranks(refuse, 3, 3) == ["fine"] * 3


def test_an_error_of_ours_is_raised_as_its_own_class() -> None:
    """Tests can say ``pytest.raises(UsageError)``; the hint survives, the rank's traceback is a note."""
    with pytest.raises(UsageError, match="rank 1 refuses") as caught:
        run_ranks(refuse, 2, 1)

    assert caught.value.hint == "ask again"
    assert "raised on rank 1 of 2" in caught.value.__notes__[0]
    assert "in refuse" in caught.value.__notes__[0]


def test_the_error_that_came_first_is_raised() -> None:
    """Time decides, not the number of the rank."""
    with pytest.raises(UsageError, match="must not"):
        run_ranks(refuse_differently, 2)


def test_errors_on_every_rank_are_returned() -> None:
    """What all ranks must raise is collected, and the processes go on."""
    before = run_ranks(my_pid, 2)

    errors = run_ranks_expecting_errors(refuse, 2, 0, error=UsageError)

    assert [error.message for error in errors] == ["rank 0 refuses", "rank 1 refuses"]
    assert run_ranks(my_pid, 2) == before


def test_one_rank_without_the_error_is_a_failure() -> None:
    """A rank that returns, or raises another class, is named."""
    with pytest.raises(RankFailedError, match="rank 0 returned 'fine'"):
        run_ranks_expecting_errors(refuse, 2, 1)
    with pytest.raises(RankFailedError, match="should raise UsageError"):
        run_ranks_expecting_errors(refuse_differently, 2, error=UsageError)


def test_outcomes_can_be_mixed() -> None:
    """Values and errors of all ranks, without judgement."""
    outcomes = collect_ranks(refuse, 2, 1)

    assert [outcome.value for outcome in outcomes] == ["fine", None]
    assert isinstance(outcomes[1].error, ColossalError)
    assert outcomes[1].traceback.startswith("Traceback")


def test_unequal_numbers_of_collectives_are_found_without_a_hang() -> None:
    """A collective that only one rank issued is named, with its shape."""
    with pytest.raises(RanksDisagreeError) as caught:
        run_ranks(issue_one_more, 2)

    text = str(caught.value)
    assert "rank 0: 2, the latest: #1 all_reduce Float[2, 3], #2 all_reduce Float[2, 3]" in text
    assert "rank 1: 1, the latest: #1 all_reduce Float[2, 3]" in text


def test_a_collective_nobody_waited_for_disturbs_no_later_job() -> None:
    """All ranks issued it, so it ends; the next job has groups of its own."""
    for _ in range(3):
        run_ranks(forget_to_wait, 2)

    assert run_ranks(refuse, 2, 2) == ["fine", "fine"]


def test_a_result_that_cannot_travel_is_told() -> None:
    """The rank that returned it fails, with what to do."""
    with pytest.raises(RankFailedError, match="Return plain values and tensors"):
        run_ranks(return_lock, 1)


def test_leaving_the_program_is_a_failure() -> None:
    """``sys.exit`` in a rank does not end the worker silently."""
    with pytest.raises(RankFailedError, match="raised SystemExit"):
        run_ranks(leave, 2)


def test_a_skip_on_every_rank_skips_the_test() -> None:
    """A rank may find out that the machine lacks something."""
    with pytest.raises(pytest.skip.Exception, match="this machine lacks something"):
        run_ranks(skip, 2)


def test_a_worker_killed_between_jobs_is_replaced() -> None:
    """The next job runs on new processes."""
    (victim,) = run_ranks(my_pid, 1)
    os.kill(victim, signal.SIGKILL)
    time.sleep(0.1)

    (replaced,) = run_ranks(my_pid, 1)

    assert replaced != victim


SLEEPERS = """
import os, time
from pathlib import Path
from colossal_testkit.ranks import run_ranks

def sleep(folder):
    Path(folder, "rank" + os.environ["RANK"]).write_text(f"{os.getpid()} {os.getppid()}")
    time.sleep(60)

def test_sleepers(pytestconfig):
    run_ranks(sleep, 2, str(pytestconfig.rootpath), timeout_seconds=60)
"""


@pytest.mark.timeout(90)
def test_a_killed_test_run_leaves_no_process(tmp_path: Path) -> None:
    """An impolite end of pytest takes the workers and the forkserver along."""
    run = _start_sleepers(tmp_path)
    processes = _await_processes(tmp_path)

    run.kill()
    run.wait(timeout=15)

    assert len(processes) == 3
    assert _await_end(processes) == []


def sleep(folder: str) -> None:
    """Say who is there, and stay."""
    Path(folder, f"rank{dist.get_rank()}").write_text(f"{os.getpid()} {os.getppid()}")
    time.sleep(60)


def test_an_interrupt_ends_the_ranks_and_says_what_they_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C, or a timeout of the test runner, goes through; stacks are printed, the workers are gone."""

    def interrupt() -> None:
        """Press Ctrl-C once both ranks are asleep."""
        _await_processes(tmp_path)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()

    with pytest.raises(KeyboardInterrupt):
        run_ranks(sleep, 2, str(tmp_path))

    workers = {int((tmp_path / f"rank{rank}").read_text().split()[0]) for rank in range(2)}
    assert _await_end(workers) == []
    assert "in sleep" in capsys.readouterr().out


def _await_end(processes: set[int]) -> list[int]:
    """Return those processes that still run after a few seconds."""
    deadline = time.monotonic() + 5
    while any(map(_is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [process for process in processes if _is_running(process)]


def _start_sleepers(folder: Path) -> subprocess.Popen[bytes]:
    """Start pytest on a test whose ranks sleep."""
    (folder / "test_sleepers.py").write_text(SLEEPERS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        f"--rootdir={folder}",
        "-c",
        os.devnull,
    ]
    return subprocess.Popen([*command, "test_sleepers.py"], cwd=folder, stdout=subprocess.DEVNULL)


def _await_processes(folder: Path) -> set[int]:
    """Return workers and forkserver of the run, once both ranks are asleep."""
    files = [folder / "rank0", folder / "rank1"]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text().count(" ") for file in files):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)
    return {int(word) for file in files for word in file.read_text().split()}


def _is_running(process: int) -> bool:
    """Say whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False
