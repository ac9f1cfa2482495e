"""The program as a child process, and the proof that nothing of it survives a test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import pytest

_MARK = "COLOSSAL_TEST_MARK"
# Longer than pytest's own limit, except for tests that raise it.
_PATIENCE_SECONDS = 60.0


@attrs.frozen
class Outcome:
    """How one call ended.

    Attributes:
        code: Exit code; negative for a signal.
        out: Standard output.
        err: Standard error.
        seconds: How long it took.
    """

    code: int
    out: str
    err: str
    seconds: float


class Program:
    """Calls ``colossal`` in a directory of its own, with an environment that no launcher has touched."""

    def __init__(self, directory: Path) -> None:
        """Use a directory as working directory and as home of the user's settings."""
        self.directory = directory
        self.mark = uuid.uuid4().hex
        foreign = ("COLOSSAL", "MASTER_", "OMPI_", "SLURM_", "TORCHELASTIC", "OMP_")
        places = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(foreign) and name not in places
        }
        self.environ = {
            **kept,
            _MARK: self.mark,
            "XDG_CONFIG_HOME": str(directory / "user"),
            # torch says so where numpy, which it does not need, is missing.
            "PYTHONWARNINGS": "ignore:Failed to initialize NumPy",
        }

    def write(self, name: str, text: str) -> Path:
        """Write a file into the working directory."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def install(
        self, name: str, source: str, *, version: str = "1.0", requires: str = "colossal-core>=0.1"
    ) -> None:
        """Put a distribution with one plugin on the path, as an installer would leave it.

        Args:
            name: Name of the plugin; its distribution is ``acme-NAME`` and its module ``acme_NAME``.
            source: Its light module.
            version: Version of the distribution.
            requires: Its one requirement.
        """
        module = f"acme_{name.replace('-', '_')}"
        self.write(f"site/{module}.py", source)
        metadata = f"acme_{name}-{version}.dist-info"
        text = f"Metadata-Version: 2.1\nName: acme-{name}\nVersion: {version}\nRequires-Dist: {requires}\n"
        self.write(f"site/{metadata}/METADATA", text)
        self.write(f"site/{metadata}/entry_points.txt", f"[colossal.plugins]\n{name} = {module}\n")
        self.environ["PYTHONPATH"] = str(self.directory / "site")

    def command(self, *args: str) -> list[str]:
        """Return the command line."""
        return [sys.executable, "-m", "colossal_cli", *args]

    def start(self, *args: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start the program; both streams arrive in ``stdout``."""
        return subprocess.Popen(
            self.command(*args),
            cwd=self.directory,
            env={**self.environ, **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def run(self, *args: str, environ: Mapping[str, str] | None = None) -> Outcome:
        """Run the program to its end."""
        began = time.monotonic()
        done = subprocess.run(
            self.command(*args),
            cwd=self.directory,
            env={**self.environ, **(environ or {})},
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
        seconds = time.monotonic() - began
        # Not text=True: that would turn \r\n and \r into \n.
        return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode(), seconds)

    def find_survivors(self) -> dict[int, str]:
        """Return the processes that this program started and that still run: number to command line."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{_MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def await_peace(self, seconds: float = 5.0) -> dict[int, str]:
        """Wait for the last process to go, and return those that stay nevertheless."""
        deadline = time.monotonic() + seconds
        while (found := self.find_survivors()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """The program; the test fails when any process that it started is left."""
    made = Program(tmp_path)

    yield made

    left = made.await_peace()
    for number in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    assert not left, f"processes survive: {left}"
