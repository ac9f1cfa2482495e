"""Where ranks meet before they have a process group: the store, and the check that all came and agree.

On one machine rank 0 serves the store on the loopback address only. torch's own server listens on every
interface, but takes a socket that listens already, so we bring one.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from colossal_core.errors import RankMismatchError, UsageError
from colossal_core.placement import Placement
from colossal_core.processes import listen_on

__all__ = ["await_connected", "meet", "open_store"]

_PREFIX = "colossal/launch"

# The store ends with rank 0, so it stays until everybody has read why, but not longer than this.
_LAST_WORDS_SECONDS = 5.0

_logger = logging.getLogger(__name__)


def open_store(placement: Placement, timeout: timedelta) -> Store:
    """Serve the store on rank 0, connect to it elsewhere; in memory for a world of one."""
    if placement.world_size == 1:
        return HashStore()
    address, port = placement.address, placement.port
    if placement.rank != 0 or placement.has_agent:
        try:
            return TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
        except (dist.DistStoreError, dist.DistNetworkError) as err:
            raise RankMismatchError(
                f"rank {placement.rank} of {placement.world_size} found no rank 0 at {address}:{port} "
                f"(MASTER_ADDR:MASTER_PORT) within {timeout.total_seconds():g} s",
                hint="look at the output of rank 0, and at both variables",
            ) from err
    if not placement.is_step:
        _logger.warning(
            "waiting for %d more ranks, but SLURM_STEP_ID is not set: start the script with srun",
            placement.world_size - 1,
        )
    return _serve_store(placement, timeout)


def _serve_store(placement: Placement, timeout: timedelta) -> Store:
    """Serve the store on rank 0; on one machine at the loopback address only."""
    address, port = placement.address, placement.port
    if placement.one_host:
        # The store takes the descriptor over and closes it in the end.
        descriptor = listen_on(address, port).detach()
        return TCPStore(
            address,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    try:
        return TCPStore(address, port, is_master=True, timeout=timeout, wait_for_workers=False)
    except (dist.DistStoreError, dist.DistNetworkError) as err:
        reason = str(err).partition("\n")[0]
        raise UsageError(
            f"rank 0 cannot serve at {address}:{port} (MASTER_ADDR:MASTER_PORT): {reason}",
            hint="MASTER_ADDR is an address of rank 0's machine, MASTER_PORT a free port",
        ) from err


def meet(store: Store, placement: Placement, terms: str, timeout: timedelta) -> None:
    """Wait until every rank has come, once each and on the same terms.

    Rank 0 publishes job and terms; the others compare, and one that differs tells all: all of them raise.
    """
    if placement.world_size == 1:
        return
    try:
        if placement.rank == 0:
            store.set(f"{_PREFIX}/terms", f"{placement.job}\n{terms}")
        else:
            _compare(store, placement, terms)
        if store.add(f"{_PREFIX}/taken/{placement.rank}", 1) != 1:
            raise UsageError(
                f"two processes came as rank {placement.rank} of {placement.world_size}",
                hint=f"look at {placement.origin} in the environment of both",
            )
        store.set(f"{_PREFIX}/rank/{placement.rank}", "here")
        _await_all(store, placement, timeout)
    except (dist.DistStoreError, dist.DistNetworkError) as err:
        raise RankMismatchError(
            f"rank {placement.rank} of {placement.world_size} lost rank 0 at "
            f"{placement.address}:{placement.port} before all ranks had called launch()",
            hint="look at the output of rank 0",
        ) from err


def _compare(store: Store, placement: Placement, terms: str) -> None:
    """Raise when rank 0 belongs to another job or came on other terms."""
    job, _, expected = store.get(f"{_PREFIX}/terms").decode().partition("\n")
    if job != placement.job:
        raise UsageError(
            f"another job listens at {placement.address}:{placement.port} (MASTER_ADDR:MASTER_PORT): "
            f"it is {job!r}, this is {placement.job!r}",
            hint="set MASTER_PORT to a port of its own for each job",
        )
    if expected != terms:
        message = f"rank 0 launches with {expected}, rank {placement.rank} with {terms}"
        store.set(f"{_PREFIX}/complaint", message)
        raise _disagree(store, placement)


def _disagree(store: Store, placement: Placement) -> RankMismatchError:
    """Return the error that all ranks raise when one came on other terms."""
    message = store.get(f"{_PREFIX}/complaint").decode()
    num_heard = store.add(f"{_PREFIX}/heard", 1)
    deadline = time.monotonic() + _LAST_WORDS_SECONDS
    while placement.rank == 0 and num_heard < placement.world_size and time.monotonic() < deadline:
        time.sleep(0.01)
        num_heard = store.add(f"{_PREFIX}/heard", 0)
    return RankMismatchError(
        message, hint="call launch() with equal arguments on all ranks of one WORLD_SIZE"
    )


def _await_all(store: Store, placement: Placement, timeout: timedelta) -> None:
    """Return once all ranks have come; name those that did not."""
    names = [f"{_PREFIX}/rank/{rank}" for rank in range(placement.world_size)]
    deadline = time.monotonic() + timeout.total_seconds()
    pause = 0.005
    while not store.check(names):
        if store.check([f"{_PREFIX}/complaint"]):
            raise _disagree(store, placement)
        if time.monotonic() > deadline:
            missing = [rank for rank, name in enumerate(names) if not store.check([name])]
            raise RankMismatchError(
                f"rank {placement.rank} waited {timeout.total_seconds():g} s at "
                f"{placement.address}:{placement.port}; "
                f"of {placement.world_size} ranks, {missing} did not come",
                hint="look at the output of the missing ranks",
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.2)  # a thousand ranks that poll would keep rank 0 busy


def await_connected(store: Store, placement: Placement, timeout: timedelta) -> None:
    """Return once every rank has made its process group.

    Without it, a rank that has little to do could leave while others still connect to it, and they would
    fail. Rank 0 serves the store, so it also waits until everybody has seen that all are connected.

    Raises:
        RankMismatchError: A rank is lost on the way, or is not connected in time.
    """
    if placement.world_size == 1:
        return
    try:
        for step in ("connected", "seen"):
            store.add(f"{_PREFIX}/{step}", 1)
            if step == "connected" or placement.rank == 0:
                _await_count(store, placement, step, timeout)
    except (dist.DistStoreError, dist.DistNetworkError) as err:
        raise RankMismatchError(
            f"rank {placement.rank} of {placement.world_size} lost rank 0 at "
            f"{placement.address}:{placement.port} before all ranks were connected",
            hint="look at the output of rank 0",
        ) from err


def _await_count(store: Store, placement: Placement, step: str, timeout: timedelta) -> None:
    """Return once all ranks have counted themselves."""
    deadline = time.monotonic() + timeout.total_seconds()
    pause = 0.001
    while (count := store.add(f"{_PREFIX}/{step}", 0)) < placement.world_size:
        if time.monotonic() > deadline:
            raise RankMismatchError(
                f"rank {placement.rank} waited {timeout.total_seconds():g} s, and {count} "
                f"of {placement.world_size} ranks are {step}",
                hint="look at the output of the missing ranks",
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.2)
