"""Start the ranks of one machine, pass on what they print, end all of them when one fails or we are told to.

One loop in one thread: it waits for output, for children that end and for signals, which all arrive as
readable descriptors, and keeps a list of what to do to the ranks at which moment.

Ranks run in sessions of their own. A Ctrl-C at the terminal therefore reaches the launcher alone, which
passes it on; and everything that a rank started can be killed with it, as one process group. Ended ranks are
not reaped before the last one is: until then the kernel keeps their numbers from being given to somebody
else's group.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import final

import attrs

from colossal_cli.running.output import LineCutter, Screen, mark_lines
from colossal_cli.running.reaper import Reaper
from colossal_cli.running.report import describe_end, find_traceback
from colossal_cli.running.terminal import Terminal
from colossal_core.processes import (
    RankEnd,
    find_first_failure,
    make_parent_guard,
    read_departure,
    to_exit_code,
)

__all__ = ["Supervisor"]

# Peers of a failed rank get this long to end by themselves, so that what they have to say is not cut off.
_SETTLE_SECONDS = 1.0
_RECHECK_SECONDS = 0.1
# After the last rank ended, somebody whom it started may still hold its output open.
_DRAIN_SECONDS = 0.5
# nox, uv and the like pass on a Ctrl-C that the terminal has sent to everybody anyway: it then comes twice.
_ECHO_SECONDS = 0.5
_TAIL_BYTES = 64 * 2**10
_READ_BYTES = 64 * 2**10


@final
@attrs.define(eq=False)
class _Rank:
    """One rank as the supervisor sees it.

    Attributes:
        number: Global rank.
        process: The process, which leads a process group of its own.
        end: How it ended, once it has.
        tail: The last bytes of its standard error.
        spoke_at: Number of the write to a screen in which its standard error came last.
    """

    number: int
    process: subprocess.Popen[bytes]
    end: RankEnd | None = None
    tail: bytes = b""
    spoke_at: int = 0


@final
@attrs.define(eq=False)
class _Stream:
    """One stream of one rank.

    Attributes:
        rank: Global rank.
        screen: Where it goes.
        is_raw: It comes from rank 0's own terminal and is written through.
        keeps_tail: Tracebacks arrive here.
    """

    rank: _Rank
    screen: Screen
    is_raw: bool
    keeps_tail: bool
    cutter: LineCutter


@final
class Supervisor:
    """Runs the ranks once.

    Owns their processes, pipes and the handlers of signals while ``run`` runs.
    """

    def __init__(
        self, command: Sequence[str], directory: Path, *, world_size: int, grace_seconds: float
    ) -> None:
        """Prepare.

        Args:
            command: What every rank executes.
            directory: Folder of the run, where ranks note when they leave; exists.
            world_size: Number of ranks of the run, on all machines.
            grace_seconds: How long ranks may take to end once they were told to.
        """
        self._command = list(command)
        self._directory = directory
        self._world_size = world_size
        self._grace_seconds = grace_seconds
        self._screens = tuple(Screen(number, is_terminal=os.isatty(number)) for number in (1, 2))
        if self._screens[0].is_terminal and self._screens[1].is_terminal:
            self._screens = (self._screens[0], self._screens[0])  # one screen, one cursor
        self._ranks: list[_Rank] = []
        self._terminals: list[Terminal] = []
        self._selector = selectors.DefaultSelector()
        self._num_writes = 0
        self._told: signal.Signals | None = None
        self._told_at = 0.0
        self._stopped_at: float | None = None
        self._settled_at: float | None = None
        self._patient_until = 0.0
        self._plan: list[tuple[float, signal.Signals]] = []
        self._was_killed = False
        self._is_insisted = False

    def run(self, environments: Mapping[int, Mapping[str, str]]) -> int:
        """Run one rank for each environment until all have ended.

        Args:
            environments: Global rank to the environment of its process, in ascending order.

        Returns:
            The exit code: 0, that of the rank that failed first, or 128 plus the number of the signal that
            ended us.
        """
        wake, waker = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(waker, False)
        self._selector.register(wake, selectors.EVENT_READ, None)
        reaper = Reaper(self._directory)
        restore = self._install_handlers(waker)
        try:
            guard = make_parent_guard(os.getpid())
            for number, environment in environments.items():
                self._start(number, environment, guard)
                reaper.watch(self._ranks[-1].process.pid)
            self._loop()
        finally:
            self._kill_all()
            restore()
            reaper.close()
            for descriptor in (wake, waker):
                os.close(descriptor)
        return self._conclude()

    # ---------------------------------------------------------------------------------------------- starting

    def _start(self, number: int, environment: Mapping[str, str], guard: Callable[[], None]) -> None:
        """Start one rank with its streams."""
        sources: list[tuple[int, Screen, bool]] = []
        ends: list[int] = []
        terminal: Terminal | None = None
        for screen in self._screens:
            if number == 0 and screen.is_terminal:
                if terminal is None:
                    terminal = Terminal(1 if screen is self._screens[0] else 2)
                    sources.append((terminal.reader, screen, True))
                    self._terminals.append(terminal)
                ends.append(terminal.writer)
            else:
                reader, writer = os.pipe()
                sources.append((reader, screen, False))
                ends.append(writer)
        try:
            process = subprocess.Popen(  # noqa: S603 - the user's own script
                self._command,
                stdin=None if number == 0 else subprocess.DEVNULL,
                stdout=ends[0],
                stderr=ends[1],
                env=environment,
                start_new_session=True,
                preexec_fn=guard,  # noqa: PLW1509 - this program has one thread
            )
        finally:
            for descriptor in set(ends):
                os.close(descriptor)
        rank = _Rank(number, process)
        self._ranks.append(rank)
        for index, (reader, screen, is_raw) in enumerate(sources):
            os.set_blocking(reader, False)
            cutter = LineCutter(collapses_returns=screen.is_terminal)
            is_last = index == len(sources) - 1
            stream = _Stream(rank, screen, is_raw=is_raw, keeps_tail=is_last, cutter=cutter)
            self._selector.register(reader, selectors.EVENT_READ, stream)

    def _install_handlers(self, waker: int) -> Callable[[], None]:
        """Make signals wake the loop; return what puts everything back."""
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGWINCH, signal.SIGTSTP]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means it
            numbers.append(signal.SIGHUP)
        before = [(number, signal.getsignal(number)) for number in numbers]
        for number in numbers:
            signal.signal(number, self._handle)
        waker_before = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)

        def restore() -> None:
            """Put handlers and wake-up descriptor back."""
            signal.set_wakeup_fd(waker_before)
            for number, handler in before:
                signal.signal(number, handler)

        return restore

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        """Note a signal for the loop; the second request to stop does not wait for it."""
        if number == signal.SIGCHLD:
            return
        if number == signal.SIGWINCH:
            for terminal in self._terminals:
                terminal.copy_size()
            return
        if number == signal.SIGTSTP:
            # Ctrl-Z stops us only, since ranks are in sessions of their own; they would go on computing.
            self._signal_running(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self._signal_running(signal.SIGCONT)
            return
        now = time.monotonic()
        if self._told is None:
            self._told, self._told_at = signal.Signals(number), now
        elif now - self._told_at > _ECHO_SECONDS:
            # Not left to the loop, which may be stuck in a write to a terminal that is stopped.
            if self._is_insisted:
                os._exit(128 + number)  # the reaper cleans up
            self._is_insisted = True
            self._told_at = now
            self._signal_running(signal.SIGKILL)

    # ---------------------------------------------------------------------------------------------- the loop

    def _loop(self) -> None:
        """Pass on output and watch the ranks until all have ended and said all."""
        drained_at: float | None = None
        while True:
            now = time.monotonic()
            self._decide(now)
            if all(rank.end is not None for rank in self._ranks):
                drained_at = now + _DRAIN_SECONDS if drained_at is None else drained_at
                if len(self._selector.get_map()) == 1 or now >= drained_at:
                    return
            moments = [moment for moment, _ in self._plan]
            moments += [moment for moment in (self._settled_at, drained_at) if moment is not None]
            timeout = min(moments, default=None)
            self._pump(None if timeout is None else max(0.0, timeout - now))
            self._collect_ends()

    def _decide(self, now: float) -> None:
        """Begin to stop when there is a reason, and carry out what has fallen due."""
        if self._told is None and any(screen.is_broken for screen in self._screens):
            self._told, self._told_at = signal.SIGPIPE, now
        if self._told is not None and self._stopped_at is None:
            self._say(f"received {self._told.name}, stopping {self._count_running()}")
            self._begin_stop(now, gently=signal.SIGTERM if self._told == signal.SIGPIPE else self._told)
        if self._settled_at is not None and now >= self._settled_at:
            if self._is_any_leaving() and now < self._patient_until:
                self._settled_at = now + _RECHECK_SECONDS
            else:
                self._settled_at = None
                if self._stopped_at is None:
                    self._begin_stop(now, gently=signal.SIGTERM)
        while self._plan and self._plan[0][0] <= now:
            _, number = self._plan.pop(0)
            self._was_killed = self._was_killed or (number == signal.SIGKILL and self._is_any_running())
            self._signal_running(number)

    def _begin_stop(self, now: float, *, gently: signal.Signals) -> None:
        """Plan how to end the ranks that still run: ask, ask again, kill."""
        self._stopped_at = now
        self._plan = [(now, gently)]
        if gently != signal.SIGTERM:
            self._plan.append((now + self._grace_seconds / 2, signal.SIGTERM))
        self._plan.append((now + self._grace_seconds, signal.SIGKILL))

    def _pump(self, timeout: float | None) -> None:
        """Wait for something to happen, and pass on what the ranks have printed."""
        for key, _ in self._selector.select(timeout):
            stream: _Stream | None = key.data
            try:
                data = os.read(key.fd, _READ_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                data = b""  # a terminal whose other end is closed says EIO
            if stream is None:
                continue  # the byte only woke us
            if data:
                self._pass_on(stream, data)
            else:
                self._close(key.fd, stream)

    def _pass_on(self, stream: _Stream, data: bytes) -> None:
        """Show what a rank has printed."""
        if stream.keeps_tail:
            stream.rank.tail = (stream.rank.tail + data)[-_TAIL_BYTES:]
        if stream.is_raw:
            stream.screen.write_through(data)
        else:
            stream.screen.write_lines(mark_lines(stream.rank.number, stream.cutter.feed(data)))
        self._num_writes += 1
        if stream.keeps_tail:
            stream.rank.spoke_at = self._num_writes

    def _close(self, descriptor: int, stream: _Stream) -> None:
        """Show the rest of a stream that has ended."""
        self._selector.unregister(descriptor)
        os.close(descriptor)
        stream.screen.write_lines(mark_lines(stream.rank.number, stream.cutter.finish()))

    def _collect_ends(self) -> None:
        """Notice ranks that have ended, without reaping them."""
        for rank in self._ranks:
            if rank.end is not None:
                continue
            code = _peek(rank.process)
            if code is None:
                continue
            now = time.monotonic()
            departure = read_departure(self._directory, rank.number)
            rank.end = RankEnd(rank=rank.number, code=code, seen_at=now, departure=departure)
            if code != 0 and self._settled_at is None and self._stopped_at is None:
                self._settled_at = now + _SETTLE_SECONDS
                self._patient_until = self._settled_at + self._grace_seconds

    # ---------------------------------------------------------------------------------------------- the end

    def _is_any_running(self) -> bool:
        """Return whether a rank has not ended."""
        return any(rank.end is None for rank in self._ranks)

    def _is_any_leaving(self) -> bool:
        """Return whether a rank is on its way out: its exit code is worth waiting for."""
        running = [rank for rank in self._ranks if rank.end is None]
        return any(read_departure(self._directory, rank.number).left_at is not None for rank in running)

    def _count_running(self) -> str:
        """Return the number of ranks that have not ended, in words."""
        count = sum(rank.end is None for rank in self._ranks)
        return f"{count} rank{'' if count == 1 else 's'}"

    def _signal_running(self, number: signal.Signals) -> None:
        """Signal the ranks that have not ended; kill, stop and go on take along whatever they started."""
        for rank in self._ranks:
            if rank.end is None and number in {signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT}:
                _kill_group(rank.process.pid, number)
            elif rank.end is None:
                os.kill(rank.process.pid, number)

    def _kill_all(self) -> None:
        """Leave nothing behind: kill every rank and everything that a rank started, then reap."""
        for rank in self._ranks:
            if rank.end is None:
                _kill_group(rank.process.pid, signal.SIGKILL)
            else:
                _kill_group(rank.process.pid, signal.SIGTERM)
        for rank in self._ranks:
            rank.process.wait()
        deadline = time.monotonic() + _DRAIN_SECONDS
        while (
            any(_kill_group(rank.process.pid, None) for rank in self._ranks) and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        for rank in self._ranks:
            _kill_group(rank.process.pid, signal.SIGKILL)
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                os.close(key.fd)
        self._selector.close()

    def _conclude(self) -> int:
        """Say who failed first, with its traceback last, and return the exit code."""
        for screen in self._screens:
            screen.finish_line()
        if self._was_killed:
            self._say(f"ranks that did not end within {self._grace_seconds:g} s were killed")
        ends = [rank.end for rank in self._ranks if rank.end is not None]
        first = find_first_failure(ends, stopped_at=self._stopped_at)
        if self._told is not None:
            return 128 + self._told
        if first is None:
            return 0
        self._say(describe_end(first, ends, world_size=self._world_size))
        rank = next(rank for rank in self._ranks if rank.number == first.rank)
        traceback = find_traceback(rank.tail)
        if traceback and rank.spoke_at != self._num_writes:
            self._screens[1].write_lines(mark_lines(rank.number, traceback.splitlines(keepends=True)))
        return to_exit_code(first.code)

    def _say(self, text: str) -> None:
        """Say something of our own, on standard error."""
        self._screens[1].write_lines(f"colossal run: {text}\n".encode())


def _peek(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of an ended process, as ``Popen`` counts; it is reaped later."""
    if sys.platform != "linux":
        return process.poll()  # Python has no waitid everywhere
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _kill_group(group: int, number: signal.Signals | None) -> bool:
    """Signal a process group, or only look (None); return whether there is one."""
    try:
        os.killpg(group, number or 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
