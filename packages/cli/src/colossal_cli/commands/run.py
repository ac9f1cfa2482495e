"""``colossal run``: the processes of one machine, with sane defaults.

Decides what the ranks are told (place, port, threads, plan, plugins) and refuses what would fail later. The
processes themselves are the supervisor's business.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, final

import attrs
import click

from colossal_core.errors import UsageError
from colossal_core.placement import LOOPBACK
from colossal_core.processes import PLAN_VARIABLE, RUN_ID_VARIABLE, make_rank_variables, reserve_port

if TYPE_CHECKING:
    from click import Context

    from colossal_cli.session import Session

__all__ = ["run"]

_DEFAULT_NPROC = 2
_DEFAULT_GRACE_SECONDS = 10.0
_LAST_PORT = 65_535

_EPILOG = """
Every rank is told its place by RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT,
as torchrun does it. OMP_NUM_THREADS is set to cores / nproc and PYTHONUNBUFFERED, PYTHONFAULTHANDLER to 1,
unless they are set. A script finds the path given to --plan in COLOSSAL_PLAN, for example by
Booster(plan=os.environ.get("COLOSSAL_PLAN")).

Exit code: 0, that of the rank that failed first (128 plus the signal's number if a signal ended it), 130
after Ctrl-C, 143 after SIGTERM. A second Ctrl-C kills at once.
"""


@click.command(
    epilog=_EPILOG,
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    },
)
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ranks on this machine. [default: its GPUs, or 2]",
)
@click.option(
    "--nnodes",
    type=click.IntRange(min=1),
    default=1,
    metavar="M",
    help="Machines; run this command on each of them.",
)
@click.option(
    "--node-rank",
    type=click.IntRange(min=0),
    metavar="R",
    help="Which of them this is, from 0. Needed with --nnodes.",
)
@click.option(
    "--master",
    metavar="ADDR:PORT",
    help="Where rank 0 listens; needed with --nnodes. [default: MASTER_PORT, or a free port]",
)
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A plan for the script: COLOSSAL_PLAN.",
)
@click.option(
    "--grace",
    "grace_seconds",
    type=click.FloatRange(min=0.0),
    default=_DEFAULT_GRACE_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="How long ranks may take to end before they are killed.",
)
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: Context,
    *,
    nproc: int | None,
    nnodes: int,
    node_rank: int | None,
    master: str | None,
    plan_file: Path | None,
    grace_seconds: float,
    is_module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run a Python SCRIPT on many ranks, and end all of them when one fails.

    Output is marked by rank; on a terminal, rank 0 writes as if it were alone. The traceback of the rank that
    failed first comes last. No rank outlives this command, however it ends.
    """
    if not is_module and not Path(script).exists():
        raise UsageError(f"there is no script {script!r} in {Path.cwd()}", hint="for a module, write -m NAME")
    run_plan = None if plan_file is None else _check_plan(ctx.obj, plan_file)
    nodes = _read_nodes(nnodes, node_rank, master)
    nproc = nproc or _count_gpus() or _DEFAULT_NPROC
    base = {**os.environ, **ctx.obj.settings.to_environ(), **_choose_defaults(nproc)}
    if run_plan is not None:
        base[PLAN_VARIABLE] = str(run_plan)
    command = [sys.executable, *(["-m"] if is_module else []), script, *args]
    ctx.exit(_supervise(command, nodes, nproc, base, grace_seconds))


@final
@attrs.frozen(kw_only=True)
class _Nodes:
    """The machines of a run.

    Attributes:
        count: How many there are.
        rank: Which of them this is.
        address: Where rank 0 listens.
        port: Its port; 0 for any free one.
    """

    count: int
    rank: int
    address: str
    port: int


def _read_nodes(count: int, rank: int | None, master: str | None) -> _Nodes:
    """Check what was said about machines."""
    address, port = _read_master(master)
    if count == 1 and rank not in {None, 0}:
        raise UsageError(f"--node-rank is {rank}, but --nnodes is 1: machines are counted from 0")
    if count > 1:
        if rank is None or not address or not port:
            raise UsageError(
                f"--nnodes {count} needs --node-rank and --master, which are {rank} and {master!r}",
                hint=f"on machine 0 of {count}: --nnodes {count} --node-rank 0 --master ADDR:PORT",
            )
        if rank >= count:
            raise UsageError(f"--node-rank is {rank}, but --nnodes is {count}: machines are counted from 0")
    return _Nodes(count=count, rank=rank or 0, address=address or LOOPBACK, port=port)


def _read_master(master: str | None) -> tuple[str, int]:
    """Return address and port, both empty when nobody chose them.

    Without the flag the environment counts, unless a rank is around us: then they are the outer run's.
    """
    if master is None:
        is_ours = "RANK" not in os.environ
        address = os.environ.get("MASTER_ADDR", "") if is_ours else ""
        text = os.environ.get("MASTER_PORT", "") if is_ours else ""
        name = "MASTER_PORT"
        if not text:
            return "", 0
    else:
        match = re.fullmatch(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:]+)):(?P<port>[^:]+)", master)
        if match is None:
            raise UsageError(f"--master is {master!r}, expected ADDR:PORT", hint="for example 10.0.0.1:29500")
        address, text, name = match["v6"] or match["host"], match["port"], "--master"
    if not text.isdigit() or not 1 <= int(text) <= _LAST_PORT:
        raise UsageError(f"{name} names the port {text!r}, expected a number between 1 and {_LAST_PORT}")
    return address, int(text)


