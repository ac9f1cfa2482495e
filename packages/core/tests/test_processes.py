"""Ports that are held, and the question which rank failed first."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from colossal_core.errors import UsageError
from colossal_core.placement import LOOPBACK
from colossal_core.processes import (
    Departure,
    RankEnd,
    find_first_failure,
    listen_on,
    read_departure,
    reserve_port,
    to_exit_code,
    write_arrival,
    write_departure,
)


def test_a_held_port_is_free_for_rank_0_and_for_nobody_else() -> None:
    """The holder keeps others away and does not stand in the way of the listener."""
    with reserve_port() as holder:
        port = holder.getsockname()[1]

        with socket.socket() as thief, pytest.raises(OSError, match="in use"):
            thief.bind((LOOPBACK, port))
        with listen_on(LOOPBACK, port) as listener:
            assert listener.getsockname() == (LOOPBACK, port)


def test_many_holders_get_many_ports() -> None:
    """Runs that start at the same time do not meet."""
    holders = [reserve_port() for _ in range(50)]
    ports = {holder.getsockname()[1] for holder in holders}
    for holder in holders:
        holder.close()

    assert len(ports) == 50


def test_a_busy_port_is_named_with_the_next_step() -> None:
    """The message is one line with address and port."""
    with listen_on(LOOPBACK, 0) as listener:
        port = listener.getsockname()[1]

        with pytest.raises(UsageError) as caught:
            reserve_port(LOOPBACK, port)

    assert f"{LOOPBACK}:{port}" in caught.value.message
    assert "\n" not in caught.value.message
    assert str(port) in caught.value.hint


def test_a_rank_notes_that_it_came_and_when_it_left(tmp_path: Path) -> None:
    """Before, between and after; a folder that is gone is nobody's problem."""
    assert read_departure(tmp_path, 3) == Departure()

    write_arrival(tmp_path, 3)
    assert read_departure(tmp_path, 3) == Departure(joined=True)

    write_departure(tmp_path, 3, has_failed=True)
    assert read_departure(tmp_path, 3).left_at is not None
    assert read_departure(tmp_path, 3).has_failed
    write_departure(tmp_path / "gone", 3, has_failed=False)


def _end(
    rank: int, code: int, seen_at: float, left_at: float | None = None, *, joined: bool = True
) -> RankEnd:
    """Return an end."""
    return RankEnd(rank=rank, code=code, seen_at=seen_at, departure=Departure(joined=joined, left_at=left_at))


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ([_end(0, 0, 1.0, 1.0), _end(1, 0, 2.0, 2.0)], None),
        # The stamps decide, not the order in which the ends are noticed.
        ([_end(0, 1, 5.0, 4.6), _end(1, 3, 5.2, 4.5)], 1),
        # A crash leaves no stamp and is noticed late, but peers cannot be the cause of it.
        ([_end(0, 1, 5.0, 4.9), _end(1, -signal.SIGSEGV, 5.1)], 1),
        ([_end(0, 1, 5.0, 4.9), _end(1, 9, 5.1)], 1),
        # An abort can be the echo of a peer that vanished.
        ([_end(0, 1, 5.0, 4.9), _end(1, -signal.SIGABRT, 5.1)], 0),
        # Long after the first failure, a crash is a story of its own.
        ([_end(0, 1, 5.0, 4.9), _end(1, -signal.SIGSEGV, 9.0)], 0),
        # Scripts that never called launch are judged by the time at which they ended.
        ([_end(0, 1, 5.0, joined=False), _end(1, 2, 4.9, joined=False)], 1),
    ],
)
def test_the_cause_is_told_from_its_consequences(ends: list[RankEnd], first: int | None) -> None:
    """See Note [Who failed first]."""
    found = find_first_failure(ends)

    assert (None if found is None else found.rank) == first


def test_what_ends_because_it_was_stopped_is_no_failure() -> None:
    """A rank that dies of our own SIGTERM did nothing wrong."""
    ends = [_end(0, -signal.SIGTERM, 6.0), _end(1, 3, 4.0, 4.0)]

    assert find_first_failure(ends, stopped_at=5.0) == ends[1]
    assert find_first_failure(ends[:1], stopped_at=5.0) is None


def test_a_rank_that_was_stopped_on_its_way_out_keeps_its_own_reason() -> None:
    """Python was still tearing down when our signal came: an error stays one, a good end stays good."""
    raised = Departure(joined=True, left_at=3.9, has_failed=True)
    returned = Departure(joined=True, left_at=3.9)
    peer = _end(1, 1, 4.1, 4.0)

    cause = find_first_failure(
        [RankEnd(rank=0, code=-signal.SIGTERM, seen_at=6.0, departure=raised), peer], stopped_at=5.0
    )
    innocent = find_first_failure(
        [RankEnd(rank=0, code=-signal.SIGTERM, seen_at=6.0, departure=returned), peer], stopped_at=5.0
    )

    assert cause is not None
    assert (cause.rank, cause.code) == (0, 1)
    assert innocent == peer


def test_signals_become_the_codes_of_a_shell() -> None:
    """128 plus the number."""
    assert [to_exit_code(code) for code in (0, 3, -11, -9)] == [0, 3, 139, 137]
