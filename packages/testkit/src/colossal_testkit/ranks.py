"""Run a function on many ranks, in a test, in milliseconds.

::

    def check_sum(scale: float) -> float:                       # module-level, in the test file
        value = torch.full((3,), scale * (dist.get_rank() + 1))
        dist.all_reduce(value)
        return value.sum().item()

    def test_sum_counts_every_rank() -> None:
        assert run_ranks(check_sum, 3, 2.0) == [36.0, 36.0, 36.0]

A pool of processes lives as long as the pytest session. Each job gets a default process group (gloo, CPU,
loopback) of exactly ``nproc`` ranks, made for it and destroyed after it, the environment that torchrun would
set, the parent's working directory, environment variables, import path and warning filters, equal seeds on
all ranks, and one thread. Arguments and results travel by value; a tensor arrives as a CPU tensor of its own.

What goes wrong is told as what it is: a `ColossalError` of the code under test is raised again as the same
class, so ``pytest.raises(UsageError)`` works; another exception becomes `RankFailedError` with the traceback
of the rank that failed first; a hang ends after the timeout with the stacks of all ranks
(`RankTimeoutError`), a dead process with its signal (`RankDiedError`), and ranks that issued different
numbers of collectives with the latest of each (`RanksDisagreeError`). When one rank has failed, the others
have three seconds to end.

Not handled: more than one machine, accelerators, and functions made inside other functions.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, final

from colossal_core.errors import ColossalError, UsageError
from colossal_testkit.pool.crew import Crew, ForkServer, Member
from colossal_testkit.pool.jobs import Arguments, make_jobs, pack_arguments
from colossal_testkit.pool.outcomes import (
    Outcome,
    RankDiedError,
    RankError,
    RankFailedError,
    RanksDisagreeError,
    RankTimeoutError,
    Verdict,
    summarise,
)
from colossal_testkit.pool.processes import WORKER_VARIABLES
from colossal_testkit.pool.references import refer_to
from colossal_testkit.pool.stacks import trim_stacks

__all__ = [
    "Outcome",
    "RankDiedError",
    "RankError",
    "RankFailedError",
    "RankPool",
    "RankTimeoutError",
    "RanksDisagreeError",
    "collect_ranks",
    "run_ranks",
    "run_ranks_expecting_errors",
    "session_pool",
]

T = TypeVar("T")

# Enough for a peer to raise its own error; a peer that waits in a collective for the failed rank never will.
_GRACE_SECONDS = 3.0
_SLICE_SECONDS = 0.5
_MAX_RANKS = 64


def run_ranks(
    function: Callable[..., T],
    nproc: int,
    *args: object,
    timeout_seconds: float = 30.0,
    process_group: bool = True,
    **kwargs: object,
) -> list[T]:
    """Run a module-level function on ``nproc`` ranks of the pool and return their values in rank order.

    Args:
        function: A function of a test file, or of any module; called as ``function(*args, **kwargs)`` on
            every rank.
        nproc: World size, at least 1.
        args: Passed by value.
        timeout_seconds: When ranks count as hanging.
        process_group: Whether the default group exists when the function starts. Without it, the function
            finds the environment of torchrun and may start the group itself; it is destroyed all the same.
        kwargs: Passed by value.

    Raises:
        ColossalError: The error that the first failing rank raised, with that rank's traceback as a note.
        UsageError: The function cannot be found by a worker, or an argument cannot be pickled.
        RankFailedError: A rank raised anything else.
        RankTimeoutError: Ranks had not ended in time.
        RankDiedError: A process ended.
        RanksDisagreeError: All returned, after different numbers of collectives in one group.
    """
    pool = session_pool()
    return pool.run(
        function, nproc, *args, timeout_seconds=timeout_seconds, process_group=process_group, **kwargs
    )


def run_ranks_expecting_errors(
    function: Callable[..., object],
    nproc: int,
    *args: object,
    error: type[ColossalError] = ColossalError,
    timeout_seconds: float = 30.0,
    process_group: bool = True,
    **kwargs: object,
) -> list[ColossalError]:
    """Run a function that must raise on every rank, and return what each raised, in rank order.

    Args:
        function: See `run_ranks`.
        nproc: See `run_ranks`.
        args: See `run_ranks`.
        error: Class that every rank's error must have.
        timeout_seconds: Every rank must have raised by then.
        process_group: See `run_ranks`.
        kwargs: See `run_ranks`.

    Raises:
        RankFailedError: A rank returned, or raised something else.
        RankTimeoutError: A rank waited instead of raising.
        RankDiedError: A process ended.
    """
    outcomes = collect_ranks(
        function, nproc, *args, timeout_seconds=timeout_seconds, process_group=process_group, **kwargs
    )
    errors = [outcome.error for outcome in outcomes if isinstance(outcome.error, error)]
    if len(errors) < nproc:
        wrong = next(outcome for outcome in outcomes if not isinstance(outcome.error, error))
        head = f"every one of {nproc} ranks should raise {error.__name__}, but:"
        message = f"{head}\n{summarise(outcomes)}\n{wrong.traceback}"
        raise RankFailedError(message.rstrip(), rank=wrong.rank, error=wrong.error)
    return errors


def collect_ranks(
    function: Callable[..., object],
    nproc: int,
    *args: object,
    timeout_seconds: float = 30.0,
    process_group: bool = True,
    **kwargs: object,
) -> list[Outcome]:
    """Run a function and return for each rank its value or its error; every rank has the whole time to end.

    Takes the arguments of `run_ranks` and raises like it for hangs and dead processes.
    """
    verdict = session_pool().judge(
        function,
        nproc,
        args,
        kwargs,
        timeout_seconds=timeout_seconds,
        grace_seconds=timeout_seconds,
        process_group=process_group,
    )
    return verdict.outcomes()


def session_pool() -> RankPool:
    """Return the one pool of this process, made on first use; the pytest plugin closes it at the end."""
    # By process id: a child that pytest's process forked must not speak on its parent's sockets.
    return _pool_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _pool_of(_pid: int) -> RankPool:
    """Make the pool of a process."""
    return RankPool()


@final
class RankPool:
    """Processes that play ranks: started on first use, one job at a time, usable again after `close`."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        self._crew: Crew | None = None
        self._num_jobs = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the forkserver without waiting, so that importing torch overlaps with other work."""
        if self._server is None or not self._server.is_alive:
            self.close()
            self._server = ForkServer(WORKER_VARIABLES)

    def close(self) -> None:
        """End all processes; return when they have ended."""
        if self._crew is not None:
            self._crew.close()
            self._crew = None
        if self._server is not None:
            self._server.close()
            self._server = None

    def run(
        self,
        function: Callable[..., T],
        nproc: int,
        *args: object,
        timeout_seconds: float = 30.0,
        process_group: bool = True,
        **kwargs: object,
    ) -> list[T]:
        """Do what `run_ranks` does, in this pool."""
        verdict = self.judge(
            function,
            nproc,
            args,
            kwargs,
            timeout_seconds=timeout_seconds,
            grace_seconds=_GRACE_SECONDS,
            process_group=process_group,
        )
        values: list[T] = verdict.values()
        return values

    __call__ = run

    def judge(
        self,
        function: Callable[..., object],
        nproc: int,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        *,
        timeout_seconds: float,
        grace_seconds: float,
        process_group: bool,
    ) -> Verdict:
        """Run a function and return all that is known, whether it went well or not.

        Prints what the ranks printed, each line with its rank. Processes in doubt are gone when this returns.
        """
        if not 1 <= nproc <= _MAX_RANKS:
            raise UsageError(
                f"nproc is {nproc!r}, expected 1 to {_MAX_RANKS}.", hint="Ask for at least one rank."
            )
        verdict = Verdict(reference=refer_to(function), num_ranks=nproc, timeout_seconds=timeout_seconds)
        arguments = pack_arguments(args, kwargs)
        with self._lock:
            crew = self._start_job(verdict, arguments, makes_group=process_group)
            try:
                _await_reports(crew, verdict, grace_seconds=grace_seconds)
            except BaseException:
                # Ctrl-C, or a timeout of the test runner: say what the ranks were doing, then let it through.
                self._abandon(crew, verdict)
                _print_outputs({rank: f"was here:\n{text}" for rank, text in verdict.stacks.items()})
                raise
            if verdict.leaves_crew_clean:
                crew.reset(nproc)
                verdict.outputs.update({member.rank: member.take_output() for member in crew.members[:nproc]})
            else:
                self._abandon(crew, verdict)
        _print_outputs(verdict.outputs)
        return verdict

    def _start_job(self, verdict: Verdict, arguments: Arguments, *, makes_group: bool) -> Crew:
        """Hand a job to a crew that is large enough and clean, replacing one that is not."""
        for _ in range(2):
            self.start()
            assert self._server is not None
            if self._crew is None:
                self._crew = Crew(self._server)
            self._crew.grow(verdict.num_ranks)
            self._num_jobs += 1
            jobs = make_jobs(
                verdict.reference,
                arguments,
                number=self._num_jobs,
                num_ranks=verdict.num_ranks,
                store_port=self._crew.store_port,
                timeout_seconds=verdict.timeout_seconds,
                makes_group=makes_group,
            )
            if self._crew.start(jobs):
                return self._crew
            # What the previous job left behind is in the way, or somebody killed a worker between jobs.
            self._crew.close()
            self._crew = None
        raise RankDiedError(f"{verdict.reference.text}: new workers end before they take a job")

    def _abandon(self, crew: Crew, verdict: Verdict) -> None:
        """Note where the ranks are, and kill them."""
        members = crew.members[: verdict.num_ranks]
        for member in members:
            verdict.outputs[member.rank] = trim_stacks(member.take_output())
        hung = [member for member in members if member.rank not in {*verdict.reports, *verdict.died}]
        crew.write_stacks(hung)
        for member in hung:
            verdict.stacks[member.rank] = (
                trim_stacks(member.take_output()).strip() or "(no stack could be written)"
            )
        ends = crew.close()
        self._crew = None
        verdict.died.update({rank: ends.get(rank, "ended with its forkserver") for rank in verdict.died})


def _await_reports(crew: Crew, verdict: Verdict, *, grace_seconds: float) -> None:
    """Collect reports until all ranks have ended, the time is up, or the grace after a failure has passed."""
    waiting: dict[int, Member] = {member.rank: member for member in crew.members[: verdict.num_ranks]}
    deadline = time.monotonic() + verdict.timeout_seconds
    while waiting and time.monotonic() < deadline:
        # In slices, since a signal that another thread received is handled between two of them only.
        seconds = min(deadline - time.monotonic(), _SLICE_SECONDS)
        reports, dead = crew.receive(list(waiting.values()), seconds)
        for report in reports:
            verdict.reports[report.rank] = report
            del waiting[report.rank]
        for member in dead:
            verdict.died[member.rank] = "ended"
            del waiting[member.rank]
        if dead or any(report.failure is not None for report in reports):
            grace = min(grace_seconds, _GRACE_SECONDS) if dead else grace_seconds
            deadline = min(deadline, time.monotonic() + grace)


def _print_outputs(outputs: Mapping[int, str]) -> None:
    """Print what ranks printed, so that the test runner captures it with the test."""
    for rank, text in sorted(outputs.items()):
        for line in text.splitlines():
            sys.stdout.write(f"[rank {rank}] {line}\n")
