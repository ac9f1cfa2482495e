"""``colossal run`` on a terminal, which a pseudo terminal stands for."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import termios
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .conftest import Program


def _run_on_terminal(
    program: Program, *args: str, act: Callable[[int, bytes], None] | None = None
) -> tuple[int, bytes]:
    """Run the program on a terminal of 24 lines and 100 columns.

    Args:
        program: The program.
        args: Its arguments.
        act: Called with the terminal and all output so far, whenever there is more.

    Returns:
        Exit code and output.
    """
    command = program.command(*args)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(program.directory)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        os.execve(command[0], command, program.environ)
    output = b""
    with contextlib.suppress(OSError):
        while data := os.read(terminal, 65536):
            output += data
            if act is not None:
                act(terminal, output)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), output


def test_rank_0_has_a_terminal_of_the_same_size_and_no_prefix(program: Program) -> None:
    """Progress bars, colours and debuggers work in rank 0; other ranks are marked."""
    program.write(
        "s.py",
        "import os, sys\n"
        "print(sys.stdout.isatty(), sys.stderr.isatty(), sys.stdin.isatty(), "
        "os.get_terminal_size().columns if sys.stdout.isatty() else 0)\n",
    )

    code, output = _run_on_terminal(program, "run", "s.py")

    assert code == 0
    assert sorted(output.splitlines()) == [b"True True True 100", b"[1] False False False 0"]


def test_a_line_of_another_rank_does_not_break_the_progress_bar(program: Program) -> None:
    """The bar is erased, the line put in its place, and the bar drawn again."""
    program.write(
        "s.py",
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    sys.stderr.write('\\r 50%'); sys.stderr.flush(); open('drawn', 'w').close(); time.sleep(1)\n"
        "    print('\\r100%', file=sys.stderr)\n"
        "else:\n"
        "    while not os.path.exists('drawn'): time.sleep(0.02)\n"
        "    time.sleep(0.2); print('hello')\n",
    )

    code, output = _run_on_terminal(program, "run", "s.py")

    assert code == 0
    assert b"\r 50%\r\x1b[K[1] hello\r\n 50%\r100%\r\n" in output


def test_the_traceback_of_rank_0_can_still_come_last(program: Program) -> None:
    """Its output passes through the launcher, so it can be shown again below that of others."""
    program.write(
        "s.py",
        "import os, time\n"
        "if os.environ['RANK'] == '0': raise ValueError('the cause')\n"
        "time.sleep(0.4)\nraise RuntimeError('the consequence')\n",
    )

    code, output = _run_on_terminal(program, "run", "s.py")

    assert code == 1
    assert output.splitlines()[-1] == b"[0] ValueError: the cause"


def test_control_c_ends_all_ranks(program: Program) -> None:
    """The key is pressed at the terminal, as a person does it."""
    program.write("s.py", "import time; print('up', flush=True); time.sleep(60)")
    pressed: list[float] = []

    def press(terminal: int, output: bytes) -> None:
        """Press Ctrl-C once, when both ranks are at work."""
        if output.count(b"up") == 2 and not pressed:
            pressed.append(time.monotonic())
            os.write(terminal, b"\x03")

    code, _ = _run_on_terminal(program, "run", "s.py", act=press)

    assert code == 130
    assert time.monotonic() - pressed[0] < 5


def test_what_is_typed_reaches_rank_0(program: Program) -> None:
    """``input()`` and ``pdb`` work in rank 0."""
    program.write("s.py", "import os\nif os.environ['RANK'] == '0': print('got', input('name? '))\n")
    typed: list[bool] = []

    def answer(terminal: int, output: bytes) -> None:
        """Answer the question once."""
        if b"name? " in output and not typed:
            typed.append(True)
            os.write(terminal, b"ada\n")

    code, output = _run_on_terminal(program, "run", "s.py", act=answer)

    assert code == 0
    assert b"got ada" in output
