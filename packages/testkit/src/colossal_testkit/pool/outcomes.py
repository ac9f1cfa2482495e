"""What came of a job, and how it is told: the first failing rank in full, the others in a line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import pytest

from colossal_core.errors import ColossalError
from colossal_testkit.pool.messages import Failure, GroupRecord, Report
from colossal_testkit.pool.references import FunctionReference
from colossal_testkit.pool.values import loads

__all__ = [
    "Outcome",
    "RankDiedError",
    "RankError",
    "RankFailedError",
    "RankTimeoutError",
    "RanksDisagreeError",
    "Verdict",
    "summarise",
]


class RankError(Exception):
    """A job of many ranks went wrong in a way that is no `ColossalError` of the code under test."""


class RankFailedError(RankError):
    """A rank raised. The message holds the traceback of the first one, and a line for each other rank.

    Attributes:
        rank: The rank that raised first.
        error: What it raised, or None when that does not pickle.
    """

    def __init__(self, message: str, *, rank: int = -1, error: BaseException | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.error = error


class RankTimeoutError(RankError):
    """Ranks had not ended when the time was up. The message holds their stacks and latest collectives."""


class RankDiedError(RankError):
    """The process of a rank ended: a signal, a crash in native code, or ``os._exit``."""


class RanksDisagreeError(RankError):
    """All ranks returned, after different numbers of collectives in one group: in a longer run, a hang."""


@final
@attrs.frozen(kw_only=True)
class Outcome:
    """What one rank made of a job: a value or an error.

    Attributes:
        rank: The rank.
        value: What it returned; None when it raised.
        error: What it raised, itself when it pickles and else a `RankFailedError` with its traceback; None
            when it returned.
        traceback: The formatted traceback, or an empty string.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""


