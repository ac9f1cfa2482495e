"""``launch`` on one rank and on many, under every launcher; ranks are forks of this process."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from colossal_core.errors import CapabilityError, RankMismatchError, UsageError
from colossal_core.placement import LOOPBACK
from colossal_core.runtime.launch import current_world, launch, rendezvous_store
from colossal_core.runtime.spawn import RankFailedError, spawn

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _forget_place() -> dict[str, str]:
    """Remove what ``spawn`` told this rank, and return it."""
    return {name: os.environ.pop(name) for name in _VARIABLES}


def _list_listeners() -> list[str]:
    """Return the addresses at which this process accepts connections, as in /proc/net/tcp."""
    own = {_read_link(path) for path in Path("/proc/self/fd").iterdir()}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].partition(":")[0])
    return found


def _read_link(path: Path) -> str:
    """Return what a descriptor stands for; empty for the one that was open only to list them."""
    try:
        return str(path.readlink())
    except OSError:
        return ""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no launcher of the tests be mistaken for one of ours."""
    for name in list(os.environ):
        if name in _VARIABLES or name.startswith(("SLURM_", "OMPI_", "TORCHELASTIC", "COLOSSAL_RUN")):
            monkeypatch.delenv(name)
    yield
    assert not dist.is_initialized(), "a test left a process group behind"


def test_a_lone_process_is_a_world_of_one() -> None:
    """It has a process group, so code for many ranks runs unchanged, and listens on loopback at most."""

    def rank() -> None:
        _forget_place()
        world = launch()
        value = torch.ones(3)
        dist.all_reduce(value)
        assert (world.rank, world.world_size, world.local_rank, world.device) == (
            0,
            1,
            0,
            torch.device("cpu"),
        )
        assert dist.get_backend() == "gloo"
        assert value.tolist() == [1.0, 1.0, 1.0]
        assert set(_list_listeners()) <= {"0100007F"}

    spawn(rank, 1)


def test_ranks_share_one_world_and_stay_on_loopback() -> None:
    """Rank 0's store and gloo's own sockets are reachable from this machine only."""

    def rank() -> None:
        world = launch()
        total = torch.tensor([float(world.rank)])
        dist.all_reduce(total)
        assert world.world_size == 3
        assert world.local_rank == world.rank == dist.get_rank()
        assert total.item() == 3.0
        assert set(_list_listeners()) == {"0100007F"}
        store = rendezvous_store()
        assert store is not None
        store.add("probe", 1)
        dist.barrier()
        assert store.add("probe", 0) == 3

    spawn(rank, 3)


def test_a_second_call_returns_the_same_world() -> None:
    """With the same or open arguments nothing happens; the generators go on."""

    def rank() -> None:
        world = launch(seed=5)
        torch.rand(1)
        state = torch.get_rng_state()
        assert launch(seed=5, backend="gloo") is world
        assert torch.equal(state, torch.get_rng_state())
        assert current_world() is world

    spawn(rank, 2)


def test_a_second_call_with_other_arguments_names_both() -> None:
    """Neither is ignored silently."""

    def rank() -> None:
        launch(seed=5)
        with pytest.raises(UsageError, match=r"seed 5 .* again with 6"):
            launch(seed=6)
        with pytest.raises(UsageError, match=r"'gloo' .* again with 'nccl'"):
            launch(seed=5, backend="nccl")
        dist.destroy_process_group()
        with pytest.raises(UsageError, match="was destroyed"):
            launch(seed=5)

    spawn(rank, 1)


def _draw() -> list[float]:
    """Draw from every generator that is seeded; numpy's counts where numpy is installed."""
    numbers = [random.random(), float(torch.rand(1))]  # noqa: S311 - nothing secret
    if "numpy" in sys.modules:
        numbers.append(float(sys.modules["numpy"].random.rand()))
    return numbers


def test_all_generators_agree_on_all_ranks() -> None:
    """Python's, torch's and numpy's give the same numbers everywhere, and other numbers for another seed."""
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("numpy")

    def rank() -> None:
        launch(seed=11)
        numbers = _draw()
        store = rendezvous_store()
        assert store is not None
        store.set(f"numbers/{dist.get_rank()}", repr(numbers))
        assert store.get("numbers/0") == store.get("numbers/1")
        dist.barrier()
        torch.manual_seed(11)
        random.seed(11)
        assert _draw()[:2] == numbers[:2]
        assert len(set(numbers)) == len(numbers)

    spawn(rank, 2)


