"""Whatever ends a run, the same command goes on: the same losses, no process left, no checkpoint broken."""

from __future__ import annotations

import itertools
import json
import os
import pty
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from colossal_core.checkpoint import find_complete
from colossal_core.checkpoint.verifying import verify

from .processes import IS_THERE, find_processes

SCRIPT = Path(__file__).with_name("interrupted_run.py")
COLOSSAL = Path(sys.executable).with_name("colossal")
ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not IS_THERE, reason="processes are looked up in /proc")


class Command:
    """One start of the run: what it prints goes into a file, its processes are found by their arguments."""

    def __init__(self, folder: Path, steps: int, *, nproc: int = 2) -> None:
        """Start it."""
        self.folder = folder
        self.result = folder / "losses.json"
        arguments = [str(SCRIPT), str(self.result), str(folder / "run"), str(steps)]
        self.output = folder / "output.txt"
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                [str(COLOSSAL), "run", "--nproc", str(nproc), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def find_ranks(self) -> list[int]:
        """Return the process ids of the ranks."""
        return [pid for pid in find_processes(str(self.result)) if pid != self.process.pid]

    def wait_for_training(self, *, seconds: float = 20.0) -> None:
        """Return once the run has saved since its start, or has ended well."""
        started = time.monotonic()
        before = find_complete(self.folder / "run")[:1]
        while find_complete(self.folder / "run")[:1] == before and self.process.poll() != 0:
            assert self.process.poll() is None, self.output.read_text(encoding="utf-8")
            assert time.monotonic() - started < seconds, self.output.read_text(encoding="utf-8")
            time.sleep(0.02)

    def wait_for_end(self, *, seconds: float = 20.0) -> int:
        """Return the exit code once every process has ended."""
        code = self.process.wait(seconds)
        deadline = time.monotonic() + seconds
        while find_processes(str(self.result)):
            assert time.monotonic() < deadline, "a process is left"
            time.sleep(0.05)
        return code


def finish(folder: Path, steps: int) -> list[float]:
    """Run to the end, and return the losses."""
    command = Command(folder, steps)
    assert command.wait_for_end(seconds=60) == 0, command.output.read_text(encoding="utf-8")
    losses: list[float] = json.loads(command.result.read_text(encoding="utf-8"))
    assert len(losses) == steps
    return losses


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[float]]:
    """Return the losses of a run of some steps that nothing has interrupted."""
    known: dict[int, list[float]] = {}

    def losses_of(steps: int) -> list[float]:
        if steps not in known:
            known[steps] = finish(tmp_path_factory.mktemp("uninterrupted"), steps)
        return known[steps]

    return losses_of


def end_politely(command: Command) -> int:
    """Send SIGTERM to the launcher."""
    command.process.terminate()
    return command.wait_for_end()


def kill_one_rank(command: Command) -> int:
    """Send SIGKILL to a rank."""
    os.kill(max(command.find_ranks()), signal.SIGKILL)
    return command.wait_for_end()


def kill_launcher(command: Command) -> int:
    """Send SIGKILL to the launcher only."""
    command.process.kill()
    return command.wait_for_end()


def interrupt(command: Command) -> int:
    """Send SIGINT to all processes, as Ctrl-C does."""
    os.killpg(command.process.pid, signal.SIGINT)
    return command.wait_for_end()


ENDS: dict[str, tuple[Callable[[Command], int], set[int]]] = {
    "SIGTERM": (end_politely, {143}),
    "SIGKILL of a rank": (kill_one_rank, {1, 137}),
    "SIGKILL of the launcher": (kill_launcher, {-9}),
    "Ctrl-C": (interrupt, {130}),
}


QUICK = {"SIGTERM"}
"""The one that is not left to `nox -s slow`: a run is saved and resumed whoever ends it."""

STEPS = 20


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "end", [pytest.param(end, marks=[] if end in QUICK else [pytest.mark.slow]) for end in ENDS]
)
def test_interrupted_run_goes_on_bit_for_bit(
    end: str, tmp_path: Path, uninterrupted: Callable[[int], list[float]]
) -> None:
    """The losses are those of the run that was not interrupted."""
    stop, codes = ENDS[end]
    command = Command(tmp_path, STEPS)
    command.wait_for_training()

    code = stop(command)
    reached = find_complete(tmp_path / "run")[0][0]

    assert code in codes, command.output.read_text(encoding="utf-8")
    assert 0 < reached < STEPS
    assert finish(tmp_path, STEPS) == uninterrupted(STEPS)
    assert f"training from step {reached}" in command.output.read_text(encoding="utf-8")


