"""Start this process as one rank of a run: process group, device, equal seeds.

``launch`` is called once, at the top of a script, whoever started it. It reads the place of this process from
the environment, opens the store that the ranks meet in, checks that all of them came and agree, and only then
makes the process group. On one machine everything stays on the loopback interface: rank 0 serves the store on
127.0.0.1 only (torch's own would listen on every interface), and gloo and NCCL are told to use it too.

A lone process gets a group of one rank over an in-memory store, so code that calls ``torch.distributed`` runs
unchanged. ``Booster`` asks :func:`current_world` and works there without ``launch``.
"""

from __future__ import annotations

import atexit
import gc
import os
import random
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, final

import attrs
import torch
import torch.distributed as dist

from colossal_core.errors import CapabilityError, RankMismatchError, UsageError
from colossal_core.placement import Placement, read_placement
from colossal_core.processes import own_run_directory, write_arrival, write_departure
from colossal_core.runtime.rendezvous import await_connected, meet, open_store
from colossal_core.runtime.spawn import spawn

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["World", "current_world", "launch", "leave", "rendezvous_store", "spawn"]

_BACKENDS = ("gloo", "nccl")
_MAX_SEED = 2**32 - 1  # numpy's limit


@final
@attrs.frozen(kw_only=True)
class World:
    """The place of this process in the run.

    Attributes:
        rank: Global rank, from 0.
        world_size: Number of ranks.
        local_rank: Rank among the processes of this machine; the index of the accelerator.
        device: Where this rank computes: ``cuda:<index>`` under nccl, else ``cpu``.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device


@final
@attrs.frozen(kw_only=True)
class _Launched:
    """What the first call of ``launch`` set up.

    Attributes:
        pid: The process that called; a forked child has not launched.
        world: What the call returned.
        backend: Backend of the process group.
        seed: Seed that was set.
        store: Where the ranks met.
        is_owner: Whether ``launch`` made the process group, and therefore ends it.
    """

    pid: int
    world: World
    backend: str
    seed: int
    store: Store
    is_owner: bool = True


@final
@attrs.frozen(kw_only=True)
class _Arrival:
    """That a supervisor was told of this rank, and is to be told when it leaves, also if ``launch`` fails.

    Attributes:
        pid: The process that called.
        rank: Its rank.
        directory: Folder of the run.
    """

    pid: int
    rank: int
    directory: Path


# The one exception to "no module state": a process group belongs to the process, and torch keeps it globally
# too.
_launched: _Launched | None = None
_arrival: _Arrival | None = None


def launch(*, backend: str | None = None, seed: int = 1024, timeout_seconds: float = 600) -> World:
    """Start the process group once, and seed all ranks alike.

    Understands ``colossal run``, torchrun, Slurm's ``srun``, OpenMPI's ``mpirun``, and a lone process, which
    becomes a world of one. A second call returns the same ``World`` and changes nothing. A process group that
    somebody else started is taken as it is, and is not destroyed at exit.

    In order: read the environment; choose backend and device; meet in the store and compare; make the process
    group; seed ``random``, numpy where it was imported, torch and CUDA. At exit the group is destroyed,
    without which gloo aborts now and then.

    Args:
        backend: ``"nccl"`` or ``"gloo"``; by default nccl where CUDA is available, else gloo. Under gloo the
            device is the CPU, also on a machine with accelerators.
        seed: Between 0 and 2**32 - 1, equal on all ranks, so models built afterwards are equal.
        timeout_seconds: How long to wait for the other ranks, now and in every collective.

    Returns:
        The place of this process.

    Raises:
        UsageError: An argument or a variable of the environment is wrong, missing or contradicts another; a
            second call asks for another backend or seed; the port of rank 0 is taken.
        RankMismatchError: Ranks do not come, or came with another backend, seed, world size, or from another
            job.
        CapabilityError: The backend cannot run here.
    """
    _check_arguments(seed, timeout_seconds)
    global _launched  # noqa: PLW0603 - see the comment at the variable
    if _launched is not None and _launched.pid == os.getpid():
        return _again(_launched, backend, seed)
    if dist.is_available() and dist.is_initialized():
        _launched = _adopt(backend, seed)
    else:
        _launched = _start(read_placement(), backend, seed, timedelta(seconds=timeout_seconds))
    _seed(seed)
    return _launched.world


def current_world() -> World:
    """Return the place of this process without starting anything.

    That is what ``launch`` returned, or that of a process group somebody else started, or a world of one.

    Raises:
        UsageError: The environment says that there are more ranks, but ``launch`` was not called.
    """
    if _launched is not None and _launched.pid == os.getpid():
        return _launched.world
    if dist.is_available() and dist.is_initialized():
        return _describe_group()[0]
    placement = read_placement()
    if placement.world_size > 1:
        raise UsageError(
            f"the environment ({placement.origin}) says that this is rank {placement.rank} "
            f"of {placement.world_size}, but launch() was not called",
            hint="call colossal_core.launch() at the top of the script",
        )
    device = _choose_device(_choose_backend(None), placement)
    return World(rank=placement.rank, world_size=1, local_rank=placement.local_rank, device=device)


def rendezvous_store() -> Store | None:
    """Return the store in which the ranks met; None before ``launch``. For what precedes any collective."""
    if _launched is not None and _launched.pid == os.getpid():
        return _launched.store
    if dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name for it
    return None


def leave(*, has_failed: bool | None = None) -> None:
    """Note that this rank leaves and destroy the process group that ``launch`` made; runs at exit by itself.

    Only a process that ends without running exit handlers, such as a forked child, needs to call it. The note
    comes first: peers fail as soon as the connections close, and a supervisor asks who began.

    Args:
        has_failed: Whether an error is the reason; by default, whether Python has shown one that nobody
            caught.
    """
    failed = "last_value" in vars(sys) if has_failed is None else has_failed
    if _arrival is not None and _arrival.pid == os.getpid():
        write_departure(_arrival.directory, _arrival.rank, has_failed=failed)
    if (
        _launched is None
        or _launched.pid != os.getpid()
        or not _launched.is_owner
        or not dist.is_initialized()
    ):
        return
    # NCCL's orderly shutdown waits for peers that are still in a collective. After an error nobody comes:
    # just go.
    if not (failed and _launched.backend == "nccl"):
        dist.destroy_process_group()
        gc.collect()  # groups in cycles end now: gloo's threads must not outlive the interpreter


def _check_arguments(seed: object, timeout_seconds: object) -> None:
    """Refuse values that would fail later, or on some ranks only."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _MAX_SEED:
        message = f"seed must be an integer between 0 and {_MAX_SEED}, got {seed!r}"
        raise UsageError(message)
    if (
        isinstance(timeout_seconds, bool)
        or not isinstance(timeout_seconds, int | float)
        or not timeout_seconds > 0
    ):
        message = f"timeout_seconds must be a positive number, got {timeout_seconds!r}"
        raise UsageError(message)