def test_a_rank_that_leaves_at_once_harms_nobody() -> None:
    """All are connected when ``launch`` returns, so nobody is gone before the slowest is there."""

    def rank() -> None:
        launch()

    for _ in range(2):
        spawn(rank, 6)


def _change(rank: str, **changes: str) -> None:
    """Change the environment of one rank."""
    if os.environ["RANK"] == rank:
        os.environ.update(changes)


def test_other_arguments_on_one_rank_are_an_error_on_all() -> None:
    """Every rank raises, within moments, and reads both values."""

    def rank() -> None:
        with pytest.raises(RankMismatchError, match=r"seed 1, 3 ranks, rank 2 with .* seed 2"):
            launch(seed=2 if os.environ["RANK"] == "2" else 1)

    spawn(rank, 3)


def test_another_world_size_on_one_rank_is_an_error_on_all() -> None:
    """``WORLD_SIZE`` that differs would otherwise be a wait without end."""

    def rank() -> None:
        _change("1", WORLD_SIZE="3", LOCAL_WORLD_SIZE="3")
        with pytest.raises(RankMismatchError, match=r"2 ranks, rank 1 with .* 3 ranks"):
            launch()

    spawn(rank, 2)


def test_a_rank_that_does_not_come_is_named() -> None:
    """Rank 0 of two waits for the time that it was given, not for ever."""

    def rank() -> None:
        if os.environ["RANK"] == "0":
            with pytest.raises(RankMismatchError, match=r"of 2 ranks, \[1\] did not come"):
                launch(timeout_seconds=1)

    spawn(rank, 2)


def test_a_missing_rank_0_is_named_with_its_address() -> None:
    """The other ranks say where they looked for it."""

    def rank() -> None:
        if os.environ["RANK"] == "1":
            with pytest.raises(RankMismatchError, match=rf"no rank 0 at {LOOPBACK}:\d+ .* within 1 s"):
                launch(timeout_seconds=1)

    spawn(rank, 2)


def test_a_rank_that_comes_twice_is_refused() -> None:
    """Two processes with one RANK would mix their messages."""

    def rank() -> None:
        _change("2", RANK="1", LOCAL_RANK="1")
        if os.environ["RANK"] == "0":
            with pytest.raises(RankMismatchError, match=r"\[2\] did not come"):
                launch(timeout_seconds=1)
            return
        with pytest.raises((UsageError, RankMismatchError)) as caught:
            launch(timeout_seconds=1)
        assert "two processes came as rank 1" in str(caught.value) or "rank 1" in str(caught.value)

    spawn(rank, 3)


def test_jobs_on_one_port_do_not_mix() -> None:
    """A rank that reaches the store of another job says so."""

    def rank() -> None:
        _change("0", COLOSSAL_RUN_ID="ours")
        _change("1", COLOSSAL_RUN_ID="theirs")
        if os.environ["RANK"] == "1":
            with pytest.raises(UsageError, match=r"another job .* 'ours', this is 'theirs'"):
                launch(timeout_seconds=2)
        else:
            with pytest.raises(RankMismatchError, match=r"\[1\] did not come"):
                launch(timeout_seconds=2)

    spawn(rank, 2)


def test_a_busy_port_is_named() -> None:
    """Rank 0 cannot listen where somebody else does."""

    def rank() -> None:
        if os.environ["RANK"] == "0":
            with socket.create_server((LOOPBACK, 0)) as taken:
                port = str(taken.getsockname()[1])
                os.environ["MASTER_PORT"] = port
                with pytest.raises(UsageError, match=rf"{LOOPBACK}:{port}.*in use"):
                    launch(timeout_seconds=1)

    spawn(rank, 2)


def test_slurm_ranks_meet() -> None:
    """Tasks of one node need nothing but Slurm's own variables."""

    def rank() -> None:
        place = _forget_place()
        os.environ.update(
            SLURM_PROCID=place["RANK"],
            SLURM_LOCALID=place["LOCAL_RANK"],
            SLURM_NTASKS="2",
            SLURM_NNODES="1",
            SLURM_JOB_ID=str(os.getppid()),
            SLURM_STEP_ID="0",
        )
        world = launch()
        assert (world.rank, world.world_size) == (int(place["RANK"]), 2)
        dist.barrier()

    spawn(rank, 2)


