"""What is said about the end of a run."""

from __future__ import annotations

import signal

from colossal_cli.running.report import describe_end, find_traceback
from colossal_core.processes import RankEnd


def test_a_chain_of_tracebacks_is_shown_from_its_beginning() -> None:
    """The cause of an error stands in the first traceback of its chain."""
    tail = (
        b"noise\nTraceback (most recent call last):\n  old\nKeyError: 'unrelated'\nmore noise\n"
        b"Traceback (most recent call last):\n  a\nKeyError: 'x'\n\n"
        b"The above exception was the direct cause of the following exception:\n\n"
        b"Traceback (most recent call last):\n  b\nValueError: y\n"
    )

    found = find_traceback(tail)

    assert found.startswith(b"Traceback (most recent call last):\n  a\n")
    assert found.endswith(b"ValueError: y\n")


def test_a_rank_that_says_nothing_has_no_traceback() -> None:
    """``sys.exit(3)`` leaves only the summary."""
    assert find_traceback(b"just a warning\n") == b""


def test_a_very_long_traceback_keeps_its_ends() -> None:
    """A deep recursion does not push the summary off the screen."""
    tail = b"Traceback (most recent call last):\n" + b"  again\n" * 5000 + b"RecursionError: deep\n"

    lines = find_traceback(tail).splitlines()

    assert len(lines) == 201
    assert lines[0].startswith(b"Traceback")
    assert lines[-1] == b"RecursionError: deep"


def test_the_summary_names_rank_signal_and_who_left_early() -> None:
    """A rank that simply returned while others were still at work is often the real cause."""
    early = RankEnd(rank=2, code=0, seen_at=1.0)
    first = RankEnd(rank=1, code=-signal.SIGSEGV, seen_at=2.0)

    text = describe_end(first, [early, first], world_size=3)

    assert "rank 1 of 3 was ended by signal 11 (SIGSEGV), exit code 139" in text
    assert "ended without an error before that: rank 2" in text