def _again(launched: _Launched, backend: str | None, seed: int) -> World:
    """Answer a second call."""
    if backend is not None and backend != launched.backend:
        message = f"launch() started with backend {launched.backend!r} and is called again with {backend!r}"
        raise UsageError(message, hint="call launch once, or with the same arguments")
    if seed != launched.seed:
        message = f"launch() started with seed {launched.seed} and is called again with {seed}"
        raise UsageError(
            message, hint="call launch once, or with the same arguments; torch.manual_seed sets a new seed"
        )
    if not dist.is_initialized():
        message = "the process group that launch() started was destroyed since; a process starts one once"
        raise UsageError(message, hint="drop the call of destroy_process_group: launch does it at exit")
    return launched.world


def _adopt(backend: str | None, seed: int) -> _Launched:
    """Take over a process group that somebody else started and will end."""
    world, present = _describe_group()
    _arrive(world.rank)
    if backend is not None and backend != present:
        message = f"a process group with backend {present!r} runs already, launch() asks for {backend!r}"
        raise UsageError(message, hint="call launch() instead of torch.distributed.init_process_group")
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name for it
    return _Launched(pid=os.getpid(), world=world, backend=present, seed=seed, store=store, is_owner=False)


def _describe_group() -> tuple[World, str]:
    """Return the world and the backend of the process group that runs."""
    backend = dist.get_backend()
    rank = dist.get_rank()
    local_rank = int(os.environ.get("LOCAL_RANK") or 0)
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
    return World(rank=rank, world_size=dist.get_world_size(), local_rank=local_rank, device=device), backend


