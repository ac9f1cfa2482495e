"""Where this process stands among all ranks, read from what its launcher left in the environment.

Four kinds of start are known, strongest first, because one may run inside another (``srun torchrun`` is
common):

1. ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``: ``colossal run``, torchrun,
   Kubernetes;
2. ``OMPI_COMM_WORLD_*``: OpenMPI's ``mpirun``;
3. ``SLURM_*``: a script started by ``srun``;
4. none of them: a lone process.

A variable that is missing, unreadable or contradicts another is an error that names it with its value;
nothing is guessed that could make a process wait for ranks that never come. No torch here: this is arithmetic
on strings.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from typing import Literal, TypeAlias, final

import attrs

from colossal_core.errors import UsageError

__all__ = ["LOOPBACK", "Placement", "Starter", "expand_host_list", "read_placement"]

Starter: TypeAlias = Literal["variables", "openmpi", "slurm", "lone"]

LOOPBACK = "127.0.0.1"

# Ports for jobs whose launcher brings none: below the range that Linux hands out for outgoing connections
# (32768 on).
_FIRST_PORT = 10_000
_NUM_PORTS = 20_000
_LAST_PORT = 65_535

_STARTERS: dict[Starter, str] = {
    "variables": "RANK and WORLD_SIZE",
    "openmpi": "OpenMPI",
    "slurm": "Slurm",
    "lone": "a lone process",
}


@final
@attrs.frozen(kw_only=True)
class Placement:
    """The place of one process among all ranks.

    Attributes:
        rank: Global rank, from 0 to ``world_size - 1``.
        world_size: Number of ranks.
        local_rank: Rank among the processes of this machine.
        one_host: All ranks run on this machine, so nothing needs to leave the loopback interface.
        address: Where rank 0 listens; empty for one rank.
        port: Port of rank 0; 0 for one rank.
        job: What tells this job from another one on the same port; equal on all ranks.
        starter: Which of the four kinds of start was found.
        is_step: False for a Slurm script outside ``srun``, where the other tasks do not exist.
        has_agent: The launcher itself serves the store at (address, port), as torchrun does.
    """

    rank: int
    world_size: int
    local_rank: int
    one_host: bool
    address: str
    port: int
    job: str
    starter: Starter
    is_step: bool = True
    has_agent: bool = False

    @property
    def origin(self) -> str:
        """What the place was read from, in words."""
        return _STARTERS[self.starter]


def read_placement(environ: Mapping[str, str] | None = None) -> Placement:
    """Read the place of this process.

    Args:
        environ: Variables to read; those of this process by default.

    Raises:
        UsageError: A variable is missing, is no number, is out of range or contradicts another.
    """
    reader = _Reader(os.environ if environ is None else environ)
    if reader.has("RANK"):
        return _read_variables(reader)
    if reader.has("OMPI_COMM_WORLD_RANK"):
        return _read_openmpi(reader)
    if reader.has("SLURM_PROCID"):
        return _read_slurm(reader)
    if reader.has("WORLD_SIZE") or reader.has("LOCAL_RANK"):
        return _read_variables(reader)
    return Placement(
        rank=0, world_size=1, local_rank=0, one_host=True, address="", port=0, job="lone", starter="lone"
    )


@final
@attrs.frozen
class _Reader:
    """Access to environment variables that names them in every error."""

    environ: Mapping[str, str]

    def has(self, name: str) -> bool:
        """Return whether the variable is set to something; an empty value counts as unset."""
        return bool(self.environ.get(name, "").strip())

    def text(self, name: str, *, why: str) -> str:
        """Return a variable that must be there."""
        if not self.has(name):
            present = [f"{key}={value!r}" for key, value in sorted(self.environ.items()) if _is_related(key)]
            others = ", ".join(present) or "none of its companions"
            raise UsageError(
                f"{name} is not set, but {why}; set are {others}",
                hint="start the script with `colossal run`, torchrun, srun or mpirun, "
                "or unset these variables for a lone process",
            )
        return self.environ[name].strip()

    def number(self, name: str, *, why: str, least: int = 0, most: int | None = None) -> int:
        """Return a variable that must be an integer between ``least`` and ``most``."""
        text = self.text(name, why=why)
        try:
            value = int(text)
        except ValueError as err:
            message = f"{name} is {text!r}, expected an integer"
            raise UsageError(message) from err
        if value < least or (most is not None and value > most):
            expected = f"at least {least}" if most is None else f"between {least} and {most}"
            message = f"{name} is {text!r}, expected {expected}"
            raise UsageError(message)
        return value

    def show(self, first: str, second: str) -> str:
        """Return two variables that contradict each other, with their values."""
        return f"{first} is {self.environ[first]!r}, but {second} is {self.environ[second]!r}"

    def first_set(self, *names: str) -> str:
        """Return the first of the names that is set, or the last one."""
        return next((name for name in names if self.has(name)), names[-1])


_CONVENTION = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SHOWN_PREFIXES = ("OMPI_COMM_WORLD_", "SLURM_NT", "SLURM_NP", "SLURM_PROC", "SLURM_LOCAL", "SLURM_JOB")


def _is_related(name: str) -> bool:
    """Return whether a variable is worth showing beside one that is missing."""
    return name in _CONVENTION or name.startswith(_SHOWN_PREFIXES)


def _check_rank(reader: _Reader, rank_name: str, size_name: str, why: str) -> tuple[int, int]:
    """Return (rank, size) after checking that one lies inside the other."""
    rank = reader.number(rank_name, why=why)
    size = reader.number(size_name, why=why, least=1)
    if rank >= size:
        raise UsageError(f"{reader.show(rank_name, size_name)}: ranks run from 0 to {size - 1}")
    return rank, size


def _check_local(reader: _Reader, rank_name: str, size_name: str, *, world: tuple[str, int], why: str) -> int:
    """Return the local rank after checking it against the number of local ranks, where that is known.

    Args:
        reader: The variables.
        rank_name: Variable of the local rank.
        size_name: Variable of the number of local ranks, which may be unset.
        world: Variable and value of the number of all ranks.
        why: What makes the local rank necessary.
    """
    world_name, world_size = world
    local_rank = reader.number(rank_name, why=why)
    limit_name = size_name if reader.has(size_name) else world_name
    limit = reader.number(limit_name, why=why, least=1)
    if limit > world_size:
        raise UsageError(
            f"{reader.show(size_name, world_name)}: one machine cannot hold more ranks than there are"
        )
    if local_rank >= limit:
        raise UsageError(f"{reader.show(rank_name, limit_name)}: local ranks run from 0 to {limit - 1}")
    return local_rank


def _read_port(reader: _Reader, why: str) -> int:
    """Return ``MASTER_PORT``."""
    return reader.number("MASTER_PORT", why=why, least=1, most=_LAST_PORT)


def _read_variables(reader: _Reader) -> Placement:
    """Read the variables that torchrun made a convention."""
    given = " and ".join(name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if reader.has(name))
    why = f"{given} {'is' if ' ' not in given else 'are'}"
    rank, world_size = _check_rank(reader, "RANK", "WORLD_SIZE", why)
    local_rank = _check_local(
        reader, "LOCAL_RANK", "LOCAL_WORLD_SIZE", world=("WORLD_SIZE", world_size), why=why
    )
    if world_size == 1:
        return _make(
            reader, rank=rank, world_size=1, local_rank=local_rank, one_host=True, starter="variables"
        )
    address = reader.text("MASTER_ADDR", why=f"WORLD_SIZE is {reader.environ['WORLD_SIZE']!r}")
    # Several groups of ranks with a loopback address are one machine that plays many, as people do to try
    # things out.
    one_host = _is_loopback(address)
    if reader.has("LOCAL_WORLD_SIZE") and reader.number("LOCAL_WORLD_SIZE", why=why, least=1) == world_size:
        one_host = True
        if local_rank != rank:
            raise UsageError(
                f"{reader.show('RANK', 'LOCAL_RANK')}: with LOCAL_WORLD_SIZE and WORLD_SIZE "
                f"both {world_size}, all ranks are on one machine, where the two are equal"
            )
    return _make(
        reader,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        one_host=one_host,
        starter="variables",
        address=address,
        port=_read_port(reader, f"WORLD_SIZE is {reader.environ['WORLD_SIZE']!r}"),
        has_agent=reader.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _read_openmpi(reader: _Reader) -> Placement:
    """Read what ``mpirun`` sets; across machines it does not say where rank 0 is, so ``MASTER_ADDR`` must."""
    why = "OMPI_COMM_WORLD_RANK is"
    rank, world_size = _check_rank(reader, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", why)
    _check_agrees(reader, "OMPI_COMM_WORLD_SIZE", world_size)
    local_rank = _check_local(
        reader,
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        world=("OMPI_COMM_WORLD_SIZE", world_size),
        why=why,
    )
    if world_size == 1:
        return _make(reader, rank=rank, world_size=1, local_rank=local_rank, one_host=True, starter="openmpi")
    address, one_host = LOOPBACK, _is_loopback(reader.environ.get("MASTER_ADDR", ""))
    if not one_host:
        local_size = reader.number("OMPI_COMM_WORLD_LOCAL_SIZE", why=why, least=1)
        one_host = local_size == world_size
        if not one_host:
            found = f"OpenMPI put {local_size} of {world_size} ranks on this machine"
            address = reader.text("MASTER_ADDR", why=found)
    identity = reader.environ.get(reader.first_set("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"), "")
    if not identity and one_host:
        identity = f"parent {os.getppid()}"  # ranks of one machine are children of one mpirun
    return _make(
        reader,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        one_host=one_host,
        starter="openmpi",
        address=address,
        port=_choose_port(reader, identity, "PMIX_NAMESPACE is not set either"),
        job=identity,
    )


def _read_slurm(reader: _Reader) -> Placement:
    """Read what ``srun`` sets for a task; rank 0 is the first host of the list."""
    why = "SLURM_PROCID is"
    size_name = reader.first_set("SLURM_STEP_NUM_TASKS", "SLURM_NPROCS", "SLURM_NTASKS")
    rank, world_size = _check_rank(reader, "SLURM_PROCID", size_name, why)
    _check_agrees(reader, size_name, world_size)
    local_rank = reader.number("SLURM_LOCALID", why=why)
    if local_rank > rank:
        raise UsageError(
            f"{reader.show('SLURM_LOCALID', 'SLURM_PROCID')}: a local rank is never above the global one"
        )
    if world_size == 1:
        return _make(reader, rank=rank, world_size=1, local_rank=local_rank, one_host=True, starter="slurm")
    hosts = _list_slurm_hosts(reader)
    address = reader.environ.get("MASTER_ADDR", "").strip()
    one_host = _is_loopback(address) or _count_slurm_nodes(reader, hosts) == 1
    if not address:
        address = LOOPBACK if one_host else (hosts or [reader.text("SLURM_NODELIST", why=why)])[0]
    step = reader.environ.get("SLURM_STEP_ID", "")
    job_id = reader.environ.get("SLURM_JOB_ID", "")
    identity = f"slurm {job_id}.{step}" if job_id else ""
    return _make(
        reader,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        one_host=one_host,
        starter="slurm",
        address=address,
        port=_choose_port(reader, identity, "SLURM_JOB_ID is not set either"),
        job=identity,
        is_step=reader.has("SLURM_STEP_ID"),
    )


def _make(
    reader: _Reader,
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    one_host: bool,
    starter: Starter,
    address: str = "",
    port: int = 0,
    job: str = "",
    is_step: bool = True,
    has_agent: bool = False,
) -> Placement:
    """Build the placement; on one machine rank 0 is reached over loopback, whatever its name."""
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        one_host=one_host,
        address=LOOPBACK if one_host and address else address,
        port=port,
        job=reader.environ.get("COLOSSAL_RUN_ID", "") or job,
        starter=starter,
        is_step=is_step,
        has_agent=has_agent,
    )


def _check_agrees(reader: _Reader, name: str, world_size: int) -> None:
    """Refuse a ``WORLD_SIZE`` that somebody exported by hand and that contradicts the launcher."""
    if reader.has("WORLD_SIZE") and reader.number("WORLD_SIZE", why=f"{name} is") != world_size:
        raise UsageError(
            reader.show("WORLD_SIZE", name),
            hint="unset WORLD_SIZE: the launcher's own variable says how many ranks there are",
        )


def _choose_port(reader: _Reader, identity: str, otherwise: str) -> int:
    """Return ``MASTER_PORT``, or a port that every rank derives alike from the identity of the job."""
    if reader.has("MASTER_PORT") or not identity:
        return _read_port(reader, otherwise)
    return _FIRST_PORT + zlib.crc32(identity.encode()) % _NUM_PORTS


def _is_loopback(address: str) -> bool:
    """Return whether an address can only mean this machine."""
    return address in {"localhost", "::1"} or address.startswith("127.")


def _list_slurm_hosts(reader: _Reader) -> list[str]:
    """Return the hosts of the step, or of the job, in Slurm's order; empty when Slurm does not say."""
    name = reader.first_set("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return expand_host_list(reader.environ.get(name, ""))


def _count_slurm_nodes(reader: _Reader, hosts: list[str]) -> int:
    """Return the number of machines of the step; 0 when Slurm does not say."""
    name = reader.first_set("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    return reader.number(name, why="SLURM_PROCID is", least=1) if reader.has(name) else len(hosts)


def expand_host_list(text: str) -> list[str]:
    """Expand Slurm's short form: ``"a[01-03,7],b"`` means a01, a02, a03, a7, b."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        hosts.extend(_expand_host(item.strip()))
    return hosts


def _expand_host(item: str) -> list[str]:
    """Expand the first bracket of one item, and the rest in turn."""
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", item)
    if match is None:
        return [item] if item else []
    head, body, tail = match.groups()
    names = []
    for part in body.split(","):
        first, _, last = part.partition("-")
        if last and first.isdigit() and last.isdigit():
            names += [f"{head}{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
        else:
            names.append(head + part)
    return [name + rest for name in names for rest in (_expand_host(tail) or [""])]