@final
@attrs.define
class Verdict:
    """Everything that is known about a finished or abandoned job, owned by the pool that ran it.

    Attributes:
        reference: The function.
        num_ranks: World size.
        timeout_seconds: The limit it had.
        reports: By rank, of those that ended in time.
        died: By rank, how a process ended instead of reporting.
        stacks: By rank, the stacks of those that had not ended.
        outputs: By rank, what was printed.
    """

    reference: FunctionReference
    num_ranks: int
    timeout_seconds: float
    reports: dict[int, Report] = attrs.field(factory=dict)
    died: dict[int, str] = attrs.field(factory=dict)
    stacks: dict[int, str] = attrs.field(factory=dict)
    outputs: dict[int, str] = attrs.field(factory=dict)

    @property
    def failures(self) -> list[tuple[int, Failure]]:
        """Ranks that raised, in order of time."""
        reports = sorted(self.reports.values(), key=lambda report: report.time)
        return [(report.rank, report.failure) for report in reports if report.failure is not None]

    @property
    def leaves_crew_clean(self) -> bool:
        """Whether its processes may go on: all ended, and raised only what code raises on purpose."""
        if len(self.reports) < self.num_ranks or self.find_disagreement():
            return False
        return all(
            failure.is_skip or isinstance(_error_of(failure), ColossalError) for _, failure in self.failures
        )

    def outcomes(self) -> list[Outcome]:
        """Return value or error of every rank; raise when a rank died, hung, or left its group behind."""
        self._raise_if_incomplete()
        if not self.failures:
            self._raise_if_disagreeing()
        return [self._outcome(self.reports[rank]) for rank in range(self.num_ranks)]

    def values(self) -> list[Any]:
        """Return the value of every rank, or raise for what went wrong first."""
        if self.died:
            self._raise_if_incomplete()
        if self.failures:
            self._raise_first_failure()
        return [outcome.value for outcome in self.outcomes()]

    def find_disagreement(self) -> str:
        """Return who issued how many collectives in the first group where that differs, or nothing."""
        by_group: dict[tuple[str, tuple[int, ...]], dict[int, GroupRecord]] = {}
        for report in self.reports.values():
            for record in report.groups:
                by_group.setdefault((record.name, record.ranks), {})[report.rank] = record
        for (name, ranks), records in by_group.items():
            counts = {records[rank].num_collectives for rank in records}
            if None in counts or len(counts) < 2:
                continue
            lines = [
                f"  rank {rank}: {record.num_collectives}, the latest: {', '.join(record.latest) or 'none'}"
                for rank, record in sorted(records.items())
            ]
            return f"in group {name!r} of ranks {list(ranks)}:\n" + "\n".join(lines)
        return ""

    def _outcome(self, report: Report) -> Outcome:
        """Return the outcome of a rank that ended."""
        if report.failure is None:
            return Outcome(rank=report.rank, value=loads(report.result or b""))
        error = _error_of(report.failure) or RankFailedError(report.failure.traceback, rank=report.rank)
        return Outcome(rank=report.rank, error=error, traceback=report.failure.traceback)

    def _raise_if_incomplete(self) -> None:
        """Raise when a rank died or had not ended in time."""
        head = f"{self.reference.text} on {self.num_ranks} ranks"
        if self.died:
            ends = "\n".join(f"rank {rank} {end}" for rank, end in sorted(self.died.items()))
            tails = "".join(
                f"\n--- output of rank {rank}:\n{_tail(self.outputs.get(rank, ''))}" for rank in self.died
            )
            raise RankDiedError(f"{head}: {ends}{tails}{self._describe_rest(self.died)}")
        if self.stacks:
            hung = ", ".join(map(str, sorted(self.stacks)))
            raise RankTimeoutError(
                f"{head}: not ended after {self.timeout_seconds:g} s: ranks {hung}"
                f"{self._describe_stacks()}{self._describe_rest(self.stacks)}"
            )

    def _raise_if_disagreeing(self) -> None:
        """Raise when ranks issued different numbers of collectives."""
        difference = self.find_disagreement()
        if difference:
            raise RanksDisagreeError(
                f"{self.reference.text} on {self.num_ranks} ranks: all returned, after different numbers of "
                f"collectives {difference}"
            )

    def _raise_first_failure(self) -> None:
        """Raise what the first rank raised, a `ColossalError` as itself; skip when every rank skipped."""
        rank, failure = self.failures[0]
        if len(self.failures) == self.num_ranks and all(other.is_skip for _, other in self.failures):
            pytest.skip(failure.message)
        story = f"{failure.traceback}{self._describe_rest({rank: ''})}{self._describe_stacks()}"
        error = _error_of(failure)
        if isinstance(error, ColossalError):
            error.add_note(f"raised on rank {rank} of {self.num_ranks}:\n{story}")
            raise error
        raise RankFailedError(
            f"{self.reference.text}: rank {rank} of {self.num_ranks} raised {failure.kind}\n{story}",
            rank=rank,
            error=error,
        )

    def _describe_rest(self, told: Mapping[int, object]) -> str:
        """Return a line for each rank that was not told about already."""
        lines = []
        for rank in range(self.num_ranks):
            if rank in told:
                continue
            report = self.reports.get(rank)
            if report is None:
                state = self.died.get(rank, "had not ended; it was killed")
            elif report.failure is None:
                state = "returned"
            else:
                state = f"raised {report.failure.kind}: {_first_line(report.failure.message)}"
            lines.append(f"\nrank {rank} {state}")
        return "".join(lines)

    def _describe_stacks(self) -> str:
        """Return the stacks of the ranks that had not ended."""
        return "".join(f"\n--- rank {rank} was here:\n{text}" for rank, text in sorted(self.stacks.items()))


def _error_of(failure: Failure) -> BaseException | None:
    """Return the exception of a rank, when it survived pickling and unpickles here."""
    if failure.pickled is None:
        return None
    try:
        error = loads(failure.pickled)
    except (ImportError, AttributeError, TypeError):
        return None
    return error if isinstance(error, BaseException) else None


def _first_line(text: str) -> str:
    """Return the first line of a message."""
    return text.partition("\n")[0]


def _tail(text: str, num_lines: int = 60) -> str:
    """Return the last lines of an output."""
    return "\n".join(text.splitlines()[-num_lines:])


def summarise(outcomes: Sequence[Outcome]) -> str:
    """Return one line for each outcome."""
    lines = []
    for outcome in outcomes:
        state = f"returned {outcome.value!r}" if outcome.error is None else f"raised {outcome.error!r}"
        lines.append(f"rank {outcome.rank} {state}")
    return "\n".join(lines)