# --- minutes ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_200_random_kills_lose_nothing(tmp_path: Path, uninterrupted: Callable[[int], list[float]]) -> None:
    """SIGKILL of a rank, of all processes or of the launcher at any moment; every restart goes on exactly."""
    steps, kills = 60, int(os.environ.get("COLOSSAL_KILLS", "200"))
    source = random.Random(os.environ.get("COLOSSAL_KILLS_SEED", "1"))  # noqa: S311 - no secret
    wanted = uninterrupted(steps)
    done = finished = 0
    for number in itertools.count():
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        killed = kill_until_done(folder, steps, kills - done, source)
        done += killed
        finished += 1
        assert json.loads((folder / "losses.json").read_text(encoding="utf-8")) == wanted
        if done == kills:
            break
    print(f"{done} kills, {finished} runs finished exactly")  # noqa: T201 - a figure to report


def kill_until_done(folder: Path, steps: int, at_most: int, source: random.Random) -> int:
    """Start a run again and again, and kill it, until it has ended; return how often it was killed."""
    kills = 0
    while True:
        command = Command(folder, steps)
        if kills == at_most or wait_for_any_moment(command, source):
            assert command.wait_for_end(seconds=120) == 0, command.output.read_text(encoding="utf-8")
            return kills
        kill(command, source.choice(["rank", "rank", "all", "launcher"]), source)
        kills += 1
        check_directory(folder / "run")


def wait_for_any_moment(command: Command, source: random.Random) -> bool:
    """Wait for some moment, mostly while it trains and saves; return whether the run has ended before."""
    try:
        if source.random() < 0.2:  # anywhere, also while it starts or loads
            return command.process.wait(source.uniform(0.5, 5.0)) == 0
        command.wait_for_training(seconds=60)
        return command.process.wait(source.uniform(0.0, 0.8)) == 0
    except subprocess.TimeoutExpired:
        return False


def kill(command: Command, victim: str, source: random.Random) -> None:
    """Send SIGKILL to some processes of a run, and wait until all of them are gone."""
    ranks = command.find_ranks()
    if victim == "launcher" or not ranks:
        targets = [command.process.pid]
    else:
        targets = [source.choice(ranks)] if victim == "rank" else [command.process.pid, *ranks]
    for pid in targets:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    command.wait_for_end(seconds=60)


def check_directory(root: Path) -> None:
    """Check that what is visible is whole."""
    for _, path in find_complete(root)[:1]:
        assert not [problem for problem in verify(path) if problem.severity == "error"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quickstart_goes_on_after_control_c_at_the_nox_command(tmp_path: Path) -> None:
    """The key reaches nox through a terminal; the command, given again, ends with the same curves."""
    arguments = ["--steps", "60", "--save-every", "5", "--checkpoints"]
    command = [sys.executable, "-m", "nox", "-f", str(ROOT / "noxfile.py"), "-s", "quickstart", "--"]
    whole = subprocess.run(
        [*command, *arguments, str(tmp_path / "whole")], cwd=tmp_path, capture_output=True, check=True
    )
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execv(command[0], [*command, *arguments, str(tmp_path / "cut")])
    deadline = time.monotonic() + 300
    shown = bytearray()
    while not find_complete(tmp_path / "cut"):
        assert time.monotonic() < deadline, shown.decode(errors="replace")
        shown += read_some(terminal)
    os.write(terminal, b"\x03")
    while part := read_some(terminal, until_end=True):
        shown += part
    assert os.waitpid(child, 0)[1] != 0
    assert not find_processes(str(tmp_path / "cut"))

    again = subprocess.run(
        [*command, *arguments, str(tmp_path / "cut")], cwd=tmp_path, capture_output=True, check=True
    )

    assert b"going on after step" in again.stdout
    assert last_line(again.stdout) == last_line(whole.stdout)


def read_some(terminal: int, *, until_end: bool = False) -> bytes:
    """Return what a terminal shows, after at most a tenth of a second; nothing once it is closed."""
    while True:
        ready, _, _ = select.select([terminal], [], [], 0.1)
        if ready:
            try:
                return os.read(terminal, 1 << 16)
            except OSError:  # Linux says so when the other end is closed
                return b""
        if not until_end:
            return b""


def last_line(printed: bytes) -> bytes:
    """Return the line with the losses."""
    return next(line for line in reversed(printed.splitlines()) if b"nats per byte" in line)
