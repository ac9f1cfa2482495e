"""How a run ends from outside: Ctrl-C, SIGTERM, a killed launcher, a closed pipe; nobody is left behind."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Program

_SCRIPT = """
import os, signal, subprocess, sys, time
mode = sys.argv[1]
if mode == "stubborn":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
if mode == "polite":
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
if mode == "parent":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("up", flush=True)
time.sleep(60)
"""


def _start(program: Program, mode: str, *flags: str) -> subprocess.Popen[str]:
    """Start two ranks and wait until both are at work."""
    program.write("s.py", _SCRIPT)
    process = program.start("run", *flags, "s.py", mode)
    assert process.stdout is not None
    assert {process.stdout.readline(), process.stdout.readline()} == {"[0] up\n", "[1] up\n"}
    return process


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_to_the_launcher_ends_all_ranks(program: Program, number: signal.Signals, code: int) -> None:
    """The exit code is 128 plus the number, and it takes moments."""
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup, and so by all that is started from here")
    process = _start(program, "plain")
    began = time.monotonic()

    process.send_signal(number)
    out, _ = process.communicate(timeout=20)

    assert process.returncode == code
    assert f"received {number.name}, stopping 2 ranks" in out
    assert time.monotonic() - began < 5


def test_ranks_may_save_before_they_end(program: Program) -> None:
    """SIGTERM is passed on, not replaced by a kill; the exit code still says 143."""
    process = _start(program, "polite")

    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)

    assert process.returncode == 143
    assert "[0] saved\n" in out
    assert "[1] saved\n" in out


def test_ranks_that_ignore_signals_are_killed_after_the_grace(program: Program) -> None:
    """First gently, then hard."""
    process = _start(program, "stubborn", "--grace", "0.5")

    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)

    assert process.returncode == 130
    assert "did not end within 0.5 s were killed" in out


def test_a_second_interrupt_does_not_wait(program: Program) -> None:
    """With a grace of a minute, the second Ctrl-C ends stubborn ranks at once."""
    process = _start(program, "stubborn", "--grace", "60")
    began = time.monotonic()

    process.send_signal(signal.SIGINT)
    time.sleep(0.7)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)

    assert process.returncode == 130
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("mode", ["plain", "stubborn", "parent"])
def test_ranks_die_with_a_launcher_that_is_killed(program: Program, mode: str) -> None:
    """``kill -9`` on the launcher leaves no rank, nor what a rank has started, nor the folder of the run."""
    process = _start(program, mode)

    process.kill()
    process.communicate(timeout=20)

    assert process.returncode == -signal.SIGKILL
    assert program.await_peace() == {}


def test_what_a_rank_has_started_ends_with_the_run(program: Program) -> None:
    """A rank that fails leaves a child behind, which is ended too."""
    program.write(
        "s.py",
        "import os, subprocess, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "    sys.exit(4)\n"
        "import time; time.sleep(60)\n",
    )

    done = program.run("run", "s.py")

    assert done.code == 4
    assert done.seconds < 10


def test_a_reader_that_leaves_ends_the_run(program: Program) -> None:
    """``colossal run ... | head -1`` does not go on forever."""
    program.write("s.py", "import time\nwhile True: print('line', flush=True); time.sleep(0.01)\n")
    process = program.start("run", "s.py")
    assert process.stdout is not None

    process.stdout.readline()
    process.stdout.close()
    code = process.wait(20)

    assert code == 128 + signal.SIGPIPE


def test_control_z_stops_the_ranks_too(program: Program) -> None:
    """A job that is suspended does not compute, and goes on where it was."""
    process = _start(program, "plain")
    ranks = [pid for pid, command in program.find_survivors().items() if command.endswith("s.py plain ")]
    ranks = [pid for pid in ranks if "colossal_cli" not in program.find_survivors()[pid]]

    process.send_signal(signal.SIGTSTP)
    stopped = _await_states(ranks, "T")
    process.send_signal(signal.SIGCONT)
    going = _await_states(ranks, "S")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)

    assert len(ranks) == 2
    assert stopped
    assert going
    assert process.returncode == 143


def _await_states(pids: list[int], state: str) -> bool:
    """Return whether all processes get into a state within a few seconds."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        texts = [Path(f"/proc/{pid}/stat").read_text(encoding="utf-8") for pid in pids]
        if {text.rpartition(")")[2].split()[0] for text in texts} == {state}:
            return True
        time.sleep(0.02)
    return False


def test_the_folder_of_a_run_is_removed(program: Program) -> None:
    """Also when the launcher is killed: the reaper removes it."""
    folders = program.directory / "tmp"
    folders.mkdir()
    program.environ["TMPDIR"] = str(folders)
    process = _start(program, "plain")
    during = list(folders.iterdir())

    process.kill()
    process.communicate(timeout=20)
    program.await_peace()

    assert len(during) == 1
    assert list(folders.iterdir()) == []