def test_openmpi_ranks_meet() -> None:
    """Ranks of one machine need nothing but OpenMPI's own variables."""

    def rank() -> None:
        place = _forget_place()
        os.environ.update(
            OMPI_COMM_WORLD_RANK=place["RANK"],
            OMPI_COMM_WORLD_LOCAL_RANK=place["LOCAL_RANK"],
            OMPI_COMM_WORLD_SIZE="2",
            OMPI_COMM_WORLD_LOCAL_SIZE="2",
        )
        world = launch()
        assert (world.rank, world.world_size) == (int(place["RANK"]), 2)
        dist.barrier()

    spawn(rank, 2)


def test_a_process_group_of_somebody_else_is_taken_as_it_is() -> None:
    """``launch`` after ``init_process_group`` reads rank and world from it."""

    def rank() -> None:
        dist.init_process_group("gloo")
        world = launch(seed=3)
        assert (world.rank, world.world_size) == (dist.get_rank(), 2)
        assert launch(seed=3) is world
        dist.barrier()
        dist.destroy_process_group()

    spawn(rank, 2)


def test_without_launch_a_lone_process_has_a_world_and_a_rank_has_none() -> None:
    """``Booster`` works alone; among others, forgetting ``launch`` is an error, not a world of one."""

    def rank() -> None:
        if os.environ["RANK"] == "1":
            with pytest.raises(UsageError, match=r"rank 1 of 2, but launch\(\) was not called"):
                current_world()
            return
        _forget_place()
        world = current_world()
        assert (world.rank, world.world_size, world.device) == (0, 1, torch.device("cpu"))
        assert not dist.is_initialized()

    spawn(rank, 2)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: launch(seed=-1), UsageError, "seed"),
        (lambda: launch(seed=2**32), UsageError, "4294967295"),
        (lambda: launch(timeout_seconds=0), UsageError, "timeout_seconds"),
        (lambda: launch(backend="mpi"), UsageError, "'gloo', 'nccl'"),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[], object], error: type[Exception], words: str) -> None:
    """Before anything is started."""
    with pytest.raises(error, match=words):
        call()

    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_nccl_without_cuda_is_refused_with_the_reason() -> None:
    """A backend that was asked for is honoured or refused, never replaced."""
    with pytest.raises(CapabilityError, match="needs CUDA"):
        launch(backend="nccl")


def test_a_half_set_environment_is_named() -> None:
    """A stale WORLD_SIZE in the shell does not make a process wait."""

    def rank() -> None:
        _forget_place()
        os.environ["WORLD_SIZE"] = "2"
        with pytest.raises(UsageError, match="RANK is not set"):
            launch()

    spawn(rank, 1)


_SCRIPT = r"""
import atexit, torch, torch.distributed as dist
atexit.register(lambda: print(f"initialized at the end: {dist.is_initialized()}\n", end=""))
from colossal_core import launch
world = launch()
value = torch.ones(1)
dist.all_reduce(value)
print(f"sum {value.item()}\n", end="")  # one write, which ranks cannot tear apart
"""


@pytest.mark.timeout(90)  # imports torch in a fresh interpreter
def test_a_script_ends_without_a_process_group(tmp_path: Path) -> None:
    """The group is destroyed at exit by itself, also when the script ends with an error."""
    script = tmp_path / "s.py"
    script.write_text(_SCRIPT + "raise SystemExit(4)\n", encoding="utf-8")

    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=80, check=False
    )

    assert done.returncode == 4, done.stderr
    assert done.stdout.splitlines() == ["sum 1.0", "initialized at the end: False"]
    assert "Traceback" not in done.stderr
    assert "terminate" not in done.stderr


@pytest.mark.timeout(90)  # imports torch in three fresh interpreters
def test_torchrun_starts_our_ranks(tmp_path: Path) -> None:
    """Who has torchrun in a job script keeps it."""
    script = tmp_path / "s.py"
    script.write_text(_SCRIPT, encoding="utf-8")

    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, env=environ, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2.0") == 2


def test_spawn_reports_the_assertions_of_these_tests() -> None:
    """What a rank finds wrong reaches the test that started it."""

    def rank() -> None:
        launch()
        assert dist.get_rank() == 0, "seen"

    with pytest.raises(RankFailedError, match="seen") as caught:
        spawn(rank, 2)

    assert caught.value.rank == 1
