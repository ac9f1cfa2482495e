r"""What ranks print, cut into lines, marked by rank, and put together on one screen or into one file.

# Note [Carriage returns]

A progress bar redraws one line again and again with ``\r``. Where output goes to a file or a pipe, every
piece that ends in ``\r`` is passed on at once with its prefix, so nothing is lost and a pager or ``tee``
still shows a moving line. On a terminal, rank 0 writes through as if it were alone (it gets a terminal of its
own, so bars, colours and ``pdb`` work, and its lines carry no prefix). The other ranks' lines are put in
between whole: the unfinished line of rank 0 is erased, and drawn again below. Of their lines a terminal shows
what it would show in the end, the text after the last ``\r``.
"""

from __future__ import annotations

import os
import select
from typing import final

__all__ = ["LineCutter", "Screen", "mark_lines"]

# A rank that never ends its line must not fill the launcher's memory. No test or log was seen with a longer
# line.
_LONGEST_LINE_BYTES = 16 * 2**20

# More than this stands on no line of a terminal, escape sequences included.
_LONGEST_REDRAW_BYTES = 4096

_ERASE_LINE = b"\r\x1b[K"


@final
class LineCutter:
    r"""Cuts a stream of bytes into lines, and keeps the unfinished rest.

    A line ends with ``\n``, ``\r\n`` or a lone ``\r``, which stays part of it.
    """

    def __init__(self, *, collapses_returns: bool = False) -> None:
        r"""Start with nothing.

        Args:
            collapses_returns: A lone ``\r`` ends no line; only the text after the last one is kept.
        """
        self._collapses = collapses_returns
        self._rest: list[bytes] = []
        self._num_rest_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes, with their ends."""
        ends = b"\n" if self._collapses else b"\r\n"
        held_return = bool(self._rest) and self._rest[-1].endswith(b"\r")
        if not held_return and not any(bytes([end]) in data for end in ends):
            self._keep(data)
            return self._flush_overlong()
        pieces = self._cut(b"".join([*self._rest, data]))
        # A \r at the very end may be the first half of \r\n.
        rest = pieces.pop() if pieces and not pieces[-1].endswith(b"\n") else b""
        self._rest, self._num_rest_bytes = [], 0
        if rest:
            self._keep(rest)
        return [self._collapse(piece) for piece in pieces] + self._flush_overlong()

    def finish(self) -> list[bytes]:
        """Return the unfinished rest as a line, when the stream has ended."""
        rest = b"".join(self._rest)
        self._rest, self._num_rest_bytes = [], 0
        return [self._collapse(rest + b"\n")] if rest else []

    def _cut(self, data: bytes) -> list[bytes]:
        """Cut after every line end; the last piece may lack one."""
        if self._collapses:
            pieces = data.split(b"\n")
            return [piece + b"\n" for piece in pieces[:-1]] + ([pieces[-1]] if pieces[-1] else [])
        return data.splitlines(keepends=True)

    def _collapse(self, line: bytes) -> bytes:
        """Return what a terminal would show of a line in the end."""
        if not self._collapses:
            return line
        text = line.removesuffix(b"\n").rstrip(b"\r")
        return text.rpartition(b"\r")[2] + b"\n"

    def _keep(self, data: bytes) -> None:
        """Add to the rest."""
        self._rest.append(data)
        self._num_rest_bytes += len(data)

    def _flush_overlong(self) -> list[bytes]:
        """End a line that is longer than any that we hold."""
        return self.finish() if self._num_rest_bytes > _LONGEST_LINE_BYTES else []


def mark_lines(rank: int, lines: list[bytes]) -> bytes:
    """Return the lines with ``[rank]`` before each."""
    prefix = b"[%d] " % rank
    return b"".join(prefix + line for line in lines)


@final
class Screen:
    """One place where output goes: the launcher's standard output or standard error.

    When it is a terminal, rank 0 writes through and may leave a line unfinished; lines of others are put
    above it.

    Attributes:
        is_terminal: Whether a person looks at it.
        is_broken: Nobody reads any more, as in ``| head``; what is written then is dropped.
    """

    def __init__(self, descriptor: int, *, is_terminal: bool) -> None:
        """Write to a descriptor that somebody else owns."""
        self.is_terminal = is_terminal
        self.is_broken = False
        self._descriptor = descriptor
        self._unfinished = b""

    def write_lines(self, data: bytes) -> None:
        """Write whole lines."""
        if not data:
            return
        if self._unfinished:
            data = _ERASE_LINE + data + self._unfinished
        self._write(data)

    def write_through(self, data: bytes) -> None:
        """Write as it comes, and remember what stands on the unfinished line."""
        self._write(data)
        _, newline, last = data.rpartition(b"\n")
        line = last if newline else self._unfinished + last
        text = line.rstrip(b"\r")
        # What stood before the last return has been drawn over.
        drawn = text.rpartition(b"\r")[2] + line[len(text) :]
        self._unfinished = drawn[-_LONGEST_REDRAW_BYTES:]

    def finish_line(self) -> None:
        """Put the cursor on a line of its own."""
        if self._unfinished:
            self._write(b"\n")
            self._unfinished = b""

    def _write(self, data: bytes) -> None:
        """Write everything, also to a descriptor that somebody made non-blocking."""
        view = memoryview(data)
        while view and not self.is_broken:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])
            except OSError:  # a closed pipe, or a terminal that went away (EIO)
                self.is_broken = True
