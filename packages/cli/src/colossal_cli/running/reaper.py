"""A second process that ends the ranks when the launcher cannot: after ``kill -9``, or out of memory.

On Linux the kernel already kills each rank when its launcher dies, but not what a rank started itself, and
other systems have no such service. So a small process, forked before anything else happens, waits for the end
of a pipe that only the launcher holds. The pipe ends with the launcher, however that ends.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import final

__all__ = ["Reaper"]

_DONE = b"done"


@final
class Reaper:
    """The launcher's end of the pipe.

    Owns the forked process from construction until ``close``.
    """

    def __init__(self, directory: Path) -> None:
        """Fork the process.

        Args:
            directory: Folder of the run, which the process removes if the launcher no longer can.
        """
        source, self._sink = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._sink)
            _wait_and_reap(source, directory)
        os.close(source)

    def watch(self, pid: int) -> None:
        """Remember a process group that dies with the launcher."""
        self._send(str(pid).encode())

    def close(self) -> None:
        """Tell that everything has ended in order, and wait for the process."""
        self._send(_DONE)
        os.close(self._sink)
        os.waitpid(self._pid, 0)

    def _send(self, word: bytes) -> None:
        """Write one line; without a reaper, which somebody killed, ranks still die with their parent."""
        try:
            os.write(self._sink, word + b"\n")
        except BrokenPipeError:
            return


def _wait_and_reap(source: int, directory: Path) -> None:
    """Be the second process: read until the launcher is gone, kill what is left, and never return."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # Whoever reads the launcher's output must not wait for this process.
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        with open(source, "rb") as lines:
            words = lines.read().split()
        if words[-1:] != [_DONE]:
            for word in words:
                _kill_group(int(word))
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os._exit(0)


def _kill_group(group: int) -> None:
    """Kill a process group that may be gone already."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
