"""``colossal run`` with scripts that need no torch: exit codes, output, environment, refusals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Program

# Scripts end with this where only the launcher may end them.
_WAIT = "\nimport time; time.sleep(60)\n"


def test_lines_carry_their_rank_and_arguments_arrive_untouched(program: Program) -> None:
    """Both streams are marked, what follows the script belongs to it, and the exit code is 0."""
    program.write(
        "s.py",
        "import os, sys\nprint('out', os.environ['RANK'], sys.argv[1:])\nprint('err', file=sys.stderr)\n",
    )

    done = program.run("run", "--nproc", "3", "s.py", "--nproc", "7", "-m", "x")

    assert done.code == 0
    assert sorted(done.out.splitlines()) == [f"[{r}] out {r} ['--nproc', '7', '-m', 'x']" for r in range(3)]
    assert sorted(done.err.splitlines()) == ["[0] err", "[1] err", "[2] err"]


def test_two_ranks_are_the_default_without_accelerators(program: Program) -> None:
    """No option is needed to see that something is distributed."""
    program.write("s.py", "import os; print(os.environ['WORLD_SIZE'])")

    done = program.run("run", "s.py", environ={"CUDA_VISIBLE_DEVICES": ""})

    assert sorted(done.out.splitlines()) == ["[0] 2", "[1] 2"]


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(3)", 3),
        ("os._exit(7)", 7),
        ("raise ValueError('boom')", 1),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 128 + signal.SIGSEGV),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(program: Program, ending: str, code: int) -> None:
    """One rank fails in its own way, the other would wait for a minute, and both are gone in seconds."""
    program.write("s.py", f"import os, signal, sys\nif os.environ['RANK'] == '1': {ending}{_WAIT}")

    done = program.run("run", "s.py")

    assert done.code == code
    assert "rank 1 of 2" in done.err
    assert done.seconds < 10


def test_the_traceback_of_the_first_failure_comes_last(program: Program) -> None:
    """Rank 1 fails, rank 0 fails a moment later because of that, and rank 1's traceback ends the output."""
    program.write(
        "s.py",
        "import os, time\n"
        "if os.environ['RANK'] == '1': raise ValueError('the cause')\n"
        "time.sleep(0.4)\n"
        "raise RuntimeError('the consequence')\n",
    )

    done = program.run("run", "s.py")

    lines = done.err.splitlines()
    assert lines[-1] == "[1] ValueError: the cause"
    assert "[0] RuntimeError: the consequence" in lines
    assert lines.index("colossal run: rank 1 of 2 failed with exit code 1, before any other") < len(lines) - 1


def test_a_segmentation_fault_says_where(program: Program) -> None:
    """Python's fault handler is on, so a crash in native code shows the line of the script."""
    program.write("s.py", "import ctypes, os\nif os.environ['RANK'] == '0': ctypes.string_at(0)\n")

    done = program.run("run", "s.py")

    assert done.code == 128 + signal.SIGSEGV
    assert "[0] Fatal Python error: Segmentation fault" in done.err
    assert 's.py", line 2' in done.err


def test_a_megabyte_and_an_unfinished_line_arrive_complete(program: Program) -> None:
    """Nothing is lost: many lines, one huge line, bytes that are no text, and a line without an end."""
    program.write(
        "s.py",
        "import sys\nw = sys.stdout.buffer.write\n"
        "for i in range(20_000): w(b'%06d ' % i + b'x' * 43 + b'\\n')\n"
        "w(b'y' * 2**20 + b'\\n')\nw(b'\\xff\\xfe\\n'); w(b'no end')\n",
    )

    command = program.command("run", "s.py")
    done = subprocess.run(
        command, cwd=program.directory, env=program.environ, capture_output=True, check=True
    )

    for rank in (b"[0] ", b"[1] "):
        lines = [line.removeprefix(rank) for line in done.stdout.split(b"\n") if line.startswith(rank)]
        assert lines[:20_000] == [b"%06d " % i + b"x" * 43 for i in range(20_000)]
        assert lines[20_000:] == [b"y" * 2**20, b"\xff\xfe", b"no end"]


def test_progress_bars_in_a_file_keep_their_returns_and_get_prefixes(program: Program) -> None:
    r"""Each piece that ends in ``\r`` is passed on by itself, so ``tee`` shows a moving line."""
    program.write(
        "s.py", "import sys\nfor i in range(3): sys.stderr.write(f'\\r{i}/3')\nprint(file=sys.stderr)\n"
    )

    done = program.run("run", "--nproc", "1", "s.py")

    assert done.err == "[0] \r[0] 0/3\r[0] 1/3\r[0] 2/3\n"


