"""Processes that end with their parent, their environment, and what is left to say about those that ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["NUM_RECORDS", "WORKER_VARIABLES", "describe_exit", "die_with_parent"]

# Entries of torch's flight recorder; two hundred take about a millisecond to read.
NUM_RECORDS = 200
# What must be in the environment before torch is imported, and stays there. One thread, because several ranks
# share few cores and because sums then have one order; the loopback device, which has another name on macOS.
WORKER_VARIABLES = {
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_FR_BUFFER_SIZE": str(NUM_RECORDS),
}

# From <linux/prctl.h>; the kernel sends the signal when the parent's thread that forked us ends.
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, and end now when that has happened already.

    Elsewhere than on Linux this does nothing: there, workers notice the closed socket only.

    Args:
        parent: Process id that the parent had when it made this process.
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(None, use_errno=True)
        if library.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def describe_exit(status: int) -> str:
    """Return what a wait status means, such as ``was ended by signal 9 (SIGKILL)``."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"was ended by signal {-code} ({name})"
