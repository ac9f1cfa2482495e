"""What is said about the end of a run."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from colossal_core.processes import RankEnd, to_exit_code

__all__ = ["describe_end", "find_traceback"]

_STARTS = re.compile(
    rb"^(?:Traceback \(most recent call last\):|  \+ Exception Group Traceback|Fatal Python error: )",
    re.MULTILINE,
)
# How Python joins the tracebacks of a chain; the first one is where the trouble began.
_LINKS = (
    b"The above exception was the direct cause of the following exception:",
    b"During handling of the above exception, another exception occurred:",
)
_MOST_LINES = 200


def find_traceback(tail: bytes) -> bytes:
    """Return the last traceback, with the chain that led to it, from the end of what a rank has printed.

    Args:
        tail: The end of standard error.

    Returns:
        Whole lines, at most 200 of them; empty when there is no traceback.
    """
    text = tail.replace(b"\r\n", b"\n")
    starts = [match.start() for match in _STARTS.finditer(text)]
    if not starts:
        return b""
    start = starts.pop()
    while starts and text[:start].rstrip().endswith(_LINKS):
        start = starts.pop()
    lines = text[start:].rstrip().splitlines()
    if len(lines) > _MOST_LINES:
        half = _MOST_LINES // 2
        lines = [*lines[:half], b"  ...", *lines[-half:]]
    return b"".join(line + b"\n" for line in lines)


def describe_end(first: RankEnd, ends: Sequence[RankEnd], *, world_size: int) -> str:
    """Return one sentence about the rank that failed first.

    Args:
        first: That rank.
        ends: All ends on this machine.
        world_size: Ranks on this machine.
    """
    code = to_exit_code(first.code)
    if first.code < 0:
        how = f"was ended by signal {-first.code} ({_name_signal(-first.code)}), exit code {code}"
    else:
        how = f"failed with exit code {code}"
    text = f"rank {first.rank} of {world_size} {how}"
    if world_size > 1:
        text = f"{text}, before any other"
    early = sorted(end.rank for end in ends if end.code == 0 and end.at < first.at)
    if early:
        text += f"; ended without an error before that: rank {', '.join(map(str, early))}"
    return text


def _name_signal(number: int) -> str:
    """Return the name of a signal, or its number when it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