def _start(placement: Placement, backend: str | None, seed: int, timeout: timedelta) -> _Launched:
    """Meet the other ranks and make the process group."""
    if not dist.is_available():
        message = f"this build of torch ({torch.__version__}) has no torch.distributed"
        raise CapabilityError(message, hint="install a build of torch with distributed support")
    chosen = _choose_backend(backend)
    device = _choose_device(chosen, placement)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if placement.one_host:
        _stay_on_loopback()
    _arrive(placement.rank)
    store = open_store(placement, timeout)
    meet(store, placement, f"backend {chosen!r}, seed {seed}, {placement.world_size} ranks", timeout)
    try:
        dist.init_process_group(
            chosen, store=store, rank=placement.rank, world_size=placement.world_size, timeout=timeout
        )
    except RuntimeError as err:
        reason = str(err).partition("\n")[0]
        raise RankMismatchError(
            f"rank {placement.rank} of {placement.world_size} lost the others while they connected: {reason}",
            hint="look at the output of the rank that failed first",
        ) from err
    await_connected(store, placement, timeout)
    world = World(
        rank=placement.rank, world_size=placement.world_size, local_rank=placement.local_rank, device=device
    )
    return _Launched(pid=os.getpid(), world=world, backend=chosen, seed=seed, store=store)


def _arrive(rank: int) -> None:
    """Make sure that this rank leaves in order, and note that it came."""
    global _arrival  # noqa: PLW0603 - see the comment at the variable
    atexit.register(leave)
    directory = own_run_directory(os.environ)
    if directory is not None:
        _arrival = _Arrival(pid=os.getpid(), rank=rank, directory=directory)
        write_arrival(directory, rank)


def _choose_backend(backend: str | None) -> str:
    """Return the backend, and refuse one that cannot run here."""
    has_cuda = torch.cuda.is_available()
    if backend is None:
        return "nccl" if has_cuda and dist.is_nccl_available() else "gloo"
    if backend not in _BACKENDS:
        message = f"backend {backend!r} is unknown, expected one of {', '.join(map(repr, _BACKENDS))}"
        raise UsageError(message)
    if backend == "nccl" and not (has_cuda and dist.is_nccl_available()):
        raise CapabilityError(
            f"backend 'nccl' needs CUDA; torch {torch.__version__} sees {torch.cuda.device_count()} devices",
            hint="leave backend open: gloo runs on the CPU",
        )
    if backend == "gloo" and not dist.is_gloo_available():
        message = f"torch {torch.__version__} was built without gloo"
        raise CapabilityError(message, hint="install a build of torch with gloo")
    return backend


def _choose_device(backend: str, placement: Placement) -> torch.device:
    """Return the device of this rank, one accelerator for each local rank."""
    if backend != "nccl":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # Slurm and OpenMPI can show each task its own device only, which then is number 0 for everybody.
    if count == 1 and placement.starter in {"slurm", "openmpi"}:
        return torch.device("cuda", 0)
    if placement.local_rank >= count:
        names = {"slurm": "SLURM_LOCALID", "openmpi": "OMPI_COMM_WORLD_LOCAL_RANK"}
        name = names.get(placement.starter, "LOCAL_RANK")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        message = (
            f"{name} is {placement.local_rank}, but this machine shows {count} devices "
            f"(CUDA_VISIBLE_DEVICES={visible!r}); each local rank needs one of its own"
        )
        raise UsageError(
            message, hint=f"start at most {count} ranks on this machine, or launch(backend='gloo')"
        )
    return torch.device("cuda", placement.local_rank)


def _stay_on_loopback() -> None:
    """Tell gloo and NCCL to use the loopback interface, unless the user chose one."""
    name = "lo" if sys.platform == "linux" else "lo0"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _seed(seed: int) -> None:
    """Seed every generator that models are usually initialised from."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
    torch.manual_seed(seed)  # and every CUDA device, as soon as it is used