def _check_plan(session: Session, path: Path) -> Path:
    """Return the absolute path of a plan file that can be understood, before any rank starts.

    The degrees are not held against the number of ranks here: the script may add pieces of its own.
    """
    from colossal_core.building import build_plan

    if not path.is_file():
        raise UsageError(f"there is no plan file {str(path)!r} in {Path.cwd()}")
    build_plan(session.registry, plan=path)
    return path.resolve()


def _count_gpus() -> int:
    """Return the number of accelerators that torch would show, without importing torch; 0 when unsure."""
    try:
        if metadata.version("torch").endswith("+cpu"):
            return 0
    except metadata.PackageNotFoundError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(
        [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    )
    if visible is None:
        return present
    return min(present, len([name for name in visible.split(",") if name.strip() not in {"", "-1"}]))


def _choose_defaults(nproc: int) -> dict[str, str]:
    """Return variables that the user left open and that nearly everybody wants."""
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    wanted = {
        # Each rank would start a thread for every core, which is slower by a multiple than one thread each.
        "OMP_NUM_THREADS": str(max(1, num_cores // nproc)),
        # What a rank printed before a crash is worth the most.
        "PYTHONUNBUFFERED": "1",
        # A segmentation fault says where.
        "PYTHONFAULTHANDLER": "1",
    }
    return {name: value for name, value in wanted.items() if not os.environ.get(name)}


def _supervise(
    command: list[str], nodes: _Nodes, nproc: int, base: dict[str, str], grace_seconds: float
) -> int:
    """Hold the port, set up the folder of the run, and run the ranks of this machine."""
    from colossal_cli.running.supervisor import Supervisor

    world_size = nodes.count * nproc
    directory = Path(tempfile.mkdtemp(prefix="colossal-run-"))
    try:
        with _hold_port(nodes) as port:
            environments = {}
            for local_rank in range(nproc):
                rank = nodes.rank * nproc + local_rank
                place = make_rank_variables(
                    rank=rank,
                    world_size=world_size,
                    local_rank=local_rank,
                    local_world_size=nproc,
                    address=nodes.address,
                    port=port,
                    run_directory=str(directory),
                )
                environments[rank] = {**base, **place, "GROUP_RANK": str(nodes.rank)}
                if nodes.count == 1:
                    environments[rank][RUN_ID_VARIABLE] = uuid.uuid5(uuid.NAMESPACE_OID, str(directory)).hex
            supervisor = Supervisor(command, directory, world_size=world_size, grace_seconds=grace_seconds)
            return supervisor.run(environments)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _hold_port(nodes: _Nodes) -> Iterator[int]:
    """Yield the port of rank 0, held until the run has ended so that nobody else gets it."""
    if nodes.rank != 0:
        yield nodes.port
        return
    with reserve_port("" if nodes.count > 1 else nodes.address, nodes.port) as holder:
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":
            holder.close()
        yield port
