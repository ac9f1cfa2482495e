"""The forkserver: imports torch once, then makes workers in milliseconds.

It has one thread and never runs a backward pass, opens a process group or starts a thread pool, because none
of these survives a fork. It obeys one command at a time, each a line of JSON over a Unix socket:

- ``fork``, with the worker's sockets and output file attached, answers the process id;
- ``stop`` kills the given workers and answers how they ended;
- end of file kills all and ends the server.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import traceback
from typing import NoReturn

from colossal_testkit.pool.processes import die_with_parent

__all__ = ["serve"]

# Imported before forking: what nearly every job imports, at a second or more each. ``torch._dynamo`` is what
# the first construction of any optimizer imports.
_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch._dynamo",
    "pytest",
    "colossal_testkit.pool.worker",
    "colossal_testkit.memory",
    "colossal_testkit.models",
    "colossal_testkit.parity",
)
_MAX_COMMAND_BYTES = 65536


def serve(command_descriptor: int, parent: int) -> None:
    """Import the preloaded modules, then obey commands until the parent closes its end.

    Args:
        command_descriptor: File descriptor of the inherited command socket.
        parent: Process id of the parent.
    """
    die_with_parent(parent)
    commands = socket.socket(fileno=command_descriptor)
    _preload()
    children: set[int] = set()
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(commands, _MAX_COMMAND_BYTES, 8)
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            _stop(children, children)
            return
        command = json.loads(data)
        if command["do"] == "fork":
            answer: object = _fork(commands, descriptors)
            children.add(int(str(answer)))
        else:
            answer = _stop(children, set(command["pids"]))
        commands.sendall(json.dumps(answer).encode() + b"\n")


def _preload() -> None:
    """Import what jobs need. What fails here fails again, visibly, in the job that needs it."""
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Objects made so far move out of the collector's sight: workers share their pages, and collecting garbage
    # after each job costs microseconds instead of a quarter of a second.
    gc.collect()
    gc.freeze()


def _fork(commands: socket.socket, descriptors: list[int]) -> int:
    """Make a worker and return its process id."""
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        commands.close()
        _become_worker(server, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def _become_worker(server: int, descriptors: list[int]) -> NoReturn:
    """Run a worker in a freshly forked process and leave without any clean-up of the server."""
    try:
        die_with_parent(server)
        worker = importlib.import_module("colossal_testkit.pool.worker")
        control, watch, output, *listener = descriptors
        worker.run_worker(
            control_descriptor=control,
            watch_descriptor=watch,
            output_descriptor=output,
            listen_descriptor=listener[0] if listener else None,
        )
    except BaseException:  # noqa: BLE001 - border of the process: say why on the way out
        traceback.print_exc()
    finally:
        os._exit(1)


def _stop(children: set[int], victims: set[int]) -> dict[str, int | None]:
    """Kill workers and return the wait status of each, as it was before when it had ended by itself."""
    statuses: dict[str, int | None] = {}
    for pid in sorted(victims & children):
        # Killing one that is already on its way out changes nothing about the status that it left.
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended == 0:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        statuses[str(pid)] = status
        children.discard(pid)
    return statuses
