"""Lines, prefixes and the shared screen."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from colossal_cli.running.output import LineCutter, Screen, mark_lines


def test_lines_come_out_whole_however_the_bytes_are_cut() -> None:
    r"""Any cut of the stream gives the same lines, with ``\r``, ``\n`` and ``\r\n`` as ends."""
    text = b"one\ntwo\r\n 10%\r 20%\r\n\nlast"
    whole = [b"one\n", b"two\r\n", b" 10%\r", b" 20%\r\n", b"\n", b"last\n"]

    for width in range(1, len(text) + 1):
        cutter = LineCutter()
        lines = [line for at in range(0, len(text), width) for line in cutter.feed(text[at : at + width])]
        lines += cutter.finish()

        assert lines == whole, width


def test_a_return_at_the_end_waits_for_the_byte_that_may_follow() -> None:
    r"""``\r`` and ``\n`` in two reads are one line end."""
    cutter = LineCutter()

    first = cutter.feed(b"a\r")
    second = cutter.feed(b"\nb")

    assert first == []
    assert second == [b"a\r\n"]


def test_a_terminal_gets_the_text_after_the_last_return() -> None:
    """A progress bar of another rank than 0 shows its last state as one line."""
    cutter = LineCutter(collapses_returns=True)

    lines = cutter.feed(b" 10%\r 20%\r100%\r\nplain\n\n") + cutter.feed(b" 5%\r 6%") + cutter.finish()

    assert lines == [b"100%\n", b"plain\n", b"\n", b" 6%\n"]


def test_a_line_without_an_end_does_not_fill_the_memory() -> None:
    """A stream without line ends comes out in pieces, and nothing of it is lost."""
    cutter = LineCutter()
    block = b"x" * 2**20

    lines = [line for _ in range(40) for line in cutter.feed(block)] + cutter.finish()

    assert len(lines) > 1
    assert sum(line.count(b"x") for line in lines) == 40 * 2**20


def test_every_line_carries_its_rank() -> None:
    """Also empty ones."""
    assert mark_lines(12, [b"a\n", b"\n"]) == b"[12] a\n[12] \n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe that stands for the output."""
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_an_unfinished_line_is_drawn_again_below_what_others_say(pipe: tuple[int, int]) -> None:
    """Rank 0's progress bar survives a line of rank 1."""
    screen = Screen(pipe[1], is_terminal=True)

    screen.write_through(b"start\n\r 10%\r 20%")
    screen.write_lines(b"[1] hello\n")
    screen.write_through(b"\r 30%\n")
    screen.write_lines(b"[1] bye\n")

    written = os.read(pipe[0], 4096)
    assert written == b"start\n\r 10%\r 20%" + b"\r\x1b[K[1] hello\n 20%" + b"\r 30%\n" + b"[1] bye\n"


def test_a_reader_that_leaves_is_noticed_and_not_an_error() -> None:
    """``| head`` ends the output, not the launcher."""
    reader, writer = os.pipe()
    os.close(reader)
    screen = Screen(writer, is_terminal=False)

    screen.write_lines(b"a\n")
    screen.write_lines(b"b\n")

    assert screen.is_broken
    os.close(writer)
