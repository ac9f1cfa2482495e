"""What a supervisor of ranks and its ranks agree on: variables, the port, who left when, who dies with whom.

``colossal run`` and ``spawn`` start ranks, ``launch`` runs inside them; this page is what both sides share,
and it imports no torch.

# Note [Who failed first]

When one rank fails, its peers fail milliseconds later, because their connections break, and on a busy machine
a supervisor may see the ends in any order. So every rank that called ``launch`` writes down the moment at
which it starts to leave, *before* it closes its connections: the cause always has the earlier stamp. A rank
that ends without a stamp (a crash, ``os._exit``) is the cause of what its peers report right after, never a
consequence, with one exception: gloo and NCCL abort (SIGABRT) when their peers vanish.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import final

import attrs

from colossal_core.errors import UsageError
from colossal_core.placement import LOOPBACK

__all__ = [
    "PLAN_VARIABLE",
    "RUN_DIRECTORY_VARIABLE",
    "RUN_ID_VARIABLE",
    "Departure",
    "RankEnd",
    "find_first_failure",
    "listen_on",
    "make_parent_guard",
    "make_rank_variables",
    "own_run_directory",
    "read_departure",
    "reserve_port",
    "to_exit_code",
    "write_arrival",
    "write_departure",
]

PLAN_VARIABLE = "COLOSSAL_PLAN"
"""Path of the plan file given to ``colossal run --plan``; a script reads it, Booster does not by itself."""

RUN_DIRECTORY_VARIABLE = "COLOSSAL_RUN_DIRECTORY"
"""Folder in which ranks note when they leave; it lives as long as the run."""

RUN_ID_VARIABLE = "COLOSSAL_RUN_ID"
"""What tells this run from another one that listens on the same port."""

# How long after the first observed failure a crash still counts as its cause. Peers notice a closed
# connection within milliseconds; a second covers a machine with many more processes than cores.
_CAUSE_WINDOW_SECONDS = 1.5

_JOINED, _WELL, _FAILED = "joined", "well", "failed"

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def make_rank_variables(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    address: str,
    port: int,
    run_directory: str,
) -> dict[str, str]:
    """Return the variables that tell a rank its place, by the names that torchrun made a convention."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        RUN_DIRECTORY_VARIABLE: run_directory,
    }


