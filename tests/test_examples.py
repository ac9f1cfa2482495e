"""Examples train, take a plan, and end when somebody presses Ctrl-C, without leaving a process behind."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from .processes import IS_THERE, find_processes

EXAMPLES = Path(__file__).parents[1] / "examples"
EXAMPLE = EXAMPLES / "train_gpt.py"
COLOSSAL = Path(sys.executable).with_name("colossal")


def train(folder: Path, *arguments: str, nproc: int = 2) -> str:
    """Run the example in a folder on some ranks and return what it printed."""
    command = [str(COLOSSAL), "run", "--nproc", str(nproc), str(EXAMPLE), *arguments]
    ended = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def read_losses(printed: str) -> dict[str, float]:
    """Return the last line's losses by name."""
    line = printed[printed.rindex("nats per byte:") :]
    return {name: float(loss) for name, loss in re.findall(r"(\w+) (\d+\.\d+)", line)}


@pytest.mark.timeout(120)
def test_training_prints_losses_and_draws_them(tmp_path: Path) -> None:
    """One run leaves a line of losses to compare, and a picture."""
    losses = read_losses(train(tmp_path, "--steps", "4"))

    assert losses.keys() == {"validation", "unigram", "bigram"}
    assert losses["bigram"] < losses["unigram"] < 5.5  # ln 256 = 5.55
    assert (tmp_path / "train_gpt.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(120)
def test_number_of_processes_does_not_change_the_numbers(tmp_path: Path) -> None:
    """A plan in float64 gives the same losses on one process as on three, to every digit shown."""
    (tmp_path / "plan.toml").write_text('precision = "fp64"\n', encoding="utf-8")
    (tmp_path / "text.txt").write_text("all work and no play makes jack a dull boy\n" * 200, encoding="utf-8")
    arguments = ("--steps", "3", "--plan", "plan.toml", "--file", "text.txt")

    losses = [read_losses(train(tmp_path, *arguments, nproc=nproc)) for nproc in (1, 3)]

    assert losses[0] == losses[1]


SHORT = {
    "classify_digits.py": ("sklearn", ("--epochs", "1"), r"epoch 1: \d+ of 397 right, test loss \d\.\d+"),
    "cut_layers.py": ("transformers", ("--steps", "3"), r"step 3: loss \d\.\d+, gradient norm"),
    "finetune_transformers.py": ("transformers", ("--steps", "3"), r"step 3: loss 2\.\d+, gradient norm"),
    "gan_digits.py": ("sklearn", ("--epochs", "1"), r"epoch 1: distance -?\d+\.\d+"),
    "large_gpt.py": (
        "colossal_gemini",
        ("--steps", "3", "--width", "64", "--layers", "4", "--device-budget", "6MiB"),
        r"step 3: loss \d+\.\d+",
    ),
    "reverse_digits.py": ("colossal_pipeline", ("--steps", "3"), r"step 3: loss \d+\.\d+"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", SHORT)
def test_short_examples_run_on_two_processes(name: str, tmp_path: Path) -> None:
    """They are what people copy first; where their library is missing, that is said."""
    library, arguments, line = SHORT[name]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    command = [str(COLOSSAL), "run", "--nproc", "2", str(EXAMPLES / name), *arguments]

    ended = subprocess.run(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )

    assert ended.returncode == 0, ended.stdout
    assert re.search(line, ended.stdout), ended.stdout


def test_every_example_is_run_and_named_in_the_readme() -> None:
    """A new script cannot be forgotten."""
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")

    assert scripts == {EXAMPLE.name, *SHORT}
    assert all(f"(examples/{name})" in readme for name in scripts)


@pytest.mark.skipif(not IS_THERE, reason="processes are looked up in /proc")
@pytest.mark.timeout(120)
def test_control_c_leaves_no_process(tmp_path: Path) -> None:
    """The key reaches the launcher through a terminal, as from a person; everything ends within seconds."""
    text = tmp_path / "marker.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 500, encoding="utf-8")
    command = [str(COLOSSAL), "run", "--nproc", "2", str(EXAMPLE), "--steps", "100000", "--file", str(text)]
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execv(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    shown = b""
    while b"norm " not in shown:
        shown += os.read(terminal, 4096)

    os.write(terminal, b"\x03")
    pressed = time.monotonic()
    while drain(terminal):
        assert time.monotonic() < pressed + 30, "still running 30 s after Ctrl-C"
    _, status = os.waitpid(child, 0)
    os.close(terminal)

    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGINT
    assert find_processes(str(text)) == []


def drain(terminal: int) -> bytes:
    """Read what a terminal has; nothing when whoever wrote to it has ended."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
