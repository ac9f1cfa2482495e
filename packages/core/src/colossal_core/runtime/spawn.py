"""Run a function on many ranks from a notebook or an interactive session.

Two ways to start a rank, chosen by what the function needs:

- a function that lives in a module of its own is *imported* by fresh interpreters (start method "spawn"):
  slower by the import of torch, and free of whatever this process has done before;
- a function of ``__main__`` (a notebook cell, a script), a lambda or a closure cannot be imported by anybody
  else, so this process is *forked*. A fork has one compute thread, because an OpenMP pool that ran before a
  fork hangs after it (measured with torch 2.13: a product of two 600 x 600 matrices never returns on two
  threads), and it cannot use a CUDA context that exists already.

Scripts are better started by ``colossal run``.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, final

import attrs
import torch
import torch.distributed as dist

from colossal_core.errors import CapabilityError, ColossalError, UsageError
from colossal_core.placement import LOOPBACK
from colossal_core.processes import (
    RankEnd,
    find_first_failure,
    make_parent_guard,
    make_rank_variables,
    read_departure,
    reserve_port,
    to_exit_code,
)

if TYPE_CHECKING:
    from multiprocessing.context import ForkContext, SpawnContext
    from multiprocessing.process import BaseProcess

__all__ = ["RankFailedError", "spawn"]

# Peers of a failed rank get this long to end by themselves, so that what they have to say is not cut off.
_SETTLE_SECONDS = 1.0
_GRACE_SECONDS = 5.0


@final
class RankFailedError(ColossalError):
    """A rank that ``spawn`` started ended with an error; the message holds its traceback.

    Attributes:
        rank: The rank whose failure caused the others.
        rank_exit_code: Its exit code; 128 plus the signal's number when a signal ended it.
    """

    default_code: ClassVar[str] = "C031"
    rank: int = -1
    rank_exit_code: int = 1


@final
@attrs.frozen(kw_only=True)
class _Task:
    """What one rank has to do.

    Attributes:
        function: What it runs.
        args: Arguments of the function.
        variables: Environment variables that tell it its place.
        num_threads: Threads for torch's own operations; None leaves the user's choice.
    """

    function: Callable[..., object]
    args: tuple[object, ...]
    variables: dict[str, str]
    num_threads: int | None


@final
@attrs.define
class _Rank:
    """One rank as its parent sees it.

    Attributes:
        index: Global rank.
        process: The process.
        reports: Where its traceback arrives.
        report: The traceback, once it has arrived.
        end: How it ended, once it has.
    """

    index: int
    process: BaseProcess
    reports: Connection
    report: str = ""
    end: RankEnd | None = None


def spawn(function: Callable[..., object], nproc: int, *args: object) -> None:
    """Run ``function(*args)`` on ``nproc`` ranks of this machine and wait for all of them.

    The function calls ``launch()`` itself, as a script does; its return value is dropped. Every rank is a
    process with a session of its own; all of them end when one fails, when this call is interrupted, or when
    this process dies.

    Args:
        function: What each rank runs. In a module of its own it must be importable by name, and the arguments
            must survive pickling. A function of ``__main__``, a lambda or a closure is run in a fork instead:
            it sees this process's memory as it was (changes stay in the rank), computes on one thread, and
            must find CUDA unused.
        nproc: Number of ranks, at least 1.
        args: Positional arguments, the same on every rank.

    Raises:
        RankFailedError: A rank failed; it names the first one and holds its traceback.
        UsageError: ``nproc`` or ``function`` is wrong, or this process is itself part of a process group.
        CapabilityError: The function can only be forked, and this process cannot be forked safely.
    """
    context, is_fork = _choose_context(function, nproc)
    with tempfile.TemporaryDirectory(prefix="colossal-spawn-") as directory, reserve_port() as holder:
        port = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        num_threads = _choose_num_threads(nproc, is_fork=is_fork)
        ranks: list[_Rank] = []
        try:
            for index in range(nproc):
                variables = make_rank_variables(
                    rank=index,
                    world_size=nproc,
                    local_rank=index,
                    local_world_size=nproc,
                    address=LOOPBACK,
                    port=port,
                    run_directory=directory,
                )
                task = _Task(function=function, args=args, variables=variables, num_threads=num_threads)
                ranks.append(_start(context, index, task))
            _watch(ranks, Path(directory))
        finally:
            _end_all(ranks)
    _raise_first_failure(ranks)


def _choose_context(function: Callable[..., object], nproc: int) -> tuple[ForkContext | SpawnContext, bool]:
    """Check the arguments and return how to start ranks, and whether that is a fork."""
    _check_arguments(function, nproc)
    if dist.is_available() and dist.is_initialized():
        raise UsageError(
            f"this process is rank {dist.get_rank()} of a process group already, so it cannot start ranks",
            hint="restart the notebook, and call launch() only inside the function given to spawn",
        )
    if _is_importable(function):
        return multiprocessing.get_context("spawn"), False
    name = f"{function.__module__}.{getattr(function, '__qualname__', repr(function))}"
    if "fork" not in multiprocessing.get_all_start_methods():
        raise CapabilityError(
            f"{name} cannot be imported by another process, and this system cannot fork",
            hint="move the function into a module",
        )
    has_used_cuda: Callable[[], bool] = torch.cuda.is_initialized
    if has_used_cuda():
        raise CapabilityError(
            f"{name} can only run in a fork, but this process has used CUDA, which no fork survives",
            hint="move the function into a module, or restart and touch CUDA inside the function only",
        )
    return multiprocessing.get_context("fork"), True


def _check_arguments(function: object, nproc: object) -> None:
    """Refuse what is no function or no number of ranks."""
    if not callable(function):
        raise UsageError(f"spawn expects a function, got {function!r}")
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise UsageError(f"nproc must be an integer of at least 1, got {nproc!r}")


def _choose_num_threads(nproc: int, *, is_fork: bool) -> int | None:
    """Return the threads of each rank: one after a fork, else an equal share unless the user has chosen."""
    if is_fork:
        return 1
    return None if "OMP_NUM_THREADS" in os.environ else max(1, (os.cpu_count() or 1) // nproc)


def _is_importable(function: Callable[..., object]) -> bool:
    """Return whether a fresh interpreter finds this very function by its module and name."""
    module = sys.modules.get(function.__module__ or "")
    if module is None or function.__module__ in {"__main__", "__mp_main__"}:
        return False
    try:
        return bool(pickle.loads(pickle.dumps(function)) is function)  # noqa: S301 - pickled on this very line
    except (pickle.PicklingError, AttributeError, TypeError):
        return False


def _start(context: ForkContext | SpawnContext, index: int, task: _Task) -> _Rank:
    """Start one rank."""
    reports, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_rank, args=(task, os.getpid(), sender), name=f"rank {index}")
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of any fork beside threads; the top of this page says what makes ours safe.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as err:
        raise UsageError(f"the arguments of spawn cannot be sent to another process: {err}") from err
    except RuntimeError as err:
        # The child imports the script again, which calls spawn again, which multiprocessing refuses.
        raise UsageError(
            "spawn was called while a rank was importing this script",
            hint='put the call under `if __name__ == "__main__":`',
        ) from err
    finally:
        sender.close()
    return _Rank(index, process, reports)


def _run_rank(task: _Task, parent: int, sender: Connection) -> None:
    """Be one rank: runs in the child process."""
    from colossal_core.runtime import launch as launching

    os.setsid()  # a Ctrl-C at the terminal reaches the parent only, which then ends all ranks
    make_parent_guard(parent)()
    os.environ.update(task.variables)
    if task.num_threads is not None:
        torch.set_num_threads(task.num_threads)
    try:
        task.function(*task.args)
    finally:
        error = sys.exception()
        if error is not None and not isinstance(error, SystemExit):
            sender.send("".join(traceback.format_exception(error)))
        launching.leave(has_failed=error is not None)
        sender.close()


def _watch(ranks: list[_Rank], directory: Path) -> None:
    """Collect reports and ends until all ranks ended, or one failed and the others had time to settle."""
    deadline: float | None = None
    while any(rank.end is None for rank in ranks):
        running = [rank for rank in ranks if rank.end is None]
        timeout = None if deadline is None else deadline - time.monotonic()
        if timeout is not None and timeout <= 0:
            leaving = any(read_departure(directory, rank.index).left_at is not None for rank in running)
            if not leaving or timeout <= -_GRACE_SECONDS:
                return
            timeout = _SETTLE_SECONDS  # its exit code is worth waiting for: it may be the cause
        wait([source for rank in running for source in (rank.process.sentinel, rank.reports)], timeout)
        for rank in running:
            _collect(rank, directory)
        failed = any(rank.end is not None and rank.end.code != 0 for rank in ranks)
        if failed and deadline is None:
            deadline = time.monotonic() + _SETTLE_SECONDS


def _collect(rank: _Rank, directory: Path) -> None:
    """Take what a rank has sent, and its exit code once it has one."""
    has_ended = not rank.process.is_alive()
    try:
        while rank.reports.poll():
            rank.report = rank.reports.recv()
    except (EOFError, OSError):
        # Closed by the rank: nothing more comes, and waiting for it would spin until the process is gone.
        rank.process.join(_GRACE_SECONDS)
        has_ended = not rank.process.is_alive()
    if has_ended:
        code = rank.process.exitcode
        rank.end = RankEnd(
            rank=rank.index,
            code=1 if code is None else code,
            seen_at=time.monotonic(),
            departure=read_departure(directory, rank.index),
        )


def _end_all(ranks: list[_Rank]) -> None:
    """End what still runs, gently first, with everything that it started, and wait for it."""
    deadline = time.monotonic() + _GRACE_SECONDS
    for rank in ranks:
        if rank.process.is_alive():
            _signal(rank, signal.SIGTERM)
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        _signal(rank, signal.SIGKILL)
        rank.process.join()
        rank.reports.close()


def _signal(rank: _Rank, number: signal.Signals) -> None:
    """Signal a rank and all that it started."""
    pid = rank.process.pid
    if pid is None:
        return
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        if rank.process.is_alive():
            os.kill(pid, number)  # it has not yet got as far as making a session of its own


def _raise_first_failure(ranks: list[_Rank]) -> None:
    """Raise for the rank whose failure caused the others, if any failed."""
    first = find_first_failure([rank.end for rank in ranks if rank.end is not None])
    if first is None:
        return
    report = ranks[first.rank].report.rstrip()
    exit_code = to_exit_code(first.code)
    how = (
        f"by signal {-first.code} ({signal.Signals(-first.code).name})" if first.code < 0 else "with an error"
    )
    message = f"rank {first.rank} of {len(ranks)} ended first, {how}, exit code {exit_code}"
    error = RankFailedError(f"{message}\n\n{report}" if report else message)
    error.rank = first.rank
    error.rank_exit_code = exit_code
    raise error