def reserve_port(address: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Hold a TCP port for rank 0 without listening on it, for as long as the returned socket is open.

    The kernel hands a bound port to nobody else, neither to another ``bind`` to port 0 nor to an outgoing
    connection. Rank 0 may still bind it, because both sockets say ``SO_REUSEADDR`` and this one never
    listens: no moment exists in which somebody else could take the port. (Linux. Elsewhere the holder closes
    the socket before it starts ranks.)

    Args:
        address: Local address to bind.
        port: A certain port, or 0 for a free one.

    Raises:
        UsageError: The port is taken, or the address is not one of this machine.
    """
    holder = socket.socket(_family(address), socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, port))
    except OSError as err:
        holder.close()
        raise _explain_bind(address, port, err) from err
    return holder


def listen_on(address: str, port: int) -> socket.socket:
    """Return a socket that listens at (address, port), which a supervisor may hold by :func:`reserve_port`.

    Raises:
        UsageError: Another process listens there already.
    """
    listener = reserve_port(address, port)
    try:
        listener.listen(1024)
    except OSError as err:
        listener.close()
        raise _explain_bind(address, port, err) from err
    return listener


def _family(address: str) -> socket.AddressFamily:
    """Return the address family of a numeric address or a name."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _explain_bind(address: str, port: int, error: OSError) -> UsageError:
    """Return the one-line error for a port or an address that cannot be used."""
    return UsageError(
        f"cannot listen on {address}:{port} (MASTER_ADDR:MASTER_PORT): {error.strerror or error}",
        hint=f"end the job on port {port}, or give another one; `colossal run` finds a free one by itself",
    )


def make_parent_guard(parent: int) -> Callable[[], None]:
    """Return a function that a freshly forked child calls so that the kernel kills it when ``parent`` dies.

    It survives ``exec``. On systems other than Linux it does nothing. Everything that it needs is loaded
    here, in the parent, since a forked child should not import.

    Args:
        parent: Process id of the caller. Linux sends the signal when the *thread* that forked ends, so fork
            from one that lives as long as the children.
    """
    if sys.platform != "linux":
        return _guard_nothing
    import ctypes  # 10 ms that only starting ranks should pay

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    kill = int(signal.SIGKILL)

    def guard() -> None:
        """Ask the kernel, then make sure that the parent did not die before it was asked."""
        prctl(_PR_SET_PDEATHSIG, kill, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return guard


def _guard_nothing() -> None:
    """Do nothing, where no such service of the kernel exists."""


@final
@attrs.frozen(kw_only=True)
class Departure:
    """What a rank wrote down about itself.

    Attributes:
        joined: The rank called ``launch``.
        left_at: ``time.monotonic()`` when it began to leave, or None. The clock is one for all processes of a
            machine.
        has_failed: It left because of an error that nobody caught.
    """

    joined: bool = False
    left_at: float | None = None
    has_failed: bool = False


def write_arrival(directory: Path, rank: int) -> None:
    """Note that a rank called ``launch``, so that an end without a later stamp is known to be abrupt."""
    _write(directory, rank, _JOINED)


def write_departure(directory: Path, rank: int, *, has_failed: bool) -> None:
    """Note that a rank begins to leave, before it closes any connection."""
    _write(directory, rank, f"{time.monotonic()!r} {_FAILED if has_failed else _WELL}")


def _write(directory: Path, rank: int, text: str) -> None:
    """Replace the note of a rank; a folder that is gone means that nobody reads it any more."""
    path = directory / f"rank-{rank}"
    try:
        # A reader must never see half a number, so the note appears whole.
        draft = path.with_suffix(".draft")
        draft.write_text(text, encoding="ascii")
        draft.replace(path)
    except OSError:
        return


def read_departure(directory: Path, rank: int) -> Departure:
    """Return what a rank wrote down; empty when it wrote nothing."""
    try:
        moment, _, how = (directory / f"rank-{rank}").read_text(encoding="ascii").partition(" ")
    except OSError:
        return Departure()
    if moment == _JOINED:
        return Departure(joined=True)
    return Departure(joined=True, left_at=float(moment), has_failed=how == _FAILED)


@final
@attrs.frozen(kw_only=True)
class RankEnd:
    """How and when one rank ended.

    Attributes:
        rank: Global rank.
        code: Exit code; minus the signal's number when a signal ended it.
        seen_at: ``time.monotonic()`` when the supervisor noticed.
        departure: What the rank wrote down about itself.
    """

    rank: int
    code: int
    seen_at: float
    departure: Departure = Departure()

    @property
    def at(self) -> float:
        """When the end began, as well as anybody knows."""
        return self.seen_at if self.departure.left_at is None else self.departure.left_at

    @property
    def is_abrupt(self) -> bool:
        """Whether the rank had no time to leave in order, so that no peer can be to blame."""
        if self.departure.left_at is not None or self.code == -signal.SIGABRT:
            return False
        return self.code < 0 or self.departure.joined

    def as_of(self, stopped_at: float | None) -> RankEnd:
        """Return the end as it would have been if nobody had stopped the ranks at that moment."""
        if stopped_at is None or self.seen_at <= stopped_at:
            return self
        if self.at > stopped_at:
            return attrs.evolve(self, code=0)
        # It was on its way out, and a signal of ours was quicker than the rest of the way.
        return attrs.evolve(self, code=int(self.departure.has_failed)) if self.code < 0 else self


def find_first_failure(ends: Iterable[RankEnd], *, stopped_at: float | None = None) -> RankEnd | None:
    """Return the rank whose failure caused the others, see Note [Who failed first]; None when none failed.

    Args:
        ends: The ends seen so far.
        stopped_at: When the supervisor began to stop ranks; what ended later ended because of that.
    """
    failed = [end for end in (end.as_of(stopped_at) for end in ends) if end.code != 0]
    if not failed:
        return None
    first = min(failed, key=lambda end: (end.at, end.rank))
    crashes = [end for end in failed if end.is_abrupt and end.at <= first.at + _CAUSE_WINDOW_SECONDS]
    return min(crashes, key=lambda end: (end.at, end.rank)) if crashes else first


def to_exit_code(code: int) -> int:
    """Return the exit code that a shell would report: 128 plus the signal's number for an end by a signal."""
    return 128 - code if code < 0 else code


def own_run_directory(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of this run that a supervisor set up, or None."""
    text = environ.get(RUN_DIRECTORY_VARIABLE, "")
    return Path(text) if text else None