def test_threads_are_shared_among_ranks_unless_the_user_has_chosen(program: Program) -> None:
    """OMP_NUM_THREADS is cores / nproc, at least 1."""
    program.write("s.py", "import os; print(os.environ['OMP_NUM_THREADS'])")
    cores = len(os.sched_getaffinity(0))

    shared = program.run("run", "--nproc", "2", "s.py")
    chosen = program.run("run", "--nproc", "2", "s.py", environ={"OMP_NUM_THREADS": "17"})

    assert set(shared.out.split()[1::2]) == {str(max(1, cores // 2))}
    assert set(chosen.out.split()[1::2]) == {"17"}


def test_a_module_runs_by_name(program: Program) -> None:
    """``-m`` means what it means to Python."""
    program.write("tool/__init__.py", "")
    program.write("tool/go.py", "import sys; print(__name__, sys.argv[1:])")

    done = program.run("run", "--nproc", "1", "-m", "tool.go", "a")

    assert done.out == "[0] __main__ ['a']\n"


def test_a_plan_is_checked_before_anything_starts_and_named_to_the_script(program: Program) -> None:
    """The script finds the absolute path in COLOSSAL_PLAN; a plan with a typo starts no rank."""
    program.write("s.py", "import os; print(os.environ.get('COLOSSAL_PLAN'))")
    good = program.write("good.toml", 'precision = "bf16"\n')
    program.write("bad.toml", 'precisoin = "bf16"\n')

    done = program.run("run", "--nproc", "1", "--plan", "good.toml", "s.py")
    refused = program.run("run", "--plan", "bad.toml", "s.py")
    missing = program.run("run", "--plan", "none.toml", "s.py")

    assert done.out == f"[0] {good}\n"
    assert (refused.code, refused.out) == (2, "")
    assert "precisoin" in refused.err
    assert (missing.code, missing.out) == (2, "")
    assert "none.toml" in missing.err


def test_flags_about_plugins_reach_the_ranks(program: Program) -> None:
    """The launcher resolves the set once and hands it on."""
    program.write("s.py", "import os; print(os.environ['COLOSSAL_NO_PLUGINS'])")

    done = program.run("--no-plugins", "run", "--nproc", "1", "s.py")

    assert done.out == "[0] 1\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py"], ["nowhere.py", "-m NAME"]),
        (["--nproc", "0", "s.py"], ["--nproc"]),
        (["--nnodes", "2", "s.py"], ["--node-rank", "--master"]),
        (
            ["--nnodes", "2", "--node-rank", "2", "--master", "h:1", "s.py"],
            ["--node-rank is 2", "--nnodes is 2"],
        ),
        (["--master", "here", "s.py"], ["ADDR:PORT"]),
        (["--master", "127.0.0.1:99999", "s.py"], ["99999", "65535"]),
        ([], ["SCRIPT"]),
    ],
)
def test_wrong_usage_is_refused_with_code_2(program: Program, arguments: list[str], words: list[str]) -> None:
    """Before any rank starts, naming what was given and what was expected."""
    program.write("s.py", "print('started')")

    done = program.run("run", *arguments)

    assert done.code == 2
    assert done.out == ""
    assert all(word in done.err for word in words), done.err


@pytest.mark.parametrize("by_flag", [True, False])
def test_a_busy_port_is_named_in_one_line(program: Program, by_flag: bool) -> None:  # noqa: FBT001 - parametrised
    """An explicit port that somebody listens on ends the run at once, whether by flag or by MASTER_PORT."""
    program.write("s.py", "print('started')")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])

        flags = ["--master", f"127.0.0.1:{port}"] if by_flag else []
        done = program.run("run", *flags, "s.py", environ={} if by_flag else {"MASTER_PORT": port})

    assert done.code != 0
    assert done.out == ""
    message, _, hint = done.err.partition("\n")
    assert port in message
    assert "in use" in message
    assert hint.startswith("  next: ")
    assert done.seconds < 10


def test_the_port_is_nobody_elses_while_the_run_lives(program: Program) -> None:
    """No other socket can take the port before rank 0 binds it, and rank 0 can bind it on any address."""
    program.write(
        "s.py",
        "import os, socket\n"
        "port = int(os.environ['MASTER_PORT'])\n"
        "thief = socket.socket()\n"
        "try: thief.bind(('127.0.0.1', port)); print('stolen')\n"
        "except OSError: print('held')\n"
        "for host in ('127.0.0.1', ''):\n"
        "    with socket.socket() as own:\n"
        "        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "        own.bind((host, port)); own.listen(); print('bound')\n",
    )

    done = program.run("run", "--nproc", "1", "s.py")

    assert done.out.splitlines() == ["[0] held", "[0] bound", "[0] bound"]


def test_two_machines_count_their_ranks_through(program: Program) -> None:
    """Two launchers stand for two machines; ranks, local ranks and groups are as torchrun numbers them."""
    names = "('RANK', 'LOCAL_RANK', 'GROUP_RANK', 'WORLD_SIZE')"
    program.write("s.py", f"import os; print(*(os.environ[name] for name in {names}))")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    flags = ["--nnodes", "2", "--nproc", "2", "--master", f"127.0.0.1:{port}"]
    first = program.run("run", *flags, "--node-rank", "0", "s.py")
    second = program.run("run", *flags, "--node-rank", "1", "s.py")

    assert sorted(first.out.splitlines()) == ["[0] 0 0 0 4", "[1] 1 1 0 4"]
    assert sorted(second.out.splitlines()) == ["[2] 2 0 1 4", "[3] 3 1 1 4"]


def test_rank_0_alone_reads_standard_input(program: Program) -> None:
    """A debugger in rank 0 works; the others see the end of input at once."""
    program.write("s.py", "import sys; print(sys.stdin.read())")

    done = subprocess.run(
        program.command("run", "s.py"),
        cwd=program.directory,
        env=program.environ,
        input=b"typed",
        capture_output=True,
        check=True,
    )

    assert sorted(done.stdout.splitlines()) == [b"[0] typed", b"[1] "]
