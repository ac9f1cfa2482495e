"""The parent's side of the processes: one forkserver, and one crew of workers at a time.

A crew grows when a job needs more ranks than it has, and is replaced as a whole after anything that leaves
doubt about the state of its members. Replacing costs a few milliseconds for each worker; the forkserver
stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from typing import IO

import attrs

from colossal_testkit.pool.messages import Job, Ready, Report, Reset
from colossal_testkit.pool.processes import describe_exit
from colossal_testkit.pool.values import dumps, loads

__all__ = ["Crew", "ForkServer", "Member"]

# A worker answers a reset in about a millisecond; beyond this something of the last job is in the way.
_RESET_SECONDS = 10.0
_START_SECONDS = 120.0
_STACK_SECONDS = 2.0
_PROGRAM = """
import sys
sys.path[:] = {path!r}
from colossal_testkit.pool.server import serve
serve({descriptor}, {parent})
"""


class ForkServer:
    """The process that makes workers; started with the first one, ended by `close` or with this process."""

    def __init__(self, variables: dict[str, str]) -> None:
        """Start the process without waiting for it.

        Args:
            variables: Added to this process's environment for the server and its workers.
        """
        self._socket, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        program = _PROGRAM.format(path=sys.path, descriptor=theirs.fileno(), parent=os.getpid())
        with theirs:
            # A session of its own keeps the terminal's Ctrl-C away: this process decides when workers end.
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and program
                [sys.executable, "-c", program],
                env={**os.environ, **variables},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                start_new_session=True,
            )
        self._socket.settimeout(_START_SECONDS)

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def fork(self, descriptors: Sequence[int]) -> int:
        """Return the process id of a new worker that owns copies of the descriptors."""
        command = json.dumps({"do": "fork"}).encode()
        try:
            socket.send_fds(self._socket, [command], list(descriptors))
            return int(self._read_answer())
        except (OSError, ValueError) as err:
            self._errors.seek(0)
            output = self._errors.read().decode(errors="replace")
            message = f"the forkserver of the rank pool cannot start workers: {err}\n{output}"
            raise RuntimeError(message) from err

    def stop(self, pids: Iterable[int]) -> dict[int, int]:
        """Kill workers and return their wait statuses; an empty mapping when the server itself is gone."""
        try:
            self._socket.sendall(json.dumps({"do": "stop", "pids": sorted(pids)}).encode())
            answer: dict[str, int] = json.loads(self._read_answer())
        except (OSError, ValueError):
            # The kernel ended the workers together with the server.
            return {}
        return {int(pid): status for pid, status in answer.items()}

    def close(self) -> None:
        """End the server and all workers; return when it has ended."""
        self._socket.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _read_answer(self) -> bytes:
        """Return one line."""
        answer = b""
        while not answer.endswith(b"\n"):
            part = self._socket.recv(65536)
            if not part:
                raise ConnectionError("it ended")
            answer += part
        return answer


@attrs.define(eq=False)
class Member:
    """The parent's ends of one worker, owned by its crew.

    Attributes:
        rank: Its index in the crew, which is the rank that it plays.
        pid: Its process id.
        control: Jobs go in, reports come out.
        watch: A byte in asks for the worker's latest collectives; closing it ends the worker.
        output: File with everything that it printed.
        seen: Bytes of the output that were handed out already.
        owes_ready: Whether it was asked to reset and has not answered.
    """

    rank: int
    pid: int
    control: Connection
    watch: socket.socket
    output: IO[bytes]
    seen: int = 0
    owes_ready: bool = False

    def take_output(self) -> str:
        """Return what was printed since the last call."""
        data = os.pread(self.output.fileno(), 1 << 20, self.seen)
        self.seen = os.fstat(self.output.fileno()).st_size
        return data.decode(errors="replace")

    def close(self) -> None:
        """Close the parent's ends."""
        self.control.close()
        self.watch.close()
        self.output.close()


class Crew:
    """Workers that share one rendezvous store. It is empty, clean between jobs, or in a job."""

    def __init__(self, server: ForkServer) -> None:
        """Open the store's port; workers come with `grow`."""
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.store_port: int = self._listener.getsockname()[1]
        self.members: list[Member] = []

    def grow(self, count: int) -> None:
        """Make workers until there are ``count``."""
        while len(self.members) < count:
            self.members.append(self._make_member(len(self.members)))

    def start(self, jobs: Sequence[Job]) -> bool:
        """Hand each worker its job; say whether all of them were there and clean."""
        members = self.members[: len(jobs)]
        if not self._await_ready(members):
            return False
        try:
            for member, job in zip(members, jobs, strict=True):
                member.control.send_bytes(dumps(job))
        except OSError:
            return False
        return True

    def receive(self, members: Sequence[Member], seconds: float) -> tuple[list[Report], list[Member]]:
        """Wait for at least one report or death among the members, at most some seconds.

        Returns:
            The reports that came in, and the members that ended instead.
        """
        by_connection = {id(member.control): member for member in members}
        reports: list[Report] = []
        dead: list[Member] = []
        for connection in wait([member.control for member in members], timeout=max(seconds, 0)):
            member = by_connection[id(connection)]
            try:
                answer = loads(member.control.recv_bytes())
            except (EOFError, OSError):
                dead.append(member)
                continue
            if isinstance(answer, Report):
                reports.append(answer)
        return reports, dead

    def reset(self, count: int) -> None:
        """Ask the workers of a job to become clean; the next job waits for their answers."""
        message = dumps(Reset())
        for member in self.members[:count]:
            with contextlib.suppress(OSError):
                member.control.send_bytes(message)
                member.owes_ready = True

    def write_stacks(self, members: Sequence[Member]) -> None:
        """Let workers append the stacks of all their threads and their latest collectives to their output."""
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGUSR1)
        # The signal is answered by C code at once; give it the processor before the thread that reads the
        # recorder.
        time.sleep(0.1)
        for member in members:
            with contextlib.suppress(OSError):
                member.watch.sendall(b"?")
        for member in members:
            with contextlib.suppress(OSError):
                member.watch.settimeout(_STACK_SECONDS)
                member.watch.recv(1)

    def close(self) -> dict[int, str]:
        """Kill all workers; return how each rank ended, as text."""
        statuses = self._server.stop(member.pid for member in self.members)
        ends = {
            member.rank: describe_exit(statuses[member.pid])
            for member in self.members
            if member.pid in statuses
        }
        for member in self.members:
            member.close()
        self.members.clear()
        self._listener.close()
        return ends

    def _make_member(self, rank: int) -> Member:
        """Fork one worker; the first one also gets the listening socket of the store."""
        control, their_control = socket.socketpair()
        watch, their_watch = socket.socketpair()
        output = tempfile.TemporaryFile()  # noqa: SIM115 - owned by the member
        with their_control, their_watch:
            descriptors = [their_control.fileno(), their_watch.fileno(), output.fileno()]
            if rank == 0:
                descriptors.append(self._listener.fileno())
            pid = self._server.fork(descriptors)
        return Member(rank=rank, pid=pid, control=Connection(control.detach()), watch=watch, output=output)

    def _await_ready(self, members: Sequence[Member]) -> bool:
        """Wait until every member has answered its last reset; say whether all did."""
        deadline = time.monotonic() + _RESET_SECONDS
        for member in members:
            while member.owes_ready:
                try:
                    if not member.control.poll(max(deadline - time.monotonic(), 0)):
                        return False
                    answer = loads(member.control.recv_bytes())
                except (EOFError, OSError):
                    return False
                if isinstance(answer, Ready):
                    member.owes_ready = False
                    if answer.problem:
                        return False
        return True
